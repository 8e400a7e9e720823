"""Between the data and the decoder: batches to arguments, token counts over the step, held-out loss.

All ranks of ``cp`` and ``tp`` get the same whole rows; what is whose is planned here, on the host, once a
micro-batch, and the decoder cuts the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import split_rows
from fsdmoe.data import Batch
from fsdmoe.experts.context import RoutingContext
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.models.attention import SplitRows
from fsdmoe.models.decoder import Decoder, StepCounts


def model_inputs(
    batch: Batch, meshes: Meshes, context_parallel: ContextParallelConfig | None = None
) -> dict[str, Any]:
    """The decoder's arguments on this rank's device; rows of one document each need no document mask."""
    is_packed = bool(batch.document_ids_BS[:, -1].any())
    split = None
    if meshes.size(Axis.CP) > 1:
        pieces = split_rows(batch.document_ids_BS, meshes.size(Axis.CP), multiple_of=meshes.size(Axis.TP))
        plan = AttentionPlan(pieces, meshes.group(Axis.CP), meshes.device)
        split = SplitRows(plan, ContextAttention((context_parallel or ContextParallelConfig()).mode))
    batch = batch.to(meshes.device)
    return {
        "split": split,
        "tokens_BS": batch.tokens_BS,
        "positions_BS": batch.positions_BS,
        "document_ids_BS": batch.document_ids_BS if is_packed else None,
        "labels_BS": batch.labels_BS,
        "loss_mask_BS": batch.loss_mask_BS,
    }


def count_step(model: Decoder, inputs: list[dict[str, Any]], meshes: Meshes) -> StepCounts:
    """Each loss term's tokens over all ranks and micro-batches, so that gradients add up by plain sums."""
    keys = ("labels_BS", "loss_mask_BS", "document_ids_BS")
    vectors = [model.count_tokens(*(each[key] for key in keys)) for each in inputs]
    total = torch.stack(vectors).sum(0)
    dist.all_reduce(total, group=meshes.group(Axis.BATCH))
    return StepCounts.from_vector(total)


def routing_context(
    meshes: Meshes, *, micro_batch: int = 0, prior_load_LE: torch.Tensor | None = None
) -> RoutingContext:
    """What routing must know of the ranks; the decoder adds what it must know of the rows."""
    return RoutingContext(
        micro_batch=micro_batch,
        sequence_group=meshes.group(Axis.SEQUENCE),
        global_group=meshes.group(Axis.WORLD),
        num_devices=meshes.size(Axis.EP),
        prior_load_LE=prior_load_LE,
    )


@torch.no_grad()
def held_out_loss(
    model: Decoder,
    batches: Iterable[Batch],
    meshes: Meshes,
    context_parallel: ContextParallelConfig | None = None,
) -> float:
    """Mean next-token loss over this and all other ranks' batches."""
    model.eval()
    total, num_tokens = torch.zeros(2, device=meshes.device, dtype=torch.float64)
    for batch in batches:
        inputs = model_inputs(batch, meshes, context_parallel)
        number = inputs["loss_mask_BS"].sum().double()
        total += model(**inputs, routing=routing_context(meshes)).cross_entropy.double() * number
        num_tokens += number
    model.train()
    dist.all_reduce(total, group=meshes.group(Axis.LOSS))
    dist.all_reduce(num_tokens, group=meshes.group(Axis.BATCH))  # pieces of a row were counted as the row
    return (total / num_tokens.clamp(min=1)).item()
