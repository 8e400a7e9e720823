"""``fsdmoe.explain(model)``: which module computes by what, which are left as they are, and why."""

from __future__ import annotations

import re
from collections import Counter

import torch
from torch import nn

from fsdmoe.core.rewrites import Rewrite, foreign_forward, rewrites_of
from fsdmoe.experts.dispatch import Dispatcher
from fsdmoe.experts.moe import MoE
from fsdmoe.fsdp import engine_of, is_fully_sharded
from fsdmoe.huggingface.lora import peel
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of
from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.expert_operands import ExpertPolicy
from fsdmoe.models.projections import quantized_of

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# What these leave on a module says more.
_TOLD_OTHERWISE = (Rewrite.EXPERTS, Rewrite.RECIPE, Rewrite.TENSOR)
_NO_KERNEL = "no kernel of fsdmoe computes it"
_NOT_ASKED = "fsdmoe.parallelize was not called, or with fused_layers = False"


def explain(model: nn.Module) -> str:
    """Which module computes by what, and why others are left as they are.

    Args:
        model: Of fsdmoe or wrapped, usually what ``parallelize`` returned.

    Returns:
        Text to print: a line for each kind of module, with the number of those that agree, and at the end
        which modules the rewrites in use are for.
    """
    experts = _experts_in(model)
    inside = {inner for each in experts for inner in each.modules() if inner is not each}
    reasons: dict[nn.Module, str] = getattr(peel(model), "left_layers", {})
    was_asked = hasattr(peel(model), "left_layers") or _is_ours(peel(model))
    computed: Counter[str] = Counter()
    left: Counter[str] = Counter()
    used: set[Rewrite] = set()
    for name, module in model.named_modules():
        what = f"{_NUMBER.sub('*', name) or 'the model'} ({type(module).__name__})"
        facts = [*experts.get(module, ()), *_facts(module)]
        if facts := facts or ["fsdmoe's own"] * _is_ours(module):
            computed[f"{what}: {'; '.join(facts)}"] += 1
        used |= {each.which for each in rewrites_of(module)}
        is_list = type(module).forward is nn.Module.forward
        is_leaf = not (facts or is_list or module in inside or any(True for _ in module.children()))
        if why := reasons.get(module, (_NO_KERNEL if was_asked else _NOT_ASKED) * is_leaf):
            left[f"{what}: {why}"] += 1
    rules = [
        f"{each.by}: {each.matches}; elsewhere not: {each.elsewhere}" for each in Rewrite if each in used
    ]
    return "\n".join(
        [
            *["computed by:", *(f"  {count} x {line}" for line, count in computed.items())],
            *["left as they are:", *(f"  {count} x {line}" for line, count in left.items())],
            *["rewrites, from the inside out:", *(f"  {rule}" for rule in rules)],
        ]
    )


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith("fsdmoe.")


def _facts(module: nn.Module) -> list[str]:
    facts = [each.says for each in rewrites_of(module) if each.which not in _TOLD_OTHERWISE]
    if isinstance(module, nn.Linear) and (quantized := quantized_of(module)) is not None:
        facts.insert(0, f"recipe {quantized.recipe.name}")
    if (size := getattr(getattr(module, "tensor", None), "size", 1)) != 1:
        facts.insert(0, f"split over tp {size}")
    return facts if foreign_forward(module) is None else [*facts, "a forward of others"]


def _experts_in(model: nn.Module) -> dict[nn.Module, list[str]]:
    """What computes every module of experts that is fsdmoe's, or known."""
    inner = peel(model)
    dtypes: dict[nn.Module, torch.dtype] = {}
    for group in engine_of(inner).groups if is_fully_sharded(inner) else ():
        owners = [module for param in group.params for module, _ in param.places]
        dtypes |= dict.fromkeys(owners, group.plan.dtype)
    found: dict[nn.Module, list[str]] = {}
    for module in model.modules():
        around = module if isinstance(module, MoE) else parallel_forward_of(module)
        if around is None:
            continue
        owner = module.experts if isinstance(module, MoE) else module
        first = next(owner.parameters())
        like = torch.empty(0, dtype=dtypes.get(owner, first.dtype), device=first.device)
        policy = around.experts.policy if isinstance(around, MoE) else around.policy
        is_fused = not (policy.sequential or policy.weight_after) and _has_kernels(owner, policy, like)
        found[owner] = _described(policy, around.dispatcher, like.dtype, is_fused=is_fused)
    return found


def _has_kernels(owner: nn.Module, policy: ExpertPolicy, like: torch.Tensor) -> bool:
    """Whether the fused kernels take these experts (see ``fsdmoe.kernels.expert_mlp``)."""
    fused = triton_for(like)
    named = ((name.rpartition(".")[2], p) for name, p in owner.named_parameters())
    down = next((p for name, p in named if name.startswith("down") and p.ndim == 3), None)
    is_transposed = getattr(getattr(parallel_forward_of(owner), "spec", None), "transposed", False)
    if fused is None or down is None or is_transposed:
        return False
    is_taken: bool = fused.supports_shape(like, tuple(down.shape), policy.activation)
    return is_taken


def _described(
    policy: ExpertPolicy, dispatcher: Dispatcher, dtype: torch.dtype, *, is_fused: bool
) -> list[str]:
    links = dispatcher.links
    where = f"over ep {links.ep.size}, etp {links.etp.size} ({dispatcher.name})"
    where = where if dispatcher.crosses_ranks else "on this rank"
    kernel = "Triton" if is_fused else "plain torch"
    engine = "" if policy.products is None else f" by {policy.products.library}"
    kernel = kernel if policy.recipe is None else f"recipe {policy.recipe.name}{engine}"
    order = "one expert after another" if policy.sequential else "grouped experts"
    facts = [f"{order} {where}, {kernel} {str(dtype).removeprefix('torch.')}"]
    facts += ["weights decoded from codes"] * policy.coded
    return facts + ["recomputed: experts"] * policy.recompute
