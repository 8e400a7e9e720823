"""One process equals any layout: the same losses from 1, 2 and 4 ranks, and from two identical runs bit for
bit."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdmoe.mesh import build_meshes
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config


def _train(output_dir: str, overrides: dict[str, Any]) -> None:
    config = tiny_config(output_dir, dist.get_world_size(), **overrides)
    run = Run(config, build_meshes(config.mesh))
    run.close(run.loop([]))


def losses(folder: Path, world_size: int, **overrides: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step, read from what the run wrote, evaluations included."""
    folder.mkdir()
    run_ranks(_train, world_size, str(folder), {"train__global_batch_size": 4} | overrides)
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["loss"], row["grad_norm"]) if "loss" in row else (row["eval_loss"], 0.0) for row in rows]


@pytest.mark.parametrize(
    ("optimizer", "layouts"),  # ranks and ep
    [
        ("adamw", [(2, 2)]),
        pytest.param("adamw", [(4, 2)], marks=pytest.mark.full),
        pytest.param("sgd", [(2, 1), (2, 2), (4, 2)], marks=pytest.mark.full),
    ],
)
def test_one_two_and_four_ranks_agree_over_twenty_steps(
    tmp_path: Path, optimizer: str, layouts: list[tuple[int, int]]
) -> None:
    # Steps of AdamW enlarge what rounding leaves: at 1e-2 a gradient norm may differ by 3e-5 after twenty.
    lr = 0.1 if optimizer == "sgd" else 3e-3
    one = losses(tmp_path / "1", 1, optim__name=optimizer, optim__lr=lr)
    assert len(one) == 22  # 20 steps, 2 evaluations
    assert one[-2][0] < one[0][0] - 0.1, "the run learns, so the comparison means something"
    for world_size, ep in layouts:
        other = losses(
            tmp_path / f"{world_size}-{ep}", world_size, optim__name=optimizer, optim__lr=lr, mesh__ep=ep
        )
        for step, (expected, got) in enumerate(zip(one, other, strict=True)):
            assert got == pytest.approx(expected, rel=1e-5), f"{world_size} ranks, ep {ep}, row {step}"


@pytest.mark.full
def test_two_identical_runs_give_the_same_losses_bit_for_bit(tmp_path: Path) -> None:
    first, second = (losses(tmp_path / name, 2, mesh__ep=2, train__steps=5) for name in "ab")
    assert len(first) == 6  # with an evaluation
    assert first == second


@pytest.mark.full
def test_another_seed_gives_other_losses(tmp_path: Path) -> None:
    assert (
        losses(tmp_path / "a", 1, train__steps=3)[0]
        != losses(tmp_path / "b", 1, train__steps=3, train__seed=1)[0]
    )
