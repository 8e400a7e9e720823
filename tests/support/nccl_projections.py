"""One rank of a comparison on NCCL: layers whose exchanges overlap with their products, and plain ones.

Started by ``test_nccl_gpu.py``. Nothing waits for the GPU between the layers, and memory is freed and taken
again all the time: a piece that is read before it is there, or overwritten while it travels, shows.
"""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.models.decoder import DenseMLP
from fsdmoe.ring_send_recv import RingSendRecv
from fsdmoe.tensor_parallel.config import Overlap
from fsdmoe.tensor_parallel.group import TensorGroup
from fsdmoe.tensor_parallel.split import parallelize_tensors
from tests.support.coordinates import use_local_tensors

LAYERS, HIDDEN, WIDTH = 4, 512, 1024
SHAPES = ((1, 4096), (3, 1024), (1, 512), (2, 2048))
"""Rows, and tokens of a row over all ranks."""


def build(meshes: Meshes, overlap: Overlap) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*(DenseMLP(HIDDEN, WIDTH) for _ in range(LAYERS)))
    parallelize_tensors(layers, meshes, overlap)
    use_local_tensors(layers)
    return layers.to(meshes.device, torch.bfloat16)


def train(layers: nn.Sequential, meshes: Meshes) -> list[Tensor]:
    """Outputs, and the gradients of inputs and weights, over several shapes."""
    found = []
    for index, (rows, length) in enumerate(SHAPES):
        torch.manual_seed(100 * index + dist.get_rank())
        x = torch.randn(rows, length // meshes.degrees.tp, HIDDEN, device=meshes.device)
        x = x.bfloat16().requires_grad_()
        y = x
        for layer in layers:
            y = y + layer(y)
        y.float().square().mean().backward()
        found += [y.detach(), x.grad]
    return found + [p.grad for p in layers.parameters()]  # type: ignore[misc]


def travels_beside_work(meshes: Meshes) -> bool:
    """Whether a exchange that was started before a second of work on this stream ends before that work."""
    piece = torch.zeros(1024, device=meshes.device)
    tensor = TensorGroup.of(meshes)
    for _ in range(2):  # the first one also connects the ranks
        exchange = RingSendRecv(piece, torch.empty_like(piece), tensor.group)
        exchange.wait()
    dist.barrier()
    torch.cuda.synchronize()
    exchange, work_is_done = RingSendRecv(piece, torch.empty_like(piece), tensor.group), torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)
    work_is_done.record()
    while not work_is_done.query():
        if all(work.is_completed() for work in exchange.works):
            return True
        time.sleep(0.001)
    return False


def main() -> None:
    meshes = build_meshes(tp=int(os.environ["WORLD_SIZE"]))
    worst = 0.0
    for _ in range(3):
        with patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as passed_on:
            plain = train(build(meshes, "none"), meshes)
            assert passed_on.call_count == 0
            overlapped = train(build(meshes, "ring"), meshes)
        # Two exchanges a layer, forward and backward.
        assert passed_on.call_count == len(SHAPES) * LAYERS * 4 * (meshes.degrees.tp - 1)
        for a, b in zip(plain, overlapped, strict=True):
            assert b.isfinite().all()
            assert a.any()
            worst = max(worst, ((b - a).float().norm() / a.float().norm()).item())
    if meshes.device.type == "cuda":
        assert travels_beside_work(meshes), "transfers must not wait for work that was given later"
    print(f"worst relative difference on rank {dist.get_rank()}: {worst:.1e}")
    assert worst < 2e-2
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
