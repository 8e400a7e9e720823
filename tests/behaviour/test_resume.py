"""A run that is stopped and resumed, under any layout, goes on as if it had never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.behaviour.tiny_run import tiny_config
from train import Run

STOP, MORE = 5, 10
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "2 ep2": (2, {"ep": 2}),
    "4 ep2": (4, {"ep": 2}),
    "4 ep4": (4, {"ep": 4}),
    "4 hsdp ep2": (4, {"dp_outer": 2, "ep": 2}),
    "4 etp2 ep2": (4, {"ep": 2, "etp": 2}),
    "8 ep4": (8, {"ep": 4}),
    "8 ep8": (8, {"ep": 8}),
    "8 hsdp ep4": (8, {"dp_outer": 2, "ep": 4}),
}
Step = tuple[float, list[tuple[Any, ...]]]
"""A step's loss, and the pieces of documents that all ranks read in it."""


def go(folder: str, degrees: dict[str, int], load: str, steps: int, overrides: dict[str, Any]) -> list[Step]:
    """Train up to step ``steps``, a run from scratch saving at every fifth; what happened in each step."""
    settings = {f"mesh__{key}": size for key, size in degrees.items()} | overrides
    settings |= {"checkpoint__load": load, "checkpoint__keep_last": 9, "train__steps": STOP + MORE}
    settings |= {"checkpoint__interval": STOP if load == "none" else -1, "train__eval_interval": -1}
    config = tiny_config(folder, dist.get_world_size(), **settings)
    run = Run(config, build_meshes(config.mesh))
    happened: list[Step] = []
    while run.progress["step"] < steps:
        record = run.train_step()
        mine = [tuple(piece) for piece in run.data.consumed_documents()]
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        happened.append((record.loss, sorted(piece for part in everyones for piece in part)))
        run.checkpoints.maybe_save(run.progress["step"], run.state)
    run.checkpoints.close()
    run.close("done")
    return happened


def train(
    folder: Path, layout: str, load: str = "none", steps: int = STOP + MORE, **overrides: Any
) -> list[Step]:
    world, degrees = LAYOUTS[layout]
    results = run_ranks(go, world, str(folder), degrees, load, steps, overrides)
    assert all(result == results[0] for result in results), "ranks saw different runs"
    return results[0]


def checkpoint_of(folder: Path) -> str:
    return str(folder / f"checkpoints/step_{STOP:08d}")


def assert_follows(resumed: list[Step], whole: list[Step], tolerance: float) -> None:
    assert len(resumed) == MORE
    for step, ((got, read), (want, meant)) in enumerate(zip(resumed, whole[STOP:], strict=True), STOP + 1):
        assert read == meant, f"step {step} reads other documents"
        assert got == pytest.approx(want, rel=tolerance), f"step {step}"


def test_the_same_layout_goes_on_bit_for_bit_and_reads_the_same_documents(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "4 hsdp ep2")
    train(tmp_path / "run", "4 hsdp ep2", steps=STOP)
    resumed = train(tmp_path / "run", "4 hsdp ep2", load="latest")
    assert resumed == whole[STOP:]


def test_other_layouts_follow_the_uninterrupted_run(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "4 hsdp ep2")
    for layout in ("1", "4 etp2 ep2", "8 ep8"):
        assert_follows(train(tmp_path / layout, layout, load=checkpoint_of(tmp_path / "whole")), whole, 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("written", LAYOUTS)
def test_every_layout_follows_every_other(tmp_path: Path, written: str) -> None:
    whole = train(tmp_path / "whole", written)
    for layout in LAYOUTS:
        assert_follows(train(tmp_path / layout, layout, load=checkpoint_of(tmp_path / "whole")), whole, 1e-6)


def test_moments_in_bf16_and_a_model_only_start_are_possible(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "2 ep2")
    load = checkpoint_of(tmp_path / "whole")
    converted = train(tmp_path / "bf16", "1", load=load, optim__moment_dtype="bfloat16")
    assert len(converted) == MORE
    assert converted[0][0] == pytest.approx(
        whole[STOP][0], rel=1e-6
    )  # the model is the same, the moments rounded
    fresh = train(tmp_path / "fresh", "1", load=load, checkpoint__load_only_model="true")
    assert len(fresh) == STOP + MORE
    assert fresh[0][1] == whole[0][1]  # data from the beginning
    assert fresh[0][0] < whole[0][0]  # with weights that have learnt already
