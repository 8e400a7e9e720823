"""Weight gradients that fetch their rows, on a Hopper GPU: right beside fp64, and the layer's as before."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fsdmoe.kernels.backend import has_fp8_kernels
from fsdmoe.kernels.gluon.bf16_weight_grad import weight_grad_fetched, weight_grad_fetched_reference
from fsdmoe.kernels.triton import experts_mlp_triton, swiglu_passes
from fsdmoe.kernels.triton.row_map import build_row_map
from tests.behaviour.kernels.test_fp8_gpu import NAMES, Layer, error

pytestmark = pytest.mark.skipif(not has_fp8_kernels(), reason="needs a Hopper GPU")
# Rows, hidden size, expert width, experts, choices a row.
SHAPES = [
    (300, 256, 256, 4, 1),
    (2000, 512, 768, 5, 2),
    (1500, 256, 512, 40, 8),  # about 300 rows an expert
    (4096, 2048, 768, 16, 8),  # 2048 rows of a gradient: the last tile is cut
]
STORES = [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True), (torch.bfloat16, True)]


class FixedSink:
    """Hands out one buffer, to be added to."""

    def __init__(self, weight: torch.Tensor) -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        self.buffer = torch.randn(weight.shape, device="cuda", generator=generator)

    def claim(self) -> tuple[torch.Tensor, bool]:
        return self.buffer, True


@pytest.mark.parametrize("fetch_left", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "accumulate"), STORES, ids=str)
def test_gradients_equal_those_in_fp64(
    shape: tuple[int, ...], dtype: torch.dtype, accumulate: bool, fetch_left: bool
) -> None:
    layer = Layer(*shape)
    a, b = (layer.d, layer.n) if fetch_left else (2 * layer.n, layer.d)
    sorted_rows = torch.full((layer.map.capacity, b if fetch_left else a), float("nan"), device="cuda")
    sorted_rows[: layer.used] = torch.randn(layer.used, sorted_rows.shape[1], device="cuda")
    sorted_rows[: layer.used][layer.map.source_M[: layer.used] < 0] = 0
    rows = layer.dy * 1e6 if fetch_left else layer.x
    rows[(layer.ids == -1).all(1)] = float("inf")  # assigned nowhere: must not be read as anything
    operands = (rows, sorted_rows.bfloat16()) if fetch_left else (sorted_rows.bfloat16(), rows)
    out = torch.full((layer.num_experts, a, b), 0.5 if accumulate else float("nan"), device="cuda").to(dtype)
    wanted, again = out.double(), out.clone()
    options = {"fetch_left": fetch_left, "accumulate": accumulate}
    weight_grad_fetched_reference(operands[0].double(), operands[1].double(), layer.map, wanted, **options)
    weight_grad_fetched(*operands, layer.map, out, **options)
    assert error(out, wanted) < (3e-3 if dtype == torch.bfloat16 else 1e-5)
    assert error(out[-1], wanted[-1]) < 1e-6, "an expert without rows"
    weight_grad_fetched(*operands, layer.map, again, **options)
    assert torch.equal(out, again), "not the same twice"


@pytest.mark.parametrize("sinks", [False, True])
def test_a_layer_has_the_gradients_that_sorted_rows_give(
    sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(4096, 2048, 768, 16, 8)

    def gradients() -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (layer.x, layer.weights, layer.gate_up, layer.down)]
        if sinks:
            for weight in leaves[2:]:
                weight.grad_sink = FixedSink(weight)  # type: ignore[attr-defined]
        y = experts_mlp_triton(leaves[0], leaves[1], layer.ids, leaves[2], leaves[3])
        y.backward(layer.dy)
        of_weights = [w.grad_sink.buffer if sinks else w.grad for w in leaves[2:]]  # type: ignore[attr-defined]
        return [y.detach(), leaves[0].grad, leaves[1].grad, *of_weights]  # type: ignore[list-item]

    fetched: list[bool] = []
    choose = swiglu_passes._fetching

    def watched(*given: object) -> object:
        fetched.append(choose(*given) is not None)  # type: ignore[arg-type]
        return choose(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(swiglu_passes, "_fetching", watched)
    found = gradients()
    assert fetched == [True]
    monkeypatch.setattr(swiglu_passes, "_fetching", lambda *_: None)
    for name, ours, others in zip(NAMES, found, gradients(), strict=True):
        assert error(ours, others) < 1e-5, name


def test_a_bound_that_proves_too_small_reads_nothing_outside() -> None:
    layer = Layer(2000, 512, 768, 5, 2)
    row_map = build_row_map(layer.ids, layer.num_experts, align=128, max_rows=128)
    assert int(row_map.offsets[-1]) == 1
    sorted_rows = torch.zeros(row_map.capacity, layer.n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(layer.num_experts, layer.d, layer.n, device="cuda", dtype=torch.bfloat16)
    weight_grad_fetched(layer.dy, sorted_rows, row_map, out, fetch_left=True, accumulate=False)
    assert not out.any()
