"""Low-rank adapters (LoRA, DoRA) that ``peft`` put around the parts of a model, recognised by structure.

peft leaves a layer where it is and puts a module around it, ``base_layer``. Around a projection that module
computes ``W x + s B A x``; around fused experts, one for each adapted parameter, one inside the other::

    mlp.experts                ParamWrapper of down_proj       lora_A, lora_B
    mlp.experts.base_layer     ParamWrapper of gate_up_proj    lora_A, lora_B
      ....base_layer.base_layer                                the experts

The factors of all experts are stacked: ``lora_A [E*Q, I]`` expert by expert, ``lora_B [O, Q*E]`` with the
experts side by side for each of the Q columns. They are cut as the weight is: over ``ep`` by expert (a
strided cut for B), over ``etp`` where they have the dim that it cuts. The factor without that dim stays
whole; every rank of ``etp`` has a part of its gradient, which is summed as it is sharded, over ``edp x etp``.

peft itself adds the product ``B A`` to the whole weight. Here the experts get the factors instead
(:class:`fsdmoe.kernels.expert_operands.LowRankUpdates`) and nothing of the size of a weight is made.

Sizes: E experts, Q rank, I and O the widths into and out of a weight.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdmoe.checkpoint.adapter_names import BASE, FACTORS, MAGNITUDE
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import Cut, Placement, SplitMeshes, register_split, split_parameter
from fsdmoe.huggingface.expert_spec import ExpertsSpec
from fsdmoe.kernels.expert_operands import LowRankUpdates
from fsdmoe.mesh import Axis

_ROW_BYTES = 16  # of a factor's rows, for grouped products


def peel(model: nn.Module) -> nn.Module:
    """The model inside of a ``PeftModel`` with LoRA, a shell without parameters; any other is itself."""
    tuner = model._modules.get("base_model")
    inner = None if tuner is None else tuner._modules.get("model")
    is_shell = any(kind.__name__ == "LoraModel" for kind in type(tuner).__mro__)
    if (
        inner is None
        or not is_shell
        or sum(1 for _ in model.parameters()) != sum(1 for _ in inner.parameters())
    ):
        return model
    return inner


def has_factors(module: nn.Module) -> bool:
    """Whether peft put ``module`` around another, with low-rank factors."""
    factors = (module._modules.get(name) for name in FACTORS)
    return BASE in module._modules and all(isinstance(found, nn.ModuleDict) for found in factors)


def base_of(module: nn.Module) -> nn.Module:
    """What is inside of adapters, or the module itself."""
    while has_factors(module):
        module = module.get_submodule(BASE)
    return module


def path_around(name: str) -> str:
    """The path of the outermost adapter around the module at ``name``: where the model calls it."""
    while name.endswith(f".{BASE}"):
        name = name.removesuffix(f".{BASE}")
    return name


# Projections that ``tp`` splits. Around one that is cut by rows, A sees all tokens and B is cut like the
# weight. Around one that is cut by columns, A is cut like the weight, its few outputs are summed and
# scattered, and B and the magnitude see this rank's tokens.


def is_first_factor(name: str) -> bool:
    """Whether the parameter of this name is the A of an adapter."""
    return FACTORS[0] in name.split(".")


def first_factors(module: nn.Module) -> list[nn.Module]:
    """The A of every adapter around a projection."""
    return list(module.get_submodule(FACTORS[0]).children()) if has_factors(module) else []


def magnitudes(module: nn.Module) -> list[Any]:
    """What DoRA adds to them."""
    found = module._modules.get(MAGNITUDE)
    return [] if found is None else list(found.children())


def is_transposed(layer: Any) -> bool:
    """Whether the weight inside of an adapter is ``[in, out]``: that of an embedding, or of ``Conv1D``."""
    return bool(layer.lora_embedding_A) or bool(layer.fan_in_fan_out)


def scattered_magnitude(
    magnitude: Any,
    x_BSI: Tensor,
    *,
    lora_A: Any,
    lora_B: Any,
    scaling: float,
    base_layer: Any,
    base_result: Tensor | None = None,
    adapter_name: str = "default",
) -> Tensor:
    """The forward of DoRA's magnitude where each rank of ``tp`` has some columns of the weight: the norms of
    its rows are those over all ranks. As in peft, no gradient flows through them."""
    weight_OI = base_layer.weight.to(x_BSI.dtype)
    with torch.no_grad():
        updated_OI = weight_OI + scaling * (lora_B.weight @ lora_A.weight).to(weight_OI.dtype)
        squares_O = updated_OI.to(torch.promote_types(updated_OI.dtype, torch.float32)).square().sum(1)
        norm_O = base_layer.tensor.all_reduce(squares_O).sqrt().to(weight_OI.dtype)
    if base_result is None:  # with dropout, which the base's own output did not have
        base_result = base_layer.tensor.scatter(F.linear(x_BSI, weight_OI))
    elif base_layer.bias is not None:
        base_result = base_result - base_layer.bias
    scale_O = magnitude.weight / norm_O
    return (scale_O - 1) * base_result + scale_O * lora_B(lora_A(x_BSI)) * scaling


class ExpertAdapters:
    """The adapters around one experts module."""

    def __init__(self, model: nn.Module, name: str, spec: ExpertsSpec) -> None:
        self.spec = spec
        self._wrappers = list(_wrappers(model, name))
        if self._wrappers and spec.num_identity:
            raise ConfigError(
                f"adapter.target_parameters: {path_around(name)} has identity experts next to the others; "
                "adapters on such experts cannot be split; adapt attention alone"
            )
        others = {wrapper.parameter_name for wrapper in self._wrappers} - {spec.gate_up, spec.down}
        if others:
            raise ConfigError(
                f"adapter.target_parameters: expected {spec.gate_up} and {spec.down} of {path_around(name)}, "
                f"got {sorted(others)} too; biases of experts cannot have an adapter"
            )

    def split(self, meshes: SplitMeshes) -> None:
        """Leave every factor with this rank's part of it, and have peft hand over the factors instead of
        adding their product to a weight."""
        for wrapper in self._wrappers:
            for adapter in wrapper.lora_A:
                for placement, linear in zip(
                    self._placements(wrapper, adapter), _linears(wrapper, adapter), strict=True
                ):
                    register_split(linear, "weight", split_parameter(linear.weight, placement, meshes))
            wrapper._activate_lora = types.MethodType(_activate_nothing, wrapper)

    def active(self) -> dict[str, list[str]]:
        """Which adapters are switched on, by parameter: what a call computes with, and again in backward."""
        return {
            wrapper.parameter_name: [a for a in wrapper.active_adapters if a in wrapper.lora_A]
            for wrapper in self._wrappers
            if not (wrapper.disable_adapters or wrapper.merged)
        }

    def updates(self, active: dict[str, list[str]], dtype: torch.dtype) -> LowRankUpdates:
        """The factors of these adapters, as the kernels want them."""
        found: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        for wrapper in self._wrappers:
            name = wrapper.parameter_name
            pairs = [self._kernel_factors(wrapper, adapter) for adapter in active.get(name, ())]
            if pairs:
                found[name] = _joined(pairs, dtype)
        nothing = (None, None)
        return LowRankUpdates(*found.get(self.spec.gate_up, nothing), *found.get(self.spec.down, nothing))

    def _kernel_factors(self, wrapper: Any, adapter: str) -> tuple[Tensor, Tensor]:
        """``A [E, Q, I]`` and ``B [E, O, Q]`` of this rank's experts, for a weight ``[E, O, I]``; the scaling
        is in B."""
        rank = wrapper.r[adapter]
        stacked_a, stacked_b = (linear.weight for linear in _linears(wrapper, adapter))
        a_EQI = stacked_a.unflatten(0, (-1, rank))
        b_EOQ = stacked_b.unflatten(1, (rank, -1)).permute(2, 0, 1)
        if _is_swapped(wrapper) is self.spec.transposed:  # to peft, the input is our output
            a_EQI, b_EOQ = b_EOQ.transpose(1, 2), a_EQI.transpose(1, 2)
        if wrapper.parameter_name == self.spec.gate_up:
            b_EOQ = self.spec.gates_before_ups(b_EOQ)
        scaling = wrapper.scaling[adapter]
        return a_EQI, b_EOQ if scaling == 1 else b_EOQ * scaling

    def _placements(self, wrapper: Any, adapter: str) -> tuple[Placement, Placement]:
        """Of A and B: cut over ``ep`` by expert, over ``etp`` where they have the dim that it cuts."""
        cuts = dict(self.spec.placements()[wrapper.parameter_name].cuts)
        inside = cuts[Axis.ETP]
        rank, on_b = wrapper.r[adapter], (inside.dim == 1) is _is_swapped(wrapper)
        stacked_a, stacked_b = (tuple(linear.weight.shape) for linear in _linears(wrapper, adapter))
        along_etp = ((Axis.ETP, _on_dim(inside, 0 if on_b else 1)),)
        of_a: tuple[tuple[Axis, Cut], ...] = ((Axis.EP, Shard(0)),)
        of_b: tuple[tuple[Axis, Cut], ...] = ((Axis.EP, _StridedShard(1, split_factor=rank)),)
        return (
            Placement(stacked_a, of_a if on_b else (*of_a, *along_etp)),
            Placement(stacked_b, (*of_b, *along_etp) if on_b else of_b),
        )


def _joined(pairs: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factors of several adapters as one of the sum of their ranks, padded for the products that take it;
    without a copy where a factor is in order already."""
    a_EQI, b_EOQ = pairs[0]
    if len(pairs) > 1:
        a_EQI = torch.cat([a for a, _ in pairs], dim=1)
        b_EOQ = torch.cat([b for _, b in pairs], dim=2)
    padding = -a_EQI.shape[1] % (_ROW_BYTES // dtype.itemsize)
    if padding:
        a_EQI = F.pad(a_EQI, (0, 0, 0, padding))
        b_EOQ = F.pad(b_EOQ, (0, padding))
    return a_EQI.to(dtype).contiguous(), b_EOQ.to(dtype).contiguous()


def _linears(wrapper: Any, adapter: str) -> tuple[Any, Any]:
    return wrapper.lora_A[adapter], wrapper.lora_B[adapter]


def _is_swapped(wrapper: Any) -> bool:
    """The parameter is ``[E, O, I]`` to peft, otherwise ``[E, I, O]``."""
    return bool(wrapper._did_swap_in_out_features)


def _on_dim(cut: Cut, dim: int) -> Cut:
    """The same cut of another dim."""
    return _StridedShard(dim, split_factor=cut.split_factor) if isinstance(cut, _StridedShard) else Shard(dim)


def _wrappers(model: nn.Module, name: str) -> Iterator[Any]:
    """The modules around the experts at ``name``, from the inside out."""
    while name.endswith(f".{BASE}"):
        name = name.removesuffix(f".{BASE}")
        wrapper = model.get_submodule(name)
        if not (has_factors(wrapper) and hasattr(wrapper, "parameter_name")):
            raise ConfigError(
                f"adapter: {name} is a {type(wrapper).__name__} around experts, of a kind that is not known "
                "here; expected LoRA by peft's target_parameters"
            )
        yield wrapper


@contextlib.contextmanager
def _activate_nothing(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
    yield
