"""A layer of experts by every library in one run: fsdmoe's kernels, torchao's and Transformer Engine's.

Forward and backward from the same operands: choices that even routing would make, routing weights, and
gradients of weights in float32 buffers as in training (torchao returns them in bf16). Each library has what
``precision.backend`` gives a run, with the recipes that it has experts for; one that is not installed is left
out. Contenders run in turn, and times are medians of rounds. Errors are relative to fp64's, of the output, of
the input's gradient and of both weights'.

    python benchmarks/te_parts.py                        under 2 minutes on one H200
    python benchmarks/te_parts.py --shapes 0 --kernels   where a contender's time goes

Linear layers are compared by ``dense_layer.py``. torchao's experts time hundreds of tiles at their first
call, for minutes: they take part with ``--torchao``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from dense_layer import Sink, is_installed
from timing import Run, alternate, require_gpu
from torch import Tensor

from fsdmoe.kernels.expert_mlp import ExpertFunction, expert_function
from fsdmoe.kernels.expert_operands import NO_UPDATES, ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.libraries import LIBRARIES, LibraryKey
from fsdmoe.precision.recipes import RecipeName, build_recipe


class Shape(NamedTuple):
    tokens: int
    hidden: int
    width: int
    num_experts: int
    top_k: int

    @property
    def flops(self) -> float:
        return 18.0 * self.tokens * self.top_k * self.hidden * self.width


SHAPES = (Shape(16384, 2048, 768, 128, 8), Shape(8192, 4096, 14336, 8, 2))
BY_LIBRARY: tuple[tuple[LibraryKey, RecipeName], ...] = (
    ("te", "fp8_blockwise"), ("te", "fp8_tensorwise"), ("torchao", "fp8_rowwise"),
)  # fmt: skip


class Case:
    """The operands of a shape, the same for everybody."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(size, device="cuda", generator=generator) * scale).bfloat16()

        tokens, hidden, width, num_experts, top_k = shape
        self.x, self.dy = random(tokens, hidden), random(tokens, hidden)
        self.gate_up = random(num_experts, 2 * width, hidden, scale=hidden**-0.5)
        self.down = random(num_experts, hidden, width, scale=width**-0.5)
        scores = torch.rand(tokens, num_experts, device="cuda", generator=generator)
        self.ids = scores.topk(top_k, dim=-1).indices
        self.weights = torch.rand(tokens, top_k, device="cuda", generator=generator)


class Contender:
    """Experts by one policy."""

    def __init__(self, case: Case, policy: ExpertPolicy, *, wide: bool = False) -> None:
        dtype = torch.float64 if wide else torch.bfloat16
        self.case, self.policy = case, policy
        self.compute: ExpertFunction = expert_function(policy)
        self.x, self.dy = case.x.to(dtype), case.dy.to(dtype)
        self.gate_up = case.gate_up.to(dtype).requires_grad_()
        self.down = case.down.to(dtype).requires_grad_()
        for weight in () if wide else (self.gate_up, self.down):
            weight.grad_sink = Sink(weight)  # type: ignore[attr-defined]

    def step(self) -> list[Tensor]:
        """The output and the gradients."""
        for weight in (self.gate_up, self.down):
            weight.grad = None
        x = self.x.detach().requires_grad_()
        weights = self.case.weights.to(torch.promote_types(x.dtype, torch.float32)).requires_grad_()
        rows = Rows(x, weights, self.case.ids)
        y = self.compute(rows, ExpertWeights(self.gate_up, self.down), self.policy, None, NO_UPDATES)
        y.backward(self.dy)
        assert x.grad is not None
        return [y.detach(), x.grad, _grad_of(self.gate_up), _grad_of(self.down)]


def _grad_of(weight: Tensor) -> Tensor:
    found = weight.grad if weight.grad is not None else weight.grad_sink.buffer  # type: ignore[attr-defined]
    assert isinstance(found, Tensor)
    return found


def contenders(case: Case, *, with_torchao: bool) -> dict[str, Contender]:
    plain = ExpertPolicy(emulate=False)
    found = {
        "bf16": Contender(case, plain),
        "fp8_blockwise, own": Contender(case, plain._replace(recipe=build_recipe("fp8_blockwise"))),
    }
    for key, name in BY_LIBRARY:
        if is_installed(key) and (key != "torchao" or with_torchao):
            products = LIBRARIES[key].products(name, "hopper")
            policy = plain._replace(recipe=build_recipe(name), products=products)
            found[f"{name}, {key}"] = Contender(case, policy)
    return found


def errors_of(found: list[Tensor], exact: list[Tensor]) -> str:
    pairs = zip(found, exact, strict=True)
    return ", ".join(f"{((a.double() - b).norm() / b.norm()).item():.4f}" for a, b in pairs)


def kernels_of(run: Callable[[], object]) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    return profiled.key_averages().table(sort_by="cuda_time_total", row_limit=12, max_name_column_width=70)


def compare(shape: Shape, *, seconds: float, with_torchao: bool, shows_kernels: bool) -> None:
    print(f"\n{shape}")
    print("| | ms | TFLOP/s | x bf16 | errors of y, dx, dgate_up, ddown |\n| --- | --- | --- | --- | --- |")
    case = Case(shape)
    exact = Contender(case, ExpertPolicy(), wide=True).step()
    built = contenders(case, with_torchao=with_torchao)
    errors = {name: errors_of(contender.step(), exact) for name, contender in built.items()}
    del exact
    runs: dict[str, Run] = {name: contender.step for name, contender in built.items()}
    times = {name: statistics.median(each) for name, each in alternate(runs, seconds, rounds=4).items()}
    for name, ms in times.items():
        rate = shape.flops / ms / 1e9
        print(f"| {name} | {ms:.2f} | {rate:.0f} | {times['bf16'] / ms:.2f} | {errors[name]} |", flush=True)
    for name in built if shows_kernels else ():
        print(f"\n{name}\n{kernels_of(partial(built[name].step))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--torchao", action="store_true", help="torchao's experts too")
    parser.add_argument("--kernels", action="store_true", help="print the kernels that take longest")
    args = parser.parse_args()
    require_gpu()
    for number in args.shapes:
        compare(SHAPES[number], seconds=args.seconds, with_torchao=args.torchao, shows_kernels=args.kernels)


if __name__ == "__main__":
    main()
