"""The gradient's states, driven at random beside a model of plain tensors that knows no buffers at all.

Both ranks draw the same rules in the same order; each contributes values of its own, which the model sums.
Drawn by seed, not by Hypothesis: what that draws depends on what a process has loaded and run before.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.fsdp.grads import GradBuffer, GradState
from fsdmoe.fsdp.param_grad import ParamGrad
from fsdmoe.kernels.grad_sink import Staged
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.testing import run_ranks

EMPTY, OPEN, REDUCING = GradState.EMPTY, GradState.OPEN, GradState.REDUCING
PARTIAL, FINAL, BROKEN = GradState.PARTIAL, GradState.FINAL, GradState.BROKEN
WORLD, DIVISOR = 2, 4.0
STEPS = 40


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


class GradMachine:
    """Three units of two parameters each, in two slots; the rules are what engine, kernels and users do."""

    def __init__(self, meshes: Meshes, lean: bool, seed: int) -> None:
        self.random = random.Random(seed)
        self.course: list[str] = []
        """What was done so far."""
        module = nn.Module()
        module.layers = nn.ModuleList(nn.Linear(5, 3 + index) for index in range(3))
        policy = FSDPPolicy(fsdp=FSDPConfig(lean=lean), grad_divisor=DIVISOR)
        fully_shard(module, meshes, policy)
        units = [unit for unit in engine_of(module).units if unit.params]
        self.units: list[GradBuffer] = [unit.grads for unit in units]
        self.models = [
            Model(*([torch.zeros(p.param.unsharded.shape) for p in unit.param_grads] for _ in range(2)))
            for unit in self.units
        ]
        self.rank = dist.get_rank()
        self.staged: list[tuple[int, int, int, Staged]] = []
        self.kept: list[tuple[Any, Tensor]] = []

    def any_unit(self) -> int:
        return self.random.randrange(len(self.units))

    def any_index(self) -> int:
        return self.random.randrange(2)

    def any_seed(self) -> int:
        return self.random.randrange(10**6)

    def any_bool(self) -> bool:
        return self.random.random() < 0.5

    def run(self) -> None:
        """One course: rules at random, all that holds looked at after each."""
        for _ in range(STEPS):
            rule = self.random.choice(RULES)
            self.course.append(rule)
            getattr(self, f"do_{rule}")()
            self.holds()
        self.check_kept()

    def param(self, unit: int, index: int) -> ParamGrad:
        return self.units[unit].param_grads[index]

    def user_grad(self, unit: int, index: int) -> Any:
        return self.param(unit, index).param.sharded.grad

    def owned(self, unit: int, index: int, whole: Tensor) -> Tensor:
        """This rank's elements of a whole gradient."""
        owned = self.param(unit, index)._owned
        return whole.flatten()[owned.start : owned.end]

    def whole_states(self, *states: GradState) -> list[int]:
        return [index for index, model in enumerate(self.models) if model.state in states]

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

    def do_compute(self) -> None:
        """A unit's turn in a backward: gradients that it makes, and those that forward made."""
        unit, takes_staged = self.any_unit(), self.random.random() < 0.75
        writes = [(self.any_index(), self.any_seed()) for _ in range(self.random.randrange(4))]
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

    def do_reduce(self) -> None:
        ready, last = self.whole_states(OPEN), self.any_bool()
        if not ready:
            return
        unit = self.random.choice(ready)
        self.units[unit].reduce(last=last)
        self.models[unit].flush(FINAL if last else PARTIAL)

    def do_end_backward(self) -> None:
        last = self.any_bool()
        for unit, model in zip(self.units, self.models, strict=True):
            if last:
                unit.finalize()
                if model.state is OPEN:
                    model.flush(FINAL)
                elif model.state in (REDUCING, PARTIAL):
                    model.state, model.main = REDUCING, FINAL
            unit.guard.wait()
            unit.settle()
            if model.state is REDUCING:
                model.state = model.main

    def do_raise_in_backward(self) -> None:
        broken = self.whole_states(OPEN, REDUCING)
        for unit, model in zip(self.units, self.models, strict=True):
            unit.guard.wait()
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

    def do_forward(self) -> None:
        """Gives memory back, and makes some gradients ahead of their backward."""
        num = self.random.randrange(5)
        made_ahead = [(self.any_unit(), self.any_index(), self.any_seed()) for _ in range(num)]
        for unit in self.units:
            unit.release_memory()
        for unit, index, seed in made_ahead:
            made = self.param(unit, index).stage()
            if made is not None:
                made.tensor.copy_(values(seed, self.rank, made.tensor.shape))
                self.staged.append((unit, index, seed, made))

    def do_abandon_staged(self) -> None:
        if self.staged:
            self.staged.pop()

    # What users do

    def drop(self, unit: int) -> None:
        self.units[unit].drop()
        self.models[unit].drop()

    def do_zero_grad(self) -> None:
        for unit in range(len(self.units)):
            self.drop(unit)

    def do_set_to_none(self) -> None:
        unit, index = self.any_unit(), self.any_index()
        model, other = self.models[unit], 1 - index
        if model.state in (BROKEN, OPEN, REDUCING):
            return  # what is dropped while it is being made is decided by its order against the kernels'
        self.param(unit, index).param.sharded.grad = None
        self.units[unit].take_user_changes()
        if not model.shown[other]:
            model.drop()
        else:
            model.clear(index)

    def do_set_by_hand(self) -> None:
        unit, index, seed = self.any_unit(), self.any_index(), self.any_seed()
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

    def do_zero_in_place(self) -> None:
        unit = self.any_unit()
        model = self.models[unit]
        if model.state not in (FINAL, PARTIAL) or not all(model.shown):
            return
        for index in range(2):
            self.user_grad(unit, index).zero_()
            model.total[index].zero_()
        self.units[unit].take_user_changes()
        model.state = model.main = FINAL

    def do_keep(self) -> None:
        unit, index = self.any_unit(), self.any_index()
        model = self.models[unit]
        if model.state is FINAL and model.shown[index]:
            self.kept.append((self.user_grad(unit, index), self.user_grad(unit, index).piece.clone()))
            self.drop(unit)

    def check_kept(self) -> None:
        """Whatever was kept past its drop has its value, or says that it is gone."""
        for gradient, value in self.kept:
            if gradient.access.problem is None:
                torch.testing.assert_close(gradient.piece, value, rtol=0, atol=0)
            else:
                assert "clone()" in gradient.access.problem


RULES = [name.removeprefix("do_") for name in vars(GradMachine) if name.startswith("do_")]
RULES += ["compute"] * 3 + ["reduce", "end_backward"]  # most of what happens


def drive(layout: dict[str, int], lean: bool, courses: int) -> None:
    meshes = build_meshes(**layout)
    for seed in range(courses):
        machine = GradMachine(meshes, lean, seed)
        try:
            machine.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, after {', '.join(machine.course)}") from error


LAYOUTS = [
    pytest.param({}, False, id="sharded"),
    pytest.param({}, True, id="lean"),
    pytest.param({"dp_outer": 2}, False, id="replicas"),
    pytest.param({"dp_outer": 2}, True, id="lean replicas"),
]


@pytest.mark.parametrize(("layout", "lean"), LAYOUTS[::3])
def test_a_gradient_is_the_sum_of_what_was_written(layout: dict[str, int], lean: bool) -> None:
    run_ranks(drive, WORLD, layout, lean, 25)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "lean"), LAYOUTS)
def test_it_is_over_many_more_courses(layout: dict[str, int], lean: bool) -> None:
    run_ranks(drive, WORLD, layout, lean, 1000, timeout=1200.0)


def pending_after_reduction() -> list[bool]:
    """Whether the gradient is pending when its reduction was started, waited for and settled."""
    module = nn.Linear(5, 3)
    fully_shard(module, build_meshes(), FSDPPolicy())
    grads = engine_of(module).root.grads
    grads.open()
    grads.reduce(last=True)
    found = [grads.guard.pending is not None]
    grads.guard.wait()
    found.append(grads.guard.pending is not None)
    grads.settle()
    return [*found, grads.guard.pending is not None]


def test_a_gradient_is_pending_until_it_is_settled_though_somebody_waited_for_it() -> None:
    assert run_ranks(pending_after_reduction, WORLD) == [[True, True, False]] * WORLD
