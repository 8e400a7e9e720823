"""What the numbers of a self-check mean. No function here measures anything, so that tests feed recorded
numbers; :mod:`fsdmoe.check.measure` takes them from the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from fsdmoe.core.all_ranks import by_rank
from fsdmoe.core.rules import size_text

MOST_CLOCK_SECONDS = 1.0
"""Clocks that differ by more make logs of several machines, and the age of files, hard to trust."""
LEAST_RATE = 0.7
"""Of the median: what is below is slow."""
MOST_DIFFERENCE = 1e-2
"""Of gradients, relative to the largest of their parameter. Kernels on a GPU may use TF32; a row that went to
the wrong expert makes a difference of about 1."""
_MOST_NAMED = 8


class Verdict(StrEnum):
    """``SLOW`` is no error: a run starts and says so. A check by itself ends with 1."""

    OK = "ok"
    SLOW = "slow"
    FAILED = "FAILED"


@dataclass(frozen=True)
class CheckResult:
    """A row of the table."""

    check: str
    verdict: Verdict
    text: str


def place(rank: int, hosts: Sequence[str]) -> str:
    """``rank 3 (node1)``."""
    return f"rank {rank} ({hosts[rank]})"


def judge_versions(facts: Sequence[Mapping[str, Any]]) -> CheckResult:
    """Versions that every rank names, which must be the same."""
    names = list(dict.fromkeys(name for each in facts for name in each))
    rows = {name: [each.get(name, "none") for each in facts] for name in names}
    wrong = [f"{name}: {by_rank(row)}" for name, row in rows.items() if len(set(row)) > 1]
    if wrong:
        return CheckResult("versions", Verdict.FAILED, "; ".join(wrong))
    told = ", ".join(f"{name} {row[0]}" for name, row in rows.items())
    return CheckResult("versions", Verdict.OK, f"the same on all ranks: {told}")


def judge_clocks(seconds: Sequence[float], hosts: Sequence[str]) -> CheckResult:
    """``seconds``: every rank's time of day at one moment."""
    middle = median(seconds)
    apart = {rank: own - middle for rank, own in enumerate(seconds) if abs(own - middle) > MOST_CLOCK_SECONDS}
    if not apart:
        spread = max(seconds) - min(seconds)
        return CheckResult("clocks", Verdict.OK, f"at most {spread:.3f} s apart")
    told = [f"{place(rank, hosts)} is {by:+.1f} s off" for rank, by in apart.items()]
    return CheckResult("clocks", Verdict.FAILED, f"{_few(told)}; set the clock there (NTP)")


def slow_of(rates: Mapping[str, float]) -> dict[str, float]:
    """Of rates by the place they were measured at, those far below the median."""
    middle = median(rates.values())
    return {where: rate for where, rate in rates.items() if rate < LEAST_RATE * middle}


def judge_rates(check: str, unit: str, rates: Mapping[str, float]) -> CheckResult:
    """Rates by the place they were measured at. One far below the median is slow."""
    slow = slow_of(rates)
    told = f"median {median(rates.values()):.3g} {unit}, lowest {min(rates.values()):.3g}"
    if not slow:
        return CheckResult(check, Verdict.OK, told)
    named = [f"{where} {rate:.3g}" for where, rate in sorted(slow.items(), key=lambda item: item[1])]
    return CheckResult(check, Verdict.SLOW, f"{_few(named)}; {told}")


def judge_owners(
    owned: Sequence[Mapping[int, int]], each: int, num_experts: int, hosts: Sequence[str]
) -> CheckResult:
    """Whether the ranks of one replica own all of every expert, and nothing twice.

    Args:
        owned: By rank, how many elements of which expert it owns.
        each: Elements of one expert.
        num_experts: Of the layer.
        hosts: By rank.
    """
    wrong = []
    for expert in range(num_experts):
        holders = [rank for rank, own in enumerate(owned) if own.get(expert)]
        found = sum(owned[rank][expert] for rank in holders)
        if found != each:
            how = "more than once" if found > each else "not as a whole" if found else "by no rank"
            by = ", ".join(place(rank, hosts) for rank in holders)
            wrong.append(f"expert {expert} is owned {how}" + f": {by}" * bool(holders))
    if wrong:
        return CheckResult("experts", Verdict.FAILED, _few(wrong))
    return CheckResult(
        "experts", Verdict.OK, f"each of {num_experts} of a small layer of its own is owned exactly once"
    )


def judge_folder(seen: Sequence[Sequence[int]], folder: str, hosts: Sequence[str]) -> CheckResult:
    """``seen``: by rank, the ranks whose files it finds in the run's folder."""
    everyone = set(range(len(seen)))
    blind = {rank: sorted(everyone - set(own)) for rank, own in enumerate(seen) if everyone - set(own)}
    if not blind:
        return CheckResult("folder", Verdict.OK, f"all ranks see each other's files in {folder}")
    # A rank that nobody sees is the cause, and the others follow from it.
    lost = [rank for rank, missing in blind.items() if len(missing) >= len(seen) - 1 > 0]
    ranks = lost if 0 < len(lost) < len(seen) else list(blind)
    named = [f"{place(rank, hosts)} does not see the files of others" for rank in ranks]
    return CheckResult("folder", Verdict.FAILED, f"{_few(named)} in {folder}; name one that all hosts share")


def judge_disk(free: int, needed: int, folder: str) -> CheckResult:
    """``needed``: bytes of one checkpoint; 0 where that is not known."""
    told = f"{size_text(free)} free in {folder}"
    if needed:
        told += f", a checkpoint takes about {size_text(needed)}"
    verdict = Verdict.FAILED if free < needed else Verdict.OK
    return CheckResult("disk", verdict, told)


def judge_gradients(differences: Mapping[str, float]) -> CheckResult:
    """Of one MoE layer's gradients under the mesh from those of one process, by parameter."""
    worst = max(differences, key=lambda name: differences[name])
    wrong = [f"{name} {by:.1e}" for name, by in differences.items() if not by <= MOST_DIFFERENCE]
    if wrong:
        return CheckResult("gradients", Verdict.FAILED, f"differ from those of one process: {_few(wrong)}")
    told = f"as in one process, at most {differences[worst]:.1e} apart ({worst})"
    return CheckResult("gradients", Verdict.OK, told)


def _few(texts: Sequence[str]) -> str:
    rest = len(texts) - _MOST_NAMED
    return ", ".join(texts[:_MOST_NAMED]) + f" and {rest} more" * (rest > 0)
