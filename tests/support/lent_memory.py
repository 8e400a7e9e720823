"""One rank of a run that lends its device memory in the middle, beside one that never does.

Started by ``test_release_gpu.py``: ``python -m tests.support.lent_memory [--unregistered]``. On a CPU it runs
too, and says nothing about memory.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.fsdp import FSDPConfig, engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.models import ModelConfig, StepCounts, build_model
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision import PrecisionConfig

MODEL = ModelConfig(
    architecture="qwen3_moe", vocab_size=4096, hidden_size=512, num_hidden_layers=2, num_attention_heads=8,
    head_dim=64, num_key_value_heads=8, intermediate_size=512, moe_intermediate_size=512, num_experts=8,
    num_experts_per_tok=2, initializer_range=0.05,
)  # fmt: skip
STEPS = 2  # before memory is lent, and after
LEFT_MIB = 64
"""The most that torch may keep of the device's memory."""


def build(size: int, share: float, *, register: bool) -> tuple[Any, AdamW]:
    """With ``share`` of its moments in host memory."""
    policy = ParallelPolicy(
        fsdp=FSDPConfig(register_buffers=register),
        precision=PrecisionConfig(param_dtype="bfloat16"),
        grad_divisor=1.0,
        initializer_range=0.05,
    )
    # Experts on two ranks each: both of their groups have something to gather and to reduce.
    model = parallelize(build_model(MODEL), build_meshes(ep=max(1, size // 2)), policy)
    return model, AdamW(model, lr=1e-3, state_offload=share)


def loss_of(model: Any, number: int) -> torch.Tensor:
    device = engine_of(model).meshes.device
    tokens = torch.randint(256, (4, 128), generator=torch.Generator().manual_seed(number)).to(device)
    counts = StepCounts.from_vector(model.count_tokens(tokens, torch.ones_like(tokens).bool(), None))
    return model(tokens, labels_BS=tokens, counts=counts).loss  # type: ignore[no-any-return]


def steps(model: Any, optimizer: AdamW, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = loss_of(model, number)
        loss.backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def lend(model: Any, optimizer: AdamW) -> str:
    """Lend all memory and take it back, with gradients in it; every value must be what it was."""
    engine = engine_of(model)
    loss_of(model, 99).backward()
    before = digests(model, optimizer)
    with torch.no_grad():
        expected = loss_of(model, 100).item()
    num_bytes = engine.release(optimizer)
    told = f"gave {num_bytes / 2**20:.0f} MiB"
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        reserved, free = torch.cuda.memory_reserved() / 2**20, torch.cuda.mem_get_info()
        told += f", {reserved:.1f} MiB reserved, {(free[1] - free[0]) / 2**20:.0f} MiB of the device in use"
        assert reserved < LEFT_MIB, told
    dist.barrier()  # nobody computes again while others still give memory back
    engine.restore()
    assert digests(model, optimizer) == before
    with torch.no_grad():
        assert loss_of(model, 100).item() == expected
    optimizer.zero_grad()
    return told


def digests(model: Any, optimizer: AdamW) -> list[str]:
    """Of what this rank holds of weights, gradients and moments."""
    tensors = [p.piece for p in model.parameters()] + [p.grad.piece for p in model.parameters()]
    for state in optimizer.state.values():
        tensors += [getattr(value, "piece", value) for value in state.values()]
    return [
        hashlib.sha256(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for t in tensors
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--unregistered", action="store_true")
    register = not parser.parse_args().unregistered
    build_meshes()
    size = dist.get_world_size()
    model, optimizer = build(size, 0.0, register=register)
    wanted = steps(model, optimizer, range(2 * STEPS))
    del model, optimizer
    gc.collect()
    model, optimizer = build(size, 0.5, register=register)
    found, told = steps(model, optimizer, range(STEPS)), []
    for _ in range(2):  # what was taken back can be lent again
        told.append(lend(model, optimizer))
    found += steps(model, optimizer, range(STEPS, 2 * STEPS))
    worst = max(abs(a - b) / a for a, b in zip(wanted, found, strict=True))
    report = engine_of(model).pool.report
    print(f"rank {dist.get_rank()}: {report}; {'; '.join(told)}; losses apart by {worst:.1e}", flush=True)
    assert found[-1] < found[0] - 0.1
    assert worst < 5e-3, (wanted, found)  # attention adds its gradients in any order
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
