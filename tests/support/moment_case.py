"""A small decoder whose matrices have whole blocks on every mesh, and gradients that no mesh changes."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from fsdmoe.fsdp import FSDPConfig, engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.models import ModelConfig, StepCounts, build_model
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision import PrecisionConfig

MODEL = ModelConfig(
    architecture="qwen3_moe", vocab_size=80, hidden_size=64, num_hidden_layers=2, num_attention_heads=16,
    head_dim=8, num_key_value_heads=16, intermediate_size=64, moe_intermediate_size=128, num_experts=4,
    num_experts_per_tok=2, initializer_range=0.2,
)  # fmt: skip

State = dict[str, str]


FP32 = PrecisionConfig(param_dtype="float32")


def build(degrees: dict[str, int], precision: PrecisionConfig = FP32, **fsdp: Any) -> Any:
    policy = ParallelPolicy(
        fsdp=FSDPConfig(**fsdp),
        precision=precision,
        grad_divisor=1.0,
        initializer_range=0.2,
    )
    return parallelize(build_model(MODEL), build_meshes(**degrees), policy)


def backward(model: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Of a fixed row, unless others are given; its loss."""
    device = engine_of(model).meshes.device
    rows = torch.zeros(1, 4, dtype=torch.int64, device=device) if rows is None else rows.to(device)
    counts = StepCounts.from_vector(model.count_tokens(rows, torch.ones_like(rows, dtype=torch.bool), None))
    loss: torch.Tensor = model(rows, labels_BS=rows, counts=counts).loss
    loss.backward()
    return loss.detach()


def gradient(shape: torch.Size, number: int, index: int) -> torch.Tensor:
    """Of a whole parameter in a step; rows differ by up to seven powers of ten."""
    generator = torch.Generator().manual_seed(1000 * number + index)
    rows = 10.0 ** -torch.randint(8, shape[:1], generator=generator).float()
    return torch.randn(shape, generator=generator) * rows.view(-1, *(1 for _ in shape[1:]))


def plain_step(params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, number: int) -> None:
    """The same on the parameters of the plain model."""
    for index, (_, parameter) in enumerate(sorted(params.items())):
        parameter.grad = gradient(parameter.shape, number, index).to(parameter.device)
    optimizer.step()


def step(model: Any, optimizer: AdamW, number: int, max_norm: float | None = None) -> torch.Tensor:
    """A step with gradients that are the same on every mesh, whatever order they would be summed in; the loss
    before it."""
    loss = backward(model)
    for index, (_, parameter) in enumerate(sorted(model.named_parameters())):
        parameter.grad.copy_(gradient(parameter.shape, number, index))
    if max_norm is not None:
        clip_grad_norm(model, max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def state_of(model: Any, optimizer: AdamW) -> State:
    """Digests of whole tensors: codes, exponents, step counts and weights."""
    found = {f"weight {name}": parameter.full_tensor() for name, parameter in model.named_parameters()}
    for name, state in optimizer.checkpoint_state()["state"].items():
        for key, tensor in state.items():
            found[f"{name} {key}"] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    digests = {}
    for name, whole in found.items():
        data = whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digests[name] = f"{tuple(whole.shape)} {whole.dtype} {hashlib.sha256(data).hexdigest()}"
    return digests
