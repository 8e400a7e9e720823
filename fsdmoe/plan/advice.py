"""What to turn: changes that a search does not make by itself, and what each gains on the same mesh.

A change is estimated in the setting as it is, and planned as the request itself was, so that memory which it
frees is used; the faster of the two counts. What gains nothing, and what a run would be refused for, is not
listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fsdmoe.core.errors import ConfigError
from fsdmoe.plan.answer import answer
from fsdmoe.plan.estimate import estimate
from fsdmoe.plan.hardware import GIB
from fsdmoe.plan.job import Setting
from fsdmoe.plan.search import Candidate, Ranking
from fsdmoe.plan.source import Fixed, Reading, Request
from fsdmoe.plan.text import setting_text
from fsdmoe.plan.winner import check, tables_of

LEAST_GAIN = 0.005
"""Of tokens/s: estimates do not tell less apart."""

Keys = dict[str, dict[str, Any]]
_CHANGES: dict[str, Keys] = {
    # Emulated where there are no kernels, such as on this host: parts that a GPU has none for have no price.
    'precision.recipe = "fp8_blockwise"': {"precision": {"recipe": "fp8_blockwise", "emulate": True}},
    'precision.grad_dtype = "bfloat16"': {"precision": {"grad_dtype": "bfloat16"}},
    'experts.dispatcher = "by_node"': {"experts": {"dispatcher": "by_node"}},
    'experts.dispatch_dtype = "float8"': {"experts": {"dispatch_dtype": "float8"}},
    'experts.dispatch_grad_dtype = "float8"': {"experts": {"dispatch_grad_dtype": "float8"}},
    'fsdp.grad_exchange = "bf16_all_to_all"': {"fsdp": {"grad_exchange": "bf16_all_to_all"}},
    "fsdp.reshard_after_forward = false": {"fsdp": {"reshard_after_forward": False}},
    'fsdp.reduce = "last"': {"fsdp": {"reduce": "last"}},
    "fsdp.lean = true": {"fsdp": {"lean": True}},
    'optim.moment_dtype = "bfloat16"': {"optim": {"moment_dtype": "bfloat16"}},
    'context_parallel.mode = "all_to_all"': {"context_parallel": {"mode": "all_to_all"}},
    "train.fused_layers = true": {"train": {"fused_layers": True}},
}
_FIXED_KEYS = {"micro_batch": "train.micro_batch_size", "recompute": "memory.recompute"}


@dataclass(frozen=True)
class Advice:
    """One change, and what it gains."""

    text: str
    gain: float
    """Tokens/s of a GPU, as a share of what they are now."""
    candidate: Candidate
    """The setting with it."""
    follows: str
    """What is then chosen otherwise, in words; may be empty."""


def turns(ranking: Ranking, wanted: Reading, request: Request) -> list[Advice]:
    """What gains something over the first of a ranking, the largest gain first."""
    best, found = ranking.best, []
    if best.found.why_no_price:
        return []
    for text, changed, keys in _changes(ranking, wanted, request):
        settings = _with_change(best, changed, keys)
        candidate = max(settings, key=lambda each: each.found.tflops, default=best)
        gain = candidate.found.tflops / best.found.tflops - 1
        if gain >= LEAST_GAIN:
            found.append(
                Advice(text, gain, candidate, _new_words(candidate.setting, _changed(best.setting, keys)))
            )
    return sorted(found, key=lambda turn: -turn.gain)


def _changes(ranking: Ranking, wanted: Reading, request: Request) -> Iterator[tuple[str, Request, Keys]]:
    """Each in words, and as a request with keys; the mesh stays, and so does the batch."""
    degrees = ranking.best.setting.degrees
    mesh = {axis: getattr(degrees, axis) for axis in ("tp", "cp", "ep", "dp_outer")}
    fixed = request.fixed._replace(**mesh)
    same = replace(request, fixed=fixed, tokens_per_step=ranking.job.tokens_per_step)
    for text, keys in _CHANGES.items():
        ((section, values),) = keys.items()
        now = vars(getattr(wanted.config, section))
        key, value = next(iter(values.items()))  # the one that the text names
        if now[key] != value:
            yield text, same, keys
    for name in Fixed._fields:
        if getattr(request.fixed, name) is not None:
            key = _FIXED_KEYS.get(name, f"mesh.{name}")
            yield f"{key}: leave it free", replace(same, fixed=fixed._replace(**{name: None})), {}
    host_gib = 2 * ranking.gpu.host_memory // GIB
    yield f"{host_gib} GiB of host memory for each GPU", replace(same, host_memory=host_gib), {}
    yield f"{2 * request.num_gpus} GPUs", replace(same, num_gpus=2 * request.num_gpus), {}


def _with_change(best: Candidate, changed: Request, keys: Keys) -> Iterator[Candidate]:
    """What can be run of the setting as it is, and of what a search finds."""
    try:
        reading, ranking = answer(changed, keys)
    except ConfigError:
        return
    found = list(ranking.candidates[:1])
    if keys:
        setting = _changed(best.setting, keys)
        found.append(Candidate(setting, estimate(ranking.job, setting, ranking.gpu), best.score))
    for candidate in found:
        try:
            check(tables_of(candidate, reading), changed.num_gpus)
        except ConfigError:
            continue
        if candidate.found.fits and not candidate.found.why_no_price:
            yield candidate


def _changed(setting: Setting, keys: Keys) -> Setting:
    sections = {section.replace("context_parallel", "context"): values for section, values in keys.items()}
    known = {name: values for name, values in sections.items() if hasattr(setting, name)}
    return replace(setting, **{name: replace(getattr(setting, name), **v) for name, v in known.items()})


def _new_words(setting: Setting, before: Setting) -> str:
    known = setting_text(before).split(", ")
    return ", ".join(word for word in setting_text(setting).split(", ") if word not in known)
