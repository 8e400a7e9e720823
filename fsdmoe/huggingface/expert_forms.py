"""Recognises the experts of transformers, and whatever is built and computes like them.

Parameter shapes and the call's arguments say what a module may be. What it is, its own forward says: it is
run on a small copy of the module with random weights and compared with the definition of each candidate
(:func:`computes`). So no class is named here, and a form that is not known is left alone.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdmoe.core.rewrites import foreign_forward
from fsdmoe.huggingface.expert_spec import FOUR, ExpertsSpec
from fsdmoe.kernels.activations import ACTIVATIONS, GPT_OSS_LIMIT
from fsdmoe.kernels.expert_mlp import experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, Rows

_SMALL = 4  # all sizes of the copy: alike, so that none is taken for another
_TOKENS = 16
# Where forms of the GELU differ most; where limits begin; beyond any limit.
_SCALES = (1.0, 4.0, 4000.0)
_TOLERANCE = 2e-5


def fused_experts(module: nn.Module) -> ExpertsSpec | None:
    """The adapter for transformers' fused experts, and for whatever is built and computes like them."""
    if foreign_forward(module) is not None:
        return None
    forms = itertools.chain(_fused(module), _ungated(module), _apart(module), _blocks(module))
    candidates = (spec for form in forms for spec in _activations(module, form))
    return next((spec for spec in candidates if computes(module, spec)), None)


# Candidates by structure; their activation is found afterwards


def _fused(module: nn.Module) -> Iterator[ExpertsSpec]:
    own = _own_parameters(module, {"gate_up_proj", "down_proj"}, set(FOUR))
    if not own:
        return
    arguments = _arguments(module)
    gate_up = own["gate_up_proj"]
    down = own["down_proj"]
    if len(arguments) < 3 or not (len(gate_up) == len(down) == 3):
        return
    num_experts, transposed = down[0], gate_up[1:] == (down[2], 2 * down[1])
    if gate_up[0] < num_experts or not (transposed or gate_up[1:] == (2 * down[2], down[1])):
        return
    hidden, width = (down[2], down[1]) if transposed else (down[1], down[2])
    rest = {name: p.shape for name, p in module.named_parameters() if "." in name}
    norms = {name.partition(".")[0] for name, shape in rest.items() if tuple(shape) == (hidden,)}
    if len(norms) > 1 or len(norms) != len(rest):
        return
    for interleaved in (False, True):
        yield ExpertsSpec(
            num_experts=num_experts, hidden_size=hidden, intermediate_size=width,
            gate_up_bias="gate_up_proj_bias" if "gate_up_proj_bias" in own else None,
            down_bias="down_proj_bias" if "down_proj_bias" in own else None,
            transposed=transposed, interleaved=interleaved, num_identity=gate_up[0] - num_experts,
            output_norm=next(iter(norms), None), arguments=arguments[:3],
        )  # fmt: skip


def _ungated(module: nn.Module) -> Iterator[ExpertsSpec]:
    names = {"up_proj", "down_proj"}
    own = _own_parameters(module, names, names)
    if not own or len(own) != sum(1 for _ in module.parameters()):
        return
    up, down = own["up_proj"], own["down_proj"]
    arguments = _arguments(module)
    if len(arguments) >= 3 and len(up) == 3 and (up[0], up[2], up[1]) == down:
        yield ExpertsSpec(
            num_experts=up[0], hidden_size=up[2], intermediate_size=up[1], gate_up="up_proj",
            activation="relu2", arguments=arguments[:3],
        )  # fmt: skip


def _apart(module: nn.Module) -> Iterator[ExpertsSpec]:
    """Gates, ups and downs as three matrices ``[E*I, H]`` somewhere inside."""
    num_experts = getattr(module, "num_experts", None)
    arguments = _arguments(module) if isinstance(num_experts, int) else ()
    if num_experts is None or len(arguments) < 3:
        return
    found = {name: tuple(p.shape) for name, p in module.named_parameters()}
    shapes = set(found.values())
    if len(found) != 3 or len(shapes) != 1:
        return
    shape = shapes.pop()
    if len(shape) != 2 or num_experts < 2 or shape[0] % num_experts:
        return
    for gate, up, down in itertools.permutations(found):
        yield ExpertsSpec(
            num_experts=num_experts, hidden_size=shape[1], intermediate_size=shape[0] // num_experts,
            gate_up=gate, up=up, down=down, arguments=arguments[:3],
        )  # fmt: skip


def _blocks(module: nn.Module) -> Iterator[ExpertsSpec]:
    """Blocks that send every token to every expert, times a weight that is mostly zero."""
    if module._modules.keys() != {"router", "experts", "shared_expert"} or len(_arguments(module)) != 1:
        return
    names = {"gate_up_proj", "down_proj"}
    own = _own_parameters(module.get_submodule("experts"), names, names)
    if not own or len(own["down_proj"]) != 3:
        return
    num_experts, width, hidden = own["down_proj"]
    if own["gate_up_proj"] == (num_experts, hidden, 2 * width):
        yield ExpertsSpec(
            num_experts=num_experts, hidden_size=hidden, intermediate_size=width, transposed=True,
            gate_up="experts.gate_up_proj", down="experts.down_proj", weights_inputs=True,
            arguments=_arguments(module),
        )  # fmt: skip


def _own_parameters(module: nn.Module, required: set[str], allowed: set[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of the module's own parameters, none of them outside of ``allowed``."""
    own = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    return own if required <= own.keys() <= allowed else {}


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def _activations(module: nn.Module, form: ExpertsSpec) -> Iterator[ExpertsSpec]:
    """The form with every activation that it may have; limits are among the module's own numbers."""
    numbers = {float(value) for value in vars(module).values() if type(value) in (int, float)}
    limits = [GPT_OSS_LIMIT, *sorted(n for n in numbers if 0 < n < math.inf and n != GPT_OSS_LIMIT)]
    is_gated = ACTIVATIONS[form.activation].is_gated
    for name, activation in ACTIVATIONS.items():
        if activation.is_gated is is_gated:
            for limit in limits if activation.is_limited else limits[:1]:
                yield replace(form, activation=name, limit=limit)


# What a module computes


@torch.no_grad()
def computes(module: nn.Module, spec: ExpertsSpec) -> bool:
    """Whether ``module``'s own forward, tried on a small copy of it, is what ``spec`` says."""
    small = replace(
        spec, num_experts=_SMALL, hidden_size=_SMALL, intermediate_size=_SMALL,
        num_identity=_SMALL if spec.num_identity else 0,
    )  # fmt: skip
    sizes = {spec.num_experts + spec.num_identity: small.num_experts + small.num_identity}
    same = (spec.num_experts, spec.num_identity, spec.hidden_size, spec.intermediate_size)
    sizes |= {size: _SMALL for size in same if size}
    # In both modes: a model from a folder is in eval mode, where dropout does not show.
    tried = itertools.product((False, True), _SCALES)
    return all(_computes_at(scale, module, small, sizes, trains=trains) for trains, scale in tried)


def _computes_at(
    scale: float, module: nn.Module, small: ExpertsSpec, sizes: dict[int, int], *, trains: bool
) -> bool:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    twin = _resized(module, sizes, draw).train(trains)
    for name, placement in small.placements().items():
        owner, _, own = name.rpartition(".")
        twin.get_submodule(owner)._parameters[own] = nn.Parameter(scale * draw(*placement.global_shape))
    x_TD = draw(_TOKENS, _SMALL)
    ids_TK = torch.rand(_TOKENS, _SMALL + small.num_identity, generator=random).topk(2).indices
    weights_TK = draw(_TOKENS, 2).abs()
    ours = _expected(Rows(x_TD, weights_TK, ids_TK), twin, small)
    forward = inspect.unwrap(type(module).forward, stop=_is_foreign)
    try:
        if small.weights_inputs:
            scores_TE = torch.zeros(_TOKENS, _SMALL).scatter(1, ids_TK, weights_TK)
            twin._modules.update(
                router=_Returns((scores_TE, scores_TE)), shared_expert=_Returns(x_TD.clone())
            )
            theirs = forward(twin, x_TD)[0] - x_TD
        else:
            theirs = forward(twin, x_TD, ids_TK, weights_TK)
    except Exception:  # an unknown forward, given inputs it may not expect: any failure means "not known"
        return False
    if not isinstance(theirs, Tensor) or theirs.numel() != ours.numel():
        return False
    difference = (theirs.view_as(ours) - ours).abs().max()
    return bool(difference <= _TOLERANCE * ours.abs().max())


def _expected(rows: Rows, twin: nn.Module, small: ExpertsSpec) -> Tensor:
    """The definition: each choice by itself, then weighted and summed."""
    x_TD, weights_TK, ids_TK = rows
    top_k = ids_TK.shape[1]
    x_ND = x_TD.repeat_interleave(top_k, 0)
    weights_N1 = weights_TK.reshape(-1, 1)
    ids_N1 = ids_TK.reshape(-1, 1)
    if small.weights_inputs:
        x_ND = x_ND * weights_N1
        weights_N1 = torch.ones_like(weights_N1)
    is_identity_N1 = ids_N1 >= small.num_experts
    each = Rows(x_ND, torch.ones_like(weights_N1), ids_N1.masked_fill(is_identity_N1, -1))
    policy = ExpertPolicy(small.activation, limit=small.limit)
    y_ND = experts_mlp_reference(each, small.kernel_weights(twin), policy)
    if small.output_norm is not None:
        y_ND = twin.get_submodule(small.output_norm)(y_ND)
    y_ND = torch.where(is_identity_N1, x_ND, y_ND) * weights_N1
    return y_ND.unflatten(0, (-1, top_k)).sum(1)


def _is_foreign(function: Any) -> bool:
    """Not the switch of transformers between implementations: what somebody put around an experts' forward
    is part of it."""
    return not str(getattr(function, "__globals__", {}).get("__name__")).startswith("transformers.")


class _Returns(nn.Module):
    """Stands in for a module."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *args: Any) -> Any:
        return self.value


def _resized(module: nn.Module, sizes: dict[int, int], draw: Callable[..., Tensor]) -> nn.Module:
    """A copy with other sizes, whose parameters and buffers are random."""
    twin = copy.copy(module)
    numbers = {
        k: sizes.get(v, v) for k, v in vars(module).items() if type(v) is int and not k.startswith("_")
    }
    twin.__dict__.update(
        numbers,
        _modules={name: child and _resized(child, sizes, draw) for name, child in module._modules.items()},
        _parameters={
            name: None if p is None or p.dim() != 1 else nn.Parameter(draw(sizes.get(len(p), len(p))))
            for name, p in module._parameters.items()
        },
        _buffers={
            name: draw(*(sizes.get(n, n) for n in b.shape)) if b is not None and b.is_floating_point() else b
            for name, b in module._buffers.items()
        },
    )
    return twin
