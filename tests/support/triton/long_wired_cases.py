"""Cases of ``interpreted_*.py`` that take longest: two ranks, two attentions."""

from __future__ import annotations

import pytest

from fsdmoe.kernels.backend import kernels
from fsdmoe.testing import run_ranks
from tests.support.moe_case import Case, Layout, check_layout
from tests.support.triton import older_interpreter
from tests.support.triton.interpreted_wired_cases import check_whole_model, launches  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("preset", ["tiny-mixtral", "tiny-deepseek-v3"])
def test_the_whole_model_equals_plain_torch(
    preset: str,
    monkeypatch: pytest.MonkeyPatch,
    launches: list[str],  # noqa: F811
) -> None:
    check_whole_model(preset, monkeypatch, launches)


def dispatch_with_kernels() -> float:
    older_interpreter.correct()
    with kernels("triton"):
        return check_layout(Layout(2), [Case("all_to_all", "dropped")])


def test_the_dispatcher_over_ranks_equals_one_process_with_kernels() -> None:
    run_ranks(dispatch_with_kernels, 2)
