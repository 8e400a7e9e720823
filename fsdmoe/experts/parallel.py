"""EP as a placement: split a MoE layer's experts over ``ep`` and ``etp``, and give it a dispatcher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdmoe.core.placement import SplitMeshes
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.dispatch import Choice, Links, build_dispatcher, options_of
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.split import check_split, down_bias_start, split_parameters
from fsdmoe.mesh import Meshes


def parallelize_moe_layers(layers: Iterable[MoE], meshes: Meshes, experts: ExpertsConfig) -> set[Choice]:
    """:func:`parallelize_experts` of each; which dispatchers they got, and why."""
    options = options_of(experts)
    return {
        parallelize_experts(
            layer, meshes, dispatcher=experts.dispatcher, chunks=experts.chunks,
            transfer_sms=experts.transfer_sms, sub_batches=experts.sub_batches, **options,
        )
        for layer in layers
    }  # fmt: skip


def parallelize_experts(
    moe: MoE,
    meshes: Meshes,
    *,
    dispatcher: str = "auto",
    chunks: int = 1,
    transfer_sms: int = 0,
    sub_batches: int = 1,
    **options: Any,
) -> Choice:
    """Split ``moe``'s experts (materialised or meta) in place; returns which dispatcher it got, and why.
    ``options``: further ones of :func:`build_dispatcher`."""
    split_experts(moe.experts, meshes)
    made, choice = build_dispatcher(
        dispatcher,
        Links.of(meshes),
        num_experts=moe.experts.num_experts,
        top_k=moe.gate.spec.top_k,
        **options,
    )
    moe.exchange_by(made, chunks, transfer_sms, sub_batches)
    return choice


def split_experts(experts: GroupedExperts, meshes: SplitMeshes) -> None:
    """Leave each parameter with this rank's slice: a DTensor on the mesh of ``ep`` and ``etp``."""
    check_split(
        meshes,
        num_experts=experts.num_experts,
        width=experts.intermediate_size,
        bias_width=0 if experts.down_proj_bias is None else experts.hidden_size,
    )
    split_parameters(experts, experts.placements(), meshes)
    experts.down_bias_start = down_bias_start(experts.hidden_size, meshes)
