"""What the rules of a configuration are written with, wherever they stand: a section next to its part, a part
that is built from several sections, or the checks across sections.

A rule is written once, at its owner, and raises a ``ConfigError``; :mod:`fsdmoe.config.checks` calls the ones
that need several sections before anything is built, the parts call them again for whoever builds them by
hand. Lines start with the dotted key and end with the fix.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_MOST_SHOWN = 12


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean x?``, or the choices when nothing is close."""
    names = list(known)
    return choice_like(name, names) or f"choose one of {', '.join(names[:_MOST_SHOWN])}"


def at_least(section: str, values: Mapping[str, Any], lowest: Mapping[str, float]) -> list[str]:
    """A line for each of ``values`` that is below its bound."""
    return [
        f"{section}.{key}: expected {low} or more, got {values[key]}; raise it"
        for key, low in lowest.items()
        if not values[key] >= low
    ]


def one_of(section: str, values: Mapping[str, Any], choices: Mapping[str, Sequence[Any]]) -> list[str]:
    """A line for each of ``values`` that is none of its choices."""
    return [
        f"{section}.{key}: expected one of {', '.join(map(str, known))}, got {values[key]!r}; "
        f"{_choice_meant(f'{section}.{key}', values[key], list(map(str, known)))}"
        for key, known in choices.items()
        if values[key] not in known
    ]


def _choice_meant(key: str, written: Any, known: Sequence[str]) -> str:
    if not isinstance(written, str):  # True is no slip of "router"
        return "choose one of them"
    elsewhere = _BY_ANOTHER_KEY.get((key, written.lower()))
    return elsewhere or choice_like(written, known) or "choose one of them"


def divisor_problems(key: str, got: int, numbers: Mapping[str, int], *, also_of: int = 0) -> list[str]:
    """A line for each of ``numbers``, by what it counts, that ``got`` does not divide, with those that do
    (``also_of``: and divide this too)."""
    return [
        f"{key}: expected a divisor of the {number} {what}, got {got}; choose "
        f"{_one_of_numbers(divisors(number, also_of))}"
        for what, number in numbers.items()
        if got < 1 or number % got
    ]


def divisors(*numbers: int) -> list[int]:
    """Common divisors, rising."""
    common = math.gcd(*numbers)
    small = [n for n in range(1, math.isqrt(common) + 1) if common % n == 0]
    return small + [common // n for n in reversed(small) if n * n != common]


def nearest_divisors(wanted: int, *numbers: int) -> str:
    """``4 or 6``: the common divisors next to a number that is none."""
    found = divisors(*numbers)
    below, above = [n for n in found if n < wanted], [n for n in found if n > wanted]
    return " or ".join(map(str, (*below[-1:], *above[:1])))


def numbers_in(text: str) -> set[int]:
    """Of ranges like ``0-3,8``."""
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def ranges_text(numbers: Iterable[int], between: str = ",") -> str:
    """``0-3,8``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return between.join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


_ELSEWHERE = {
    "zero3": "params", "zero2": "grads", "zero1": "optimizer", "full_shard": "params", "bf16": "bfloat16",
    "fp16": "float16", "half": "float16", "fp32": "float32", "adamw_torch": "adamw",
    "full": "layer", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "fused_adam": "adamw",
    "constant_with_warmup": "constant", "warmup_stable_decay": "wsd", "float": "float32", "qlora": "lora",
    "alltoall": "all_to_all", "deepep": "flex", "zero_3": "params", "zero_2": "grads", "zero_1": "optimizer",
    "shard_grad_op": "grads", "dpo": "preference", "sharegpt": "chat", "messages": "chat", "json": "jsonl",
    "alpaca": "completion", "instruct": "completion", "ulysses": "all_to_all", "allgather": "all_gather",
    "rowwise": "fp8_rowwise", "tensorwise": "fp8_tensorwise",
    "blockwise": "fp8_blockwise",
}  # fmt: skip
"""What choices are called in other tools."""
_FP8 = 'weights stay in one of them; for products in fp8 set precision.recipe = "fp8_blockwise"'
_BY_ANOTHER_KEY = {
    ("precision.param_dtype", "fp8"): _FP8,
    ("precision.param_dtype", "float8"): _FP8,
    **{("precision.recipe", name): "did you mean fp8_blockwise?" for name in ("fp8", "float8", "e4m3")},
    **{
        ("optim.name", name): 'write "adamw" with optim.moment_dtype = "torchao_8bit"'
        for name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw8bit", "adamw_torch_8bit")
    },
    ("optim.schedule", "linear"): 'write "wsd" with optim.decay_fraction = 1, which falls linearly',
}
"""Choices of other tools that are made with another key here."""


def near_file(path: str) -> str | None:
    """``did you mean corpus.txt?`` for a file that is not there, if its folder has one like it."""
    folder, _, name = path.rpartition("/")
    try:
        close = difflib.get_close_matches(name, os.listdir(os.path.expanduser(folder) or "."), 1, 0.65)
    except OSError:
        return None
    return f"did you mean {os.path.join(folder, close[0])}?" if close else None


def unreachable(error: OSError, written: Mapping[str, Any]) -> str:
    """A line about a path that cannot be looked at, by the key of ``written`` that names it or a folder above
    it. Any other error goes on."""
    found = os.path.abspath(error.filename or "")
    keys = {
        len(path): key
        for key, text in _texts(written)
        if text  # of a flag without a value it is empty, which abspath takes for the working directory
        and ((path := os.path.abspath(os.path.expanduser(text))) == found or found.startswith(f"{path}/"))
    }
    if error.filename is None or not keys:
        raise error
    return (
        f"{keys[max(keys)]}: expected a path that this user may read, got {error.filename!r} "
        f"({error.strerror}); change its permissions, or name another"
    )


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in tables, with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)


def choice_like(name: str, known: Sequence[str]) -> str | None:
    """``did you mean x?``; none when nothing is close."""
    if _ELSEWHERE.get(name.lower()) in known:
        return f"did you mean {_ELSEWHERE[name.lower()]}?"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else None


def counted(number: int, noun: str) -> str:
    """``1 layer``, ``1,200 layers``."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def size_text(num_bytes: float) -> str:
    """``38.62 MiB``: in the unit in which a small difference shows."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:,.0f} {unit}" if unit == "bytes" else f"{num_bytes:,.2f} {unit}"


def _one_of_numbers(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    shown = numbers if len(numbers) <= _MOST_SHOWN else [*numbers[: _MOST_SHOWN - 1], "…"]
    return f"one of {', '.join(map(str, shown))}"
