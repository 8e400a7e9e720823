"""Codes that the optimizer writes with the weights: the bits of a quantisation afterwards, in Triton's
interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe.core.placement import Placement
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.fsdp.block_scales import BlockScales
from fsdmoe.fsdp.layout import OwnedRange
from fsdmoe.fsdp.plan import ParamPlan
from fsdmoe.kernels.adamw_step import AdamWStep
from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.linear import Linear
from fsdmoe.kernels.quantized_linear import LinearPolicy
from fsdmoe.kernels.triton import adamw_, adamw_codes_, encode_weight_, launch
from fsdmoe.kernels.triton.fp8_weights import quantize_weight
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.formats import E4M3, Recipe, Scaling
from fsdmoe.precision.quantized_weight import WeightCodes, WeightCoding, quantize_for_gather
from fsdmoe.precision.recipes import build_recipe

pytestmark = pytest.mark.usefixtures("poisoned")
SHAPE = (2, 128, 256)
FP8 = torch.float8_e4m3fn


def draw(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    main, grad, first, second = (torch.randn(SHAPE, generator=generator).flatten() for _ in range(4))
    return [tensor.to(dtype) for tensor in (main, grad, first, second.square())]


def empty(*, transposed: bool, power_of_two: bool) -> WeightCodes:
    matrices, rows, columns = SHAPE
    other = torch.zeros(matrices, columns, rows, dtype=FP8) if transposed else None
    scales = torch.zeros(matrices, rows // 128, columns // 128)
    return WeightCodes(torch.zeros(SHAPE, dtype=FP8), other, scales, power_of_two)


def numbers(**tensors: torch.Tensor) -> AdamWStep:
    return AdamWStep(
        lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=torch.tensor(3.0), **tensors
    )


def bits(codes: torch.Tensor) -> torch.Tensor:
    return codes.detach().view(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "transposed", "power_of_two"), [(torch.float32, False, True), (torch.bfloat16, True, False)]
)
def test_an_update_writes_the_codes_of_the_weights_that_it_writes(
    dtype: torch.dtype, transposed: bool, power_of_two: bool
) -> None:
    check_update(dtype, transposed=transposed, power_of_two=power_of_two)


def check_update(dtype: torch.dtype, *, transposed: bool, power_of_two: bool) -> None:
    ours, expected = draw(dtype), draw(dtype)
    codes = empty(transposed=transposed, power_of_two=power_of_two)
    adamw_codes_(ours[0], ours[1], ours[2], ours[3], numbers(), codes)
    adamw_(expected[0], expected[1], expected[2], expected[3], numbers())
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    plain, other = quantize_weight(expected[0].view(SHAPE), power_of_two=power_of_two)
    assert torch.equal(bits(codes.plain_EAB), bits(plain.codes))
    assert torch.equal(codes.scales, plain.scales)
    if codes.transposed_EBA is not None:
        assert torch.equal(bits(codes.transposed_EBA), bits(other.codes))
    again = empty(transposed=transposed, power_of_two=power_of_two)
    encode_weight_(expected[0].view(SHAPE), again)
    assert torch.equal(bits(again.plain_EAB), bits(plain.codes))
    assert torch.equal(again.scales, plain.scales)


def test_a_step_that_found_an_infinity_leaves_the_codes_as_they_are() -> None:
    buffers, codes = draw(torch.float32), empty(transposed=True, power_of_two=False)
    adamw_codes_(*buffers, numbers(found_inf=torch.tensor(1.0)), codes)  # type: ignore[arg-type]
    assert not bits(codes.plain_EAB).any()
    assert not codes.scales.any()


class OneLayer(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.layer = Linear(128, 256, bias=False)
        self.layer.quantized = LinearPolicy(recipe, True, None)
        assert recipe.gather_scaling is not None
        quantize_for_gather(self.layer, "weight", WeightCoding(recipe.gather_scaling, transposed=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_layers_compute_with_the_codes_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the update wrote, and after other hands those of what is there."""
    recipe = build_recipe("fp8_tensorwise")
    assert recipe is not None
    check_layer(recipe, "bfloat16", monkeypatch)


def check_layer(recipe: Recipe, main_dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    original = launch.QuickLaunch.__getitem__

    def counted(self: Any, grid: Any) -> Any:
        launched.append(self.function.__name__)
        return original(self, grid)

    monkeypatch.setattr(launch.QuickLaunch, "__getitem__", counted)
    precision = PrecisionConfig(main_dtype=main_dtype, recipe=recipe.name, quantized_weights=True)  # type: ignore[arg-type]
    policy = FSDPPolicy(fsdp=FSDPConfig(), precision=precision, grad_divisor=1.0)
    with kernels("triton"):
        model = fully_shard(OneLayer(recipe), build_meshes(), policy)
        optimizer = AdamW(model, lr=1e-2, moment_dtype=torch.float32)
        model(torch.randn(3, 128)).square().mean().backward()
        before = bits(codes_of(model).plain_EAB).clone()
        launched.clear()
        optimizer.step()
        optimizer.zero_grad()
        engine_of(model).begin_forward()
        updates = {"_adamw_kernel", "_adamw_codes_kernel", "_quantize_weight_kernel"}
        # Where a whole matrix has one scale, codes are made once all of it is updated.
        encoded = [] if codes_of(model).by_tiles else ["_quantize_weight_kernel"]
        assert [name for name in launched if name in updates] == ["_adamw_codes_kernel", *encoded]
        check(model)
        assert not torch.equal(bits(codes_of(model).plain_EAB), before)
        (group,) = engine_of(model).groups
        group.weights.main[:5].mul_(100)
        check(model)


def codes_of(model: nn.Module) -> WeightCodes:
    (group,) = engine_of(model).groups
    assert group.weights.codes is not None
    return group.weights.codes[0]


def check(model: nn.Module) -> None:
    """What the layer reads is the quantised form of the main weights."""
    (group,) = engine_of(model).groups
    engine_of(model).begin_forward()
    found = codes_of(model)
    other = torch.zeros_like(found.plain_EAB)
    expected = found._replace(plain_EAB=other, transposed_EBA=None, scales=torch.zeros_like(found.scales))
    encode_weight_(group.weights.main[: 256 * 128].view(1, 256, 128), expected)
    assert torch.equal(bits(found.plain_EAB), bits(expected.plain_EAB))
    assert torch.equal(found.scales, expected.scales)
    assert found.transposed_EBA is not None
    assert torch.equal(bits(found.transposed_EBA), bits(found.plain_EAB).mT)
    assert group.params[0].unsharded.data_ptr() == found.plain_EAB.data_ptr()


def test_ranges_of_a_weight_have_the_codes_and_scales_of_the_whole() -> None:
    check_ranges((128, 128))


def check_ranges(block: tuple[int | None, int | None]) -> None:
    whole, scaling = draw(torch.float32)[0], Scaling(E4M3, block)
    plan = ParamPlan("w", Placement(SHAPE), SHAPE, FP8, True, 64, scaling=scaling)
    cuts = [0, 77, 30_077, 30_078, 50_000, whole.numel()]
    ranges = [OwnedRange("w", start, end, 0) for start, end in itertools.pairwise(cuts)]
    found = [BlockScales([plan], [owned], whole.device) for owned in ranges]
    mains = [whole[owned.start : owned.end].clone() for owned in ranges]
    codes = [torch.zeros(owned.numel, dtype=FP8) for owned in ranges]
    with kernels("triton"):
        measured = [each.measure(main) for each, main in zip(found, mains, strict=True)]
        largest = torch.stack(measured).amax(0)
        for each, main, own, out in zip(found, mains, measured, codes, strict=True):
            own.copy_(largest)
            each.encode(main, out)
    expected = empty(transposed=False, power_of_two=False)
    if block == (None, None):
        expected = expected._replace(scales=torch.zeros(SHAPE[0], 1, 1))
    encode_weight_(whole.view(SHAPE), expected)
    assert torch.equal(bits(torch.cat(codes).view(SHAPE)), bits(expected.plain_EAB))
    for each in found:
        assert torch.equal(each.scales[0].scales, expected.scales)
