"""An elastic run goes on when a launcher is killed, with the losses of one that was never interrupted."""

from pathlib import Path

import pytest

from tests.support.elastic_kills import kill_often


@pytest.mark.full
def test_losses_stay_when_a_launcher_is_killed_at_a_random_moment(tmp_path: Path) -> None:
    seconds, difference = kill_often(tmp_path, kills=1, seed=3, steps=25)
    assert len(seconds) == 1
    assert difference < 1e-5
