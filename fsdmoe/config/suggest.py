"""What somebody meant who wrote a key that there is not: names of other tools, slips, keys of another
section."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsdmoe.config.keys import all_keys, keys_with
from fsdmoe.config.names_elsewhere import ALIASES, NOT_HERE, SECTIONS_ELSEWHERE
from fsdmoe.config.schema import SECTIONS

WITH_VALUE = ("--config", "--run", "--resume", "--world", "--gpu")
BARE = ("--print-config", "--dry-run", "--evaluate-only", "--files-elsewhere", "--take-over", "--check-only")
FLAGS = (*WITH_VALUE, *BARE, "--help")
"""Options without a section."""

_MOST_SAID = 8
"""Keys of a foreign table that an answer goes through."""
_MOST_LISTED = 15
"""Keys that a word of `--help` may list to be of use."""
_NOWHERE = "see --help for the sections, --help all for every key"
_GENERIC = (
    "enabled", "enable", "device", "type", "params", "_target_", "name", "mode", "config", "freq",
    "strategy",
)  # fmt: skip
"""Words that say something only together with the table that they stand in."""
_PREFIXES = (
    "use_", "enable_", "no_", "disable_", "with_", "do_", "hf_", "model_", "training_", "train_", "moe_",
)  # fmt: skip
_OF_LAUNCHERS = (
    "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "standalone", "rdzv_backend",
    "rdzv_endpoint", "rdzv_id", "max_restarts",
)  # fmt: skip


def suggest_section(written: str, table: Mapping[str, Any] | None = None) -> str:
    """For the name of a table that there is not.

    Args:
        written: Its name.
        table: What is in it: what its keys are here.
    """
    section = SECTIONS_ELSEWHERE.get(written.lower(), "")
    is_foreign = bool(section) or written.lower() in ALIASES or written.lower() in NOT_HERE
    if not is_foreign and (close := _close(written, SECTIONS, 0.5)):
        return f"did you mean [{close}]?"
    answers = {suggest(f"{written}.{name}"): name for name in reversed([*_leaves(table or {})])}
    inside = [(name, answer) for answer, name in reversed(answers.items())]
    said = [f"{name} is {_meant(answer)}" for name, answer in inside if _meant(answer)]
    said += [f"{name}: {answer}" for name, answer in inside if not _meant(answer) and not _is_help(answer)]
    lead = [f"did you mean [{section}]?"] if section else []
    if not lead and not said:
        found = ALIASES.get(written.lower())
        answer = NOT_HERE.get(written.lower()) or f"choose one of {', '.join(SECTIONS)}"
        return f"did you mean {found}?" if found else answer
    return " ".join([*lead, "; ".join(said[:_MOST_SAID])]).strip()


def _leaves(table: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The dotted names of the values in a table."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _meant(answer: str) -> str:
    """The key in an answer that names one."""
    return answer.removeprefix("did you mean ").removesuffix("?") if answer.startswith("did you mean") else ""


def _is_help(answer: str) -> bool:
    return answer.startswith("see --help")


def suggest(written: str, flags: Iterable[str] = ()) -> str:
    """For a dotted key, or an option without its dashes, that there is not.

    Args:
        written: As the user wrote it.
        flags: Options without a section that are allowed too.
    """
    name = written.lower().replace("-", "_")
    above, _, last = name.rpartition(".")
    if last in _OF_LAUNCHERS and not above:
        return "it is the launcher's; write it before train.py, or use `fsdmoe train`, which takes both"
    known = {key.name: key.name.rpartition(".")[2] for key in all_keys()}
    for tried in _forms(name):
        if tried in NOT_HERE:
            return NOT_HERE[tried]
        if found := ALIASES.get(tried) or (tried if tried in known else ""):
            return f"did you mean {found}?"
    found = " or ".join([key for key, own in known.items() if own == last][:3])
    if not found and not above:
        found = _close(f"--{written.lower().replace('_', '-')}", flags, 0.7)
    if not found:
        beside = {own: key for key, own in known.items() if key.rpartition(".")[0] == above}
        found = beside.get(_close(last, beside, 0.6), "")
    if not found:
        found = _close(name, known, 0.75) or next(
            (key for key, own in known.items() if own == _close(last, known.values(), 0.75)), ""
        )
    found = found or ALIASES.get(_close(last, ALIASES, 0.85), "")
    return f"did you mean {found}?" if found else _look_for(above, last)


def _forms(name: str) -> Iterator[str]:
    """What to look up for a dotted name: all of it, ever fewer tables before its last part, this in the
    section that its table is here, alone, without what is put before names elsewhere, and the tables around
    it."""
    *tables, last = name.split(".")
    yield from (".".join([*tables[start:], last]) for start in range(len(tables)))
    if tables and (section := SECTIONS_ELSEWHERE.get(tables[0])):
        yield f"{section}.{last}"
    if last not in _GENERIC or not tables:
        yield last
    for prefix in _PREFIXES:
        if last.startswith(prefix):
            bare = last.removeprefix(prefix)
            yield bare
            yield from (key.name for key in all_keys() if key.name.endswith(f".{bare}"))
    for table in reversed(tables):
        if table not in SECTIONS:
            yield table


def _look_for(above: str, last: str) -> str:
    """Where to look: the section, or a word of the name that some keys have."""
    if above.partition(".")[0] in SECTIONS:
        return f"see --help {above.partition('.')[0]}"
    words = sorted((word for word in last.split("_") if len(word) > 3), key=len, reverse=True)
    found = [word for word in words if 0 < len(keys_with(word)) <= _MOST_LISTED]
    return f"see --help {found[0]}, or --help" if found else _NOWHERE


def _close(name: str, known: Iterable[str], cutoff: float) -> str:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")
