"""Random training programs, run on the sharded model and on the plain one.

::

    python -m tests.support.random_programs.run --count 300                     # CPU ranks, every layout
    python -m tests.support.random_programs.run --clones --count 300            # all of them with clones
    python -m tests.support.random_programs.run --device cuda --count 500 --world 1
    python -m tests.support.random_programs.run --device cuda --count 100 --world 4   # NCCL ranks on one GPU
    python -m tests.support.random_programs.run --replay "Program(...)"         # as a failure prints it

A failure prints the program that makes it again, with what could be left out left out. At the end stands how
often each pair of operation and policy was carried out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from fsdmoe.mesh import build_meshes
from fsdmoe.testing.ranks import RankFailure, run_ranks
from tests.support.one_gpu import run_ranks_on_one_gpu
from tests.support.random_programs.draw import Program, draw_any, draw_cloned, draw_program
from tests.support.random_programs.judge import judge_program
from tests.support.random_programs.layout import Layout, Verdict
from tests.support.random_programs.model import Shape
from tests.support.random_programs.packed import PackedProgram, judge_packed

AnyProgram = Program | PackedProgram

ROOT_COMMAND = "python -m tests.support.random_programs.run"
BATCH = 50
TIMEOUT = 60.0
"""Seconds for a batch, and a fifth of it more for each of its programs: only a hang takes so long."""


def run_batch(programs: list[AnyProgram], folder: str) -> list[Verdict]:
    """All of one layout, one after another on the same ranks. Rank 0 leaves word of how far it came."""
    logging.disable(logging.WARNING)
    try:
        return list(_run_batch(programs, folder))
    finally:
        logging.disable(logging.NOTSET)  # the ranks serve other tests too


def _run_batch(programs: list[AnyProgram], folder: str) -> Iterator[Verdict]:
    layout = programs[0].layout
    meshes = build_meshes(dp_outer=layout.dp_outer, ep=layout.ep, cp=layout.cp, tp=layout.tp)
    for number, program in enumerate(programs):
        place = Path(folder, str(number))
        if dist.get_rank() == 0:
            place.mkdir()
        dist.barrier()
        judge = judge_packed if isinstance(program, PackedProgram) else judge_program
        yield judge(program, meshes, str(place))  # type: ignore[arg-type]


def run_programs(
    programs: list[AnyProgram], timeout: float = TIMEOUT, tell: Callable[[str], None] | None = None
) -> list[Verdict]:
    """On pooled CPU ranks; verdicts in the order of the programs. ``tell`` hears of failures batch by
    batch."""
    found: dict[int, Verdict] = {}
    for indices in batches_of(programs):
        while indices:
            with tempfile.TemporaryDirectory(prefix="fsdmoe-programs-") as folder:
                chosen = [programs[index] for index in indices]
                world, patience = chosen[0].layout.world, timeout * (1 + len(chosen) / 5)
                try:
                    verdicts = run_ranks(run_batch, world, chosen, folder, timeout=patience)[0]
                except RankFailure as error:
                    num_begun = len(list(Path(folder).iterdir()))
                    if not num_begun:
                        raise  # no program has to do with it
                    verdicts = [Verdict()] * (num_begun - 1)
                    at = Path(folder, str(len(verdicts)), "at")
                    number = at.read_text() if at.exists() else "the start"
                    verdicts.append(Verdict(problem=f"ranks failed at operation {number}: {error}"))
            found |= dict(zip(indices, verdicts, strict=False))
            if tell is not None and any(verdict.problem for verdict in verdicts):
                tell(tell_failures(chosen[: len(verdicts)], verdicts))
            indices = indices[len(verdicts) :]
    return [found[index] for index in range(len(programs))]


def batches_of(programs: list[AnyProgram]) -> Iterator[list[int]]:
    """Indices of programs of one layout, at most BATCH at a time."""
    by_layout: dict[Layout, list[int]] = {}
    for index, program in enumerate(programs):
        by_layout.setdefault(program.layout, []).append(index)
    for _, indices in sorted(by_layout.items(), key=lambda item: dataclasses.astuple(item[0])):
        for start in range(0, len(indices), BATCH):
            yield indices[start : start + BATCH]


def shrink(program: AnyProgram, problem: str, tries: int = 80) -> AnyProgram:
    """Leave out operations and policies while it still fails in the same way."""
    for smaller in smaller_forms(program):
        if tries <= 0:
            break
        tries -= 1
        if way_of(run_programs([smaller], timeout=20.0)[0].problem) == way_of(problem):
            return shrink(smaller, problem, tries)
    return program


def way_of(problem: str) -> str:
    """A problem without numbers and names of parameters."""
    told = problem.partition("): ")[2] if problem.startswith("operation") else problem[:25]
    return " ".join(word for word in told.split(";")[0].split() if word.isalpha())


def smaller_forms(program: AnyProgram) -> Iterator[AnyProgram]:
    if isinstance(program, PackedProgram):
        for number, _ in enumerate(program.documents):
            fewer = program.documents[:number] + program.documents[number + 1 :]
            yield dataclasses.replace(program, documents=fewer)
        changes = {"silent": (), "recompute": (), "rows": 1, "order": 0}
        yield from (dataclasses.replace(program, **{key: value}) for key, value in changes.items())  # type: ignore[arg-type]
        return
    ops = program.ops
    for num in (8, 4, 2, 1):
        for start in range(len(ops) - num, -1, -1):
            yield dataclasses.replace(program, ops=ops[:start] + ops[start + num :])
    for key in program.fsdp:
        rest = {k: v for k, v in program.fsdp.items() if k != key}
        yield dataclasses.replace(program, fsdp=rest)
    for changes in (
        {"recompute": "none"}, {"sided": False}, {"root": False}, {"tied": False}, {"frozen": ()},
        {"embed": "plain"}, {"head": "plain"}, {"parts": ()}, {"dropout": 0.0}, {"attention": False},
        {"adapters": False}, {"chunks": 1}, {"flex_rows": 0.0}, {"clones": (0, 0, True), "flex_rows": 0.0},
    ):  # fmt: skip
        shape = dataclasses.replace(program.shape, **changes)  # type: ignore[arg-type]
        if shape != program.shape:
            yield dataclasses.replace(program, shape=shape)
    if program.divisor != 1.0:
        yield dataclasses.replace(program, divisor=1.0)


def count_pairs(programs: list[AnyProgram], verdicts: list[Verdict]) -> Counter[tuple[str, str]]:
    """How often each (operation, policy) was carried out."""
    pairs: Counter[tuple[str, str]] = Counter()
    for program, verdict in zip(programs, verdicts, strict=True):
        pairs.update((kind, feature) for kind in verdict.done for feature in program.features())
    return pairs


def pair_table(pairs: Counter[tuple[str, str]]) -> str:
    """A row for each policy, a column for each operation, as tab-separated text."""
    kinds, features = sorted({p[0] for p in pairs}), sorted({p[1] for p in pairs})
    rows = ["\t".join(["policy", *kinds])]
    rows += ["\t".join([feature, *(str(pairs[kind, feature]) for kind in kinds)]) for feature in features]
    return "\n".join(rows)


def parse_program(text: str) -> AnyProgram:
    """What ``repr`` of a program printed."""
    return eval(text, {each.__name__: each for each in (Program, PackedProgram, Layout, Shape)})


def tell_failures(programs: list[AnyProgram], verdicts: list[Verdict]) -> str:
    failing = [(p, v.problem) for p, v in zip(programs, verdicts, strict=True) if v.problem]
    return "\n".join(f"{problem}\n    {program}" for program, problem in failing)


def summary(verdicts: list[Verdict]) -> str:
    refusals = Counter(text[:100] for verdict in verdicts for text in verdict.refused)
    lines = [f"refused {num} times: {text}" for text, num in refusals.most_common()]
    done, num = sum(len(verdict.done) for verdict in verdicts), sum(bool(v.problem) for v in verdicts)
    lines += [f"rounding grew: compared within {v.widened:.1e}" for v in verdicts if v.widened]
    return "\n".join([*lines, f"{len(verdicts)} programs, {done} operations, {num} mismatches"])


def run_as_rank(programs: list[AnyProgram], tell: Callable[[str], None]) -> list[Verdict]:
    """As one of the ranks that somebody else started, or alone."""
    found: dict[int, Verdict] = {}
    folder = [tempfile.mkdtemp(prefix="fsdmoe-programs-")]
    build_meshes()
    dist.broadcast_object_list(folder, src=0)
    for number, indices in enumerate(batches_of(programs)):
        place = f"{folder[0]}/{number}"
        Path(place).mkdir(exist_ok=True)
        chosen = [programs[index] for index in indices]
        verdicts = run_batch(chosen, place)
        found |= dict(zip(indices, verdicts, strict=True))
        if any(verdict.problem for verdict in verdicts):
            tell(tell_failures(chosen, verdicts))
    return [found[index] for index in range(len(programs))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--world", type=int, help="only programs of so many ranks")
    parser.add_argument("--clones", action="store_true", help="only programs with clones of experts")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--replay", help="a program, as a failure prints it")
    parser.add_argument("--shrink", type=int, default=0, help="shrink so many failures")
    parser.add_argument("--pairs", help="file for the table of pairs")
    args = parser.parse_args()
    worlds = (1, 2, 3, 4) if args.world is None else (args.world,)
    # Documents on a CPU alone: products in TF32 would choose other experts.
    draw: Callable[..., AnyProgram] = draw_any if args.device == "cpu" else draw_program
    if args.clones:
        draw = draw_cloned
        worlds = (2, 4) if args.world is None else worlds
    programs: list[AnyProgram] = [draw(seed, worlds) for seed in range(args.first, args.first + args.count)]
    if args.replay:
        programs = [parse_program(args.replay)]
    if args.device == "cuda" and "RANK" not in os.environ and (args.world or 1) > 1:
        for first in range(args.first, args.first + args.count, BATCH):
            given = ["--device", "cuda", "--world", str(args.world), "--first", str(first)]
            given += ["--count", str(min(BATCH, args.first + args.count - first))]
            given += ["--clones"] if args.clones else []
            given += ["--pairs", f"{args.pairs}.{first}"] if args.pairs else []
            print(
                run_ranks_on_one_gpu(args.world, "-m", "tests.support.random_programs.run", *given),
                flush=True,
            )
        return
    tell = functools.partial(print, flush=True)
    verdicts = run_as_rank(programs, tell) if args.device == "cuda" else run_programs(programs, tell=tell)
    if args.device == "cuda" and dist.get_rank():
        dist.destroy_process_group()
        return
    print(summary(verdicts))
    if args.pairs:
        Path(args.pairs).write_text(pair_table(count_pairs(programs, verdicts)) + "\n")
    failing = [(p, v.problem) for p, v in zip(programs, verdicts, strict=True) if v.problem]
    for program, problem in failing[: args.shrink]:
        small = shrink(program, problem)
        print(run_programs([small])[0].problem, f"\n    {small}")
    if args.device == "cuda":
        dist.destroy_process_group()
    if failing:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
