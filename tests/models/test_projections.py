"""Projections that run while tokens travel give what the plain ones give, gradients and sinks included."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdmoe.errors import ConfigError
from fsdmoe.kernels.linear import Linear, add_rows_
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.models import projections
from fsdmoe.models.projections import input_projections, output_projection, overlapped_projections
from fsdmoe.parallel import ParallelPolicy
from fsdmoe.tensor_parallel import ring
from fsdmoe.tensor_parallel.config import Overlap, TensorParallelConfig
from fsdmoe.tensor_parallel.group import TensorGroup
from fsdmoe.tensor_parallel.split import TensorPlan, parallelize_tensors
from fsdmoe.testing import run_ranks
from tests.support.coordinates import use_local_tensors
from tests.support.sent_bytes import SentBytes

LENGTH, HIDDEN, WIDTH = 8, 12, 16


class Gated(nn.Module):
    """Two projections of one gathered input, one that scatters."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = Linear(HIDDEN, WIDTH, bias=bias), Linear(HIDDEN, 2 * WIDTH, bias=bias)
        self.down = Linear(WIDTH, HIDDEN, bias=bias)
        self.tensor = TensorGroup()

    def tensor_plan(self) -> TensorPlan:
        plan: TensorPlan = {"gate.weight": 0, "up.weight": 0, "down.weight": 1}
        if self.gate.bias is not None:
            plan |= {"gate.bias": 0, "up.bias": 0, "down.bias": "tokens"}
        return plan

    def forward(self, x_BsD: Tensor) -> Tensor:
        gate, up = input_projections(x_BsD, (self.gate, self.up), self.tensor)
        return output_projection(self.down, gate.tanh() * up.unflatten(2, (-1, 2)).prod(-1), self.tensor)


class Sink:
    """As the sharding engine's: the first gradient overwrites, further ones are added."""

    def __init__(self, weight: Tensor) -> None:
        self.buffer, self.claims = torch.full_like(weight, torch.nan, dtype=torch.float32), 0

    def claim(self) -> tuple[Tensor, bool]:
        self.claims += 1
        return self.buffer, self.claims > 1


class Case(NamedTuple):
    rows: int
    bias: bool
    sinks: bool
    recompute: bool
    passes: int = 2


CASES = (
    Case(1, bias=False, sinks=False, recompute=False),
    Case(3, bias=True, sinks=True, recompute=False),
    Case(2, bias=True, sinks=False, recompute=True),
    Case(1, bias=False, sinks=True, recompute=True),
)


def run(case: Case, meshes: Meshes, overlap: Overlap) -> dict[str, Tensor]:
    """Outputs, every gradient, and outputs without a graph."""
    torch.manual_seed(0)
    module = Gated(bias=case.bias)
    parallelize_tensors(module, meshes, overlap)
    use_local_tensors(module)
    weights = {name: p for name, p in module.named_parameters() if name.endswith("weight")}
    sinks = {name: Sink(p) for name, p in weights.items()} if case.sinks else {}
    for name, sink in sinks.items():
        weights[name].grad_sink = sink  # type: ignore[attr-defined]
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(case.rows, LENGTH // meshes.degrees.tp, HIDDEN, requires_grad=True)
    found: dict[str, Tensor] = {}
    for each in range(case.passes):
        y = checkpoint(module, x, use_reentrant=False) if case.recompute else module(x)
        y.square().sum().backward()
        found[f"y{each}"] = y.detach()
    assert x.grad is not None
    found["x.grad"] = x.grad
    for name, parameter in module.named_parameters():
        if name in sinks:
            assert parameter.grad is None, f"{name} has a sink"
            assert sinks[name].claims == case.passes
        gradient = sinks[name].buffer if name in sinks else parameter.grad
        assert gradient is not None
        found[f"{name}.grad"] = gradient
    with torch.no_grad():
        found["no_grad"] = module(x)
    return found


def compare_with_plain() -> None:
    meshes = build_meshes(tp=dist.get_world_size())
    for case in CASES:
        plain, overlapped = run(case, meshes, "none"), run(case, meshes, "ring")
        assert plain.keys() == overlapped.keys()
        for name, wanted in plain.items():
            error = (overlapped[name] - wanted).norm() / wanted.norm()
            assert error <= 1e-6, f"{case}: {name} differs by {error:.1e}"


@pytest.mark.parametrize("size", [2, 4])
def test_outputs_and_gradients_are_those_of_plain_projections(size: int) -> None:
    run_ranks(compare_with_plain, size)


def order_of_work() -> list[list[str]]:
    """What this rank does, forward and backward."""
    events: list[str] = []

    class RingSendRecv(ring.RingSendRecv):
        def __init__(self, *args: Any) -> None:
            events.append("start")
            super().__init__(*args)

        def wait(self) -> Tensor:
            events.append("wait")
            return super().wait()

    def add_rows(*args: Any, **kwargs: Any) -> None:
        events.append("multiply")
        add_rows_(*args, **kwargs)

    with (
        mock.patch.object(ring, "RingSendRecv", RingSendRecv),
        mock.patch.object(projections, "add_rows_", add_rows),
        SentBytes() as sent,
    ):
        module = Gated(bias=False)
        parallelize_tensors(module, build_meshes(tp=2), "ring")
        use_local_tensors(module)
        y = module(torch.randn(1, LENGTH // 2, HIDDEN, requires_grad=True))
        forward = events.copy()
        y.sum().backward()
    assert sent.total == 4 * y.nbytes, "one gather and one scatter of the tokens, each way"
    return [forward, events[len(forward) :]]


def test_a_piece_is_multiplied_while_the_next_one_travels() -> None:
    into_two = ["start", *["multiply"] * 2, "wait", *["multiply"] * 2]  # both projections share one exchange
    into_one = ["start", "multiply", "wait", "multiply"]
    from_one = ["multiply", "start", "multiply", "wait"]
    from_two = [*["multiply"] * 2, "start", *["multiply"] * 2, "wait"]
    for forward, backward in run_ranks(order_of_work, 2):
        assert forward == into_two + from_one
        assert backward == into_one + from_two


def partly_frozen(meshes: Meshes, overlap: Overlap) -> list[Tensor]:
    """One weight frozen, an input without a gradient, and the gathered tokens used beside their product."""
    tensor = TensorGroup.of(meshes, overlap)
    torch.manual_seed(3)
    frozen, trained = nn.Linear(HIDDEN, WIDTH, bias=False), nn.Linear(HIDDEN, WIDTH)
    frozen.requires_grad_(False)
    torch.manual_seed(4 + tensor.rank)
    x = torch.randn(2, LENGTH // 2, HIDDEN, requires_grad=True)
    if overlap == "none":
        x_BSD = tensor.gather(x)
        outputs = [frozen(x_BSD), trained(x_BSD)]
    else:
        x_BSD, *outputs = overlapped_projections(x, (frozen, trained), tensor)
    factor = torch.randn(2, LENGTH, 1)
    (outputs[0] * outputs[1] * factor).sum().backward(retain_graph=True)
    (x_BSD.square() * factor).sum().backward()
    data = x.detach()
    (alone,) = input_projections(data, (trained,), tensor)
    alone.square().sum().backward()
    assert frozen.weight.grad is None
    return [x.grad, trained.weight.grad, trained.bias.grad]  # type: ignore[list-item]


def compare_partly_frozen() -> None:
    meshes = build_meshes(tp=2)
    for plain, overlapped in zip(partly_frozen(meshes, "none"), partly_frozen(meshes, "ring"), strict=True):
        torch.testing.assert_close(overlapped, plain, rtol=1e-5, atol=1e-5)


def test_gathered_tokens_may_be_used_beside_their_products_and_weights_may_be_frozen() -> None:
    run_ranks(compare_partly_frozen, 2)


def half_precision() -> float:
    tensor = TensorGroup.of(build_meshes(tp=4), "ring")
    torch.manual_seed(5)
    linear = nn.Linear(HIDDEN, WIDTH, bias=False, dtype=torch.bfloat16)
    whole = torch.randn(2, LENGTH, HIDDEN).bfloat16()
    (y,) = input_projections(tensor.own(whole), (linear,), tensor)
    assert y.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):  # which takes what is not bfloat16 yet
        (same,) = input_projections(tensor.own(whole).float(), (linear,), tensor)
    assert same.dtype == torch.bfloat16
    wanted = whole.double() @ linear.weight.double().t()
    return max((each.double() - wanted).abs().max().item() for each in (y, same)) / wanted.abs().max().item()


def test_half_precision_and_autocast_stay_within_rounding() -> None:
    assert max(run_ranks(half_precision, 4)) < 2**-8


def test_an_overlap_that_does_not_exist_or_would_not_happen_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel\.overlap: expected one of none, ring, got"):
        TensorParallelConfig(overlap="tree")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"tensor_parallel\.overlap: expected none in compiled layers"):
        ParallelPolicy(compile=True, tensor_parallel=TensorParallelConfig(overlap="ring"))
