"""What to turn: estimated, in order of what it gains, and nothing that does not help."""

from pathlib import Path

import pytest

from fsdmoe.plan.advice import LEAST_GAIN, Advice, turns
from fsdmoe.plan.answer import answer
from fsdmoe.plan.source import Fixed, Request

MESH = Fixed(tp=1, cp=1, ep=8, dp_outer=1)
SMALL = MESH._replace(micro_batch=2)
"""Each change is planned anew, which is much cheaper with a micro-batch that is fixed."""


def planned(request: Request) -> list[Advice]:
    wanted, ranking = answer(request)
    return turns(ranking, wanted, request)


@pytest.mark.parametrize("gpu", ["l40s", pytest.param("h100", marks=pytest.mark.full)])
def test_every_line_gains_over_the_first_and_the_largest_gain_stands_first(gpu: str) -> None:
    request = Request("qwen3-30b-a3b", 16, gpu, 4096, fixed=SMALL)
    wanted, ranking = answer(request)
    found = turns(ranking, wanted, request)
    assert found
    assert [turn.gain for turn in found] == sorted((turn.gain for turn in found), reverse=True)
    now = ranking.best.found
    for turn in found:
        then = turn.candidate.found
        assert then.fits, turn.text
        assert turn.gain == pytest.approx(then.tflops / now.tflops - 1)
        assert turn.gain >= LEAST_GAIN, turn.text
    proposed = any(turn.text.startswith("precision.recipe") for turn in found)
    assert proposed == (gpu == "h100"), "only there are kernels"


def test_what_somebody_fixed_is_named_where_it_costs_most() -> None:
    first = planned(Request("qwen3-30b-a3b", 64, "h200", 4096, fixed=MESH._replace(recompute="layer")))[0]
    assert first.text == "memory.recompute: leave it free"
    assert first.gain > 0.1
    assert "recompute" in first.follows or "micro-batch" in first.follows


def test_a_change_in_the_file_is_not_proposed_again(tmp_path: Path) -> None:
    """And what is in the file stays when others are tried."""
    file = tmp_path / "run.toml"
    file.write_text('[model]\npreset = "qwen3-30b-a3b"\n[fsdp]\ngrad_exchange = "bf16_all_to_all"\n')
    request = Request(str(file), 16, "l40s", 4096, fixed=SMALL)
    found = planned(request)
    assert not any("grad_exchange" in turn.text for turn in found)
    assert all(turn.candidate.setting.fsdp.grad_exchange == "bf16_all_to_all" for turn in found)
