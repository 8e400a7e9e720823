"""Estimates as rows of tables, and a setting in a line."""

from __future__ import annotations

from fsdmoe.core.rules import size_text
from fsdmoe.plan.job import Setting
from fsdmoe.plan.memory import MemoryEstimate
from fsdmoe.plan.traffic import TrafficEstimate

MEMORY_NAMES = {
    "weights": "weights (compute precision)",
    "main_weights": "main weights",
    "gradients": "gradients",
    "moments": "optimizer moments",
    "gather_slots": "slots for gathered weights",
    "grad_slots": "slots for whole gradients",
    "activations": "activations of a micro-batch",
    "loss": "logits of a chunk, loss",
    "layer_workspace": "workspace of a layer",
    "dispatch": "rows to and from experts",
    "context": "CUDA's context, communicators",
    "slack": "allocator's slack",
}
"""By field of :class:`MemoryEstimate`, in the order of its bars."""
TRAFFIC_NAMES = {
    "gathered": "weights received per step",
    "reduced": "gradients received per step",
    "replicated": "gradients across replicas per step",
    "experts": "rows to and from experts sent per step",
    "tensor": "sent over mesh.tp per step",
    "context": "sent over mesh.cp per step",
    "host": "to and from host memory per step",
}


def memory_rows(memory: MemoryEstimate) -> list[tuple[str, str]]:
    rows = [(text, getattr(memory, name)) for name, text in MEMORY_NAMES.items()]
    rows.append(("everything on the device", memory.total))
    return [(text, size_text(value)) for text, value in rows]


def traffic_rows(traffic: TrafficEstimate) -> list[tuple[str, str]]:
    return [(text, size_text(getattr(traffic, name))) for name, text in TRAFFIC_NAMES.items()]


def without_zeros(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of rows of sizes those that there is something of."""
    return [row for row in rows if row[1] != size_text(0)]


def setting_text(setting: Setting) -> str:
    """``dp 4 tp 2 ep 8, micro-batch 2, recompute norms, lean``; what is at its default is left out."""
    degrees = {axis: size for axis, size in vars(setting.degrees).items() if size > 1}
    words = [" ".join(f"{axis} {size}" for axis, size in degrees.items()) or "one rank"]
    words.append(f"micro-batch {setting.micro_batch_size}")
    experts = {"chunks": setting.experts.chunks, "sub-batches": setting.experts.sub_batches}
    words += [f"{name} {number}" for name, number in experts.items() if number > 1]
    words += [f"clones {setting.experts.clones}"] * (setting.experts.clones > 0)
    if setting.recompute:
        words.append("recompute " + " + ".join(sorted(setting.recompute)))
    if setting.offload:
        words.append("offload " + " + ".join(sorted(setting.offload)))
    words += [word for word, is_on in _words(setting).items() if is_on]
    return ", ".join(words)


def num_changes(setting: Setting) -> int:
    """How many things of a plain run the setting changes: one of dp and ep, of any micro-batch."""
    degrees, experts = setting.degrees, setting.experts
    numbers = (degrees.tp, degrees.cp, degrees.etp, experts.chunks, experts.sub_batches, 1 + experts.clones)
    more = sum(number > 1 for number in numbers)
    return len(setting.recompute) + len(setting.offload) + more + sum(_words(setting).values())


def _words(setting: Setting) -> dict[str, bool]:
    fsdp, precision = setting.fsdp, setting.precision
    return {
        "moments bf16": setting.optim.moment_dtype == "bfloat16",
        "gradients summed in bf16": precision.reduce_dtype == "bfloat16",
        precision.recipe: precision.recipe != "bf16",
        "lean": fsdp.lean,
        "weights stay gathered": fsdp.keeps_params,
        "states on the host": fsdp.cpu_offload,
    }
