"""Main gradients in a format of their own: rounded once a micro-batch, and stepped with as they are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.precision import PrecisionConfig
from fsdmoe.testing import run_ranks

MICRO_BATCHES = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8))


def rows(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * rank + number))


def rounded_sum(main: torch.dtype, dtype: torch.dtype, ranks: int) -> dict[str, torch.Tensor]:
    """In one process and plain torch: what all ranks' micro-batches add up to, rounded after each."""
    model = net().to(main).float()
    total = {name: torch.zeros_like(p, dtype=dtype) for name, p in model.named_parameters()}
    for number in range(MICRO_BATCHES):
        model.zero_grad()
        for rank in range(ranks):
            model(rows(rank, number)).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            total[name] = (total[name].float() + parameter.grad).to(dtype)
    return total


def train(main: str, grad: str, kind: str, fsdp: dict[str, Any]) -> tuple[Any, ...]:
    """Weights before a step, its gradients and weights after it, whole."""
    precision = PrecisionConfig(param_dtype="float32", main_dtype=main, grad_dtype=grad)  # type: ignore[arg-type]
    policy = FSDPPolicy(fsdp=FSDPConfig(**fsdp), precision=precision, grad_divisor=1.0)
    model = fully_shard(net(), build_meshes(), policy)
    optimizer: torch.optim.Optimizer = (
        AdamW(model, lr=1e-2, weight_decay=0.1)
        if kind == "adamw"
        else torch.optim.SGD(model.parameters(), lr=1e-2)
    )
    for number in range(MICRO_BATCHES):
        with engine_of(model).micro_batch(last=number == MICRO_BATCHES - 1):
            model(rows(dist.get_rank(), number)).square().sum().backward()
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    clip_grad_norm(model, 1e6)  # reads them all, and changes nothing
    grads = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    after = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    return before, grads, after


def by_torch(
    before: dict[str, torch.Tensor], grads: dict[str, torch.Tensor], kind: str
) -> list[torch.Tensor]:
    """A step of torch's own optimizer, in float32, with these gradients."""
    leaves = [nn.Parameter(value.float()) for value in before.values()]
    for leaf, grad in zip(leaves, grads.values(), strict=True):
        leaf.grad = grad.float()
    groups = [{"params": [leaf], "weight_decay": 0.1 if leaf.dim() > 1 else 0.0} for leaf in leaves]
    if kind == "adamw":
        torch.optim.AdamW(groups, lr=1e-2).step()
    else:
        torch.optim.SGD(leaves, lr=1e-2).step()
    return [leaf.detach() for leaf in leaves]


@pytest.mark.parametrize(
    ("world", "main", "grad", "kind", "fsdp"),
    [
        (1, "float32", "bfloat16", "adamw", {}),
        (2, "float32", "bfloat16", "sgd", {}),
        pytest.param(2, "float32", "bfloat16", "adamw", {"lean": True}, marks=pytest.mark.full),
        pytest.param(2, "float32", "bfloat16", "adamw", {"cpu_offload": True}, marks=pytest.mark.full),
        pytest.param(3, "float32", "bfloat16", "adamw", {"shard": "grads"}, marks=pytest.mark.full),
        pytest.param(2, "float32", "bfloat16", "sgd", {"grad_exchange": "bf16_all_to_all"},
                     marks=pytest.mark.full),
        pytest.param(2, "bfloat16", "float32", "adamw", {}, marks=pytest.mark.full),
        pytest.param(1, "bfloat16", "float32", "sgd", {}, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_gradients_are_rounded_once_a_micro_batch_and_stepped_with(
    world: int, main: str, grad: str, kind: str, fsdp: dict[str, Any]
) -> None:
    before, grads, after = run_ranks(train, world, main, grad, kind, fsdp)[0]
    dtypes = getattr(torch, main), getattr(torch, grad)
    for name, wanted in rounded_sum(*dtypes, world).items():
        assert (before[name].dtype, grads[name].dtype) == dtypes
        # A sum in another order rounds to a neighbour now and then.
        bound = (2**-7 if grad == "bfloat16" else 1e-5) * wanted.float().abs().max().item()
        torch.testing.assert_close(grads[name].float(), wanted.float(), rtol=0, atol=bound)
    stepped = by_torch(before, grads, kind)
    # In bfloat16 the update, at most 1e-2, and the new weight are rounded.
    rtol, atol = (0.0, 1e-6) if main == "float32" else (2**-8, 1e-2 * 2**-8)
    for found, wanted in zip(after.values(), stepped, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=rtol, atol=atol)


def test_other_formats_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision\.grad_dtype: expected one of .*float16"):
        PrecisionConfig(grad_dtype="float16")  # type: ignore[arg-type]
