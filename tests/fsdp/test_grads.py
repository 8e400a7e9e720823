"""The gradient's states, driven at random beside a model of plain tensors that knows no buffers at all.

Both ranks draw the same rules in the same order; each contributes values of its own, which the model sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn

from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.fsdp.grads import GradBuffer, GradState
from fsdmoe.fsdp.param_grad import ParamGrad, StagedGradient
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.testing import run_ranks

EMPTY, OPEN, REDUCING = GradState.EMPTY, GradState.OPEN, GradState.REDUCING
PARTIAL, FINAL, BROKEN = GradState.PARTIAL, GradState.FINAL, GradState.BROKEN
WORLD, DIVISOR = 2, 4.0
UNITS, PARAMS, SEEDS = st.integers(0, 2), st.integers(0, 1), st.integers(0, 10**6)
MOSTLY = st.sampled_from([True, True, True, False])
WRITES = st.lists(st.tuples(PARAMS, SEEDS), max_size=3)


def values(seed: int, rank: int, shape: torch.Size) -> Tensor:
    """Small integers: sums are exact in whatever order."""
    generator = torch.Generator().manual_seed(2 * seed + rank)
    return torch.randint(-8, 9, shape, generator=generator).float()


def over_ranks(seed: int, shape: torch.Size) -> Tensor:
    return torch.stack([values(seed, rank, shape) for rank in range(WORLD)]).sum(0)


@dataclass
class Model:
    """What one unit's gradient should be: sums over all ranks, not yet divided."""

    pending: list[Tensor]
    """Written since it was opened."""
    total: list[Tensor]
    state: GradState = EMPTY
    main: GradState = EMPTY
    shown: list[bool] = field(default_factory=lambda: [False, False])

    def flush(self, main: GradState) -> None:
        for index, pending in enumerate(self.pending):
            self.total[index] += pending
            pending.zero_()
        self.state, self.main = REDUCING, main

    def clear(self, index: int) -> None:
        self.pending[index].zero_()
        self.total[index].zero_()
        self.shown[index] = False

    def drop(self) -> None:
        for index in range(len(self.total)):
            self.clear(index)
        self.state = self.main = EMPTY


class GradMachine(RuleBasedStateMachine):
    """Three units of two parameters each, in two slots; the rules are what engine, kernels and users do."""

    meshes: ClassVar[Meshes]
    lean: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        module = nn.Module()
        module.layers = nn.ModuleList(nn.Linear(5, 3 + index) for index in range(3))
        policy = FSDPPolicy(fsdp=FSDPConfig(lean=self.lean), grad_divisor=DIVISOR)
        fully_shard(module, self.meshes, policy)
        units = [unit for unit in engine_of(module).units if unit.params]
        self.units: list[GradBuffer] = [unit.grads for unit in units]
        self.models = [
            Model(*([torch.zeros(p.param.unsharded.shape) for p in unit.params] for _ in range(2)))
            for unit in self.units
        ]
        self.rank = dist.get_rank()
        self.staged: list[tuple[int, int, int, StagedGradient]] = []
        self.kept: list[tuple[Any, Tensor]] = []

    def param(self, unit: int, index: int) -> ParamGrad:
        return self.units[unit].params[index]

    def user_grad(self, unit: int, index: int) -> Any:
        return self.param(unit, index).param.sharded.grad

    def owned(self, unit: int, index: int, whole: Tensor) -> Tensor:
        """This rank's elements of a whole gradient."""
        owned = self.param(unit, index)._owned
        return whole.flatten()[owned.start : owned.end]

    def whole_states(self, *states: GradState) -> list[int]:
        return [index for index, model in enumerate(self.models) if model.state in states]

    @invariant()
    def holds(self) -> None:
        """States and values are the model's; a gradient can be read exactly while it is complete."""
        assert [unit.state for unit in self.units] == [model.state for model in self.models]
        for unit, model in enumerate(self.models):
            for index, total in enumerate(model.total):
                gradient = self.user_grad(unit, index)
                if not model.shown[index]:
                    assert gradient is None
                elif model.state is FINAL:
                    expected = self.owned(unit, index, total) / DIVISOR
                    torch.testing.assert_close(gradient.piece, expected, rtol=0, atol=0)
                else:
                    with pytest.raises(RuntimeError, match="not complete"):
                        _ = gradient.piece

    # What engine and kernels do

    @rule(unit=UNITS, writes=WRITES, takes_staged=MOSTLY)
    def compute(self, unit: int, writes: list[tuple[int, int]], takes_staged: bool) -> None:
        """A unit's turn in a backward: gradients that forward made, then those that backward makes."""
        buffer, model = self.units[unit], self.models[unit]
        buffer.open()
        if model.state is not OPEN and buffer.slot is not None:
            for other in self.whole_states(OPEN):  # who used the slot is reduced, to be continued
                if self.units[other].slot is buffer.slot:
                    self.models[other].flush(PARTIAL)
        model.state, model.shown = OPEN, [True, True]
        for index, seed in writes[:1]:
            self.write(unit, index, seed)
        if takes_staged:
            self.write_staged(unit)
        for index, seed in writes[1:]:
            self.write(unit, index, seed)

    def write(self, unit: int, index: int, seed: int) -> None:
        claimed = self.param(unit, index).claim()
        assert claimed is not None
        view, accumulate = claimed
        made = values(seed, self.rank, view.shape)
        view.add_(made) if accumulate else view.copy_(made)
        self.models[unit].pending[index] += over_ranks(seed, view.shape)

    def write_staged(self, unit: int) -> None:
        for each in [each for each in self.staged if each[0] == unit]:
            self.staged.remove(each)
            _, index, seed, made = each
            claimed = self.param(unit, index).claim(made)
            assert claimed is not None
            view, accumulate = claimed
            if not made.in_place:
                view.add_(made.tensor) if accumulate else view.copy_(made.tensor)
            self.models[unit].pending[index] += over_ranks(seed, view.shape)

    @precondition(lambda self: self.whole_states(OPEN))
    @rule(choice=UNITS, last=st.booleans())
    def reduce(self, choice: int, last: bool) -> None:
        ready = self.whole_states(OPEN)
        unit = ready[choice % len(ready)]
        self.units[unit].reduce(last=last)
        self.models[unit].flush(FINAL if last else PARTIAL)

    @precondition(lambda self: self.whole_states(OPEN, REDUCING, PARTIAL))
    @rule(last=st.booleans())
    def end_backward(self, last: bool) -> None:
        for unit, model in zip(self.units, self.models, strict=True):
            if last:
                unit.finalize()
                if model.state is OPEN:
                    model.flush(FINAL)
                elif model.state in (REDUCING, PARTIAL):
                    model.state, model.main = REDUCING, FINAL
            unit._wait()
            unit.settle()
            if model.state is REDUCING:
                model.state = model.main

    @precondition(lambda self: self.whole_states(OPEN, REDUCING))
    @rule()
    def raise_in_backward(self) -> None:
        broken = self.whole_states(OPEN, REDUCING)
        for unit, model in zip(self.units, self.models, strict=True):
            unit._wait()
            unit.interrupt()
            if model.state in (OPEN, REDUCING):
                model.state = BROKEN
        self.holds()
        for unit in broken:
            with pytest.raises(RuntimeError, match="zero_grad"):
                self.units[unit].open()
            with pytest.raises(RuntimeError, match="not under way"):
                self.param(unit, 0).claim()
            self.drop(unit)

    @rule(made_ahead=st.lists(st.tuples(UNITS, PARAMS, SEEDS), max_size=4))
    def forward(self, made_ahead: list[tuple[int, int, int]]) -> None:
        """Gives memory back, and makes some gradients ahead of their backward."""
        for unit in self.units:
            unit.release_memory()
        for unit, index, seed in made_ahead:
            made = self.param(unit, index).stage()
            if made is not None:
                made.tensor.copy_(values(seed, self.rank, made.tensor.shape))
                self.staged.append((unit, index, seed, made))

    @precondition(lambda self: self.staged)
    @rule()
    def abandon_staged(self) -> None:
        self.staged.pop()

    # What users do

    def drop(self, unit: int) -> None:
        self.units[unit].drop()
        self.models[unit].drop()

    @precondition(lambda self: self.whole_states(PARTIAL, FINAL))
    @rule()
    def zero_grad(self) -> None:
        for unit in range(len(self.units)):
            self.drop(unit)

    @precondition(lambda self: self.whole_states(PARTIAL, FINAL))
    @rule(unit=UNITS, index=PARAMS)
    def set_to_none(self, unit: int, index: int) -> None:
        model, other = self.models[unit], 1 - index
        if model.state in (BROKEN, OPEN, REDUCING):
            return  # what is dropped while it is being made is decided by its order against the kernels'
        self.param(unit, index).param.sharded.grad = None
        self.units[unit].take_user_changes()
        if not model.shown[other]:
            model.drop()
        else:
            model.clear(index)

    @rule(unit=UNITS, index=PARAMS, seed=SEEDS)
    def set_by_hand(self, unit: int, index: int, seed: int) -> None:
        model = self.models[unit]
        if model.state not in (EMPTY, FINAL):
            return
        shape = model.total[index].shape
        given = values(seed, 0, shape)  # the same on all ranks
        sharded: Any = self.param(unit, index).param.sharded
        sharded.grad = sharded.with_piece(self.owned(unit, index, given).clone())
        self.units[unit].take_user_changes()
        model.total[index].copy_(given * DIVISOR)
        model.state = model.main = FINAL
        model.shown[index] = True

    @precondition(lambda self: self.whole_states(PARTIAL, FINAL))
    @rule(unit=UNITS)
    def zero_in_place(self, unit: int) -> None:
        model = self.models[unit]
        if model.state not in (FINAL, PARTIAL) or not all(model.shown):
            return
        for index in range(2):
            self.user_grad(unit, index).zero_()
            model.total[index].zero_()
        self.units[unit].take_user_changes()
        model.state = model.main = FINAL

    @precondition(lambda self: self.whole_states(FINAL))
    @rule(unit=UNITS, index=PARAMS)
    def keep(self, unit: int, index: int) -> None:
        model = self.models[unit]
        if model.state is FINAL and model.shown[index]:
            self.kept.append((self.user_grad(unit, index), self.user_grad(unit, index).piece.clone()))
            self.drop(unit)

    def teardown(self) -> None:
        """Whatever was kept past its drop has its value, or says that it is gone."""
        for gradient, value in self.kept:
            if gradient.access.problem is None:
                torch.testing.assert_close(gradient.piece, value, rtol=0, atol=0)
            else:
                assert "clone()" in gradient.access.problem


def drive(layout: dict[str, int], lean: bool, examples: int) -> None:
    GradMachine.meshes, GradMachine.lean = build_meshes(**layout), lean
    # derandomized: both ranks must draw the same
    options = settings(
        max_examples=examples, stateful_step_count=40, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(GradMachine, settings=options)


LAYOUTS = [
    pytest.param({}, False, id="sharded"),
    pytest.param({}, True, id="lean"),
    pytest.param({"dp_outer": 2}, False, id="replicas"),
    pytest.param({"dp_outer": 2}, True, id="lean replicas"),
]


@pytest.mark.parametrize(("layout", "lean"), LAYOUTS)
def test_a_gradient_is_the_sum_of_what_was_written(layout: dict[str, int], lean: bool) -> None:
    run_ranks(drive, WORLD, layout, lean, 50)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "lean"), LAYOUTS)
def test_it_is_over_many_more_courses(layout: dict[str, int], lean: bool) -> None:
    run_ranks(drive, WORLD, layout, lean, 1000, timeout=1200.0)
