"""Which modules of a wrapped model are experts, recognised by structure: the interface between such models
and EP.

An *experts module* holds the fused weights of all experts of a layer and is called as
``experts(hidden_states [T, H], expert ids [T, K], weights [T, K]) -> [T, H]``. Its router stays what it is:
another module, or part of the block around it. This is how transformers writes Qwen2/3-MoE, Mixtral,
DeepSeek-V2/V3, GLM4-MoE, OLMoE, gpt-oss and most others; :func:`fused_experts` recognises all of them alike,
from parameter shapes, from the call's arguments, and by trying what the module's own forward computes.

For a module that it does not recognise, write an adapter: a function from the module to an
:class:`ExpertsSpec`, or None where it does not apply::

    @register_moe_adapter
    def my_experts(module: nn.Module) -> ExpertsSpec | None:
        if not isinstance(module, MyExperts):
            return None
        return ExpertsSpec(
            num_experts=64, hidden_size=2048, intermediate_size=1024,
            gate_up="w13", down="w2", arguments=("x", "chosen", "scores"),
        )
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdmoe.errors import refuse
from fsdmoe.experts.split import expert_placement, whole_down_bias
from fsdmoe.kernels.activations import ACTIVATIONS
from fsdmoe.kernels.expert_mlp import experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.placement import Cut, Placement, halves

logger = logging.getLogger(__name__)

_FOUR = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """What the parameters of an experts module mean, and how it is called."""

    num_experts: int
    """E."""
    hidden_size: int
    """H, the width of rows."""
    intermediate_size: int
    """I, the width of one expert."""
    activation: str = "swiglu"
    """A name in ``fsdmoe.kernels.activations``."""
    gate_up: str = "gate_up_proj"
    """Name of the parameter ``[E, 2I, H]``."""
    down: str = "down_proj"
    """Name of the parameter ``[E, H, I]``."""
    gate_up_bias: str | None = None
    """Name of the parameter ``[E, 2I]``."""
    down_bias: str | None = None
    """Name of the parameter ``[E, H]``."""
    transposed: bool = False
    """``[E, H, 2I]`` and ``[E, I, H]`` instead."""
    interleaved: bool = False
    """Gates and ups take turns along 2I, instead of all gates before all ups."""
    arguments: tuple[str, ...] = ("hidden_states", "top_k_index", "top_k_weights")
    """Names of the forward's arguments, in order: rows, expert ids, weights."""

    def parameters(self) -> dict[str, str]:
        """Role to the module's own name of it."""
        named = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return {role: name for role, name in zip(_FOUR, named, strict=True) if name is not None}

    def placements(self) -> dict[str, Placement]:
        """How ``ep`` and ``etp`` cut each parameter, by its own name. ETP splits the width of gates and ups
        alike; ``down_bias`` has no width, so ETP splits its H."""
        hidden, width = self.hidden_size, self.intermediate_size
        cut = functools.partial(expert_placement, self.num_experts)
        if self.transposed:
            gate_up = cut((hidden, 2 * width), self._halves(2))
            down = cut((width, hidden), Shard(1))
        else:
            gate_up = cut((2 * width, hidden), self._halves(1))
            down = cut((hidden, width), Shard(2))
        by_role = {
            "gate_up_proj": gate_up,
            "down_proj": down,
            "gate_up_proj_bias": cut((2 * width,), self._halves(1)),
            "down_proj_bias": cut((hidden,), Shard(1)),
        }
        return {name: by_role[role] for role, name in self.parameters().items()}

    def _halves(self, dim: int) -> Cut:
        """The cut of a dim of gates and ups: interleaved pairs stay together."""
        return Shard(dim) if self.interleaved else halves(dim)

    def kernel_weights(self, module: nn.Module, down_bias_start: int = 0) -> ExpertWeights:
        """The module's (or this rank's) parameters as the kernels want them: views, or copies where it keeps
        gates and ups interleaved."""
        roles = {role: getattr(module, name) for role, name in self.parameters().items()}
        gate_up, down = roles["gate_up_proj"], roles["down_proj"]
        bias, down_bias = roles.get("gate_up_proj_bias"), roles.get("down_proj_bias")
        if self.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        bias = None if bias is None else self.gates_before_ups(bias)
        down_bias = whole_down_bias(down_bias, self.hidden_size, down_bias_start)
        return ExpertWeights(self.gates_before_ups(gate_up), down, bias, down_bias)

    def gates_before_ups(self, gate_up_EN: Tensor) -> Tensor:
        """A tensor with the module's gates and ups along dim 1, in the kernels' order."""
        return _parted(gate_up_EN) if self.interleaved else gate_up_EN

    def check(self, name: str, module: nn.Module) -> None:
        """ConfigError if the module's parameters are not as the spec says."""
        problems = []
        for own, placement in self.placements().items():
            found = getattr(module, own, None)
            shape = None if found is None else tuple(found.shape)
            if shape != placement.global_shape:
                problems.append(
                    f"experts: expected {name}.{own} of shape {placement.global_shape}, got {shape}; fix "
                    "the adapter's ExpertsSpec"
                )
        refuse(problems)


Adapter = Callable[[nn.Module], ExpertsSpec | None]
_registered: list[Adapter] = []


def register_moe_adapter(adapter: Adapter) -> Adapter:
    """Let ``fsdmoe.parallelize`` ask ``adapter`` about every module, before its own; a decorator.

    Args:
        adapter: From a module to the ``ExpertsSpec`` of its experts, or None where it does not apply.

    Returns:
        ``adapter`` itself.
    """
    if adapter not in _registered:
        _registered.insert(0, adapter)
    return adapter


def unregister_moe_adapter(adapter: Adapter) -> None:
    """Remove a registered adapter."""
    _registered.remove(adapter)


def find_experts(model: nn.Module, *, skip: Collection[int] = ()) -> dict[str, ExpertsSpec]:
    """Every experts module of ``model`` that an adapter knows, by name; not those whose id is in ``skip``."""
    found = {}
    for name, module in model.named_modules():
        if id(module) in skip:
            continue
        spec = next((spec for adapter in (*_registered, fused_experts) if (spec := adapter(module))), None)
        if spec is not None:
            spec.check(name, module)
            found[name] = spec
    return found


def warn_of_unknown_moe(model: nn.Module, known: Iterable[str]) -> None:
    """Say which modules look like experts and will not be split."""
    for kind, names in find_unknown_moe(model, known).items():
        logger.warning(
            "experts: %d modules like %s (%s) have a form that is not known here: they are sharded and "
            "trained like dense layers, but not split over ep; to split them, describe them with "
            "fsdmoe.register_moe_adapter (docs/huggingface.md)",
            len(names), names[0], kind,
        )  # fmt: skip


def find_unknown_moe(model: nn.Module, known: Iterable[str]) -> dict[str, list[str]]:
    """Modules that look like experts and are not among the ``known`` ones: class name to module names."""
    unknown: dict[str, list[str]] = {}
    taken = set(known)
    for name, module in model.named_modules():
        if any(name == other or name.startswith(other + ".") for other in taken):
            continue
        if any(other.startswith(f"{name}.") for other in taken):  # adapters around known ones
            continue
        if name.rpartition(".")[2] in ("experts", "expert") and any(True for _ in module.parameters()):
            taken.add(name)
            kind = module[0] if isinstance(module, nn.ModuleList) and len(module) else module
            unknown.setdefault(type(kind).__name__, []).append(name)
    return unknown


def fused_experts(module: nn.Module) -> ExpertsSpec | None:
    """The adapter for transformers' fused experts, and for whatever is built and computes like them."""
    own = dict(module.named_parameters(recurse=False))
    if not {"gate_up_proj", "down_proj"} <= own.keys() <= set(_FOUR) or len(own) != sum(
        1 for _ in module.parameters()
    ):
        return None
    arguments = tuple(inspect.signature(type(module).forward).parameters)[1:]
    gate_up, down = tuple(own["gate_up_proj"].shape), tuple(own["down_proj"].shape)
    if len(arguments) < 3 or not (len(gate_up) == len(down) == 3 and gate_up[0] == down[0]):
        return None
    transposed = gate_up[1:] == (down[2], 2 * down[1])
    if not transposed and gate_up[1:] != (2 * down[2], down[1]):
        return None
    hidden, width = (down[2], down[1]) if transposed else (down[1], down[2])
    for activation, interleaved in itertools.product(ACTIVATIONS, (False, True)):
        spec = ExpertsSpec(
            num_experts=gate_up[0], hidden_size=hidden, intermediate_size=width, activation=activation,
            gate_up_bias="gate_up_proj_bias" if "gate_up_proj_bias" in own else None,
            down_bias="down_proj_bias" if "down_proj_bias" in own else None,
            transposed=transposed, interleaved=interleaved, arguments=arguments[:3],
        )  # fmt: skip
        if computes(module, spec):
            return spec
    return None


@torch.no_grad()
def computes(module: nn.Module, spec: ExpertsSpec) -> bool:
    """Whether ``module``'s own forward, tried with few and small weights, is what ``spec`` says."""
    small = replace(spec, num_experts=3, hidden_size=4, intermediate_size=2)
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    twin = copy.copy(module)
    weights = {name: nn.Parameter(4 * draw(*p.global_shape)) for name, p in small.placements().items()}
    twin.__dict__.update(_parameters=weights, num_experts=small.num_experts)
    x_TD, ids_TK, weights_TK = draw(8, 4), torch.tensor([[0, 1], [1, 2]] * 4), draw(8, 2).abs()
    try:
        theirs = inspect.unwrap(type(module).forward)(twin, x_TD, ids_TK, weights_TK)
    except Exception:  # an unknown forward, given inputs it may not expect: any failure means "not known"
        return False
    rows, policy = Rows(x_TD, weights_TK, ids_TK), ExpertPolicy(spec.activation)
    ours = experts_mlp_reference(rows, small.kernel_weights(twin), policy)
    return (
        isinstance(theirs, Tensor) and theirs.shape == ours.shape and torch.allclose(theirs, ours, 1e-4, 1e-4)
    )


def _parted(interleaved_EN: Tensor) -> Tensor:
    """Gates and ups in turn along dim 1, to all gates before all ups."""
    return torch.cat((interleaved_EN[:, ::2], interleaved_EN[:, 1::2]), dim=1)
