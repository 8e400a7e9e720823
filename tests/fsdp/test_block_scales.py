"""Weights that travel quantised: the same bits under every cut, half the bytes, and training that goes on."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe.checkpoint import load, save
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import Placement
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of
from fsdmoe.fsdp.block_scales import BlockScales
from fsdmoe.fsdp.layout import OwnedRange
from fsdmoe.fsdp.plan import ParamPlan
from fsdmoe.mesh import build_meshes
from fsdmoe.models import StepCounts, build_model
from fsdmoe.models.config import ModelConfig
from fsdmoe.optim import AdamW
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision import PrecisionConfig
from fsdmoe.precision.formats import E4M3, Scaling
from fsdmoe.precision.quantize import quantize
from fsdmoe.precision.quantized_weight import scales_of
from fsdmoe.testing import run_ranks
from tests.support.sent_bytes import SentBytes

MODEL = ModelConfig(
    architecture="qwen3_moe", vocab_size=64, hidden_size=96, num_hidden_layers=2, num_attention_heads=4,
    head_dim=40, num_key_value_heads=2, moe_intermediate_size=72, num_experts=4, num_experts_per_tok=2,
    initializer_range=0.1,
)  # fmt: skip


def build(recipe: str = "fp8_blockwise", *, quantized: bool = True, ep: int = 1, **keys: Any) -> Any:
    precision = PrecisionConfig(
        recipe=recipe, emulate=True, quantized_weights=quantized, param_dtype="float32", **keys  # type: ignore[arg-type]
    )  # fmt: skip
    policy = ParallelPolicy(precision=precision, grad_divisor=1.0, initializer_range=0.1)
    return parallelize(build_model(MODEL), build_meshes(ep=ep), policy)


def step(model: Any, number: int) -> float:
    """Forward and backward of this rank's rows; the loss of all rows."""
    tokens = torch.randint(64, (12, 16), generator=torch.Generator().manual_seed(number))
    mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    counts = StepCounts.from_vector(model.count_tokens(tokens, everywhere, None))
    out = model(mine, labels_BS=mine, counts=counts)
    out.loss.backward()
    total = out.cross_entropy.clone()
    dist.all_reduce(total)
    return total.item()


def gathered(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Codes and scales of every quantised weight, as its layer reads them."""
    found = {}
    for unit in engine_of(model).units:
        unit.make_ready()
        for param in unit.params:
            if (scales := scales_of(param.unsharded)) is not None:
                codes = param.unsharded.detach().view(torch.uint8)
                found[param.name] = codes.clone(), scales.scales.clone()
    return found


@pytest.mark.parametrize("block", [(128, 128), (None, None)])
def test_codes_and_scales_of_any_cut_are_those_of_the_whole(block: tuple[int | None, int | None]) -> None:
    shape, scaling = (3, 200, 150), Scaling(E4M3, block)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    plan = ParamPlan("w", Placement(shape), shape, torch.float8_e4m3fn, True, 64, scaling=scaling)
    expected = [quantize(matrix, scaling) for matrix in whole]
    flat = whole.flatten()
    for cuts in ([0, 90_000], [0, 77, 30_077, 30_078, 89_000, 90_000]):
        ranges = [OwnedRange("w", start, end, 0) for start, end in itertools.pairwise(cuts)]
        pieces = [BlockScales([plan], [owned], flat.device) for owned in ranges]
        mains = [flat[owned.start : owned.end] for owned in ranges]
        measured = [each.measure(main) for each, main in zip(pieces, mains, strict=True)]
        largest = torch.stack(measured).amax(0)
        codes = [torch.empty(owned.numel, dtype=torch.float8_e4m3fn) for owned in ranges]
        for each, main, own, out in zip(pieces, mains, measured, codes, strict=True):
            own.copy_(largest)
            each.encode(main, out)
        found = torch.cat(codes).float().view(shape)
        assert torch.equal(found, torch.stack([each.codes_RC for each in expected]))
        for each in pieces:
            assert torch.equal(each.scales[0].scales, torch.stack([e.scales_BB for e in expected]))


def _codes(recipe: str, num_steps: int) -> tuple[list[float], dict[str, Any], list[bool]]:
    """Losses, what is gathered after them, and whether this rank's codes changed in every group."""
    model = build(recipe, ep=2 if dist.get_world_size() == 4 and num_steps else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    engine, losses, before = engine_of(model), [], {}
    for number in range(num_steps):
        losses.append(step(model, number))
        if not number:
            before = {g: g.weights.shard.view(torch.uint8).clone() for g in engine.groups if g.weights.scales}
        optimizer.step()
        optimizer.zero_grad()
    if not num_steps:
        engine.begin_forward()
    moved = [
        not torch.equal(group.weights.shard.view(torch.uint8), old)
        for group, old in before.items()
        if any(group.owned_range(param).numel for param in group.params)
    ]
    if num_steps:
        return losses, {}, moved
    return losses, gathered(model), moved


@pytest.mark.parametrize(
    ("recipe", "worlds"),
    [
        ("fp8_blockwise", (2, 4)),
        ("fp8_tensorwise", (3,)),
        pytest.param("fp8_blockwise", (3,), marks=pytest.mark.full),
        pytest.param("fp8_tensorwise", (2, 4), marks=pytest.mark.full),
    ],
)
def test_what_layers_read_is_the_same_bits_on_one_to_four_ranks(recipe: str, worlds: tuple[int, ...]) -> None:
    ((_, one, _),) = run_ranks(_codes, 1, recipe, 0)
    assert {name.rpartition(".")[2] for name in one} == {"weight", "gate_up_proj", "down_proj"}
    assert len(one) == 12
    for world_size in worlds:
        for _, found, _ in run_ranks(_codes, world_size, recipe, 0):
            assert found.keys() == one.keys()
            for name, (codes, scales) in found.items():
                assert torch.equal(codes, one[name][0]), name
                assert torch.equal(scales, one[name][1]), name


@pytest.mark.full
def test_steps_move_the_codes_of_every_rank() -> None:
    """Losses over many steps: ``tests/parallel/test_quantized_layers.py``."""
    ((one, *_),) = run_ranks(_codes, 1, "fp8_blockwise", 3)
    for world_size in (2, 3, 4):
        for losses, _, moved in run_ranks(_codes, world_size, "fp8_blockwise", 3):
            assert losses[0] == pytest.approx(one[0], rel=1e-5)
            assert moved
            assert all(moved)


def _bytes(quantized: bool) -> tuple[int, int]:
    """What a rank sends for weights in a forward, and the elements of covered weights."""
    model = build(quantized=quantized)
    step(model, 0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # so that nothing gathered is left
    with torch.no_grad(), SentBytes() as sent:
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        model(tokens)
    codes = [g for g in engine_of(model).groups if g.weights.scales is not None]
    return sent.total, sum(g.plan.layout.slice_numel for g in codes) * (dist.get_world_size() - 1)


def test_half_the_bytes_of_bf16_are_sent_for_quantised_weights() -> None:
    """In float32, as this model computes, it is a quarter; of the other weights nothing changes."""
    plain, quantised = (run_ranks(_bytes, 2, flag)[0] for flag in (False, True))
    saved = plain[0] - quantised[0]
    assert quantised[1] > 100_000
    assert saved == pytest.approx(3 * quantised[1], rel=0.01)


def _resume(folder: str, is_first: bool, recipe: str, ep: int) -> list[float]:
    model = build(recipe, ep=ep) if recipe != "bf16" else _plain(ep)
    optimizer = AdamW(model, lr=5e-4)
    if not is_first:
        load(folder, model, optimizer)
    losses = []
    for number in range(0 if is_first else 3, 6):
        losses.append(step(model, number))
        optimizer.step()
        optimizer.zero_grad()
        if is_first and number == 2:
            save(folder, model, optimizer)
    return losses


def _plain(ep: int) -> Any:
    policy = ParallelPolicy(
        precision=PrecisionConfig(param_dtype="float32"), grad_divisor=1.0, initializer_range=0.1
    )
    return parallelize(build_model(MODEL), build_meshes(ep=ep), policy)


@pytest.mark.full  # runs that go on so are in tests/parallel/test_quantized_state.py
def test_a_checkpoint_goes_on_under_another_mesh_and_another_recipe(tmp_path: Path) -> None:
    first = run_ranks(_resume, 2, str(tmp_path / "c"), True, "fp8_blockwise", 2)[0]
    same = run_ranks(_resume, 3, str(tmp_path / "c"), False, "fp8_blockwise", 1)[0]
    assert same == pytest.approx(first[3:], rel=5e-3)  # a token whose experts change is 1e-3 of so few
    assert same[0] == pytest.approx(first[3], rel=1e-5)
    for recipe in ("fp8_tensorwise", "bf16"):
        other = run_ranks(_resume, 1, str(tmp_path / "c"), False, recipe, 1)[0]
        assert other == pytest.approx(first[3:], rel=0.02)


def _misuse() -> str:
    model = build()
    q_proj = model.model.layers[0].self_attn.q_proj
    with engine_of(model).micro_batch(last=True):
        q_proj.register_forward_hook(lambda module, args, y: y + module.weight.float().square().sum())
        with pytest.raises(RuntimeError) as error:
            step(model, 0)
    return str(error.value)


def test_a_quantised_weight_used_elsewhere_is_refused_and_not_rounded() -> None:
    assert "q_proj.weight is quantised, and something other than its own layer" in run_ranks(_misuse, 1)[0]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"recipe": "mxfp8"}, r"precision\.quantized_weights: mxfp8 quantises weights along"),
        ({"recipe": "fp8_rowwise"}, r"precision\.quantized_weights: fp8_rowwise"),
        ({}, r"precision\.quantized_weights: expected a recipe"),
    ],
)
def test_recipes_whose_weights_need_two_copies_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PrecisionConfig(quantized_weights=True, **keys)


@pytest.mark.parametrize("key", ["lean", "cpu_offload"])
def test_shards_that_are_not_on_the_device_are_refused(key: str) -> None:
    precision = PrecisionConfig(recipe="fp8_blockwise", emulate=True, quantized_weights=True)
    with pytest.raises(ConfigError, match=rf"fsdp\.{key}: .*, got precision\.quantized_weights = true"):
        FSDPPolicy(fsdp=FSDPConfig(**{key: True}), precision=precision)
