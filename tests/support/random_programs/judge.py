"""Runs a program on both sides, operation by operation, and holds the sharded side against the plain one.

After every operation each rank tells in one message how it ended, what it gave, and its pieces of every
gradient and weight; rank 0 runs the plain model, compares them all, and tells the others whether to go on.

What is held:

- An operation that the plain model refuses is refused by the sharded one, on every rank; one that it
  performs is performed, but for those that :meth:`Ledger.may_refuse` names, which may raise instead.
- Losses, norms and gradients asked for are equal, on every rank.
- Gradients are equal wherever they are defined: not while micro-batches are announced to follow, nor after
  a backward that raised, until they are dropped. A parameter without a gradient whose unit has one may have
  zeros.
- Weights are equal, always.

Equal means within a tolerance that rounding does not reach, unless the program itself lets it grow. So a
program that mismatches runs once more with a witness beside the plain model: the same model, its weights
changed in their last bit. Only where that alone moves the plain model is the tolerance wider, in proportion.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import Meshes
from tests.support.random_programs.draw import Op, Program
from tests.support.random_programs.layout import Verdict
from tests.support.random_programs.ledger import Ledger
from tests.support.random_programs.sides import PlainSide, ShardedSide, Told, unit_of
from tests.support.random_programs.witness import Witness

OK, REFUSED, BOOM, CRASHED = range(4)
GO_ON, ENDED, MISMATCH = range(3)
EXACT, LOOSE, ON_GPU = 2e-5, 0.1, 1e-2
ROUNDINGS, ROUNDINGS_TO_BF16 = 20, 12
"""So many times what a change of the last bit does may come from a program's own sums, each rounded. In
bfloat16, where all weights are changed by as much as rounding may do, plain torch was eight times as far from
float64 in a program that mismatched."""


Answer = tuple[int, float, Tensor, Tensor, Tensor, Tensor]
"""Of a rank: how it ended, value, which gradients there are, tensor asked for, gradients, weights."""


class Courier:
    """Carries what each rank tells to rank 0, as one flat message."""

    def __init__(self, side: ShardedSide) -> None:
        self.side, self.world = side, dist.get_world_size()
        self.params = list(side.params.values())
        pieces = [p.piece.numel() for p in self.params]
        num_x = 2 * 3 * 16
        sizes = torch.tensor([sum(pieces), max([num_x, *pieces])], device=side.device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
        self.num_held, self.num_extra = sizes.tolist()
        self.places = self._to_judge(self._places())
        """For every rank the place of each held element among all parameters laid end to end, or -1."""

    def _places(self) -> Tensor:
        """In float64, which holds such integers."""
        places = torch.full((self.num_held,), -1.0, dtype=torch.float64)
        start = first = 0
        for parameter in self.params:
            whole = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape) + first
            piece = torch.empty(parameter.piece.numel(), dtype=torch.float64)
            for box in parameter.boxes:
                box.view_of(piece).copy_(box.slice_of(whole))
            places[start : start + len(piece)] = piece
            start, first = start + len(piece), first + parameter.numel()
        return places.to(self.side.device)

    def _to_judge(self, message: Tensor) -> list[Tensor]:
        """Every rank's message on rank 0, none on the others."""
        everybody = [torch.empty_like(message) for _ in range(self.world if dist.get_rank() == 0 else 0)]
        dist.gather(message, everybody or None)
        return everybody

    def carry(self, code: int, told: Told) -> list[Answer]:
        """Everybody's answers, on rank 0."""
        grads = [p.grad for p in self.params]
        device = self.side.device
        there = torch.tensor([0.0 if g is None else 1.0 for g in grads], device=device)
        extra = told.tensors[0] if told.tensors else torch.zeros(0)
        held = [
            torch.zeros(p.piece.numel(), device=device) if g is None else readable(g).to(device)
            for g, p in zip(grads, self.params, strict=True)
        ]
        message = torch.cat([
            torch.tensor([float(code), told.value], device=device), there,
            padded(extra.detach().float().to(device), self.num_extra),
            padded(torch.cat(held), self.num_held),
            padded(torch.cat([p.detach().piece.to(device) for p in self.params]), self.num_held),
        ])  # fmt: skip
        sizes = [1, 1, len(there), self.num_extra, self.num_held, self.num_held]
        parts = [m.split(sizes) for m in self._to_judge(message)]
        return [(int(p[0].item()), p[1].item(), *p[2:]) for p in parts]  # type: ignore[misc]


def readable(gradient: Tensor) -> Tensor:
    """A rank's part of it; NaN where it refuses to be read, which is wrong wherever it is defined."""
    try:
        return gradient.piece  # type: ignore[attr-defined]
    except RuntimeError:
        return torch.full_like(gradient._piece, torch.nan)  # type: ignore[attr-defined]


def padded(flat: Tensor, numel: int) -> Tensor:
    return torch.cat([flat, flat.new_zeros(numel - flat.numel())])


class Judge:
    """Rank 0's: the plain side, and the comparison."""

    def __init__(
        self, program: Program, courier: Courier, device: torch.device, with_witness: bool = False
    ) -> None:
        self.tolerance = LOOSE if not program.is_exact else ON_GPU if device.type == "cuda" else EXACT
        self.plain, self.device = PlainSide(program, device, self.tolerance), device
        self.witness = Witness(program, device, self.tolerance) if with_witness else None
        self.roundings = ROUNDINGS if program.is_exact else ROUNDINGS_TO_BF16
        self.places = [places.long() for places in courier.places]
        params = list(self.plain.params.values())
        numels = torch.tensor([p.numel() for p in params], device=device)
        self.owner = torch.repeat_interleave(torch.arange(len(params), device=device), numels)
        """Which parameter an element belongs to."""
        self.held = [(places >= 0).nonzero().flatten() for places in self.places]
        self.mine = [places[held] for places, held in zip(self.places, self.held, strict=True)]
        """Of every rank: where its message holds elements, and which ones they are."""
        self.owners = [self.owner[mine] for mine in self.mine]
        self.no_params = torch.zeros(len(params), dtype=torch.bool, device=device)
        self.units = [unit_of(name, self.plain.model) for name in self.plain.params]

    def run(self, op: Op) -> tuple[int, Told]:
        ended = run(self.plain, op)
        if self.witness is not None:
            _, told = run(self.witness, op)
            apart = self.witness.distance_to(self.plain)
            apart = max([apart, *(
                abs(a - b) / (1 + abs(b)) for a, b in zip(told.values, ended[1].values, strict=False)
            )])  # fmt: skip
            self.tolerance = max(self.tolerance, self.roundings * apart)
        return ended

    def discard(self, losses: set[int], kept: set[int]) -> None:
        for side in (self.plain, self.witness):
            if side is not None:
                side.discard(losses, kept)

    def compare_ends(self, code: int, codes: list[int], may_refuse: bool) -> str:
        if len(set(codes)) > 1:
            return f"the ranks ended differently: {codes}"
        if codes[0] == CRASHED:
            return "it crashed"
        if code == OK and codes[0] != OK and not may_refuse:
            return "the plain model did it, the sharded one refused"
        if code != OK and codes[0] == OK:
            return "the plain model refused, the sharded one did it"
        if BOOM in (code, codes[0]) and code != codes[0] and not (may_refuse and codes[0] == REFUSED):
            return "it ended in another exception than the plain model"
        return ""

    def compare_values(self, told: Told, values: list[float], extras: list[Tensor], name: str) -> str:
        """``name``: whose gradient was asked for; empty for the gradient of the input."""
        wanted = told.values
        for rank, value in enumerate(values if wanted else []):
            if not abs(value - wanted[rank]) <= self.tolerance * (1 + abs(wanted[rank])):
                return f"rank {rank} gave {value}, the plain model {wanted[rank]}"
        if told.tensors is None:
            return ""
        if name:
            return self._compare_one(name, told.tensors[0], extras)
        for rank, expected in enumerate(told.tensors):
            got = extras[rank][: expected.numel()]
            if not differ(got, expected) <= self.tolerance:
                return f"rank {rank}'s gradient of its input is off by {differ(got, expected):.1e}"
        return ""

    def _compare_one(self, name: str, expected: Tensor, extras: list[Tensor]) -> str:
        """``extras`` hold pieces of one parameter, whose elements ``places`` tell."""
        index = list(self.plain.params).index(name)
        first = int((self.owner < index).sum())
        for rank, places in enumerate(self.places):
            mine = places[(places >= 0)]
            mine = mine[self.owner[mine] == index] - first
            got = extras[rank][: len(mine)]
            if len(mine) and not differ(got, expected.flatten()[mine], expected) <= self.tolerance:
                off = differ(got, expected.flatten()[mine], expected)
                return f"the gradient of {name} that was asked for is off by {off:.1e} on rank {rank}"
        return ""

    def compare_grads(self, there: list[Tensor], grads: list[Tensor], ledger: Ledger) -> str:
        undefined = ledger.undefined
        if any(not torch.equal(there[0], other) for other in there):
            return "some ranks have a gradient that others have not"
        params = list(self.plain.params.items())
        reached = {unit for unit, (_, p) in zip(self.units, params, strict=True) if p.grad is not None}
        if reached:
            reached.add("root")  # which takes part in every backward
        skip = torch.tensor([name in undefined for name, _ in params], device=self.device)
        for index, (name, parameter) in enumerate(params):
            if name in undefined:
                continue
            has = bool(there[0][index])
            if has and parameter.grad is None:
                if self.units[index] not in reached and name not in ledger.may_be_zero:
                    return f"{name} has a gradient, the plain model's is None"
                parameter.grad = torch.zeros_like(parameter)  # and must be zero
            elif not has and parameter.grad is not None:
                if parameter.grad.any():
                    return f"{name} has no gradient, the plain model has one"
                parameter.grad = None
        flats = [torch.zeros(p.numel(), device=self.device) if p.grad is None else p.grad.flatten()
                 for _, p in params]  # fmt: skip
        if self.witness is not None:
            self.witness.follow(self.plain)
        return self._compare_flat("gradient", flats, grads, skip)

    def compare_weights(self, weights: list[Tensor]) -> str:
        flats = [p.detach().flatten() for p in self.plain.params.values()]
        names = list(self.plain.params)
        for name, other in self.plain.alternatives.items():
            but = torch.tensor([n != name for n in names], device=self.device)
            if self._compare_flat("weight", flats, weights, but):
                self.plain.take(name, other)
                if self.witness is not None:
                    self.witness.take(name, self.witness.alternatives[name])
        self.plain.alternatives = {}
        return self._compare_flat("weight", flats, weights, self.no_params)

    def _compare_flat(self, what: str, flats: list[Tensor], held: list[Tensor], skip: Tensor) -> str:
        peaks = torch.stack([flat.abs().max() for flat in flats])
        scales = peaks + 1e-2 * peaks.max() + 1e-6
        scales[skip] = torch.inf
        expected = torch.cat(flats)
        for rank, (mine, owners) in enumerate(zip(self.mine, self.owners, strict=True)):
            values = held[rank][self.held[rank]]
            off = (values - expected[mine]).abs() / scales[owners]
            off = torch.where(skip[owners], 0.0, off)
            if mine.numel() and not off.max() <= self.tolerance:
                worst = int(off.nan_to_num(torch.inf).argmax())
                name = list(self.plain.params)[int(owners[worst])]
                got, want = values[worst].item(), expected[mine[worst]].item()
                return f"{what} of {name} is {got:.6g} on rank {rank}, {want:.6g} on the plain model"
        return ""

    def is_over(self) -> bool:
        """Nothing can be told from here on: experts chosen by rounding, or numbers that exploded."""
        values = [p.detach() for p in self.plain.params.values()]
        values += [p.grad for p in self.plain.params.values() if p.grad is not None]
        largest = torch.stack(torch._foreach_norm(values, torch.inf)).max()
        return self.plain.ties.seen or not bool(largest < 1e3)


def differ(got: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    peak = (expected if scale is None else scale).abs().max()
    return float((got - expected).abs().max() / (peak + 1e-6))


def run(side: PlainSide | ShardedSide, op: Op) -> tuple[int, Told]:
    try:
        return OK, side.run(op)
    except ValueError as error:
        if str(error) == "boom":
            return BOOM, Told()
        return (REFUSED if isinstance(error, ConfigError) else CRASHED), Told(error=repr(error))
    except RuntimeError as error:
        return REFUSED, Told(error=repr(error))
    except Exception as error:
        return CRASHED, Told(error=repr(error))


def judge_program(program: Program, meshes: Meshes, folder: str) -> Verdict:
    """Run it on this rank; what rank 0 returns is the verdict."""
    verdict, state = judge_once(program, meshes, folder)
    if state == MISMATCH:
        again = f"{folder}/again"
        os.makedirs(again, exist_ok=True)
        second, _ = judge_once(program, meshes, again, with_witness=True)
        if second.widened and not second.problem:  # a mismatch that does not come again is one all the same
            return second
    return verdict


def judge_once(
    program: Program, meshes: Meshes, folder: str, with_witness: bool = False
) -> tuple[Verdict, int]:
    side = ShardedSide(program, meshes, dist.get_rank(), folder)
    courier, ledger = Courier(side), Ledger(program, side.trained, side.subsets)
    judge = Judge(program, courier, meshes.device, with_witness) if dist.get_rank() == 0 else None
    usual = judge.tolerance if judge is not None else 0.0
    verdict, state = Verdict(), GO_ON
    at = os.open(f"{folder}/at", os.O_CREAT | os.O_WRONLY) if judge is not None else -1
    for number, op in enumerate(program.ops):
        if not ledger.is_meant(op):
            continue
        mine = OK, Told()
        if judge is not None:
            mine = judge.run(op)
            os.pwrite(at, f"{number:3}".encode(), 0)
        code, told = run(side, op)
        if code == OK and told.skipped:
            continue
        may_refuse = ledger.may_refuse(op)
        answers = courier.carry(code, told)
        gone = ledger.note(op, raised=code != OK)
        side.discard(*gone)
        state = GO_ON
        verdict.done.append(kind_of(op))
        if judge is not None:
            judge.discard(*gone)
            verdict.problem = compare(judge, ledger, op, mine, answers, may_refuse)
            if verdict.problem:
                verdict.problem = f"operation {number} {op}: {verdict.problem}; {told.error or mine[1].error}"
                state = MISMATCH
            elif code != OK and mine[0] == OK:
                verdict.refused.append(f"{kind_of(op)}: {told.error}")
                state = ENDED if ledger.ends(op) else GO_ON
            elif judge.is_over():
                state = ENDED
        state = agree(state, meshes.device)
        if state != GO_ON:
            break
    if judge is not None:
        os.close(at)
        verdict.widened = judge.tolerance if judge.tolerance > usual else 0.0
    return verdict, state


def compare(
    judge: Judge, ledger: Ledger, op: Op, mine: tuple[int, Told], answers: list[Answer], may_refuse: bool
) -> str:
    """What is wrong after ``op``, if anything."""
    codes, values, there, extras, grads, weights = (list(part) for part in zip(*answers, strict=True))
    problem = judge.compare_ends(mine[0], codes, may_refuse)
    if not problem and mine[0] == OK != codes[0] and ledger.ends(op):
        return ""  # only the plain side did it
    if not problem and mine[0] == codes[0] == OK and not ledger.is_unsound(op):
        name = ledger.kept[op[1]] if op[0] == "read" else ""
        name = judge.plain.name(op[2]) if op[0] == "grad_params" else name
        problem = judge.compare_values(mine[1], values, extras, name)
    if not problem and not ledger.is_partial:
        problem = judge.compare_grads(there, grads, ledger)
    return problem or judge.compare_weights(weights)


def agree(state: int, device: torch.device) -> int:
    """What rank 0 says."""
    told = torch.tensor([state], device=device)
    dist.broadcast(told, src=0)
    return int(told.item())


def kind_of(op: Op) -> str:
    """The operation's name, with what of its arguments makes another case of it."""
    last = {True: "", False: " to be continued"}
    if op[0] == "zero":
        return f"zero by {op[1].rstrip('01')}" + ("" if op[2] else " in place")
    if op[0] == "backward":
        return "backward" + (" retained" if op[2] else "") + last[op[4]]
    if op[0] in ("both", "micro", "fail_backward"):
        return op[0] + last[op[-1]]
    return f"{op[0]} {op[1]}" if op[0] in ("eval", "replace") else op[0]
