"""Between the data and the decoder: batches to arguments, token counts over the step, held-out loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.data import Batch
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.models.decoder import Decoder, StepCounts


def model_inputs(batch: Batch, device: torch.device) -> dict[str, Any]:
    """The decoder's arguments on ``device``; rows of one document each need no document mask."""
    is_packed = bool(batch.document_ids_BS[:, -1].any())
    batch = batch.to(device)
    return {
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


@torch.no_grad()
def held_out_loss(model: Decoder, batches: Iterable[Batch], meshes: Meshes) -> float:
    """Mean next-token loss over this and all other ranks' batches."""
    model.eval()
    totals = torch.zeros(2, device=meshes.device, dtype=torch.float64)
    for batch in batches:
        inputs = model_inputs(batch, meshes.device)
        mean = model(**inputs).cross_entropy
        num_tokens = inputs["loss_mask_BS"].sum()
        totals += torch.stack((mean.double() * num_tokens, num_tokens.double()))
    model.train()
    dist.all_reduce(totals, group=meshes.group(Axis.LOSS))
    return (totals[0] / totals[1].clamp(min=1)).item()
