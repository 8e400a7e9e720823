"""A ranking as plain values (JSON, the page) and as tables of a terminal."""

from __future__ import annotations

from typing import Any

from fsdmoe.core.rules import size_text
from fsdmoe.observe import print_table
from fsdmoe.plan.advice import Advice, turns
from fsdmoe.plan.estimate import HEADROOM, Estimate, shortage
from fsdmoe.plan.hardware import GIB, NEVER_RAN
from fsdmoe.plan.job import memory_plan
from fsdmoe.plan.loads import EVEN
from fsdmoe.plan.search import Candidate, Ranking, summary_of_losers, why_it_loses
from fsdmoe.plan.source import Reading, Request
from fsdmoe.plan.text import (
    MEMORY_NAMES,
    TRAFFIC_NAMES,
    memory_rows,
    num_changes,
    setting_text,
    traffic_rows,
    without_zeros,
)
from fsdmoe.plan.winner import tables_of, toml_text

NEARLY_AS_FAST = 1.05
TIME_NAMES = {
    "compute": "compute",
    "recompute": "recomputed",
    "experts": "rows of experts on their way",
    "tensor": "mesh.tp",
    "context": "mesh.cp",
    "sharding": "weights and gradients during compute",
    "offload": "copies to the host, not hidden",
    "optimizer": "optimizer",
}


def estimate_values(found: Estimate) -> dict[str, Any]:
    """Bytes, seconds and rates of one estimate, by name."""
    is_priced = not found.why_no_price
    return {
        "fits": found.fits,
        "wall": found.wall,
        "why_no_price": found.why_no_price or None,
        "tokens_per_second": round(found.tokens_per_second) if is_priced else None,
        "model_tflops": round(found.tflops, 1) if is_priced else None,
        "seconds": found.time.total if is_priced else None,
        "memory_total": found.memory.total,
        "memory_capacity": found.gpu.memory,
        "memory": {text: getattr(found.memory, name) for name, text in MEMORY_NAMES.items()},
        "host": found.memory.host,
        "traffic": {text: round(getattr(found.traffic, name)) for name, text in TRAFFIC_NAMES.items()},
        "time": {text: getattr(found.time, name) for name, text in TIME_NAMES.items()} if is_priced else {},
    }


def candidate_values(candidate: Candidate, best: Candidate) -> dict[str, Any]:
    setting = candidate.setting
    return {
        "setting": setting_text(setting),
        "degrees": vars(setting.degrees),
        "micro_batch_size": setting.micro_batch_size,
        "recompute": sorted(setting.recompute),
        "offload": sorted(setting.offload),
        "why_it_loses": None if candidate is best else why_it_loses(candidate, best),
        **estimate_values(candidate.found),
    }


def turn_values(turn: Advice) -> dict[str, Any]:
    found = turn.candidate.found
    return {
        "change": turn.text,
        "gain": turn.gain,
        "follows": turn.follows,
        "tokens_per_second": round(found.tokens_per_second),
        "model_tflops": round(found.tflops, 1),
        "seconds": found.time.total,
        "memory_total": found.memory.total,
    }


def mesh_values(ranking: Ranking) -> list[dict[str, Any]]:
    """A line for each mesh, those that do not fit included: its time, its memory, and why it is not the
    first."""
    lost = [loss.leanest for loss in ranking.losses if loss.leanest is not None]
    values = []
    for each in sorted([*ranking.candidates, *lost], key=lambda one: one.order):
        found = each.found
        why = "" if each is ranking.best else why_it_loses(each, ranking.best)
        values.append(
            {
                "setting": setting_text(each.setting),
                "fits": found.fits,
                "seconds": None if found.why_no_price else found.time.total,
                "memory_total": found.memory.total,
                "host": found.memory.host,
                "why": why if found.fits else f"does not fit: {shortage(found.memory, found.gpu)}",
            }
        )
    return values


def ranking_values(ranking: Ranking, wanted: Reading, request: Request, most: int = 20) -> dict[str, Any]:
    best = ranking.best
    values = []
    for each in ranking.candidates[: max(1, most)]:
        found = candidate_values(each, best)
        found["toml"] = toml_text(each, wanted, request, ranking)
        values.append(found)
    return {
        "gpus": request.num_gpus,
        "gpu": ranking.gpu.name,
        "rates_measured": ranking.gpu.is_measured,
        "memory_limit": round((1 - HEADROOM) * ranking.gpu.memory),
        "host_capacity": ranking.gpu.host_memory,
        "parameters": memory_plan(ranking.job, best.setting).num_parameters,
        "seq_len": ranking.job.seq_len,
        "global_batch_size": ranking.job.global_batch_size,
        "skew": best.setting.skew(ranking.job)._asdict(),
        "num_settings": ranking.num_settings,
        "best": values[0],
        "others": values[1:],
        "turns": [turn_values(turn) for turn in turns(ranking, wanted, request)],
        "meshes": mesh_values(ranking),
        "losers": dict(summary_of_losers(ranking).most_common()),
        "config": tables_of(best, wanted),
    }


def plainest(ranking: Ranking) -> Candidate:
    """Of the settings that take little longer than the first, the one that changes least of a plain run; of
    equals the fastest."""
    limit = NEARLY_AS_FAST * ranking.best.found.time.total
    near = [each for each in ranking.candidates if each.found.time.total <= limit]
    return min(near, key=lambda each: num_changes(each.setting))


def _by_time(ranking: Ranking) -> list[tuple[int, Candidate, list[Candidate]]]:
    """The first of each time that the table can tell from others, with its number, and those as fast."""
    groups: dict[float, list[tuple[int, Candidate]]] = {}
    for number, each in enumerate(ranking.candidates, 1):
        groups.setdefault(each.order[0], []).append((number, each))
    return [(group[0][0], group[0][1], [each for _, each in group[1:]]) for group in groups.values()]


def _also(others: list[Candidate]) -> str:
    return f" (as fast: {len(others)} other mesh{'es' * (len(others) > 1)})" if others else ""


def print_ranking(ranking: Ranking, wanted: Reading, request: Request, most: int) -> None:
    best, job = ranking.best, ranking.job
    num_parameters = memory_plan(job, best.setting).num_parameters
    print_table(
        f"{num_parameters / 1e9:.1f} B parameters on {request.num_gpus} x {ranking.gpu.name}, "
        f"{job.global_batch_size} x {job.seq_len} tokens a step: {ranking.num_settings:,} settings",
        ("#", "setting", "s a step", "tokens/s", "GiB", "host GiB", "wall", "why not the first"),
        [
            (
                str(number),
                setting_text(each.setting) + _also(others),
                "no price" if each.found.why_no_price else f"{each.found.time.total:.3g}",
                "no price" if each.found.why_no_price else f"{each.found.tokens_per_second:,.0f}",
                f"{each.found.memory.total / GIB:.1f}",
                f"{each.found.memory.host / GIB:.1f}",
                each.found.wall,
                "" if number == 1 else why_it_loses(each, best),
            )
            for number, each, others in _by_time(ranking)[:most]
        ],
    )
    plain = plainest(ranking)
    if num_changes(plain.setting) < num_changes(best.setting):
        place = 1 + ranking.candidates.index(plain)
        print(
            f"Simpler, at {plain.found.time.total / best.found.time.total:.2f} x the time: number {place}, "
            f"{setting_text(plain.setting)}."
        )
    losers = summary_of_losers(ranking)
    if losers:
        rows = [(reason, str(count)) for reason, count in losers.most_common()]
        print_table("Why all other meshes lose", ("reason", "meshes"), rows)
    found = best.found
    rows = [*memory_rows(found.memory), ("host memory", size_text(found.memory.host))]
    rows = without_zeros([*rows, *traffic_rows(found.traffic)])
    if not found.why_no_price:
        rows += [(TIME_NAMES[name], f"{seconds:.3f} s") for name, seconds in vars(found.time).items()]
    print_table("The first, on one rank", ("what", "how much"), rows)
    if found.why_no_price:
        print(f"{found.why_no_price}. The order is that of the same run in bf16.")
    rates = "measured" if ranking.gpu.is_measured else "the H200's measured shares of its peaks"
    print(f"Rates of {ranking.gpu.name}: {rates}. The wall that binds: {found.wall}.")
    skew = job.loads.skew(best.setting.degrees.ep)
    if skew != EVEN:
        print(
            f"The busiest rank of a layer gets {skew.time:.2f} times an even share of the rows, and one rank "
            f"over all layers up to {skew.memory:.2f} times."
        )
    if best.setting.skew(job) != skew:
        print(
            f"With experts.clones = {best.setting.experts.clones} the busiest rank of a layer gets "
            f"{best.setting.skew(job).time:.2f} times."
        )
    bound = best.setting.experts.flex.rows
    if best.setting.dispatcher == "flex" and best.setting.skew(job).time > bound:
        print(
            f"Buffers of experts.flex.rows = {bound:g} are too small for that: steps are run a second time, "
            "which is not in the time above. Raise it."
        )
    if ranking.gpu.never_ran:
        print(f"{NEVER_RAN}: take this as an estimate (docs/low_precision.md, Blackwell).")
    gains = [(turn.text, f"{turn.gain:+.1%}", turn.follows) for turn in turns(ranking, wanted, request)]
    if gains:
        print_table("What to turn", ("change", "tokens/s a GPU", "then"), gains)
