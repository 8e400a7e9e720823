"""An elastic run goes on when a launcher is killed or a node is lost, with the losses of one that was never
interrupted."""

import random
from pathlib import Path

import pytest

from tests.support.elastic_kills import differences, kill_once, losses, uninterrupted, write_config


@pytest.mark.full
def test_losses_stay_when_a_launcher_is_killed_at_a_random_moment(tmp_path: Path) -> None:
    kill_once(write_config(tmp_path, 25), random.Random(3), last=15)
    assert differences(losses(tmp_path / "run"), uninterrupted(tmp_path, 25)) < 1e-5


@pytest.mark.full
def test_a_lost_node_costs_no_finished_step_with_copies_in_memory(tmp_path: Path) -> None:
    config = write_config(tmp_path, 25, in_memory=True)
    killed = kill_once(config, random.Random(3), last=15, in_memory=True)
    assert killed.resumed >= killed.step - 1
    assert differences(losses(tmp_path / "run"), uninterrupted(tmp_path, 25)) < 1e-5
