"""The one autograd function of experts: what its implementations keep, and that there is no second."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdmoe
from fsdmoe.kernels.expert_autograd import Gradient
from fsdmoe.kernels.expert_mlp_grouped import GroupedProducts
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.precision.formats import FP8_BLOCKWISE
from tests.support.experts_by_products import experts_mlp_grouped

ROWS, TOP_K, EXPERTS, HIDDEN, WIDTH = 40, 2, 4, 256, 128
INPUT = 2 * ROWS * HIDDEN + 4 * ROWS * TOP_K  # rows in bf16, routing weights in fp32


def draw() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows, routing weights and ids; both weights."""
    x = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.zeros(ROWS, TOP_K, requires_grad=True)
    ids = torch.zeros(ROWS, TOP_K, dtype=torch.int64)
    gate_up = torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    down = torch.zeros(EXPERTS, HIDDEN, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    return x, weights, ids, gate_up, down


def kept_bytes(function, given: tuple[Tensor, ...], *others: Tensor) -> int:
    """What it keeps for backward, parameters left out."""
    parameters = {tensor.data_ptr() for tensor in (*given[3:], *others)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*given)
    return sum(size for place, size in saved.items() if place not in parameters)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_plain_torch_keeps_rows_pre_activations_and_a_permutation(recompute: bool, adapted: bool) -> None:
    shapes = (8, HIDDEN), (2 * WIDTH, 8), (8, WIDTH), (HIDDEN, 8)
    factors = [torch.zeros(EXPERTS, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    updates = LowRankUpdates(*factors) if adapted else LowRankUpdates()

    def run(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        policy = ExpertPolicy(recompute=recompute)
        return experts_mlp_grouped(
            Rows(x, weights, ids), ExpertWeights(gate_up, down), policy, updates=updates
        )

    pre_activations = 0 if recompute else 4 * ROWS * TOP_K * WIDTH
    permutation = 4 * (2 * ROWS * TOP_K + EXPERTS)
    assert kept_bytes(run, draw(), *factors) == INPUT + pre_activations + permutation


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels, which are not run."""
    launch = pytest.importorskip("fsdmoe.kernels.triton.launch")
    names: list[str] = []

    def note(kernel, *_: object, **__: object) -> None:
        names.append(kernel.function.__name__)

    monkeypatch.setattr(launch.QuickLaunch, "_launch", note)
    return names


def map_bytes(num_slots: int, align: int) -> int:
    """Of rows that are sorted by expert: positions, sources, offsets, counts, tiles, the order of experts."""
    return 4 * (ROWS * TOP_K + num_slots + EXPERTS + 2 + EXPERTS + num_slots // align + EXPERTS)


@pytest.mark.parametrize("recompute", [False, True])
def test_kernels_in_bf16_keep_rows_pre_activations_and_a_map(launches: list[str], recompute: bool) -> None:
    from fsdmoe.kernels.triton import experts_mlp_triton

    num_slots = ROWS * TOP_K // 64 * 64 + EXPERTS * 64
    expected = INPUT + (0 if recompute else 4 * num_slots * WIDTH) + map_bytes(num_slots, 64)
    assert (
        kept_bytes(
            lambda *given: experts_mlp_triton(*given, policy=ExpertPolicy(recompute=recompute)), draw()
        )
        == expected
    )
    assert "_gate_up_kernel" in launches


def test_kernels_that_emulate_a_recipe_keep_the_same(launches: list[str]) -> None:
    from fsdmoe.kernels.triton import experts_mlp_rounded
    from fsdmoe.precision.recipes import build_recipe

    num_slots = ROWS * TOP_K // 64 * 64 + EXPERTS * 64
    recipe = build_recipe("mxfp8")
    assert recipe is not None
    expected = INPUT + 4 * num_slots * WIDTH + map_bytes(num_slots, 64)
    assert kept_bytes(lambda *given: experts_mlp_rounded(*given, recipe), draw()) == expected
    assert "_activate_kernel" in launches


def test_kernels_in_fp8_keep_scales_of_panels_too(launches: list[str]) -> None:
    gluon = pytest.importorskip("fsdmoe.kernels.gluon")
    num_slots = ROWS * TOP_K // 128 * 128 + EXPERTS * 128
    scales = 4 * EXPERTS * (HIDDEN // 128 + WIDTH // 128)
    expected = INPUT + 4 * num_slots * WIDTH + scales + map_bytes(num_slots, 128)
    policy = ExpertPolicy(recipe=FP8_BLOCKWISE)

    def compute(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return gluon.experts_mlp_fp8(Rows(x, weights, ids), ExpertWeights(gate_up, down), policy)

    assert kept_bytes(compute, draw()) == expected
    assert "fp8_gemm_kernel" in launches


def test_experts_have_one_autograd_function_and_one_for_an_output_apart() -> None:
    kernels = Path(fsdmoe.__file__).parent / "kernels"
    found = [
        f"{path.name}: {node.name}"
        for path in sorted(kernels.rglob("*.py"))
        if "expert" in path.name or "_mlp" in path.name or path.stem == "low_rank"
        if path.stem != "library_experts"  # rows to another library's product and back
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and "Function" in " ".join(map(ast.unparse, node.bases))
    ]
    assert found == ["expert_autograd.py: _Experts", "expert_autograd.py: _Output"]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("needs_output", [False, True])
def test_a_recomputed_layer_computes_its_output_again_only_where_backward_needs_it(
    monkeypatch: pytest.MonkeyPatch, needs_output: bool, reentrant: bool
) -> None:
    computed: list[int] = []
    down = GroupedProducts.down

    def count(self: GroupedProducts, *args: Any) -> Tensor:
        computed.append(1)
        return down(self, *args)

    monkeypatch.setattr(GroupedProducts, "down", count)
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, 16), (ROWS, TOP_K), (EXPERTS, 2 * 8, 16), (EXPERTS, 16, 8)
    given = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    ids = torch.randint(0, EXPERTS, (ROWS, TOP_K), generator=generator)

    def layer(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        y = experts_mlp_grouped(Rows(x, weights, ids), ExpertWeights(gate_up, down))
        return x + (y.sin() if needs_output else y)

    expected = torch.autograd.grad(layer(*given).square().sum(), given)
    computed.clear()
    checkpoint(layer, *given, use_reentrant=reentrant).square().sum().backward()
    assert len(computed) == (2 if needs_output or reentrant else 1)
    for each, gradient in zip(given, expected, strict=True):
        torch.testing.assert_close(each.grad, gradient)


def test_a_gradient_goes_to_its_sink_or_to_autograd() -> None:
    weight = torch.zeros(2, 3, dtype=torch.bfloat16)
    alone = Gradient(weight, None)
    alone.put(torch.ones(2, 3))
    assert alone.for_autograd is not None
    assert alone.for_autograd.dtype == torch.bfloat16

    class Sink:
        buffer = torch.ones(2, 3)

        def claim(self) -> tuple[Tensor, bool]:
            return self.buffer, True

    sunk = Gradient(weight, Sink())  # type: ignore[arg-type]
    sunk.put(torch.ones(2, 3))
    place = sunk.place()
    assert sunk.for_autograd is None
    assert place is not None
    assert place[0] is Sink.buffer
    assert torch.equal(Sink.buffer, torch.full((2, 3), 2.0))
