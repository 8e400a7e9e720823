"""Cases that run the kernels in Triton's interpreter, in fp32 on the CPU; ``test_interpreter`` starts them.

The interpreter must be switched on before a kernel is defined, so these run in a process of their own. Tiles
are shrunk so that small problems have several of them and ragged edges everywhere, and every fresh tensor is
filled with NaN or the largest integer first, so that whatever a kernel leaves unwritten shows.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fsdmoe.experts.balance import balance_loss
from fsdmoe.experts.config import BalanceConfig
from fsdmoe.experts.context import RoutingContext
from fsdmoe.kernels.expert_autograd import ExpertInputs
from fsdmoe.kernels.expert_mlp import experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.triton import (
    BalanceFactors,
    TopKPolicy,
    balance_triton,
    experts_mlp_triton,
    low_rank_terms,
    router_topk_triton,
    swiglu_mlp,
)
from fsdmoe.kernels.triton.permute_kernels import permute_rows
from fsdmoe.kernels.triton.row_map import RowMap, build_row_map
from fsdmoe.kernels.triton.swiglu_mlp import FusedProducts
from fsdmoe.kernels.triton.tiles import LayerTiles, Tile
from fsdmoe.kernels.triton.weight_grad import weight_grad
from tests.support.experts_by_products import experts_mlp_fused
from tests.support.kernel_references import router_topk_reference

pytestmark = pytest.mark.usefixtures("poisoned")
TILE = Tile(m=16, n=32, k=16, num_warps=4, num_stages=2, group=2)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swiglu_mlp, "tiles_for", lambda *_: LayerTiles(16, False, TILE, TILE))
    monkeypatch.setattr(swiglu_mlp, "grad_tile", lambda *_: replace(TILE, parts=2))


def reference(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return experts_mlp_reference(Rows(x, weights, ids), ExpertWeights(gate_up, down))


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def draw(num_rows: int = 18, top_k: int = 2, num_experts: int = 3, d: int = 48, n: int = 24) -> Inputs:
    """The last expert gets no rows; about a third of the ids are -1; a row may name one expert twice."""
    generator = torch.Generator().manual_seed(num_rows + d)
    ids = torch.randint(-1, num_experts - 1, (num_rows, top_k), generator=generator)
    if num_rows:
        ids[0] = 1
        ids[1] = -1
    return (
        torch.randn(num_rows, d, generator=generator),
        torch.rand(num_rows, top_k, generator=generator),
        ids,
        torch.randn(num_experts, 2 * n, d, generator=generator) * d**-0.5,
        torch.randn(num_experts, d, n, generator=generator) * n**-0.5,
    )


def run(function, inputs: Inputs, dtype: torch.dtype = torch.float32, **options) -> list[torch.Tensor]:
    """y and the gradients of x, weights, gate_up and down."""
    x, weights, ids, gate_up, down = inputs
    leaves = [t.detach().to(dtype, copy=True).requires_grad_() for t in (x, weights, gate_up, down)]
    y = function(leaves[0], leaves[1], ids, leaves[2], leaves[3], **options)
    dy = torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@functools.cache
def expected() -> list[torch.Tensor]:
    """What the kernels give for the default draw."""
    return run(experts_mlp_triton, draw())


def assert_close(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    for name, o, e in zip(("y", "x", "weights", "gate_up", "down"), ours, exact, strict=True):
        error = (o.double() - e.double()).norm() / e.double().norm().clamp_min(1e-30)
        assert error < 2e-6, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("gathered", [False, True])
def test_the_layer_equals_the_definition_in_fp64(gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swiglu_mlp, "tiles_for", lambda *_: LayerTiles(16, gathered, TILE, TILE))
    inputs = draw()
    assert_close(run(experts_mlp_triton, inputs), run(reference, inputs, torch.float64))


@pytest.mark.parametrize(("biased", "recompute"), [(False, False), (True, False), (True, True)])
def test_a_layer_that_keeps_sorted_rows_equals_the_definition_in_fp64(biased: bool, recompute: bool) -> None:
    x, weights, ids, gate_up, down = draw()
    bias = [torch.linspace(-1, 1, gate_up[..., 0].numel()).view(gate_up.shape[:2])] if biased else []
    policy = ExpertPolicy(keeps_rows=True, recompute=recompute)

    def fused(leaves: list[torch.Tensor]) -> torch.Tensor:
        x, weights, gate_up, down, *bias = leaves
        options = {"gate_up_bias": bias[0]} if bias else {}
        return experts_mlp_triton(x, weights, ids, gate_up, down, policy=policy, **options)

    def defined(leaves: list[torch.Tensor]) -> torch.Tensor:
        return experts_mlp_reference(Rows(leaves[0], leaves[1], ids), ExpertWeights(*leaves[2:]))

    found, wanted = (
        _with_gradients(function, [t.to(dtype).requires_grad_() for t in (x, weights, gate_up, down, *bias)])
        for function, dtype in ((fused, torch.float32), (defined, torch.float64))
    )
    for index, (ours, exact) in enumerate(zip(found, wanted, strict=True)):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < 2e-6, f"number {index} is off by {error:.1e}"


@pytest.mark.parametrize(("num_sequences", "num_experts"), [(1, 6), (5, 6), (9, 1024)])
@pytest.mark.parametrize("known", [False, True])
def test_balance_terms_equal_the_definition(num_sequences: int, num_experts: int, known: bool) -> None:
    """A sequence without tokens included."""
    config = BalanceConfig(sequence=0.3, micro_batch=0.2, z_loss=0.1)
    loads = torch.randint(0, 9, (num_sequences, num_experts)).float()
    loads[-1] *= num_sequences == 1
    sums = torch.cat((loads, torch.rand(num_sequences, num_experts + 1)), 1).requires_grad_()
    number = 17.0 if known else torch.tensor(17.0)
    loss, load_E = balance_triton(sums, number, BalanceFactors(0.3, 0.2, 0.1))
    _, probs, z_S = sums.split((num_experts, num_experts, 1), 1)
    wanted = balance_loss(loads, probs, z_S.sum(), config, RoutingContext(num_global_tokens=number))
    torch.testing.assert_close(loss, wanted)
    assert torch.equal(load_E, loads.sum(0))
    torch.testing.assert_close(*(torch.autograd.grad(3 * each, sums)[0] for each in (loss, wanted)))


@pytest.mark.parametrize("num_columns", [40, 136, 384, 1024])
def test_rows_of_any_width_are_permuted_and_their_padding_is_zero(num_columns: int) -> None:
    """Widths of one block and of several, of whole blocks and of a part of one."""
    x_RD, _, ids_RK, *_ = draw(num_rows=21, d=num_columns)
    cleared_RK = torch.ones(ids_RK.shape)
    row_map = build_row_map(ids_RK, 3, align=16)
    out_MD = permute_rows(x_RD, row_map, clear_RK=cleared_RK)
    end = int(row_map.offsets[3])
    source_M = row_map.source_M[:end].long()
    expected_MD = torch.where((source_M >= 0)[:, None], x_RD[source_M.clamp(min=0) // 2], 0.0)
    assert torch.equal(out_MD[:end], expected_MD)
    assert torch.equal(cleared_RK, (row_map.position_RK >= 0).float())


@pytest.mark.parametrize("activation", swiglu_mlp.ACTIVATIONS)
def test_a_layer_with_any_gated_activation_equals_the_definition_in_fp64(activation: str) -> None:
    """With a limit that many gates and ups are beyond."""
    inputs = draw(num_rows=10, d=24, n=12)

    def defined(
        x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *both: torch.Tensor
    ) -> torch.Tensor:
        policy = ExpertPolicy(activation, limit=0.7)
        return experts_mlp_reference(Rows(x, weights, ids), ExpertWeights(*both), policy)

    found = run(experts_mlp_triton, inputs, policy=ExpertPolicy(activation, limit=0.7))
    assert_close(found, run(defined, inputs, torch.float64))


@pytest.mark.parametrize("recompute", [False, True])
def test_clamped_experts_with_biases_equal_the_definition_in_fp64(recompute: bool) -> None:
    """gpt-oss: rows are so long that many gates and ups meet the clamps."""
    x, weights, ids, gate_up, down = draw()
    generator = torch.Generator().manual_seed(2)
    biases = [torch.randn(*shape, generator=generator) for shape in (gate_up.shape[:2], down.shape[:2])]
    inputs = (6 * x, weights, gate_up, down, *biases)

    def fused(leaves: list[torch.Tensor]) -> torch.Tensor:
        policy = ExpertPolicy("gpt_oss", recompute=recompute)
        return experts_mlp_fused(Rows(leaves[0], leaves[1], ids), ExpertWeights(*leaves[2:]), policy)

    def defined(leaves: list[torch.Tensor]) -> torch.Tensor:
        policy = ExpertPolicy("gpt_oss")
        return experts_mlp_reference(Rows(leaves[0], leaves[1], ids), ExpertWeights(*leaves[2:]), policy)

    found, wanted = (
        _with_gradients(function, [t.to(dtype).requires_grad_() for t in inputs])
        for function, dtype in ((fused, torch.float32), (defined, torch.float64))
    )
    with torch.no_grad():
        assert torch.equal(fused(list(inputs)), found[0]), "without gradients"
    for index, (ours, exact) in enumerate(zip(found, wanted, strict=True)):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < 2e-6, f"number {index} is off by {error:.1e}"


@pytest.mark.parametrize(("rank", "gathered", "recompute"), [(8, True, False), (40, False, True)])
def test_low_rank_updates_equal_the_definition_in_fp64(
    rank: int, gathered: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of frozen weights, and of weights that are trained with them."""
    monkeypatch.setattr(swiglu_mlp, "tiles_for", lambda *_: LayerTiles(16, gathered, TILE, TILE))
    block = 64 if rank > 16 else 16
    monkeypatch.setattr(low_rank_terms, "narrow_tile", lambda *_: replace(TILE, n=block))
    small = replace(TILE, m=block), replace(TILE, n=block)
    monkeypatch.setattr(low_rank_terms, "factor_tiles", lambda *_: small)
    x, weights, ids, gate_up, down = draw()
    generator = torch.Generator().manual_seed(3)
    num_experts, two_n, d = gate_up.shape
    shapes = [(rank, d), (two_n, rank), (rank, two_n // 2), (d, rank)]
    factors = [torch.randn(num_experts, *shape, generator=generator) * 0.3 for shape in shapes]
    policy = ExpertPolicy(recompute=recompute)

    def computed(function, leaves: list[torch.Tensor]) -> torch.Tensor:
        updates = LowRankUpdates(*leaves[4:])
        return function(Rows(*leaves[:2], ids), ExpertWeights(*leaves[2:4]), policy, None, updates)

    found, wanted = (
        _with_gradients(
            functools.partial(computed, function),
            [t.to(dtype).requires_grad_() for t in (x, weights, gate_up, down, *factors)],
        )
        for function, dtype in ((experts_mlp_fused, torch.float32), (experts_mlp_reference, torch.float64))
    )
    for index, (ours, exact) in enumerate(zip(found, wanted, strict=True)):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < 2e-6, f"number {index} is off by {error:.1e}"


def test_low_rank_updates_of_one_weight_and_of_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank_terms, "narrow_tile", lambda *_: replace(TILE, n=16))
    small = replace(TILE, m=16), replace(TILE, n=16)
    monkeypatch.setattr(low_rank_terms, "factor_tiles", lambda *_: small)
    torch.manual_seed(4)
    for num_rows, only in ((6, "down"), (0, "gate_up")):
        x, weights, ids, gate_up, down = draw(num_rows)
        rows = Rows(x.requires_grad_(), weights, ids)
        shapes = ((8, 24), (48, 8)) if only == "down" else ((8, 48), (48, 8))
        pair = [(0.3 * torch.randn(3, *shape)).requires_grad_() for shape in shapes]
        updates = LowRankUpdates(None, None, *pair) if only == "down" else LowRankUpdates(*pair)
        found, exact = (
            torch.autograd.grad(
                function(rows, ExpertWeights(gate_up, down), ExpertPolicy(), None, updates).sum(), [x, *pair]
            )
            for function in (experts_mlp_fused, experts_mlp_reference)
        )
        for ours, theirs in zip(found, exact, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _with_gradients(function, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    y = function(leaves)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def test_tiles_stored_in_parts_and_many_row_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = expected()
    tile = replace(TILE, parts=4, group=1)
    monkeypatch.setattr(swiglu_mlp, "tiles_for", lambda *_: LayerTiles(16, False, tile, tile))
    monkeypatch.setattr(swiglu_mlp, "grad_tile", lambda *_: replace(tile, group=3))
    assert_close(run(experts_mlp_triton, draw()), whole)


def test_no_rows_give_no_output_and_zero_weight_gradients() -> None:
    y, dx, dweights, dgate_up, ddown = run(experts_mlp_triton, draw(num_rows=0))
    assert y.shape == dx.shape == (0, 48)
    assert dweights.shape == (0, 2)
    assert not dgate_up.any()
    assert not ddown.any()


def test_a_bound_on_the_rows_changes_nothing_but_the_size_of_buffers() -> None:
    inputs = draw()
    num_assigned = int((inputs[2] >= 0).sum())
    bounded = run(experts_mlp_triton, inputs, max_rows=num_assigned)
    for a, b in zip(expected(), bounded, strict=True):
        assert torch.equal(a, b)
    maps = [build_row_map(inputs[2], 3, align=16, max_rows=rows) for rows in (num_assigned, None)]
    assert maps[0].capacity < maps[1].capacity


def test_a_bound_that_is_too_small_gives_nan_instead_of_a_partial_sum() -> None:
    x, weights, ids, gate_up, down = draw(num_rows=70, num_experts=2)
    given = ExpertInputs(x, weights, gate_up, down)
    products = FusedProducts(max_rows=16)
    activated, (_, row_map, *_) = products.gate_up(given, ids, keep=False)
    y = products.down(given, activated)
    assert y.isnan().all()
    assert row_map.offsets[-2] <= row_map.capacity


class Sink:
    def __init__(self, buffer: torch.Tensor, accumulate: bool) -> None:
        self.buffer, self.accumulate = buffer, accumulate

    def claim(self) -> tuple[torch.Tensor, bool]:
        return self.buffer, self.accumulate


@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradients_go_straight_to_their_sinks(accumulate: bool) -> None:
    x, weights, ids, gate_up, down = draw()
    _, dx, _, dgate_up, ddown = expected()
    parameters = [torch.nn.Parameter(gate_up), torch.nn.Parameter(down)]
    buffers = [torch.full_like(p, 2.0 if accumulate else float("nan")) for p in parameters]
    for parameter, buffer in zip(parameters, buffers, strict=True):
        parameter.grad_sink = Sink(buffer, accumulate)  # type: ignore[attr-defined]
    x = x.requires_grad_()
    y = experts_mlp_triton(x, weights, ids, *parameters)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    assert torch.equal(x.grad, dx)
    for parameter, buffer, grad in zip(parameters, buffers, (dgate_up, ddown), strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(buffer, grad + (2.0 if accumulate else 0.0))


def test_a_sink_of_another_shape_is_refused() -> None:
    x, weights, ids, gate_up, down = draw()
    parameter = torch.nn.Parameter(gate_up)
    parameter.grad_sink = Sink(torch.zeros(gate_up.numel()), False)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="contiguous gradient buffer"):
        experts_mlp_triton(x, weights, ids, parameter, down).sum().backward()


def test_only_wanted_gradients_are_computed() -> None:
    x, weights, ids, gate_up, down = draw()
    x.requires_grad_()
    y = experts_mlp_triton(x, weights, ids, gate_up, down)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    assert torch.equal(x.grad, expected()[1])
    assert gate_up.grad is None
    assert down.grad is None


def test_without_gradients_the_pre_activation_is_not_even_written(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw()
    for weight in inputs[3:]:
        weight.requires_grad_()  # as those of a model in evaluation
    written = []
    gate_up = swiglu_mlp.gate_up
    monkeypatch.setattr(
        swiglu_mlp, "gate_up", lambda *a, **k: written.append(k["store_pre"]) or gate_up(*a, **k)
    )
    with torch.no_grad():
        y = experts_mlp_triton(*inputs)
    assert torch.equal(y, experts_mlp_triton(*inputs))
    assert written == [False, True]


@pytest.mark.parametrize(("num_rows", "top_k", "num_experts"), [(300, 2, 7), (20, 8, 33), (5, 1, 1)])
def test_the_map_is_a_stable_sort_with_padding(num_rows: int, top_k: int, num_experts: int) -> None:
    ids = torch.randint(-1, num_experts, (num_rows, top_k), generator=torch.Generator().manual_seed(3))
    row_map: RowMap = build_row_map(ids.int(), num_experts, align=16)
    place, offsets = row_map.position_RK.flatten(), row_map.offsets.tolist()
    assert offsets[0] == 0
    assert offsets[-1] == 0
    assert torch.equal(place < 0, ids.flatten() < 0)
    for expert, (start, end) in enumerate(pairwise(offsets[:-1])):
        mine = (ids.flatten() == expert).nonzero().flatten()
        assert row_map.counts_E[expert] == len(mine)
        assert end - start == max(1, -(-len(mine) // 16)) * 16
        assert row_map.source_M[start : start + len(mine)].tolist() == mine.tolist()
        assert (row_map.source_M[start + len(mine) : end] == -1).all()
        assert place[mine].tolist() == list(range(start, start + len(mine)))
        assert (row_map.tile_expert[start // 16 : end // 16] == expert).all()
    by_load = row_map.counts_E.argsort(descending=True, stable=True)
    assert row_map.order_E.tolist() == by_load.tolist()


@pytest.mark.parametrize(("first", "num_experts"), [(0, 7), (0, 4), (3, 3), (6, 1)])
def test_weight_gradients_of_a_range_of_experts_with_uneven_loads(first: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(5)
    ids = torch.multinomial(torch.tensor([1.0, 9, 0, 4, 1, 20, 3]), 90, replacement=True, generator=generator)
    row_map = build_row_map(ids[:, None], 7, align=16)
    left, right = (permute_rows(torch.randn(90, width, generator=generator), row_map) for width in (40, 72))
    out = torch.full((num_experts, 40, 72), float("nan"))
    weight_grad(left, right, row_map, out, accumulate=False, tile=TILE, first_expert=first)
    for place, (start, end) in enumerate(pairwise(row_map.offsets[first : first + num_experts + 1].tolist())):
        torch.testing.assert_close(out[place], left[start:end].T @ right[start:end])


def test_permuted_rows_are_copies_and_padding_is_zero() -> None:
    x, _, ids, *_ = draw()
    row_map = build_row_map(ids, 3, align=16)
    rows = permute_rows(x, row_map)[: row_map.offsets[-2]]
    source = row_map.source_M[: len(rows)].long()
    assert torch.equal(rows[source >= 0], x[source[source >= 0] // 2])
    assert not rows[source < 0].any()


@pytest.mark.parametrize(
    ("policy", "num_experts", "num_segments", "biased", "masked"),
    [
        (TopKPolicy(top_k=3, norm_topk=True), 13, 1, False, False),
        (TopKPolicy(top_k=3, score="topk_softmax"), 13, 1, True, False),
        (TopKPolicy(top_k=1), 6, 2, True, True),
        (
            TopKPolicy(top_k=2, score="sigmoid", norm_topk=True, num_groups=4, topk_groups=2, scaling=2.5),
            16,
            4,
            True,
            True,
        ),
        (TopKPolicy(top_k=2, num_groups=2, group_score="max"), 16, 1, False, True),
    ],
)
def test_the_router_equals_its_definition_in_fp64(
    policy: TopKPolicy, num_experts: int, num_segments: int, biased: bool, masked: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(96, num_experts, generator=generator)
    bias = torch.randn(num_experts, generator=generator) * 0.1 if biased else None
    mask = torch.rand(96, generator=generator) < 0.7 if masked else None
    sent = torch.randn(96, policy.top_k, generator=generator)

    def one(function, dtype: torch.dtype):  # type: ignore[no-untyped-def]
        leaf = logits.to(dtype).requires_grad_()
        out = function(leaf, bias, policy, num_segments=num_segments, token_mask_T=mask)
        loss = (out.weights * sent).sum() + (out.prob_sum * out.load).sum() + out.z_sum
        return out, torch.autograd.grad(loss, leaf)[0]

    ours, grad = one(router_topk_triton, torch.float32)
    exact, exact_grad = one(router_topk_reference, torch.float64)
    assert torch.equal(ours.ids, exact.ids)
    assert torch.equal(ours.load, exact.load.float())
    for name in ("weights", "prob_sum", "z_sum"):
        torch.testing.assert_close(getattr(ours, name).double(), getattr(exact, name), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=1e-5, atol=1e-5)


def test_segments_that_do_not_divide_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="3 equal segments"):
        router_topk_triton(torch.zeros(4, 8), None, TopKPolicy(top_k=1), num_segments=3)
