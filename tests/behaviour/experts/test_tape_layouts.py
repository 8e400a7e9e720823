"""Routing recorded by one rank and followed under another mesh and other packing, through ``train.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdmoe.testing import run_ranks
from tests.support.token_run import assert_same, course, write_documents

OTHER_WEIGHTS = {"train__seed": 7}
OTHER_PACKING = {"data__seq_len": 64, "train__global_batch_size": 4, "train__micro_batch_size": 1}
FOLDED = {"mesh__ep": 4, "mesh__tp": 2} | OTHER_PACKING
DYNAMIC = {
    "mesh__ep": 2, "mesh__cp": 2, "context_parallel__dynamic": True, "context_parallel__max_tokens": 64,
}  # fmt: skip
LAYOUTS = [
    pytest.param(4, FOLDED, id="ep 4 over tp 2, longer rows"),
    pytest.param(4, DYNAMIC | {"mesh__ep": 4}, id="documents planned anew", marks=pytest.mark.full),
    pytest.param(2, {"mesh__ep": 2, "memory__recompute": "layer"}, id="recompute", marks=pytest.mark.full),
    pytest.param(
        4, {"mesh__cp": 2, "mesh__ep": 2, "data__seq_len": 32}, id="cp", marks=pytest.mark.full
    ),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_a_recording_is_followed_under_another_mesh_and_packing(
    tmp_path: Path, ranks: int, layout: dict[str, Any]
) -> None:
    """The weights of both replays are others than the recorded run's, so free routing would choose otherwise;
    choices are the recorded ones, weights those of the current routers, which learn alike."""
    data = write_documents(tmp_path)

    def run(name: str, world: int, overrides: dict[str, Any]) -> dict[str, Any]:
        return run_ranks(course, world, str(tmp_path / name), data, overrides)[0]

    recorded = run("recorded", 1, {"experts__record": tmp_path / "routing"})
    replay = {"experts__replay": tmp_path / "routing"} | OTHER_WEIGHTS
    alone = run("alone", 1, replay)
    for one, other in zip(alone["loads"], recorded["loads"], strict=True):
        assert torch.equal(one, other)
    free = run("free", 1, OTHER_WEIGHTS)
    assert not torch.equal(free["loads"][0], recorded["loads"][0])
    assert abs(free["losses"][0] - alone["losses"][0]) > 1e-4
    assert_same(run("other", ranks, replay | layout), alone)


def test_a_recording_by_several_ranks_gives_their_own_run_again(tmp_path: Path) -> None:
    data = write_documents(tmp_path)
    layout = {"mesh__ep": 2, "mesh__tp": 2}
    record, replay = {"experts__record": tmp_path / "routing"}, {"experts__replay": tmp_path / "routing"}
    recorded = run_ranks(course, 2, str(tmp_path / "recorded"), data, record | layout)[0]
    assert len(list((tmp_path / "routing").iterdir())) == 2 * 2, "a file a step and rank"
    assert_same(run_ranks(course, 1, str(tmp_path / "again"), data, replay)[0], recorded)
