"""The parts of wrapped models that ``memory.recompute`` and ``memory.offload`` name, found by structure.

======================  ===================================================================================
norms                   modules of class ``...Norm``, those on heads included
router                  ``gate`` or ``router`` next to the experts
shared_experts          ``shared_expert(s)``, ``shared_mlp``, and MLPs without experts: up to the input of
                        their last projection
attention_projections   the attention's forward up to the call of ``scaled_dot_product_attention`` (or of
                        planned attention), from its input
mla_up                  the same, where there are latents: their projections are the cheap ones
attention               that call
experts                 in our kernels, as in native decoders
======================  ===================================================================================

Modules stay what they are; their forwards are called as parts (:mod:`fsdmoe.memory.recompute`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rewrites import Rewrite, rewrite
from fsdmoe.experts.moe import MoE
from fsdmoe.huggingface.attention import attended
from fsdmoe.huggingface.lora import base_of
from fsdmoe.huggingface.wrapped_experts import ParallelForward, parallel_forward_of
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.memory.layer_call import name_activation, saving_as, tensors_in
from fsdmoe.memory.recompute import drawing_part, hand_out
from fsdmoe.models.memory_parts import recompute_experts

_HEADS = ("query", "key", "value")
_EVERYWHERE = ("layer", "activation")
"""Names that every model takes: the activation of routed experts is never kept."""


def prepare_parts(model: nn.Module, layers: Sequence[nn.Module], memory: MemoryConfig) -> None:
    """Let the modules of every layer run as parts; ConfigError for a name that fits no layer."""
    found: set[str] = set(_EVERYWHERE)
    recomputed: list[nn.Module] = []
    for index, layer in enumerate(layers):
        parts = memory.parts_at(index, len(layers))
        if parts - set(_EVERYWHERE) or "activation" in parts:
            found |= _prepare(layer, parts)
        if parts:
            rewrite(layer, Rewrite.NO_CACHE, _without_cache)
            recomputed.append(layer)
        if memory.offloads_at(index, len(layers)):
            _name_activations(layer)
    for owner in _owners(model, recomputed):
        owner.register_forward_pre_hook(_refuse_cache, with_kwargs=True)
    absent = [name for name in memory.recompute if name not in found]
    if absent and layers:
        raise ConfigError(
            f"memory.recompute: expected parts that the model has, got {absent[0]}, which was found in no "
            f"layer of {type(model).__name__}; drop it"
        )


def _without_cache(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A model that is called without ``use_cache=False`` hands its layers a cache in training, too: what runs
    again in backward would append its keys once more."""
    if torch.is_grad_enabled() and kwargs.get("past_key_values") is not None:
        kwargs = kwargs | {"past_key_values": None}
    return forward(*args, **kwargs)


def _owners(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that call ``layers``, which is where a cache of the caller's arrives."""
    wanted = set(layers)
    return [
        module
        for module in model.modules()
        if any(isinstance(child, nn.ModuleList) and wanted & set(child) for child in module.children())
    ]


def _refuse_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One that the model makes itself is empty, and nobody misses it. A caller's holds tokens to attend to,
    or is to be filled."""
    if torch.is_grad_enabled() and kwargs.get("past_key_values") is not None:
        raise ConfigError(
            f"past_key_values: expected none in a forward of {type(module).__name__} with gradients, got "
            "one; memory.recompute runs layers again in backward, which would append their keys twice. Call "
            "it under torch.no_grad(), or set memory.recompute = []"
        )


def _prepare(layer: nn.Module, parts: frozenset[str]) -> set[str]:
    """The names of ``parts`` that the layer has."""
    found: set[str] = set()
    for name, module in layer.named_modules():
        own = name.rpartition(".")[2]
        if isinstance(module, MoE):
            if "experts" in parts:
                recompute_experts(module)
            if "dispatch" in parts:
                module.send_again()
            found |= {"router", "dispatch", "experts", "shared_experts"}
        elif _is_norm(module):
            found |= _run_as(module, "norms", parts)
        elif own.startswith("act") and not any(True for _ in module.parameters()):
            found |= _run_as(module, "activation", parts)
        elif (experts := parallel_forward_of(module)) is not None and parts & {"dispatch", "experts"}:
            found |= {"dispatch", "experts"}
            if "dispatch" in parts:
                experts.send_again()
            if "experts" in parts:
                # Those with copied weights are run again as a whole in any case.
                experts.policy = experts.policy._replace(recompute=not experts.spec.is_copied)
        elif (router := _router_in(module)) is not None and "router" in parts:
            found.add("router")
            if hasattr(base_of(router[0]), "memory_calls"):
                continue  # one with policies, which recomputes its logits alone: it sums over ranks
            rewrite(router[0], Rewrite.PART, _route, router[1], says="recomputed: router")
        elif _is_attention(module):
            found |= _prepare_attention(module, parts)
        elif _last_of_mlp(module) is not None and not hasattr(module, "entries"):
            found |= _prepare_mlp(module, parts)
    return found & parts


def _run_as(module: nn.Module, name: str, parts: frozenset[str]) -> set[str]:
    if name in parts:
        rewrite(module, Rewrite.PART, drawing_part, name, says=f"recomputed: {name}")
    return {name}


def _route(experts: ParallelForward, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As a part, unless its choice is replayed: that is done around it, and would not be done again."""
    routing = experts.routing
    if routing is not None and routing.replay is not None and routing.replay.replays:
        return forward(*args, **kwargs)
    return drawing_part("router", forward, *args, **kwargs)


def _prepare_mlp(module: nn.Module, parts: frozenset[str]) -> set[str]:
    last = _last_of_mlp(module)
    assert last is not None
    if "shared_experts" in parts:
        rewrite(last, Rewrite.PART, _hand_out_first, says="its input is the end of what is recomputed")
    return _run_as(module, "shared_experts", parts)


def _hand_out_first(forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    hand_out(x)
    return forward(x, *args, **kwargs)


def _prepare_attention(module: nn.Module, parts: frozenset[str]) -> set[str]:
    has_latents = hasattr(module, "kv_b_proj")
    found = {"attention_projections", "attention"} | ({"mla_up"} if has_latents else set())
    named = found & parts
    if named:
        says = f"recomputed: {', '.join(sorted(named))}"
        rewrite(module, Rewrite.ATTENTION, _attend, frozenset(named), type(module).__name__, says=says)
    return found


def _attend(named: frozenset[str], kind: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)  # nothing is kept; attention may be another one, while it is tried
    seen: list[bool] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        with _AttentionCalls() as calls:
            result = forward(*args, **kwargs)
        seen.append(calls.has_seen or "attention_plan" in kwargs)
        return result

    before = next((name for name in ("attention_projections", "mla_up") if name in named), None)
    result = run(*args, **kwargs) if before is None else drawing_part(before, run, *args, **kwargs)
    if not all(seen):
        raise ConfigError(
            f"memory.recompute: expected {kind} to call scaled_dot_product_attention, which "
            f"{', '.join(sorted(named))} needs to tell projections from attention; set attn_implementation = "
            '"sdpa", or drop the name'
        )
    return result


class _AttentionCalls(TorchFunctionMode):
    """Where projections end and attention begins."""

    has_seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.has_seen = True
        query, key, value, *rest = [*args, *(kwargs.pop(name) for name in _HEADS if name in kwargs)]
        draws = bool(rest[1] if len(rest) > 1 else kwargs.get("dropout_p"))
        return attended(func, query, key, value, *rest, draws=draws, **kwargs)


def _name_activations(layer: nn.Module) -> None:
    """Say what the inputs of a layer's modules are, in the words of native decoders."""
    attention = next((module for module in layer.children() if _is_attention(module)), None)
    norms = [module for module in layer.children() if _is_norm(module)]
    if len(norms) > 1:
        _give_name(norms[1], "mlp_norm_input")
    if attention is not None:
        rewrite(attention, Rewrite.OFFLOADED, _name_inside, says="offload may take: qkv")
        _give_name(attention.get_submodule(_last_name(attention)), "attention_output")
    for module in layer.children():
        if module is not attention and not _is_norm(module) and any(True for _ in module.parameters()):
            _give_name(module, "mlp_input")
            experts = (parallel_forward_of(inner) for inner in module.modules())
            if any(each is not None and not each.dispatcher.crosses_ranks for each in experts):
                _give_name(module, "expert_input")


def _give_name(module: nn.Module, name: str) -> None:
    rewrite(module, Rewrite.NAME, _name_input, name, says=f"offload may take: {name}")


def _name_inside(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _AttentionCalls():
        return saving_as("qkv", _name_input, "attention_input", forward, *args, **kwargs)


def _name_input(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for tensor in itertools.islice(tensors_in((args, kwargs), depth=2), 1):
        name_activation(name, tensor)
    return forward(*args, **kwargs)


def _is_norm(module: nn.Module) -> bool:
    """Leaves with weights of one dim, whose class says what they are."""
    own = list(module.parameters())
    return (
        "norm" in type(module).__name__.lower()
        and not any(True for _ in module.children())
        and bool(own)
        and all(p.ndim == 1 for p in own)
    )


def _is_attention(module: nn.Module) -> bool:
    children = dict(module.named_children())
    first = "q_proj" in children or "q_b_proj" in children or "qkv_proj" in children
    return first and _last_name(module) in children


def _last_name(attention: nn.Module) -> str:
    return "o_proj" if hasattr(attention, "o_proj") else "out_proj"


def _last_of_mlp(module: nn.Module) -> nn.Module | None:
    """The last projection of a gated MLP."""
    children = dict(module.named_children())
    return children.get("down_proj") if {"gate_proj", "up_proj"} <= children.keys() else None


def _router_in(block: nn.Module) -> tuple[nn.Module, ParallelForward] | None:
    """The router of a block with experts, where it is a module, and the experts."""
    children = dict(block.named_children())
    forwards: Iterator[ParallelForward | None] = (parallel_forward_of(m) for m in children.values())
    experts = next((each for each in forwards if each is not None), None)
    router = children.get("gate", children.get("router"))
    return None if experts is None or router is None else (router, experts)
