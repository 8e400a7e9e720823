"""The GPU time of a training step by part of the model, from a profile of one step.

A kernel of ours is known by its name. Products of cuBLAS all have the same names, so they are told apart by
the operation that launched them: one of its operands has the vocabulary's size (head), the number of experts
(router) or the width of the dense MLP. A replayed graph has no such operations: profile without graphs, whose
kernels are the same.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fsdmoe.models.config import ModelConfig


class Work(NamedTuple):
    """Time that one kernel took (without a GPU: one operation), and who launched it."""

    kernel: str
    operation: str
    shapes: Sequence[Sequence[int]]
    milliseconds: float


PARTS = (
    "attention", "attention projections", "norms and positions", "router", "experts: forward",
    "experts: dgrad", "experts: wgrad", "experts: activation's backward", "permutation", "dense MLP",
    "embedding", "head", "optimizer", "other",
)  # fmt: skip

_BY_NAME = (
    ("experts: wgrad", r"_weight_grad_kernel|_bias_grad_kernel"),
    ("experts: forward", r"_gate_up_kernel|_project_kernel|fp8_gemm_kernel|grouped_mm|_product_kernel"),
    ("experts: activation's backward", r"swiglu_(backward|grad)"),
    ("permutation", r"_permute_kernel|_combine_kernel|_count_kernel|_place_kernel|_sort_weights_kernel"),
    ("router", r"_router_grad_kernel|^_forward_kernel|^_backward_kernel|topk|Router"),
    ("optimizer", r"adamw|adam|_look_ahead_kernel|_apply_kernel|_symmetric_kernel|lp_norm|_scale_kernel"),
    ("norms and positions", r"rms_norm|norm_rope|_rope_kernel"),
    ("embedding", r"indexing_backward|index_put|embedding|vectorized_gather"),
    ("head", r"cross_entropy|log_softmax"),
    ("attention", r"flash|fmha|cudnn.*sdpa|scaled_dot_product|attention"),
)  # fmt: skip
_PRODUCT = re.compile(r"gemm|nvjet|cutlass|aten::(add)?mm|cublas|splitK", re.IGNORECASE)


_LAUNCH = re.compile(r"cu(da)?Launch")
"""Calls of the runtime: events of their own, which claim the kernels of their operations once more."""


def part_of(work: Work, model: ModelConfig) -> str:
    """The part of ``model`` that a kernel belongs to."""
    for part, pattern in _BY_NAME:
        if re.search(pattern, work.kernel):
            # One kernel has both: a projection of forward is one of backward with the other operand.
            is_dgrad = part == "experts: forward" and "Backward" in work.operation
            return "experts: dgrad" if is_dgrad else part
    if not _PRODUCT.search(work.kernel):
        # Operations around embedding and loss have kernels of general names (sort, fill, copy).
        return _by_operation(work) or "other"
    sizes = {size for shape in work.shapes for size in shape}
    if model.vocab_size in sizes:
        return "head"
    if model.num_moe_layers and model.num_experts in sizes:
        return "router"
    if not model.num_moe_layers and model.intermediate_size in sizes:
        return "dense MLP"
    return "attention projections" if sizes else "other"


def _by_operation(work: Work) -> str | None:
    for part, pattern in (
        ("embedding", r"index_put|mbedding"),
        ("attention", r"attention"),
        ("head", r"Head"),
    ):
        if re.search(pattern, work.operation):
            return part
    return None


def by_part(found: Iterable[Work], model: ModelConfig) -> dict[str, float]:
    """Milliseconds of each part, in the order of :data:`PARTS`."""
    sums = dict.fromkeys(PARTS, 0.0)
    for work in found:
        sums[part_of(work, model)] += work.milliseconds
    return sums


def profile_step(step: Callable[[], object], *, on_gpu: bool) -> list[Work]:
    """What one step ran."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    events = profiler.events()
    assert events is not None
    return _kernels(events) if on_gpu else _operations(events)


def _operations(events: Iterable[Any]) -> list[Work]:
    return [Work(e.name, e.name, e.input_shapes or (), e.self_cpu_time_total / 1e3) for e in events]


def _kernels(events: Iterable[Any]) -> list[Work]:
    """Kernels with the operation that launched them; those that no operation claims have none."""
    found: list[Work] = []
    claimed: defaultdict[str, float] = defaultdict(float)
    whole: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.is_user_annotation or _LAUNCH.match(event.name):
            continue
        if event.device_type != torch.autograd.DeviceType.CPU:
            whole[event.name] += event.self_device_time_total / 1e3
            continue
        for kernel in event.kernels:
            spent = kernel.duration / 1e3
            found.append(Work(kernel.name, event.name, event.input_shapes or (), spent))
            claimed[kernel.name] += spent
    rest = ((name, spent - claimed[name]) for name, spent in whole.items())
    return found + [Work(name, "", (), spent) for name, spent in rest if spent > 1e-4]


def largest_others(found: Iterable[Work], model: ModelConfig, count: int = 8) -> list[tuple[str, float]]:
    """The kernels that no part claims, the longest first: what the patterns here do not know."""
    sums: defaultdict[str, float] = defaultdict(float)
    for work in found:
        if part_of(work, model) == "other":
            sums[work.kernel] += work.milliseconds
    return sorted(sums.items(), key=lambda pair: -pair[1])[:count]


def largest_kernels(found: Iterable[Work], count: int = 30) -> list[tuple[str, int, float]]:
    """The kernels with the most time, the longest first: name, launches (one for those that no operation
    claims) and milliseconds; the last line has all others together."""
    sums: defaultdict[str, float] = defaultdict(float)
    launches: defaultdict[str, int] = defaultdict(int)
    for work in found:
        sums[work.kernel] += work.milliseconds
        launches[work.kernel] += 1
    names = sorted(sums, key=lambda name: -sums[name])
    rest = names[count:]
    whole = ("all others", sum(launches[name] for name in rest), sum(sums[name] for name in rest))
    return [*((name, launches[name], sums[name]) for name in names[:count]), whole]
