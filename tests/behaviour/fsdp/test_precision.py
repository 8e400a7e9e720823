"""Number formats, gradient exchange and where slices live, against what the same arithmetic gives in one
process."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.fsdp.exchange import cast_in_place
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, relative, run_sharded, shard_tiny
from tests.support.tiny_modules import batch_of, reference

BF16 = PrecisionConfig()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}


def against_bf16(fsdp: dict[str, object], reduce_dtype: str) -> float:
    """Gradients of bf16 weights, added up in fp32 over ranks, against plain bf16 models added up by hand."""
    precision = PrecisionConfig(reduce_dtype=reduce_dtype)
    model = shard_tiny(Case(fsdp=fsdp, precision=precision), build_meshes())
    model(*batch_of(0, 0, dist.get_rank()), 12).backward()
    found = gradients(model)
    wanted: dict[str, torch.Tensor] = {}
    for rank in range(dist.get_world_size()):
        plain = reference().bfloat16()
        plain(*batch_of(0, 0, rank), 12).backward()
        for name, parameter in plain.named_parameters():
            wanted[name] = wanted.get(name, 0) + parameter.grad.float()
    return max(relative(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("fsdp", "reduce_dtype", "bound"),
    [
        ({}, "float32", 0.0),
        ({"grad_exchange": "bf16_all_to_all"}, "float32", 0.0),
        ({"lean": True}, "float32", 0.0),
        ({"cpu_offload": True}, "float32", 0.0),
        ({}, "bfloat16", 0.01),
    ],
)
def test_bf16_gradients_are_summed_as_asked(fsdp: dict[str, object], reduce_dtype: str, bound: float) -> None:
    """Each weight is used once a step here, so its bf16 gradient travels exactly; fp32 sums of two are exact
    too."""
    assert max(run_ranks(against_bf16, 2, fsdp, reduce_dtype)) <= bound


def dtypes_of(precision: PrecisionConfig) -> dict[str, object]:
    model = shard_tiny(Case(precision=precision), build_meshes())
    seen: dict[str, object] = {}
    model.head.register_forward_pre_hook(lambda m, a: seen.update(inside=m.weight.dtype))
    out = model(*batch_of(0, 0, 0), 12)
    out.backward()
    group = engine_of(model).units[1].groups[0]
    return {
        **seen,
        "output": out.dtype, "parameter": model.head.weight.dtype, "gradient": model.head.weight.grad.dtype,
        "reduced": group.grad.full.dtype,
    }  # fmt: skip


def test_every_format_is_where_it_was_asked_for() -> None:
    precision = PrecisionConfig(reduce_dtype="bfloat16", output_dtype="bfloat16")
    for found in run_ranks(dtypes_of, 2, precision):
        assert found.pop("parameter") == found.pop("gradient") == torch.float32
        assert set(found.values()) == {torch.bfloat16}
    assert run_ranks(dtypes_of, 2, BF16)[0]["reduced"] == torch.float32
    assert run_ranks(dtypes_of, 2, BF16)[0]["output"] == torch.float32


STEPS = 3


def train_bf16(fsdp: dict[str, object]) -> list[float]:
    case = Case(fsdp=fsdp, precision=BF16, micro_batches=2)
    model = shard_tiny(case, build_meshes())
    optimizer = AdamW(model, lr=3e-3)
    losses = []
    for step in range(STEPS):
        losses.append(run_sharded(model, case, step % 2)[0].item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    return run_ranks(train_bf16, 2, {})[0]


@pytest.mark.parametrize("fsdp", [{"cpu_offload": True}, {"lean": True}, {"shard": "grads"}])
def test_where_slices_live_does_not_change_training(
    fsdp: dict[str, object], plain_losses: list[float]
) -> None:
    assert run_ranks(train_bf16, 2, fsdp)[0] == pytest.approx(plain_losses, rel=1e-5)
    assert plain_losses[-1] < plain_losses[0]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 64))
def test_casting_in_place_rounds_like_a_copy(numel: int, first: int) -> None:
    full = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    wanted = full.to(torch.bfloat16)
    half = cast_in_place(full, torch.empty(first, dtype=torch.bfloat16))
    assert half.data_ptr() == full.data_ptr()
    assert torch.equal(half, wanted)


def keep_router_in_fp32() -> set[torch.dtype]:
    model = reference()
    policy = FSDPPolicy(
        fsdp=FSDPConfig(), dtype_of=lambda name, p: torch.float32 if "norm" in name else torch.bfloat16
    )
    fully_shard(model, build_meshes(), policy)
    inside: set[torch.dtype] = set()
    model.layers[0].register_forward_pre_hook(lambda m, a: inside.update(p.dtype for p in m.parameters()))
    with torch.no_grad():
        model(*batch_of(0, 0, 0), 12)
    assert {g.plan.dtype for g in engine_of(model).units[1].groups} == inside
    return inside


def test_single_parameters_may_be_computed_in_another_dtype() -> None:
    assert run_ranks(keep_router_in_fp32, 2)[0] == {torch.float32, torch.bfloat16}
