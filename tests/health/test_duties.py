"""Faults put into real runs: each is found, named and acted on."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdmoe.core import events
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.health.checksums import CorruptionError, odd_ones
from fsdmoe.health.duties import ChecksumDuty
from fsdmoe.health.flight import place_of_ranks
from fsdmoe.health.hang import HangWatch
from fsdmoe.health.spikes import Spikes
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import RankFailure, run_ranks
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config


def _run(folder: str, **overrides: Any) -> Run:
    config = tiny_config(folder, dist.get_world_size(), train__eval_interval=-1, **overrides)
    return Run(config, build_meshes(config.mesh))


def _flip(folder: str) -> tuple[str, str]:
    """A weight changes on rank 1 between two steps."""
    run = _run(folder, mesh__dp_outer=2, mesh__dp_shard=1, health__checksums=1)
    run.train_step()
    name, weight = next((n, p) for n, p in run.model.named_parameters() if n.endswith("o_proj.weight"))
    assert isinstance(weight, ShardedTensor)
    if dist.get_rank() == 1:
        with torch.no_grad():
            weight.piece[0] *= 1.5
    with pytest.raises(CorruptionError) as error:
        run.train_step()
    run.close("failed")
    return name, str(error.value)


def test_a_weight_that_changed_on_one_replica_is_named(tmp_path: Path) -> None:
    name, text = run_ranks(_flip, 2, str(tmp_path))[0]
    assert f"{name} on rank 0 (" in text  # of two copies none is known to be right
    assert "differ after step 2" in text
    assert "alike after step 1" in text


def test_of_three_copies_the_odd_one_is_named() -> None:
    assert odd_ones([7, 7, 9]) == [2]
    assert odd_ones([7, 9]) == [0, 1]


def _clean(folder: str) -> list[str]:
    on = {"health__checksums": 1, "health__on_spike": "rollback", "health__gc_interval": 3}
    run = _run(folder, mesh__ep=2, train__steps=200, **on)
    for _ in range(200):
        run.train_step()
    run.close("finished")
    return [event["event"] for event in events.read(Path(folder))]


@pytest.mark.full
def test_two_hundred_clean_steps_raise_no_alarm(tmp_path: Path) -> None:
    assert run_ranks(_clean, 2, str(tmp_path))[0] == ["start", "end"]


def test_checksums_are_of_the_runs_steps_whatever_was_skipped() -> None:
    seen: list[int] = []
    checksums: Any = SimpleNamespace(compare=seen.append)
    duty = ChecksumDuty(checksums, 2)
    for step, is_taken in enumerate([True, False, True, True, True, True]):
        duty.begin(step)
        if is_taken:
            duty.after_update(torch.empty(0))
    assert seen == [4, 6]


def _spike(
    folder: str, action: str, interval: int = 2, load: str = "latest"
) -> tuple[list[int], list[str], list[bool]]:
    """The loss of the sixth step is a spike; checkpoints are of every second step."""
    run = _run(
        folder, mesh__ep=2, train__steps=9, checkpoint__interval=interval, checkpoint__load=load,
        health__on_spike=action,
    )  # fmt: skip
    losses: list[float] = []

    def is_spike(_: Spikes, loss: float) -> bool:
        losses.append(loss)
        return len(losses) == 6

    changed = []
    step, weights = run.train_step, [p.piece for p in run.model.parameters() if isinstance(p, ShardedTensor)]

    def watched() -> Any:
        before = [piece.clone() for piece in weights]
        record = step()
        changed.append(not all(torch.equal(*pair) for pair in zip(before, weights, strict=True)))
        return record

    with mock.patch.object(Spikes, "is_spike", is_spike), mock.patch.object(run, "train_step", watched):
        run.loop([])
    run.checkpoints.close()
    run.close("finished")
    rows = (json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines())
    kinds = [event["event"] for event in events.read(Path(folder)) if event["event"] != "save"]
    return [row["step"] for row in rows], kinds, changed


@pytest.mark.full
@pytest.mark.parametrize("action", ["skip", "lower", "rollback"])
def test_a_spike_is_skipped_lowered_or_rolled_back(tmp_path: Path, action: str) -> None:
    steps, kinds, changed = run_ranks(_spike, 2, str(tmp_path), action)[0]
    assert steps == list(range(1, 10))  # what was rolled back is not in the file
    back = ["rollback"] if action == "rollback" else []
    assert kinds == ["start", "ready", "fault", *back, "end"]
    expected = [True] * (11 if back else 9)  # from the checkpoint of step 4: steps 5 and 6 again
    expected[5] = action == "lower"
    assert changed == expected


def _spike_in_a_used_folder(folder: str) -> tuple[list[int], list[str], list[bool]]:
    """That of a run which was finished, and of another one in its place."""
    first = _run(folder, mesh__ep=2, train__steps=9, checkpoint__interval=2)
    first.loop([])
    first.checkpoints.close()
    first.close("finished")
    for name in ("metrics.jsonl", "events.jsonl"):
        if dist.get_rank() == 0:
            (Path(folder) / name).unlink()
    dist.barrier()
    return _spike(folder, "rollback", interval=100, load="none")


def test_without_a_checkpoint_of_its_own_a_run_skips_what_it_cannot_roll_back(tmp_path: Path) -> None:
    steps, kinds, changed = run_ranks(_spike_in_a_used_folder, 2, str(tmp_path))[0]
    assert steps == list(range(1, 10))
    assert kinds == ["start", "ready", "fault", "fault", "end"]
    assert changed == [step != 6 for step in steps]
    assert (tmp_path / "checkpoints/step_00000009.2").is_dir(), "its own last one"


def _rolled_back_average(folder: str) -> tuple[int, float]:
    """How far an average that was switched on at a resume is from the weights, after a rollback."""
    first = _run(folder, train__steps=3, checkpoint__interval=3)
    first.loop([])
    first.checkpoints.close()
    first.close("stopped")
    on = {"optim__ema__decay": 0.9, "health__on_spike": "rollback"}
    run = _run(folder, checkpoint__load="latest", train__steps=20, checkpoint__interval=100, **on)
    for _ in range(3):
        run.train_step()
    assert run._go_back()
    average = run.average
    assert average is not None
    found = max(float((each.average - each.main).abs().max()) for each in average._averaged)
    run.checkpoints.close()
    run.close("stopped")
    return average._steps, found


def test_a_rollback_to_a_checkpoint_without_an_average_starts_it_anew(tmp_path: Path) -> None:
    assert run_ranks(_rolled_back_average, 1, str(tmp_path))[0] == (0, 0.0)


def _hang(folder: str) -> None:
    watch = HangWatch(2.0, Path(folder), place_of_ranks())
    dist.barrier()
    watch.end_step()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(math.inf if dist.get_rank() == 0 else 10**6)


def _watch(folder: str) -> None:
    HangWatch(100.0, Path(folder), place_of_ranks()).close()


def test_stacks_of_an_earlier_start_are_kept(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank_0.txt").write_text("in _hang\n")
    run_ranks(_watch, 1, str(tmp_path), fresh=True)
    assert (tmp_path / "stacks" / "rank_0.txt").read_text().startswith("in _hang\n\nanother start, 20")


@pytest.mark.full
def test_a_rank_that_never_comes_is_named_with_the_collective_and_stacks(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(_hang, 2, str(tmp_path), fresh=True)
    text = (tmp_path / "errors.txt").read_text()
    assert "never came to all_reduce over all ranks" in text
    assert "rank 1 (" in text.partition("never came")[0]
    assert [event["event"] for event in events.read(tmp_path)] == ["fault"]
    assert "in _hang" in (tmp_path / "stacks" / "rank_1.txt").read_text()
