"""All legal meshes with all ways to save memory, ranked by predicted time.

For a mesh and a micro-batch the ways are tried from the cheapest to the dearest, so the first that fits is
the fastest: what is recomputed and offloaded first, for it costs time in every layer, then how states are
kept. What a way changes in the numbers of a run, or risks, is charged a little, so of two settings of a mesh
that are alike in time the plainer one wins. Meshes are sorted by time, and by charges where it is the same in
three digits.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from fsdmoe.config import Config
from fsdmoe.config.checks import asked
from fsdmoe.config.compatibility import check_compatibility, refuse_incompatible
from fsdmoe.context_parallel.config import check_context_parallel
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import divisors
from fsdmoe.experts.divide import check_clones_stay
from fsdmoe.huggingface.folder import hf_limits
from fsdmoe.mesh import Degrees
from fsdmoe.optim.config import MAX_BETA2
from fsdmoe.plan.estimate import Estimate, estimate, filled, shortage
from fsdmoe.plan.hardware import Gpu
from fsdmoe.plan.job import Job, Setting, memory_plan
from fsdmoe.plan.low_precision import with_backend
from fsdmoe.plan.memory import (
    MemoryEstimate,
    StepBytes,
    estimate_memory,
    makes_head_gradient_in_slot,
    state_bytes,
    step_bytes,
)
from fsdmoe.plan.memory_section import chosen, offload_choices, recompute_choices
from fsdmoe.plan.source import Fixed
from fsdmoe.plan.step_time import TimeEstimate, estimate_time
from fsdmoe.plan.text import num_changes

MOST_TENSOR_RANKS = 16
FEWEST_TOKENS = 1024
"""Of a row on one rank: shorter pieces are not worth splitting for."""
MOST_MICRO_BATCH = 16
CHUNKS = (1, 2, 4, 8)
"""Numbers of chunks that are tried."""
CLONES = 2
"""Slots for clones that are tried too where routing is not even."""
SUB_BATCHES = 2
"""What is tried too where rows leave the NVLink domain: there it was measured."""
FEW_EXPERTS = 16
"""Models with more than so many experts do not split single ones (etp)."""


class StateChoice(NamedTuple):
    """One way to keep weights, gradients and moments."""

    lean: bool = False
    moments: Literal["bfloat16"] | None = None
    on_host: bool = False

    @property
    def charge(self) -> float:
        """What it is charged in addition to its time, as a share of it."""
        return 0.005 * self.lean + 0.02 * (self.moments is not None)


_STATES = (
    StateChoice(),
    StateChoice(lean=True),
    StateChoice(moments="bfloat16"),
    StateChoice(lean=True, moments="bfloat16"),
)
_LAST_RESORT = (StateChoice(on_host=True), StateChoice(on_host=True, moments="bfloat16"))


@dataclass(frozen=True)
class Candidate:
    """A setting with its estimate, and what it is ranked by."""

    setting: Setting
    found: Estimate
    score: float
    """Seconds, and charges."""

    @property
    def order(self) -> tuple[float, int, float]:
        """Of candidates with different meshes: by time, in three digits, then by how much they change of a
        plain run, and by what is charged."""
        return float(f"{self.found.time.total:.3g}"), num_changes(self.setting), self.score


class _Lean(NamedTuple):
    """A setting that does not fit."""

    setting: Setting
    memory: MemoryEstimate


@dataclass(frozen=True)
class Loss:
    """A mesh that nothing fits."""

    degrees: Degrees
    leanest: Candidate | None
    """The way that comes nearest to fitting; None where what is fixed leaves no way to try."""


@dataclass(frozen=True)
class Ranking:
    """What a search found: the best setting of every mesh that fits, fastest first."""

    job: Job
    gpu: Gpu
    candidates: tuple[Candidate, ...]
    losses: tuple[Loss, ...]
    num_settings: int
    """How many were looked at."""

    @property
    def best(self) -> Candidate:
        if not self.candidates:
            raise ConfigError(self.why_nothing_fits())
        return self.candidates[0]

    def why_nothing_fits(self) -> str:
        if not self.losses:
            return (
                "--gpus: no mesh of so many ranks divides the model and the batch; "
                "choose a number of GPUs that divides the sequences of a step (--tokens-per-step / --seq)"
            )
        tried = [loss.leanest for loss in self.losses if loss.leanest is not None]
        if not tried:
            return (
                "--micro-batch, --recompute: what is fixed leaves nothing to try: a micro-batch must divide "
                "the sequences of a rank, and train.graphs takes only some parts; fix less"
            )
        least = min(tried, key=lambda way: filled(way.found.memory, self.gpu))
        more = ", or more host memory (--host-memory)" * (least.found.memory.host > self.gpu.host_memory)
        axes = ", ".join(f"{axis} {size}" for axis, size in vars(least.setting.degrees).items() if size > 1)
        return (
            f"--gpus: nothing fits {self.gpu.name}: the leanest way ({axes or 'one rank'}) "
            f"{shortage(least.found.memory, self.gpu)}; take more GPUs, or larger ones (--gpu){more}"
        )


def search(config: Config, job: Job, gpu: Gpu, num_gpus: int, fixed: Fixed | None = None) -> Ranking:
    """Rank all of it for ``num_gpus`` ranks. ``config`` gives what the search leaves alone, ``fixed`` what it
    may not change."""
    return _Search(config, job, gpu, fixed or Fixed()).run(num_gpus)


def _fixed_problems(fixed: Fixed, legal: list[Degrees], num_gpus: int) -> list[str]:
    """Which of the fixed degrees no mesh has; all of them where each alone is possible."""
    wanted = {axis: getattr(fixed, axis) for axis in ("tp", "cp", "ep", "dp_outer")}
    wanted = {axis: size for axis, size in wanted.items() if size is not None}
    possible = {axis: sorted({getattr(degrees, axis) for degrees in legal}) for axis in wanted}
    problems = [
        f"--{axis.replace('_', '-')}: no mesh of {num_gpus} ranks for this model and batch has {size}; "
        f"choose one of {', '.join(map(str, possible[axis]))}"
        for axis, size in wanted.items()
        if size not in possible[axis]
    ]
    given = ", ".join(f"--{axis.replace('_', '-')} {size}" for axis, size in wanted.items())
    return problems or [f"{given}: no mesh of {num_gpus} ranks has all of them; fix less"]


class _Search:
    def __init__(self, config: Config, job: Job, gpu: Gpu, fixed: Fixed) -> None:
        self._config, self._job, self._gpu, self._fixed = config, job, gpu, fixed
        self._steps: dict[tuple[object, ...], StepBytes] = {}
        self._compatible: dict[tuple[object, ...], bool] = {}
        self._count = 0
        self._bases = {choice: base for choice in (*_STATES, *_LAST_RESORT) if (base := self._base(choice))}
        self._recompute = fixed.parts(recompute_choices(job.model, is_wrapped=job.is_wrapped))

    def run(self, num_gpus: int) -> Ranking:
        if self._config.context_parallel.dynamic:
            raise ConfigError(
                "context_parallel.dynamic: expected false for a search, which plans rows of one length, got "
                "true; drop it for the search, or plan one mesh with it by train.py --dry-run"
            )
        legal = list(legal_degrees(self._config, self._job, num_gpus, self._gpu))
        allowed = [d for d in legal if self._fixed.allows(tp=d.tp, cp=d.cp, ep=d.ep, dp_outer=d.dp_outer)]
        if legal and not allowed:
            raise ConfigError(*_fixed_problems(self._fixed, legal, num_gpus))
        plain = self._bases[StateChoice()]
        compatible = [d for d in allowed if self._is_compatible(replace(plain, degrees=d))]
        if allowed and not compatible:
            refuse_incompatible(self._as_config(replace(plain, degrees=allowed[0])))
        # What the engine or the optimizer says against the model on a mesh.
        refused = {d: asked(memory_plan, self._job, replace(plain, degrees=d)) for d in compatible}
        meshes = [d for d in compatible if not refused[d]]
        if compatible and not meshes:
            raise ConfigError(*(line for _, line in refused[compatible[0]]))
        candidates: list[Candidate] = []
        losses: list[Loss] = []
        for choices in (_STATES, _LAST_RESORT):
            if self._bases.keys().isdisjoint(choices):
                break  # the losses of the ways before stand
            losses.clear()
            for degrees in meshes:
                best, leanest = self._best_of(degrees, choices)
                if best is None:
                    losses.append(Loss(degrees, self._lost(leanest)))
                else:
                    candidates.append(best)
            if candidates:
                break
        candidates.sort(key=lambda candidate: candidate.order)
        return Ranking(self._job, self._gpu, tuple(candidates), tuple(losses), self._count)

    def _lost(self, leanest: _Lean | None) -> Candidate | None:
        if leanest is None:
            return None
        return Candidate(
            leanest.setting, estimate(self._job, leanest.setting, self._gpu, leanest.memory), math.inf
        )

    def _best_of(
        self, degrees: Degrees, choices: tuple[StateChoice, ...]
    ) -> tuple[Candidate | None, _Lean | None]:
        """The fastest setting of a mesh; where none fits, what the leanest would take."""
        states = {
            choice: state_bytes(self._job, replace(self._bases[choice], degrees=degrees))
            for choice in choices
            if choice in self._bases
        }
        found: list[Candidate] = []
        leanest: list[_Lean] = []
        rows = self._job.global_batch_size // (degrees.dp_outer * degrees.dp_shard)
        for size in divisors(rows):
            is_fixed = self._fixed.micro_batch is not None
            if not self._fixed.allows(micro_batch=size) or (size > MOST_MICRO_BATCH and not is_fixed):
                continue
            if size < self._config.experts.sub_batches:
                continue
            fits = False
            for clones in self._clones(degrees):
                candidate, least = self._first_that_fits(degrees, size, clones, states)
                leanest += [least] if least is not None else []
                found += [candidate] if candidate is not None else []
                fits |= candidate is not None
            if not fits:
                break  # larger micro-batches need more
        fastest = min(found, key=lambda candidate: candidate.score, default=None)
        return fastest, min(leanest, key=lambda way: filled(way.memory, self._gpu), default=None)

    def _clones(self, degrees: Degrees) -> tuple[int, ...]:
        """Slots a rank, where somebody did not say so."""
        given = self._config.experts.clones
        is_even = self._job.loads.skew(degrees.ep).time == 1
        # Whether experts of a wrapped model can be cloned is known once it is built.
        if given or is_even or self._job.is_wrapped:
            return (given,)
        reach = _clones_reach(self._config, degrees.ep, degrees.world_size, self._gpu)
        return (0, CLONES) if reach else (0,)

    def _first_that_fits(
        self,
        degrees: Degrees,
        micro_batch_size: int,
        clones: int,
        states: dict[StateChoice, MemoryEstimate],
    ) -> tuple[Candidate | None, _Lean | None]:
        least: _Lean | None = None
        least_share = math.inf
        best: Candidate | None = None
        for parts, moved in itertools.product(self._recompute, offload_choices()):
            if "layer" in parts and moved:  # there is hardly anything left to move
                continue
            section = chosen(self._config.memory, parts, moved)
            for choice, held in states.items():
                base = self._bases[choice]
                setting = replace(
                    base, degrees=degrees, micro_batch_size=micro_batch_size, memory=section,
                    experts=replace(base.experts, clones=clones),
                )  # fmt: skip
                if not self._is_compatible(setting):
                    continue
                self._count += 1
                memory = estimate_memory(self._job, setting, held, self._step(setting))
                share = filled(memory, self._gpu)
                if share > 1:
                    if share < least_share:
                        least = _Lean(setting, memory)
                        least_share = share
                    continue
                for option in self._with_overlap(setting):
                    time = estimate_time(self._job, option, self._gpu)
                    score = time.total * (1 + choice.charge + _charge(option))
                    if best is None or score < best.score:
                        made = estimate(self._job, option, self._gpu, memory, time)
                        best = Candidate(option, made, score)
                break
            if best is not None and not moved and best.setting.recompute == parts:
                break  # dearer parts save what is not needed
        return best, least

    def _is_compatible(self, setting: Setting) -> bool:
        """Whether the table refuses none of it. Asked once for all sizes that switch on the same features."""
        experts = setting.experts
        axes = tuple(size > 1 for size in vars(setting.degrees).values())
        has_rows = setting.micro_batch_size >= experts.sub_batches
        states = (setting.fsdp.lean, setting.fsdp.cpu_offload)
        ways = (experts.chunks > 1, experts.sub_batches > 1, experts.clones > 0)
        key = (axes, has_rows, states, ways, setting.recompute, setting.offload)
        if key not in self._compatible:
            self._compatible[key] = not check_compatibility(self._as_config(setting))
        return self._compatible[key]

    def _as_config(self, setting: Setting) -> Config:
        d = setting.degrees
        mesh = replace(self._config.mesh, dp_outer=d.dp_outer, cp=d.cp, tp=d.tp, ep=d.ep, etp=d.etp)
        train = replace(self._config.train, micro_batch_size=setting.micro_batch_size)
        return replace(
            self._config, precision=with_backend(self._config.precision, self._gpu),
            mesh=mesh, experts=setting.experts, fsdp=setting.fsdp, memory=setting.memory,
            train=train, optim=setting.optim, context_parallel=setting.context,
        )  # fmt: skip

    def _with_overlap(self, setting: Setting) -> list[Setting]:
        """In how many chunks or sub-batches rows may travel, where somebody did not say so. Neither takes
        more memory."""
        d, experts = setting.degrees, setting.experts
        if d.ep * d.etp == 1 or max(experts.chunks, experts.sub_batches) > 1:
            return [setting]
        found = [replace(setting, experts=replace(experts, chunks=chunks)) for chunks in CHUNKS]
        halves = replace(setting, experts=replace(experts, sub_batches=SUB_BATCHES))
        if d.ep * d.etp > self._gpu.domain and self._is_compatible(halves):
            found.append(halves)
        return found

    def _base(self, choice: StateChoice) -> Setting | None:
        """None where the configuration does not allow it."""
        config = self._config
        optim = config.optim
        if choice.moments is not None:
            if (
                optim.name != "adamw"
                or optim.moment_dtype == choice.moments
                or optim.beta2 > MAX_BETA2[choice.moments]
            ):
                return None
            optim = replace(optim, moment_dtype=choice.moments)
        fsdp = replace(
            config.fsdp,
            lean=config.fsdp.lean or choice.lean,
            cpu_offload=config.fsdp.cpu_offload or choice.on_host,
        )
        made = Setting(
            degrees=Degrees(1, 1, 1, 1, 1, 1, 1), fsdp=fsdp, precision=config.precision, optim=optim,
            experts=config.experts, context=config.context_parallel,
            micro_batch_size=config.experts.sub_batches, is_replayed=config.train.graphs == "step",
        )  # fmt: skip
        is_plain = not (choice.lean or choice.on_host)
        return made if is_plain or self._is_compatible(made) else None

    def _step(self, setting: Setting) -> StepBytes:
        d = setting.degrees
        key = (
            d.tp, d.cp, d.ep, d.etp, setting.micro_batch_size, setting.recompute, setting.offload,
            setting.experts.clones, makes_head_gradient_in_slot(setting),
        )  # fmt: skip
        if key not in self._steps:
            self._steps[key] = step_bytes(self._job, setting)
        return self._steps[key]


def _charge(setting: Setting) -> float:
    """Of two settings that take the same time, the one with fewer axes and fewer parts is to win."""
    d = setting.degrees
    num_axes = sum(size > 1 for size in (d.dp_outer, d.cp, d.tp, d.etp))
    num_axes += max(setting.experts.chunks, setting.experts.sub_batches) > 1
    num_axes += setting.experts.clones > 0
    return 0.003 * num_axes + 0.002 * len(setting.recompute) + 0.03 * bool(setting.offload)


def legal_degrees(config: Config, job: Job, num_gpus: int, gpu: Gpu) -> Iterator[Degrees]:
    """Every mesh that the model, the rows and the batch can be divided over."""
    model, can_split = job.model, _rows_can_be_split(config)
    heads = [model.num_attention_heads, *([] if model.is_mla else [model.num_key_value_heads])]
    widths = [model.intermediate_size] if model.first_k_dense_replace else []
    most_tensor = min(MOST_TENSOR_RANKS, gpu.domain) if can_split else 1
    has_experts = model.num_moe_layers > 0
    for tp in (n for n in divisors(num_gpus, *heads, model.vocab_size, *widths) if n <= most_tensor):
        most_context = max(1, job.seq_len // tp // FEWEST_TOKENS) if can_split else 1
        for cp in (n for n in divisors(num_gpus // tp) if n <= most_context):
            if not _splits_rows(config, job, cp, tp):
                continue
            for dp_outer in divisors(num_gpus // (tp * cp)):
                replica = num_gpus // dp_outer
                dp_shard = replica // (tp * cp)
                if job.global_batch_size % (dp_outer * dp_shard):
                    continue
                for ep in divisors(replica, model.num_experts) if has_experts else (1,):
                    for etp in _expert_splits(job, replica // ep):
                        if config.experts.dispatcher == "by_node" and not _spans_nodes(ep, etp, gpu):
                            continue
                        if config.experts.clones and not _clones_reach(config, ep, num_gpus, gpu):
                            continue
                        yield Degrees(dp_outer, dp_shard, cp, tp, replica // (ep * etp), ep, etp)


def _clones_reach(config: Config, ep: int, num_gpus: int, gpu: Gpu) -> bool:
    """Whether clones of experts may be sent over so many ranks."""
    return config.experts.dispatcher != "flex" or not asked(check_clones_stay, ep, gpu.domain, num_gpus)


def _spans_nodes(ep: int, etp: int, gpu: Gpu) -> bool:
    """Whether rows may go to a node once: experts are on several, with several EP ranks on each."""
    return ep * etp > gpu.domain > etp and ep * etp % gpu.domain == gpu.domain % etp == 0


def _expert_splits(job: Job, left: int) -> list[int]:
    model = job.model
    if model.num_experts > FEW_EXPERTS or job.is_wrapped or not model.num_moe_layers:
        return [1]
    return [n for n in divisors(left, model.moe_intermediate_size) if n <= 8]


def _rows_can_be_split(config: Config) -> bool:
    """Wrapped models attend as their configuration says; some cannot have their rows split."""
    if config.model.hf is None:
        return True
    return not hf_limits(config.model.hf, config.data.seq_len, ("mesh.cp = 1", "mesh.tp = 1"))


def _splits_rows(config: Config, job: Job, cp: int, tp: int) -> bool:
    model = job.model
    return not asked(
        check_context_parallel,
        config.context_parallel, sizes=(cp,), seq_len=job.seq_len,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_attention_heads if model.is_mla else model.num_key_value_heads, tp=tp,
    )  # fmt: skip


_REASONS = {
    "compute": "smaller products",
    "recompute": "more is recomputed to fit",
    "experts": "rows of experts travel further",
    "tensor": "mesh.tp exchanges",
    "context": "mesh.cp exchanges",
    "sharding": "more weights and gradients are sent",
    "offload": "copies to the host are not hidden",
    "optimizer": "a longer optimizer step",
}


def why_it_loses(other: Candidate, best: Candidate) -> str:
    """In a few words: how much slower, and by what most."""
    mine, theirs = best.found.time, other.found.time
    ratio = theirs.total / mine.total
    if ratio < 1.005:
        more = num_changes(other.setting) > num_changes(best.setting)
        return "as fast, but changes more of the run" if more else "as fast"
    worst = max(vars(mine), key=lambda name: getattr(theirs, name) - getattr(mine, name))
    where = " in bf16" if other.found.why_no_price else ""
    return f"{_times(ratio)} the time{where}: {_REASONS[worst]} (+{_seconds(theirs, mine, worst)})"


def summary_of_losers(ranking: Ranking) -> Counter[str]:
    """How many meshes lose for which reason."""
    counts: Counter[str] = Counter()
    best = ranking.best
    for other in ranking.candidates[1:]:
        counts[why_it_loses(other, best).partition(": ")[2].partition(" (")[0] or "as fast"] += 1
    if ranking.losses:
        counts["does not fit whatever is recomputed or offloaded"] = len(ranking.losses)
    return counts


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x" if ratio < 10 else f"{math.floor(ratio)} x"


def _seconds(theirs: TimeEstimate, mine: TimeEstimate, name: str) -> str:
    return f"{getattr(theirs, name) - getattr(mine, name):.2g} s"
