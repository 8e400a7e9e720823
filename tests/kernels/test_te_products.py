"""Transformer Engine's products: which of its calls are made, on which halves of which codes. A stand-in for
the library keeps the values that it was given; the library itself is for a GPU
(``tests/behaviour/kernels/test_te_gpu.py``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels import recipe_support, te_products
from fsdmoe.kernels.expert_mlp import experts_mlp
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.libraries import LIBRARIES
from fsdmoe.kernels.products import Products
from fsdmoe.kernels.te_products import require_te, te_parts
from fsdmoe.precision import PrecisionConfig
from fsdmoe.precision.recipes import build_recipe
from tests.support.recipe_steps import relative, three_steps


class Codes:
    """Values in place of codes, as rows and if wanted as columns."""

    def __init__(self, values: Tensor, *, columns: bool) -> None:
        self.rows: Tensor | None = values.clone()
        self.columns: Tensor | None = values.clone() if columns else None

    def update_usage(self, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert self.columns is not None or not columnwise_usage
        self.rows = self.rows if rowwise_usage else None

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Codes]:
        tensors = [self.rows, self.columns]
        self.rows = self.columns = None
        return tensors, self


class Library:
    """What ``te_products`` takes of Transformer Engine, in exact arithmetic."""

    def __init__(self) -> None:
        self.made: list[tuple[str, bool]] = []
        self.DType = SimpleNamespace(kFloat8E4M3="e4m3", kFloat8E5M2="e5m2")

    def quantizer(self, element: str, **options: Any) -> Any:
        assert options["rowwise"]

        def quantize(x: Tensor) -> Codes:
            assert x.is_contiguous()
            self.made.append((element, options["columnwise"]))
            return Codes(x, columns=options["columnwise"])

        return SimpleNamespace(quantize=quantize)

    def Float8BlockQuantizer(self, element: str, **options: Any) -> Any:
        assert not options["force_pow_2_scales"]
        made = self.quantizer(f"{element} {options['block_scaling_dim']}", **options)
        return Callable(made)

    def Float8CurrentScalingQuantizer(self, element: str, device: Any, **options: Any) -> Any:
        return Callable(self.quantizer(element, **options))

    def split_quantize(self, x: Tensor, sizes: list[int], quantizers: list[Any]) -> list[Codes]:
        assert x.is_contiguous()
        assert sum(sizes) == len(x)
        pieces = zip(x.split(sizes), quantizers, strict=True)
        return [quantizer(piece) for piece, quantizer in pieces]

    def prepare_for_saving(self, *codes: Codes) -> tuple[list[Tensor | None], list[Codes]]:
        return [tensor for each in codes for tensor in each.prepare_for_saving()[0]], list(codes)

    def restore_from_saved(self, codes: list[Codes], tensors: list[Tensor | None]) -> None:
        for each, rows, columns in zip(codes, tensors[::2], tensors[1::2], strict=True):
            each.rows, each.columns = rows, columns

    def general_gemm(self, a: Codes, b: Codes, dtype: torch.dtype, **options: Any) -> tuple[Tensor, ...]:
        layout, out = options["layout"], options.get("out")
        first = a.rows if layout[0] == "T" else a.columns
        second = b.columns if layout[1] == "T" else b.rows
        assert first is not None
        assert second is not None
        found = (second.t() if layout[1] == "T" else second) @ (first.t() if layout[0] == "T" else first)
        if out is None:
            return (found.to(dtype),)
        assert out.is_contiguous()
        out.add_(found) if options.get("accumulate") else out.copy_(found)
        return (out,)

    def general_grouped_gemm(
        self, a: list[Codes], b: list[Codes], out: list[Tensor], quantizers: list[None],
        dtype: torch.dtype, *, m_splits: list[int], single_output: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        assert len(a) == len(b) == len(quantizers) == len(m_splits) > 0
        places = list(out[0][: sum(m_splits)].split(m_splits)) if single_output else out
        for first, second, place in zip(a, b, places, strict=True):
            self.general_gemm(first, second, dtype, out=place, **options)


class Callable:
    """A quantiser: called, with the switches that ours are given."""

    internal = False

    def __init__(self, made: Any) -> None:
        self._made = made

    def __call__(self, x: Tensor) -> Codes:
        assert self.internal
        return self._made.quantize(x)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(te_products, "require_te", lambda: None)
    monkeypatch.setitem(LIBRARIES, "te", LIBRARIES["te"]._replace(require=lambda: None))
    monkeypatch.setattr(te_products, "_library", lambda: te_products._TeModules(found, found, found))
    return found


class Sink:
    """A float32 buffer that is overwritten first and added to afterwards."""

    def __init__(self, weight: Tensor) -> None:
        self.buffer = torch.full_like(weight, torch.nan, dtype=torch.float32)
        self.is_written = False

    def claim(self, staged: object = None) -> tuple[Tensor, bool]:
        accumulate, self.is_written = self.is_written, True
        return self.buffer, accumulate


def products_of(recipe: str) -> Products:
    return te_products.te_products(recipe, "hopper")


def with_grads(compute: Any, *tensors: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    y = compute(*leaves)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def test_a_linear_layer_has_the_three_products(library: Library) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 27, 128, generator=random, dtype=torch.float64)  # 81 rows are filled up
    weight = torch.randn(96, 128, generator=random, dtype=torch.float64)
    found = with_grads(products_of("fp8_blockwise").linear, x, weight)
    for theirs, wanted in zip(found, with_grads(nn.functional.linear, x, weight), strict=True):
        torch.testing.assert_close(theirs, wanted)


def test_gradients_have_their_element_and_weights_their_blocks(library: Library) -> None:
    x = torch.randn(16, 128, requires_grad=True)
    weight = torch.randn(128, 128, requires_grad=True)
    products_of("fp8_tensorwise").linear(x, weight).sum().backward()
    # x with its transpose, the weight for forward, dy, and the weight again with its transpose.
    assert library.made == [("e4m3", True), ("e4m3", False), ("e5m2", True), ("e4m3", True)]
    library.made.clear()
    products_of("fp8_blockwise").linear(x, weight).sum().backward()
    assert library.made == [("e4m3 1", True), ("e4m3 2", False), ("e4m3 1", True), ("e4m3 2", True)]


def test_only_what_a_gradient_needs_is_transposed_and_kept(library: Library) -> None:
    x, weight = torch.randn(16, 128), torch.randn(128, 128)
    linear = products_of("fp8_tensorwise").linear
    with torch.no_grad():
        linear(x, weight.clone().requires_grad_())
    assert library.made == [("e4m3", False), ("e4m3", False)]
    library.made.clear()
    y = linear(x.clone().requires_grad_(), weight)  # frozen
    y.sum().backward()
    assert library.made == [("e4m3", False), ("e4m3", False), ("e5m2", False), ("e4m3", True)]


def test_a_gradient_goes_to_the_buffer_of_its_weight_and_is_added_up(library: Library) -> None:
    x = torch.randn(32, 128)
    weight = torch.randn(64, 128, requires_grad=True)
    weight.grad_sink = sink = Sink(weight)  # type: ignore[attr-defined]
    linear = products_of("fp8_blockwise").linear
    for factor in (1.0, 2.0):
        linear(factor * x, weight).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(sink.buffer, 3 * torch.ones(64, 32) @ x)


def test_backward_may_run_twice_and_leaves_no_codes_behind(library: Library) -> None:
    x, weight = torch.randn(16, 128), torch.randn(64, 128, requires_grad=True)
    y = products_of("fp8_blockwise").linear(x, weight)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    torch.testing.assert_close(weight.grad, 2 * torch.ones(64, 16) @ x)
    node: Any = y.grad_fn
    while not hasattr(node, "codes"):
        node = node.next_functions[0][0]
    assert node.codes[0].rows is None
    assert node.codes[0].columns is None


def expert_case() -> tuple[list[Tensor], Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = (40, 128), (3, 256, 128), (3, 128, 128)
    x, gate_up, down = (0.3 * torch.randn(shape, generator=random) for shape in shapes)
    ids = torch.stack([torch.randperm(3, generator=random)[:2] for _ in range(40)])
    ids[ids == 1] = 0  # one expert without rows, choices of the same expert
    ids[3, 1] = ids[5, 0] = ids[5, 1] = -1
    return [x, torch.rand(40, 2, generator=random), gate_up, down], ids


@pytest.mark.parametrize("weight_after", [False, True])
def test_experts_have_the_products_of_each_group(library: Library, weight_after: bool) -> None:
    tensors, ids = expert_case()

    def compute(policy: ExpertPolicy) -> Any:
        return lambda x, weights, gate_up, down: experts_mlp(
            Rows(x, weights, ids), ExpertWeights(gate_up, down), policy
        )

    plain = ExpertPolicy(weight_after=weight_after)
    recipe = build_recipe("fp8_blockwise")
    by_te = plain._replace(recipe=recipe, products=products_of("fp8_blockwise"))
    wanted = with_grads(compute(plain), *tensors)
    for theirs, exact in zip(with_grads(compute(by_te), *tensors), wanted, strict=True):
        torch.testing.assert_close(theirs, exact, rtol=1e-4, atol=1e-5)


def test_gradients_of_experts_without_rows_are_zero_in_a_buffer_that_was_not(library: Library) -> None:
    (x, weights, gate_up, down), ids = expert_case()
    gate_up.requires_grad_()
    gate_up.grad_sink = sink = Sink(gate_up)  # type: ignore[attr-defined]
    policy = ExpertPolicy(recipe=build_recipe("fp8_tensorwise"), products=products_of("fp8_tensorwise"))
    for _ in range(2):
        experts_mlp(Rows(x, weights, ids), ExpertWeights(gate_up, down), policy).sum().backward()
    assert (sink.buffer[1] == 0).all()
    alone = gate_up.detach().clone().requires_grad_()
    experts_mlp(Rows(x, weights, ids), ExpertWeights(alone, down), ExpertPolicy()).sum().backward()
    assert alone.grad is not None
    torch.testing.assert_close(sink.buffer, 2 * alone.grad, rtol=1e-4, atol=1e-4)


def test_experts_without_any_row_compute_nothing(library: Library) -> None:
    (x, weights, gate_up, down), ids = expert_case()
    gate_up.requires_grad_()
    policy = ExpertPolicy(recipe=build_recipe("fp8_blockwise"), products=products_of("fp8_blockwise"))
    y = experts_mlp(Rows(x, weights, torch.full_like(ids, -1)), ExpertWeights(gate_up, down), policy)
    y.sum().backward()
    assert gate_up.grad is not None
    assert not y.any()
    assert not gate_up.grad.any()


def test_a_sharded_model_trains_by_it_as_in_bfloat16(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_support, "current_architecture", lambda: "hopper")
    plain = three_steps(PrecisionConfig())
    found = three_steps(PrecisionConfig(recipe="fp8_blockwise", backend="te"))
    assert ("e4m3 2", True) in library.made
    assert found.losses == pytest.approx(plain.losses, rel=2e-3)
    for name, gradient in found.gradients.items():
        assert relative(gradient, plain.gradients[name]) < 0.03, name


def test_what_it_covers_depends_on_the_architecture() -> None:
    assert "experts" in te_parts("fp8_blockwise", "hopper")
    assert te_parts("fp8_tensorwise", "hopper") == te_parts("fp8_tensorwise", "blackwell")
    assert te_parts("mxfp8", "hopper") == te_parts("nvfp4", "hopper") == frozenset()
    assert (
        te_parts("mxfp8", "blackwell")
        == te_parts("nvfp4", "blackwell")
        == te_parts("fp8_blockwise", "hopper")
    )
    assert te_parts("fp8_blockwise", "blackwell") == te_parts("fp8_rowwise", "hopper") == frozenset()
    assert te_parts("fp8_tensorwise", "other") == te_parts("fp8_tensorwise", None) == frozenset()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_products.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-build-isolation 'fsdmoe\[te\]', or set"):
        require_te()


_CHOICES = """
import sys
import fsdmoe.parallel.quantized_layers
from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.libraries import LIBRARIES
from fsdmoe.precision import PrecisionConfig
from fsdmoe.kernels.recipe_support import check_recipe

check_recipe(PrecisionConfig(recipe="fp8_blockwise", emulate=True))
LIBRARIES["te"].require()
assert "transformer_engine" not in sys.modules
try:
    LIBRARIES["te"].products("fp8_blockwise", "hopper")
except ConfigError as error:
    print(error)
"""


def test_it_is_imported_only_when_its_products_are_made_and_a_broken_one_is_told(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("undefined symbol: _ZN3c10")\n')
    paths = [str(tmp_path), str(Path(te_products.__file__).parents[2])]
    code = f"import sys; sys.path[:0] = {paths!r}\n{_CHOICES}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "expected a Transformer Engine that loads with torch" in done.stdout
    assert "got ImportError: undefined symbol: _ZN3c10" in done.stdout
    assert "--no-build-isolation" in done.stdout
