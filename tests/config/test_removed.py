"""Keys that earlier versions had: refused with the reason where they were used, passed over where not."""

from typing import Any

import pytest

from fsdmoe.config import Config
from fsdmoe.config.removed import REMOVED
from tests.support.config_building import build

USED: dict[str, tuple[Any, str]] = {
    "train.recompute": (
        "norms",
        'is memory.recompute now, a list of parts; write memory.recompute = ["norms"]',
    ),
    "data.chat_format": (
        "{role}: {content}",
        "is data.chat_template now, a Jinja file; delete the line to use the tokenizer's own template",
    ),
    "train.compile": (
        True,
        "no longer there: fused kernels are faster (docs/results/removed.md); delete the line",
    ),
    "tensor_parallel.overlap": (
        "ring",
        "no longer there: one collective is faster than a ring (docs/results/removed.md); delete the line",
    ),
    "precision.delayed_scales": (
        True,
        "no longer there: they did not make a step faster (docs/results/removed.md); delete the line",
    ),
    "fsdp.across_nodes": (
        "two_stages",
        "no longer there: one collective is as fast as two stages (docs/results/removed.md); delete the line",
    ),
}


def table_of(key: str, value: Any) -> dict[str, Any]:
    section, _, name = key.partition(".")
    return {section: {name: value}}


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_that_was_used_is_refused_with_the_reason(key: str) -> None:
    value, answer = USED[key]
    assert build(table_of(key, value)) == (None, [f"{key}: {answer}"])


@pytest.mark.parametrize("key", REMOVED)
def test_so_it_is_on_the_command_line(key: str) -> None:
    value, answer = USED[key]
    text = None if value is True else value  # a bare switch
    assert build({}, **{key.replace(".", "__"): text}) == (None, [f"{key}: {answer}"])


@pytest.mark.parametrize("key", REMOVED)
def test_a_line_that_left_the_feature_off_is_passed_over(key: str) -> None:
    off = REMOVED[key].off
    written = False if off == "false" else off
    assert build(table_of(key, written)) == (Config(), [])
    assert build({}, **{key.replace(".", "__"): off}) == (Config(), [])


def test_a_section_without_keys_may_still_be_named() -> None:
    assert build({"tensor_parallel": {}}) == (Config(), [])


def test_other_keys_of_a_removed_section_are_unknown() -> None:
    _, problems = build({"tensor_parallel": {"overlap": "none", "size": 2}})
    assert [line.partition(";")[0] for line in problems] == ["tensor_parallel: unknown section"]
