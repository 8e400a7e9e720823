"""On a Hopper GPU, codes that AdamW writes are those of a quantisation afterwards, both ways round."""

from __future__ import annotations

import itertools

import pytest
import torch

from fsdmoe.core.placement import Placement
from fsdmoe.fsdp.block_scales import BlockScales
from fsdmoe.fsdp.layout import OwnedRange
from fsdmoe.fsdp.plan import ParamPlan
from fsdmoe.kernels.adamw_step import AdamWStep
from fsdmoe.kernels.backend import has_fp8_kernels, kernels
from fsdmoe.precision.formats import E4M3, Scaling
from fsdmoe.precision.quantized_weight import WeightCodes

pytestmark = pytest.mark.skipif(not has_fp8_kernels(), reason="needs a Hopper GPU")
SHAPE = (40, 384, 512)
FP8 = torch.float8_e4m3fn


def reference(main: torch.Tensor, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales in plain torch."""
    plan = ParamPlan("w", Placement(SHAPE), SHAPE, FP8, True, 64, scaling=scaling)
    found = BlockScales([plan], [OwnedRange("w", 0, main.numel(), 0)], main.device)
    codes = torch.empty(SHAPE, dtype=FP8, device="cuda")
    with kernels("torch"):
        found.measure(main)
        found.encode(main, codes.flatten())
    return codes.view(torch.uint8), found.scales[0].scales


@pytest.mark.parametrize("block", [(128, 128), (None, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_writes_the_codes_of_its_weights(
    dtype: torch.dtype, block: tuple[int | None, int | None]
) -> None:
    from fsdmoe.kernels.triton import adamw_, adamw_codes_, encode_weight_

    generator = torch.Generator("cuda").manual_seed(0)
    main, grad, first, second = (
        torch.randn(SHAPE, device="cuda", generator=generator).flatten().to(dtype) for _ in range(4)
    )
    buffers = [main, grad, first, second.square()]
    expected = [buffer.clone() for buffer in buffers]
    numbers = AdamWStep(
        lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=torch.tensor(3.0, device="cuda")
    )
    matrices, rows, columns = SHAPE
    grid = (matrices, 1, 1) if block[0] is None else (matrices, rows // 128, columns // 128)

    def empty() -> WeightCodes:
        codes = (torch.zeros(shape, dtype=FP8, device="cuda") for shape in (SHAPE, (matrices, columns, rows)))
        return WeightCodes(*codes, torch.zeros(grid, device="cuda"), False)

    written, afterwards = empty(), empty()
    adamw_codes_(buffers[0], buffers[1], buffers[2], buffers[3], numbers, written)
    adamw_(expected[0], expected[1], expected[2], expected[3], numbers)
    encode_weight_(expected[0].view(SHAPE), afterwards)
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))
    codes, scales = reference(expected[0], Scaling(E4M3, block))
    for found in (written, afterwards):
        assert torch.equal(found.plain_EAB.view(torch.uint8), codes)
        assert torch.equal(found.scales, scales)
        assert found.transposed_EBA is not None
        assert torch.equal(found.transposed_EBA.view(torch.uint8), codes.mT)


@pytest.mark.parametrize("block", [(128, 128), (None, None)])
def test_ranges_of_a_weight_have_the_codes_of_the_whole(block: tuple[int | None, int | None]) -> None:
    scaling = Scaling(E4M3, block)
    whole = torch.randn(SHAPE, device="cuda").flatten()
    plan = ParamPlan("w", Placement(SHAPE), SHAPE, FP8, True, 64, scaling=scaling)
    cuts = [0, 64 * 77, 3_000_064, 3_000_128, whole.numel()]
    ranges = [OwnedRange("w", start, end, 0) for start, end in itertools.pairwise(cuts)]
    pieces = [BlockScales([plan], [owned], whole.device) for owned in ranges]
    mains = [whole[owned.start : owned.end] for owned in ranges]
    measured = [each.measure(main) for each, main in zip(pieces, mains, strict=True)]
    largest = torch.stack(measured).amax(0)
    codes = [torch.empty(owned.numel, dtype=FP8, device="cuda") for owned in ranges]
    for each, main, own, out in zip(pieces, mains, measured, codes, strict=True):
        own.copy_(largest)
        each.encode(main, out)
    expected, scales = reference(whole, scaling)
    assert torch.equal(torch.cat(codes).view(torch.uint8).view(SHAPE), expected)
    for each in pieces:
        assert torch.equal(each.scales[0].scales, scales)
