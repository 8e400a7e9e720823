"""The detectors detect, and a healthy engine neither allocates after warm-up nor moves its parameters."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdmoe.fsdp import engine_of
from fsdmoe.fsdp.engine import Engine
from fsdmoe.fsdp.guard import SlotGuard
from fsdmoe.fsdp.unit import Unit
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, check_gradients, run_plain, run_sharded, shard_tiny
from tests.support.tiny_modules import batch_of, reference


@contextmanager
def no_gather_in_backward() -> Iterator[None]:
    """An engine that forgets that backward needs weights too."""
    issue, make_ready = Unit.issue, Unit.make_ready

    def forgetful(real: Any, result: Any) -> Any:
        def method(self: Unit, **options: bool) -> Any:
            return real(self, **options) if torch._C._current_graph_task_id() == -1 else result

        return method

    Unit.issue, Unit.make_ready = forgetful(issue, True), forgetful(make_ready, None)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Unit.issue, Unit.make_ready = issue, make_ready  # type: ignore[method-assign]


def run_forgetful(detectors: str) -> str:
    """What becomes of a broken engine: the guard's message, or the state of its gradients."""
    enter = SlotGuard.enter
    if detectors == "poison":
        SlotGuard.enter = lambda self: None  # type: ignore[method-assign]
    case = Case(fsdp={"debug": detectors != "none"})
    model, plain = shard_tiny(case, build_meshes()), reference()
    try:
        with no_gather_in_backward():
            run_sharded(model, case, 0)
    except RuntimeError as error:
        return str(error)
    finally:
        SlotGuard.enter = enter  # type: ignore[method-assign]
    run_plain(plain, case, 0)
    worst = {"dense": 0.0, "expert": 0.0}
    try:
        check_gradients(model, plain, worst)
    except AssertionError:
        return "not finite"
    return "wrong" if max(worst.values()) > 1e-3 else "right"


@pytest.mark.parametrize(
    ("detectors", "outcome"),
    [("none", "wrong"), ("poison", "not finite"), ("guard and poison", "backward reads a weight of")],
)
def test_a_unit_that_computes_on_a_stale_slot_is_caught(detectors: str, outcome: str) -> None:
    for found in run_ranks(run_forgetful, 2, detectors):
        assert outcome in found


class EngineAllocations(TorchDispatchMode):
    """Counts new storages that come out of operations which the engine itself calls."""

    METHODS = ("pre_forward", "post_forward", "_pre_backward", "_finish", "_end_backward", "begin_forward")

    def __init__(self) -> None:
        super().__init__()
        self.new: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        self._depth = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._depth:
            given = {
                t.untyped_storage()._cdata
                for t in tree_leaves((args, kwargs))
                if type(t) in (torch.Tensor, nn.Parameter)
            }
            self.ran[str(function)] += 1
            for out in tree_leaves(result):
                if type(out) is torch.Tensor and out.untyped_storage()._cdata not in given:
                    self.new[str(function)] += 1
        return result

    def __enter__(self) -> Any:
        self._real = {name: getattr(Engine, name) for name in self.METHODS}
        for name, real in self._real.items():
            setattr(Engine, name, self._inside(real))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        for name, real in self._real.items():
            setattr(Engine, name, real)
        super().__exit__(*exception)

    def _inside(self, real: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return real(*args, **kwargs)
            finally:
                self._depth -= 1

        return method


def count_allocations(case: Case) -> tuple[Counter[str], Counter[str], bool]:
    model = shard_tiny(case, build_meshes(**case.degrees))
    optimizer = AdamW(model)

    def step(index: int) -> None:
        run_sharded(model, case, index)
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for index in range(2):
        step(index)
    addresses = [param.unsharded.data_ptr() for unit in engine_of(model).units for param in unit.params]
    with EngineAllocations() as counted:
        step(2)
        step(3)
    now = [param.unsharded.data_ptr() for unit in engine_of(model).units for param in unit.params]
    return counted.new, counted.ran, addresses == now


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), marks=pytest.mark.full),
        Case(precision=PrecisionConfig(), micro_batches=2),
        Case(precision=PrecisionConfig(), fsdp={"grad_exchange": "bf16_all_to_all"}),
        Case(precision=PrecisionConfig(), fsdp={"shard": "optimizer"}, micro_batches=2),
    ],
)
def test_nothing_is_allocated_after_the_first_steps_and_parameters_never_move(case: Case) -> None:
    for new, ran, same in run_ranks(count_allocations, 2, case):
        assert not new
        assert ran  # the counter saw the engine at work
        assert same


def gathers_overlap() -> bool:
    """While a layer computes, the next one's gather is under way."""
    model = shard_tiny(Case(), build_meshes())
    engine = engine_of(model)
    batch = batch_of(0, 0, dist.get_rank())
    model(*batch, 12).backward()
    engine.zero_grad()
    states = []
    layers = [unit for unit in engine.units if unit.name.startswith("layers")]
    for unit, following in itertools.pairwise(layers):
        unit.module.attention.register_forward_hook(lambda *_, u=following: states.append(u.state.name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0)  # weights changed: everything has to be gathered again
    model(*batch, 12)
    return states == ["GATHERING"] * len(states) and len(states) == len(layers) - 1


def test_the_next_unit_is_gathered_while_one_computes() -> None:
    assert all(run_ranks(gathers_overlap, 2))
