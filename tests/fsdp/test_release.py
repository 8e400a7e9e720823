"""Memory that is given back between steps: all of it, and the run goes on as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe import checkpoint
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.models import StepCounts, build_model
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.parallel_case import MODELS


def build(**precision: Any) -> Any:
    policy = ParallelPolicy(precision=PrecisionConfig(**precision), grad_divisor=1.0, initializer_range=0.2)
    return parallelize(build_model(MODELS["qwen3_moe"]), build_meshes(ep=2), policy)


def backward(model: Any, number: int) -> float:
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(number))
    mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    counts = StepCounts.from_vector(model.count_tokens(tokens, everywhere, None))
    loss = model(mine, labels_BS=mine, counts=counts).loss
    loss.backward()
    return loss.item()


def storages(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Bytes behind everything that the engine and the optimizer hold."""
    engine, found = engine_of(model), {}
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [getattr(value, "_piece", value) for value in states]
    for unit in engine.units:
        for slot in (unit.slot, unit.grads.slot):
            tensors += [] if slot is None else list(slot.buffers.values())
        for group in unit.groups:
            tensors += [group.weights.main, group.weights.shard]
            tensors += [] if group.grad is None or group.grad.main is None else [group.grad.main]
    for tensor in tensors:
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def _train(
    releases: bool, dtype: str, with_gradients: bool, optimizer_name: str
) -> tuple[list[float], dict[str, Any], int, int]:
    codes = {"recipe": "fp8_blockwise", "emulate": True, "quantized_weights": True, "param_dtype": "float32"}
    model = build(**codes if dtype == "float8" else {"param_dtype": dtype})
    optimizer: Any = (
        AdamW(model, lr=1e-2) if optimizer_name == "flat" else torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    engine, losses, given, left = engine_of(model), [], 0, 0
    for number in range(3):
        losses.append(backward(model, number))
        if releases and with_gradients and number == 1:
            before = storages(model, optimizer)
            given, left = engine.release(optimizer) - before, storages(model, optimizer)
            engine.restore()
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if releases and not with_gradients and number == 1:
            before = storages(model, optimizer)
            given, left = engine.release(optimizer) - before, storages(model, optimizer)
            engine.restore()
    return losses, {name: p.full_tensor() for name, p in model.named_parameters()}, given, left


@pytest.mark.parametrize(
    ("dtype", "with_gradients", "optimizer"),
    [
        ("bfloat16", False, "flat"),
        ("float32", True, "torch"),
        pytest.param("float32", False, "flat", marks=pytest.mark.full),
        pytest.param("bfloat16", True, "flat", marks=pytest.mark.full),
        pytest.param("float8", False, "flat", marks=pytest.mark.full),
    ],
)
def test_training_goes_on_bit_for_bit_after_all_memory_was_away(
    dtype: str, with_gradients: bool, optimizer: str
) -> None:
    plain = run_ranks(_train, 2, False, dtype, with_gradients, optimizer)
    for (losses, weights, *_), (expected, wanted, given, left) in zip(
        plain, run_ranks(_train, 2, True, dtype, with_gradients, optimizer), strict=True
    ):
        assert losses == expected
        assert all(torch.equal(weights[name], wanted[name]) for name in weights)
        assert left == 0
        assert given >= 0, "and what reductions work in"


def _uses() -> dict[str, str]:
    model = build(param_dtype="float32")
    optimizer = AdamW(model, lr=1e-2)
    backward(model, 0)
    engine, told = engine_of(model), {}
    parameter = next(model.parameters())
    engine.release(optimizer)
    uses = {
        "forward": lambda: backward(model, 1),
        "step": optimizer.step,
        "clip": lambda: clip_grad_norm(model, 1.0),
        "read": lambda: parameter.full_tensor(),
        "norm": lambda: parameter.detach().norm(),
        "state": lambda: optimizer.state[parameter]["exp_avg"].full_tensor(),
        "gradient": lambda: parameter.grad.full_tensor(),
        "again": lambda: engine.release(optimizer),
    }
    for name, use in uses.items():
        with pytest.raises(RuntimeError) as error:
            use()
        told[name] = str(error.value)
    engine.restore()
    engine.restore()  # nothing to do
    optimizer.step()
    return told


def test_without_its_memory_every_use_is_refused_with_what_to_call() -> None:
    for told in run_ranks(_uses, 2):
        for use, message in told.items():
            assert "restore()" in message, use


def _nowhere(folder: str) -> bool:
    model = build(param_dtype="float32")
    optimizer = AdamW(model, lr=1e-2)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = {name: p.full_tensor() for name, p in model.named_parameters()}
    checkpoint.save(folder, model, optimizer)
    engine = engine_of(model)
    engine.release(optimizer, keep="nothing")
    engine.restore()
    emptied = all(not p.full_tensor().any() for p in model.parameters())
    checkpoint.load(folder, model, optimizer)
    after = {name: p.full_tensor() for name, p in model.named_parameters()}
    return emptied and all(torch.equal(before[name], after[name]) for name in before)


def test_values_may_be_dropped_and_loaded_again(tmp_path: Path) -> None:
    assert run_ranks(_nowhere, 2, str(tmp_path / "c")) == [True, True]


def _misplaced() -> tuple[str, str]:
    model = build(param_dtype="float32")
    engine = engine_of(model)
    with pytest.raises(ConfigError) as wrong:
        engine.release(keep="disk")  # type: ignore[arg-type]
    model.model.norm.register_forward_hook(lambda *_: engine.release())
    with pytest.raises(RuntimeError) as error:
        backward(model, 0)
    return str(wrong.value), str(error.value)


def test_it_is_for_the_time_between_steps() -> None:
    wrong, inside = run_ranks(_misplaced, 2)[0]
    assert "expected one of host, nothing, got 'disk'" in wrong
    assert "expected to be called between steps" in inside
