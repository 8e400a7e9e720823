"""Every launch builds for Hopper and Blackwell, with the tiles that the table picks; no GPU is needed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fsdmoe.kernels.adamw_step import AdamWStep
from fsdmoe.kernels.expert_operands import DEFAULT_POLICY, ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.triton import (
    BalanceFactors,
    TopKPolicy,
    adamw_,
    add_rows_by_id_triton,
    apply_update_triton,
    balance_triton,
    build_group_map,
    cross_entropy_,
    experts_mlp_triton,
    gated_norm_triton,
    look_ahead_triton,
    norm_rope_triton,
    order_rows_triton,
    rms_norm_triton,
    rope_triton,
    router_input_grad,
    router_topk_triton,
    scale_,
    sum_rows_triton,
    symmetric_product_triton,
    take_rows_triton,
)
from fsdmoe.kernels.triton.row_map import build_row_map
from fsdmoe.kernels.triton.swiglu_mlp import ACTIVATIONS
from fsdmoe.kernels.triton.tiles import grad_tile
from fsdmoe.kernels.triton.weight_grad import weight_grad
from fsdmoe.precision.block_floats import BlockFloats, ElementPlace
from tests.support.experts_by_products import experts_mlp_fused
from tests.support.triton.compile_launches import compiling

# A block's shared memory on both architectures.
SHARED_LIMIT = 232448


class Sink:
    def __init__(self, weight: torch.Tensor) -> None:
        self.buffer = torch.zeros_like(weight, dtype=torch.float32)

    def claim(self) -> tuple[torch.Tensor, bool]:
        return self.buffer, True


def run_layer(
    num_rows: int, n: int, *, sinks: bool = False, biased: bool = False, policy: ExpertPolicy = DEFAULT_POLICY
) -> None:
    """Forward and backward of a layer of 2 experts over 128 columns, 2 choices a row."""
    x = torch.zeros(num_rows, 128, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.zeros(num_rows, 2, requires_grad=True)
    ids = torch.zeros(num_rows, 2, dtype=torch.int64)
    gate_up = torch.nn.Parameter(torch.zeros(2, 2 * n, 128, dtype=torch.bfloat16))
    down = torch.nn.Parameter(torch.zeros(2, 128, n, dtype=torch.bfloat16))
    if sinks:
        gate_up.grad_sink, down.grad_sink = Sink(gate_up), Sink(down)  # type: ignore[assignment]
    bias = torch.zeros(2, 2 * n, dtype=torch.bfloat16, requires_grad=True) if biased else None
    policy = ExpertPolicy("gpt_oss") if biased else policy
    y = experts_mlp_triton(x, weights, ids, gate_up, down, policy=policy, gate_up_bias=bias)
    y.sum().backward()


def run_adapted_layer(num_rows: int, rank: int) -> None:
    """The same with frozen weights and updates of both."""
    frozen = [torch.zeros(2, *shape, dtype=torch.bfloat16) for shape in ((128, 128), (128, 64))]
    shapes = ((rank, 128), (128, rank), (rank, 64), (128, rank))
    factors = [torch.zeros(2, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    rows = Rows(
        torch.zeros(num_rows, 128, dtype=torch.bfloat16, requires_grad=True),
        torch.zeros(num_rows, 2, requires_grad=True),
        torch.zeros(num_rows, 2, dtype=torch.int64),
    )
    weights, updates = ExpertWeights(*frozen), LowRankUpdates(*factors)
    experts_mlp_fused(rows, weights, updates=updates).sum().backward()


def check(compiled: dict[str, Any], *names: str) -> None:
    for name in names:
        assert any(key.startswith(name + " ") for key in compiled), f"{name} was not launched"
    for key, kernel in compiled.items():
        assert kernel.metadata.shared <= SHARED_LIMIT, key
        assert kernel.asm["cubin"], key


LAYER = (
    "_count_kernel",
    "_place_kernel",
    "_gate_up_kernel",
    "_project_kernel",
    "_combine_kernel",
    "_permute_kernel",
    "_swiglu_backward_kernel",
    "_weight_grad_kernel",
)


@pytest.mark.parametrize("architecture", [90, 100])
def test_the_layer_builds(architecture: int) -> None:
    with compiling(architecture) as compiled:
        run_layer(512, 64)
    check(compiled, *LAYER)


@pytest.mark.parametrize("architecture", [90, 100])
def test_a_layer_that_keeps_sorted_rows_builds(architecture: int) -> None:
    with compiling(architecture) as compiled:
        run_layer(512, 64, policy=ExpertPolicy(keeps_rows=True))
    check(compiled, *LAYER)


@pytest.mark.full
@pytest.mark.parametrize("rank", [8, 32, 64, 128])
@pytest.mark.parametrize("num_rows", [16, 512])
def test_a_layer_with_low_rank_updates_builds_for_hopper(num_rows: int, rank: int) -> None:
    with compiling(90) as compiled:
        run_adapted_layer(num_rows, rank)
    check(compiled, *LAYER)


@pytest.mark.full
@pytest.mark.parametrize("architecture", [90, 100])
def test_a_layer_of_clamped_experts_with_biases_builds(architecture: int) -> None:
    with compiling(architecture) as compiled:
        run_layer(512, 64, biased=True)
    check(compiled, *LAYER, "_bias_grad_kernel")


@pytest.mark.full
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_with_any_gated_activation_builds_for_hopper(activation: str) -> None:
    with compiling(90) as compiled:
        run_layer(512, 64, policy=ExpertPolicy(activation))
    check(compiled, *LAYER)


def test_the_layer_uses_the_matrix_units_and_bulk_copies_of_hopper() -> None:
    with compiling(90) as compiled:
        run_layer(512, 64)
    for key, kernel in compiled.items():
        if key.startswith(("_gate_up", "_project", "_weight_grad")):
            assert "wgmma.mma_async" in kernel.asm["ptx"], key
            assert "cp.async.bulk.tensor" in kernel.asm["ptx"], key
            if "'num_warps': 4" in key:  # narrow tiles
                assert 2 * kernel.metadata.shared <= SHARED_LIMIT - 1024, key


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
def test_two_programs_of_a_narrow_weight_gradient_fit_a_multiprocessor(dtype: torch.dtype) -> None:
    ids = torch.zeros(512, 2, dtype=torch.int64)
    buffer = torch.zeros(2, 128, 384, dtype=dtype)
    tile = grad_tile(buffer, accumulate=False)
    with compiling(90) as compiled:
        row_map = build_row_map(ids, 3, align=128)
        rows = [torch.zeros(row_map.capacity, width, dtype=torch.bfloat16) for width in (128, 384)]
        weight_grad(*rows, row_map, buffer, accumulate=False, tile=tile, first_expert=1)
    (kernel,) = (kernel for key, kernel in compiled.items() if key.startswith("_weight_grad_kernel "))
    assert tile.per_sm == 2
    assert 2 * kernel.metadata.shared <= SHARED_LIMIT - 1024  # each program has a further 1 KiB


@pytest.mark.full
@pytest.mark.parametrize("architecture", [90, 100])
def test_a_layer_of_few_rows_with_sinks_builds(architecture: int) -> None:
    with compiling(architecture) as compiled:
        run_layer(16, 64, sinks=True)
    check(compiled, *LAYER)


@pytest.mark.full
@pytest.mark.parametrize("architecture", [90, 100])
def test_a_layer_of_wide_experts_builds(architecture: int) -> None:
    with compiling(architecture) as compiled:
        run_layer(512, 2064)
    check(compiled, *LAYER)


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [(90, (64,)), *(pytest.param(each, (64, 256), marks=pytest.mark.full) for each in (90, 100))],
)
def test_the_router_builds(architecture: int, sizes: tuple[int, ...]) -> None:
    logits = torch.zeros(64, 64, requires_grad=True)
    policy = TopKPolicy(top_k=4, score="sigmoid", norm_topk=True, num_groups=4, topk_groups=2)
    with compiling(architecture) as compiled:
        routed = router_topk_triton(logits, torch.zeros(64), policy, token_mask_T=torch.ones(64).bool())
        loss, _ = balance_triton(routed.sums, torch.zeros(()), BalanceFactors(0.1, 0.1, 0.1))
        (routed.weights.sum() + routed.prob_sum.sum() + routed.z_sum + loss).backward()
        for num_experts in sizes:
            weight = torch.zeros(num_experts, 512, dtype=torch.bfloat16)
            router_input_grad(torch.zeros(64, num_experts), weight, torch.zeros_like(weight[:64]))
    check(compiled, "_forward_kernel", "_backward_kernel", "_router_grad_kernel")


@pytest.mark.parametrize("architecture", [90, pytest.param(100, marks=pytest.mark.full)])
def test_loss_optimizer_positions_and_norms_build(architecture: int) -> None:
    logits = torch.zeros(4, 5000, dtype=torch.bfloat16)
    flat = [torch.zeros(64) for _ in range(4)]
    one = torch.ones(())
    numbers = AdamWStep(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=one, found_inf=one)
    x = torch.zeros(2, 8, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    with compiling(architecture) as compiled:
        cross_entropy_(logits, torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool), one)
        scale_(logits, one)
        add_rows_by_id_triton(torch.zeros(9, 5000), torch.zeros(4, dtype=torch.int64), logits)
        adamw_(*flat, numbers, weight=torch.zeros(64, dtype=torch.bfloat16))
        for interleaved, width in ((False, 32), (True, 32), (False, 64)):
            tables = torch.zeros(2, 2, 8, width)
            out = rope_triton(x, *tables, interleaved=interleaved)
            out.sum().backward()
        weight = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
        norm_rope_triton(x, weight, 1e-6, *torch.zeros(2, 2, 8, 32)).sum().backward()
        for size in (64, 7168):
            rows = torch.zeros(4, size, dtype=torch.bfloat16, requires_grad=True)
            rms_norm_triton(rows, torch.ones(size, dtype=torch.bfloat16), 1e-6).sum().backward()
        gate = torch.zeros(4, 64, dtype=torch.bfloat16, requires_grad=True)
        gated_norm_triton(gate, gate, weight, 1e-6, silu=True).sum().backward()
    norms = (
        "_rms_norm_kernel",
        "_rms_norm_backward_kernel",
        "_norm_rope_kernel",
        "_norm_rope_backward_kernel",
    )
    segments = "_sum_segments_kernel", "_join_segments_kernel"
    check(
        compiled, "_cross_entropy_kernel", "_scale_kernel", *segments, "_adamw_kernel", "_rope_kernel", *norms
    )
    ptx = next(kernel.asm["ptx"] for key, kernel in compiled.items() if key.startswith("_adamw_kernel "))
    wide = len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", ptx))
    assert wide >= 4, "full blocks of all four buffers are to be read 16 bytes at a time"


@pytest.mark.parametrize("architecture", [pytest.param(80, marks=pytest.mark.full), 90])
def test_an_optimizer_with_moments_in_eight_bits_builds(architecture: int) -> None:
    main, grad, weight = torch.zeros(4096), torch.zeros(4096), torch.zeros(4096, dtype=torch.bfloat16)
    small = BlockFloats(torch.zeros(4096, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8))
    scalar = torch.ones(())
    numbers = AdamWStep(
        lr=1.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=scalar, found_inf=scalar
    )
    place = ElementPlace(salt=1 << 30, start=0, run=4096, stride=1 << 33, offset=0)
    with compiling(architecture) as compiled:
        adamw_(main, grad, small, small, numbers, place=place, weight=weight)
        adamw_(main, grad, small, weight, numbers, place=place)
        adamw_(weight, weight, weight, weight, numbers, place=place, stochastic=True)
    check(compiled, "_adamw_kernel")
    ptx = next(kernel.asm["ptx"] for kernel in compiled.values())
    wide = len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", ptx))
    assert wide >= 2, "full blocks of main weights and gradients are to be read 16 bytes at a time"


@pytest.mark.parametrize("architecture", [90, pytest.param(100, marks=pytest.mark.full)])
def test_the_permutation_of_a_dispatcher_builds(architecture: int) -> None:
    ids = torch.zeros(64, 2, dtype=torch.int64)
    with compiling(architecture) as compiled:
        slots = build_group_map(ids, 4).position_RK
        take_rows_triton(torch.zeros(64, 128, dtype=torch.bfloat16), slots, 128)
        sum_rows_triton(torch.zeros(128, 128, dtype=torch.bfloat16), slots)
        index = torch.zeros(64, 4, dtype=torch.int32)
        order_rows_triton(torch.zeros(64, 2), ids, index, torch.zeros(10, dtype=torch.int32), 4)
    check(compiled, "_count_kernel", "_place_kernel", "_permute_kernel", "_combine_kernel")
    check(compiled, "_order_rows_kernel")


@pytest.mark.full
@pytest.mark.parametrize("architecture", [90, 100])
def test_symmetric_products_build_and_two_programs_fit_a_multiprocessor(architecture: int) -> None:
    wide = torch.zeros(2, 256, 512, dtype=torch.bfloat16)
    with compiling(architecture) as compiled:
        symmetric_product_triton(wide)
        symmetric_product_triton(wide.mT.contiguous(), is_tall=True)
        square = wide[:, :, :256].contiguous()
        symmetric_product_triton(square, alpha=0.5, added=square, beta=2.0)
        symmetric_product_triton(square, added=square, beta=2.0, factors_N3=torch.ones(2, 3))
    check(compiled, "_symmetric_kernel")
    assert len(compiled) == 4
    assert all(2 * kernel.metadata.shared <= SHARED_LIMIT for kernel in compiled.values())


def test_muons_passes_over_elements_build_for_hopper() -> None:
    flat, rounded = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    with compiling(90) as compiled:
        look_ahead_triton(flat, flat, rounded, 0.95)
        apply_update_triton(flat, rounded, None, 0.9, 0.1)
        apply_update_triton(flat, rounded, rounded, 0.9, 0.1)
    check(compiled, "_look_ahead_kernel", "_apply_kernel", "_apply_kernel")
