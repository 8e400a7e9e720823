"""The grouped experts against the loop that defines them: values, gradients, what is kept, what is unread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdmoe.kernels import expert_mlp_grouped, grouped
from fsdmoe.kernels.activations import ACTIVATIONS
from fsdmoe.kernels.expert_mlp import experts_mlp, experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.grouped import grouped_matmul, grouped_matmul_loop
from tests.support.experts_by_products import experts_mlp_grouped


@dataclass
class Case:
    x: Tensor
    weights: Tensor
    ids: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def leaves(self) -> list[Tensor]:
        candidates = [self.x, self.weights, self.gate_up, self.down, self.gate_up_bias, self.down_bias]
        return [leaf for leaf in candidates if leaf is not None]

    def run(self, function: Callable[..., Tensor], **options: Any) -> tuple[Tensor, list[Tensor]]:
        leaves = [leaf.detach().requires_grad_() for leaf in self.leaves]
        x, weights, gate_up, down, *biases = leaves
        gate_up_bias, down_bias = biases or (None, None)
        max_rows = options.pop("max_rows", None)
        parameters = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
        y = function(Rows(x, weights, self.ids), parameters, ExpertPolicy(**options), max_rows)
        dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
        return y.detach(), list(torch.autograd.grad(y, leaves, dy))


def make_case(
    num_rows: int = 13, num_ids: int = 3, num_experts: int = 5, *, dim: int = 16, width: int = 8,
    biases: bool = False, dtype: torch.dtype = torch.float32, ids: str = "partial",
) -> Case:  # fmt: skip
    """``partial``: some -1, expert 1 never chosen; ``skewed``: all to expert 0; ``none``: all -1."""
    table = torch.rand(num_rows, num_experts).argsort(1)[:, :num_ids]
    if ids == "partial":
        table[(table == 1) | (torch.rand(table.shape) < 0.3)] = -1
    elif ids == "skewed":
        table.fill_(0)
    elif ids == "none":
        table.fill_(-1)
    return Case(
        x=torch.randn(num_rows, dim, dtype=dtype),
        weights=torch.rand(num_rows, num_ids),
        ids=table,
        gate_up=torch.randn(num_experts, 2 * width, dim, dtype=dtype) * dim**-0.5,
        down=torch.randn(num_experts, dim, width, dtype=dtype) * width**-0.5,
        gate_up_bias=torch.randn(num_experts, 2 * width, dtype=dtype) if biases else None,
        down_bias=torch.randn(num_experts, dim, dtype=dtype) if biases else None,
    )


def assert_same(
    got: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]], tolerance: float
) -> None:
    for one, other in zip([got[0], *got[1]], [expected[0], *expected[1]], strict=True):
        assert one.dtype == other.dtype
        assert torch.isfinite(one).all()
        assert (one - other).norm() <= tolerance * other.norm() + 1e-30, (one - other).norm() / other.norm()


@pytest.mark.parametrize("weight_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("activation", "biases"),
    [*((name, False) for name in ACTIVATIONS if name != "gpt_oss"), ("gpt_oss", True), ("swiglu", True)],
)
@pytest.mark.parametrize("ids", ["full", "partial", "skewed", "none"])
def test_grouped_equals_the_loop(activation: str, biases: bool, weight_after: bool, ids: str) -> None:
    case = make_case(biases=biases, ids=ids)
    if not ACTIVATIONS[activation].is_gated:
        case.gate_up = case.gate_up[:, : case.down.shape[2]]
    # A limit that many pre-activations are beyond.
    options = {"activation": activation, "limit": 0.7, "weight_after": weight_after}
    expected = case.run(experts_mlp_reference, **options)
    assert_same(case.run(experts_mlp, **options), expected, 2e-6)


@pytest.mark.parametrize("weight_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("ids", ["partial", "none"])
def test_grouped_with_kept_rows_equals_the_loop(biases: bool, weight_after: bool, ids: str) -> None:
    case = make_case(biases=biases, ids=ids, dtype=torch.float64)
    expected = case.run(experts_mlp_reference, weight_after=weight_after)
    for recompute in (False, True):
        got = case.run(experts_mlp, weight_after=weight_after, keeps_rows=True, recompute=recompute)
        assert_same(got, expected, 1e-6)


@pytest.mark.parametrize("weight_after", [False, True], ids=["before", "after"])
def test_bf16_is_within_its_rounding_of_fp64(weight_after: bool) -> None:
    case = make_case(num_rows=64, dim=32, width=16, biases=True, dtype=torch.bfloat16)
    exact = Case(
        **{name: value.double() if value.is_floating_point() else value for name, value in vars(case).items()}
    )
    got = case.run(experts_mlp, weight_after=weight_after)
    y, gradients = exact.run(experts_mlp_reference, weight_after=weight_after)
    dtypes = [leaf.dtype for leaf in case.leaves]
    expected = y.bfloat16(), [gradient.to(dtype) for gradient, dtype in zip(gradients, dtypes, strict=True)]
    assert_same(got, expected, 1e-2)


def test_an_unweighted_id_of_minus_one_gets_a_zero_gradient() -> None:
    case = make_case(ids="partial")
    _, (_, dweights, *_) = case.run(experts_mlp)
    assert torch.equal(dweights == 0, case.ids < 0)


def test_no_rows_give_no_output_and_zero_weight_gradients() -> None:
    case = make_case(num_rows=0, biases=True)
    y, gradients = case.run(experts_mlp)
    assert y.shape == (0, 16)
    assert all(gradient.abs().sum() == 0 for gradient in gradients)


def test_a_tight_bound_on_the_rows_changes_nothing() -> None:
    case = make_case(ids="partial")
    assert_same(case.run(experts_mlp, max_rows=int((case.ids >= 0).sum())), case.run(experts_mlp), 1e-30)
    none = make_case(ids="none")
    assert_same(none.run(experts_mlp, max_rows=0), none.run(experts_mlp_reference), 1e-30)


def test_rows_that_a_grouped_product_leaves_uninitialised_are_never_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(biases=True, ids="partial")
    expected = case.run(experts_mlp_reference)

    def poisoned(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        product = grouped_matmul(a, b, ends)
        if b.dim() == 3:
            assert product.shape[0] > int(ends[-1]), "this case must have a tail"
            product[int(ends[-1]) :] = torch.nan
        return product

    for module in (expert_mlp_grouped, grouped):
        monkeypatch.setattr(module, "grouped_matmul", poisoned)
    assert_same(case.run(experts_mlp_grouped), expected, 2e-6)


def test_shapes_that_grouped_mm_refuses_take_the_loop() -> None:
    case = make_case(dim=6, width=3, biases=True)
    assert_same(case.run(experts_mlp), case.run(experts_mlp_reference), 2e-6)


def test_the_grouped_product_equals_its_loop_in_both_shapes() -> None:
    ends = torch.tensor([3, 3, 7], dtype=torch.int32)
    a, weights, b = torch.randn(9, 8), torch.randn(3, 8, 4), torch.randn(9, 4)
    torch.testing.assert_close(
        grouped_matmul(a, weights, ends)[:7], grouped_matmul_loop(a, weights, ends)[:7]
    )
    torch.testing.assert_close(grouped_matmul(a.t(), b, ends), grouped_matmul_loop(a.t(), b, ends))


def test_parts_of_wider_rows_in_bf16_are_multiplied() -> None:
    # In fp32 their copies lie closer together than products take them.
    rows = torch.randn(6, 24, dtype=torch.bfloat16)[:, :10]
    weights = torch.randn(2, 10, 16, dtype=torch.bfloat16)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    product = grouped_matmul(rows, weights, ends)
    torch.testing.assert_close(product, grouped_matmul_loop(rows, weights, ends), rtol=2e-2, atol=2e-2)


def test_nothing_in_it_waits_for_the_device() -> None:
    """Meta tensors have no values: any ``.item()``, ``.tolist()`` or ``nonzero`` would raise."""
    case = make_case(biases=True, dtype=torch.bfloat16)
    meta = Case(**{name: value.to("meta") for name, value in vars(case).items()})
    y, gradients = _run_on_meta(meta)
    assert y.shape == case.x.shape
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in case.leaves]


def _run_on_meta(case: Case) -> tuple[Tensor, list[Tensor]]:
    leaves = [leaf.requires_grad_() for leaf in case.leaves]
    parameters = ExpertWeights(case.gate_up, case.down, case.gate_up_bias, case.down_bias)
    y = experts_mlp(Rows(case.x, case.weights, case.ids), parameters)
    return y, list(torch.autograd.grad(y, leaves, torch.empty_like(y)))


class Sink:
    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.claims = buffer, 0

    def claim(self) -> tuple[Tensor, bool]:
        self.claims += 1
        return self.buffer, self.claims > 1


def test_weight_gradients_go_to_their_sinks_and_accumulate_there() -> None:
    case = make_case(dtype=torch.bfloat16)
    _, (_, _, dgate_up, ddown) = case.run(experts_mlp)
    gate_up, down = case.gate_up.requires_grad_(), case.down.requires_grad_()
    gate_up.grad_sink = Sink(torch.full(gate_up.shape, torch.nan))  # fp32 buffers for bf16 weights
    down.grad_sink = Sink(torch.full(down.shape, torch.nan))
    for _ in range(2):
        y = experts_mlp(Rows(case.x, case.weights, case.ids), ExpertWeights(gate_up, down))
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype))
    assert gate_up.grad is None
    assert down.grad is None
    torch.testing.assert_close(gate_up.grad_sink.buffer, 2 * dgate_up.float())
    torch.testing.assert_close(down.grad_sink.buffer, 2 * ddown.float())


def test_frozen_weights_cost_no_gradient() -> None:
    case = make_case()
    x = case.x.requires_grad_()
    y = experts_mlp(Rows(x, case.weights, case.ids), ExpertWeights(case.gate_up, case.down))
    y.sum().backward()
    assert x.grad is not None
    assert case.gate_up.grad is None


@pytest.mark.parametrize("keeps_rows", [False, True])
@pytest.mark.parametrize("weight_after", [False, True], ids=["before", "after"])
def test_kept_for_backward_are_the_input_the_pre_activation_and_indices(
    weight_after: bool, keeps_rows: bool
) -> None:
    """Or in place of the input the sorted rows and the activations."""
    num_rows, num_ids, num_experts, dim, width = 96, 4, 8, 64, 32
    case = make_case(num_rows, num_ids, num_experts, dim=dim, width=width, dtype=torch.bfloat16, ids="full")
    parameters = {case.gate_up.data_ptr(), case.down.data_ptr()}
    kept: list[Tensor] = []
    leaves = [leaf.requires_grad_() for leaf in case.leaves]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rows = Rows(leaves[0], leaves[1], case.ids)
        policy = ExpertPolicy(weight_after=weight_after, keeps_rows=keeps_rows)
        experts_mlp(rows, ExpertWeights(leaves[2], leaves[3]), policy)
    kept = [tensor for tensor in kept if tensor.data_ptr() not in parameters]
    rows = [tensor for tensor in kept if tensor.dtype == torch.bfloat16]
    small = [tensor for tensor in kept if tensor.dtype != torch.bfloat16]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in rows)
    rows_kept = num_rows * num_ids * (dim + width) if keeps_rows else num_rows * dim
    formula = 2 * rows_kept + 4 * num_rows * num_ids * width
    index_bytes = sum(tensor.numel() * tensor.element_size() for tensor in small)
    print(f"kept: {num_bytes} bytes, 2·R·D + 4·R·K·N = {formula}; weights and indices {index_bytes}")
    assert num_bytes == formula
    assert index_bytes == 4 * num_rows * num_ids * 3 + 4 * num_experts  # weights, slots, sources; group ends


@pytest.mark.parametrize("weight_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("adapted", ["both", "gate_up", "down"])
@pytest.mark.parametrize("rank", [3, 8])  # grouped_mm takes the second alone
def test_low_rank_updates_equal_the_product_added_to_the_weight(
    weight_after: bool, adapted: str, rank: int
) -> None:
    case = make_case(biases=True, dtype=torch.float64)
    num_experts, wide, dim = case.gate_up.shape
    width, policy = wide // 2, ExpertPolicy(weight_after=weight_after)
    shapes = {"gate_up": ((rank, dim), (wide, rank)), "down": ((rank, width), (dim, rank))}
    results = []
    factors = {
        name: [torch.randn(num_experts, *shape, dtype=torch.float64) for shape in pair]
        for name, pair in shapes.items()
        if adapted in (name, "both")
    }
    for function in (experts_mlp, experts_mlp_reference):
        x, weights = case.x.clone().requires_grad_(), case.weights.clone().requires_grad_()
        leaves = {name: [f.clone().requires_grad_() for f in pair] for name, pair in factors.items()}
        pairs = (leaves.get(name, [None, None]) for name in ("gate_up", "down"))
        updates = LowRankUpdates(*(factor for pair in pairs for factor in pair))
        parameters = ExpertWeights(case.gate_up, case.down, case.gate_up_bias, case.down_bias)
        y = function(Rows(x, weights, case.ids), parameters, policy, None, updates)
        trained = [x, weights, *(factor for pair in leaves.values() for factor in pair)]
        dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
        results.append((y.detach(), list(torch.autograd.grad(y, trained, dy))))
    assert_same(results[0], results[1], 1e-6)  # routing weights are fp32
