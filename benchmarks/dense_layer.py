"""Linear layers in fp8 beside bf16, forward and backward, on one GPU.

Every contender has the same weights, inputs and gradients; gradients of weights go to float32 buffers, as in
training. They run in turn, in an order that is turned round every round: what counts is the ratio within one
run. "fresh" quantises the weight in each forward and each backward, as for weights that are gathered for
every use; the others once, as for weights that stay or travel quantised. "torchao" and "te" are values of
precision.backend, where these libraries are installed: both quantise for each product, and torchao gives
gradients in bf16. Errors are relative to fp64's.

    --shapes 0 2        only these shapes         --seconds 0.2        of one measurement
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from dataclasses import dataclass

import torch
from timing import Run, alternate
from torch import Tensor

from fsdmoe.kernels.backend import has_fp8_products
from fsdmoe.kernels.fp8_linear import KeptCodes
from fsdmoe.kernels.libraries import LIBRARIES, LibraryKey
from fsdmoe.kernels.linear import Linear
from fsdmoe.kernels.quantized_linear import LinearPolicy
from fsdmoe.precision.formats import Recipe
from fsdmoe.precision.recipes import RecipeName, build_recipe

NAMES: tuple[RecipeName, ...] = ("fp8_blockwise", "fp8_rowwise", "fp8_tensorwise")


@dataclass(frozen=True)
class Shape:
    """Layers that read one tensor."""

    name: str
    tokens: int
    inputs: int
    outputs: tuple[int, ...]

    @property
    def flops(self) -> float:
        return 6.0 * self.tokens * self.inputs * sum(self.outputs)


SHAPES = (
    Shape("q k v of 30B-A3B", 16384, 2048, (4096, 512, 512)),
    Shape("o of 30B-A3B", 16384, 4096, (2048,)),
    Shape("gate and up, 4096 to 14336", 8192, 4096, (14336, 14336)),
    Shape("down, 14336 to 4096", 8192, 14336, (4096,)),
)


class Sink:
    """A float32 buffer that every backward overwrites."""

    def __init__(self, weight: Tensor) -> None:
        self.buffer = torch.zeros_like(weight, dtype=torch.float32)

    def claim(self, staged: object = None) -> tuple[Tensor, bool]:
        return self.buffer, False


class Contender:
    """The layers of a shape, by a recipe or in bf16."""

    def __init__(
        self, shape: Shape, recipe: Recipe | None, *, stays: bool, library: LibraryKey | None = None
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def random(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device="cuda", generator=generator).bfloat16()

        self.x = random(shape.tokens, shape.inputs).requires_grad_()
        self.layers = []
        for size in shape.outputs:
            layer = Linear(shape.inputs, size, bias=False, device="cuda", dtype=torch.bfloat16)
            layer.weight.data.copy_(random(size, shape.inputs) * shape.inputs**-0.5)
            if library != "torchao":
                layer.weight.grad_sink = Sink(layer.weight)  # type: ignore[attr-defined]
            if library is not None:
                assert recipe is not None
                products = LIBRARIES[library].products(recipe.name, "hopper")
                layer.quantized = LinearPolicy(recipe, products=products)
            elif recipe is not None:
                kept = KeptCodes(lambda: 0) if stays else None
                layer.quantized = LinearPolicy(recipe, emulate=False, kept=kept)
            self.layers.append(layer)
        self.gradients = [random(shape.tokens, size) for size in shape.outputs]

    def forward(self) -> list[Tensor]:
        return [layer(self.x) for layer in self.layers]

    def step(self) -> Tensor:
        x = self.x.detach().requires_grad_()  # another tensor in every step, as in training
        for layer in self.layers:
            layer.weight.grad = None
        outputs = [layer(x) for layer in self.layers]
        torch.autograd.backward(outputs, self.gradients)
        assert x.grad is not None
        return x.grad

    def results(self) -> list[Tensor]:
        with torch.no_grad():
            outputs = self.forward()
        grad_x = self.step()
        return [*outputs, grad_x, *map(_weight_grad, self.layers)]

    def exact(self) -> list[Tensor]:
        """The same in fp64, in the order of :meth:`results`."""
        x = self.x.detach().double()
        grads = [gradient.double() for gradient in self.gradients]
        weights = [layer.weight.detach().double() for layer in self.layers]
        grad_x = sum(grad @ weight for grad, weight in zip(grads, weights, strict=True))
        assert isinstance(grad_x, Tensor)
        return [*(x @ weight.t() for weight in weights), grad_x, *(grad.t() @ x for grad in grads)]


def _weight_grad(layer: Linear) -> Tensor:
    sink = getattr(layer.weight, "grad_sink", None)
    found = layer.weight.grad if sink is None else sink.buffer
    assert isinstance(found, Tensor)
    return found


def is_installed(library: LibraryKey) -> bool:
    package = "transformer_engine" if library == "te" else library
    return importlib.util.find_spec(package) is not None


def contenders(shape: Shape) -> dict[str, Contender]:
    found = {"bf16": Contender(shape, None, stays=True)}
    for name in NAMES:
        recipe = build_recipe(name)
        assert recipe is not None
        found[name] = Contender(shape, recipe, stays=True)
        if name == "fp8_blockwise":
            found[f"{name}, fresh"] = Contender(shape, recipe, stays=False)
        for key, library in LIBRARIES.items():
            if is_installed(key) and "dense" in library.parts(name, "hopper"):
                found[f"{name}, {key}"] = Contender(shape, recipe, stays=False, library=key)
    return found


def worst(found: list[Tensor], exact: list[Tensor]) -> float:
    pairs = zip(found, exact, strict=True)
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)


def compare(shape: Shape, *, seconds: float) -> None:
    print(f"\n{shape.name}: {shape.tokens} tokens, {shape.inputs} to {shape.outputs}")
    print("| | ms | TFLOP/s | x bf16 | error |\n| --- | --- | --- | --- | --- |", flush=True)
    built = contenders(shape)
    exact = built["bf16"].exact()
    errors = {name: worst(contender.results(), exact) for name, contender in built.items()}
    runs: dict[str, Run] = {name: contender.step for name, contender in built.items()}
    times = {name: statistics.median(each) for name, each in alternate(runs, seconds, rounds=4).items()}
    for name, ms in times.items():
        rate = shape.flops / ms / 1e9
        print(
            f"| {name} | {ms:.3f} | {rate:.0f} | {times['bf16'] / ms:.2f} | {errors[name]:.4f} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--seconds", type=float, default=0.2)
    arguments = parser.parse_args()
    if not has_fp8_products():
        raise SystemExit("expected a Hopper GPU and a torch built for CUDA 12.9 or later")
    for number in arguments.shapes:
        compare(SHAPES[number], seconds=arguments.seconds)


if __name__ == "__main__":
    main()
