"""A run that is stopped and resumed, under any layout, goes on as if it had never stopped.

Three things are compared with the run that was not stopped: the whole state right after loading
(parameters, router biases, moments, step counts, data position; bit for bit, whatever the layouts), the
documents that each further step reads, and its loss.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe.checkpoint.parts import collect
from fsdmoe.checkpoint.tree import split_tree
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import Axis, build_meshes
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config

STOP, MORE, FEW = 3, 4, 2
ROWS = 24  # of a global batch: they go over 1, 2, 3, 4 and 8 ranks
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "2": (2, {}),
    "2 ep2": (2, {"ep": 2}),
    "3": (3, {}),
    "4 ep2": (4, {"ep": 2}),
    "4 ep4": (4, {"ep": 4}),
    "4 hsdp ep2": (4, {"dp_outer": 2, "ep": 2}),
    "4 etp2 ep2": (4, {"ep": 2, "etp": 2}),
    "8 ep4": (8, {"ep": 4}),
    "8 ep8": (8, {"ep": 8}),
    "8 hsdp ep4": (8, {"dp_outer": 2, "ep": 4}),
    "8 etp4 ep2": (8, {"etp": 4, "ep": 2}),
    "2 tp2": (2, {"tp": 2}),
    "4 cp2 tp2 ep4": (4, {"cp": 2, "tp": 2, "ep": 4}),
    "8 hsdp cp2 tp2 ep2": (8, {"dp_outer": 2, "cp": 2, "tp": 2, "ep": 2}),
}
Step = tuple[float, list[tuple[Any, ...]]]
"""A step's loss, and the pieces of documents that all ranks read in it."""
State = dict[str, str]
"""A digest of every tensor and of every plain value of a run, by name."""
Life = tuple[State, list[Step]]
"""The state after :data:`STOP` steps (or after loading), and what happened in each step that was taken."""


def state_of(run: Run) -> State:
    """Digests of whole tensors: the same under every layout if and only if every element is."""
    tensors, values = split_tree(collect(run.state(), run.meshes))
    found = {f"value {key}": json.dumps(value, sort_keys=True) for key, value in values.items()}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor.detach()
        data = whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{tuple(whole.shape)} {whole.dtype} {hashlib.sha256(data).hexdigest()}"
    return found


def go(folder: str, degrees: dict[str, int], load: str, steps: int, overrides: dict[str, Any]) -> Life:
    """Train up to step ``steps``, a run from scratch saving at every third."""
    settings = {f"mesh__{key}": size for key, size in degrees.items()} | overrides
    settings |= {"checkpoint__load": load, "checkpoint__keep_last": 9, "train__steps": STOP + MORE}
    settings |= {"checkpoint__interval": STOP if load == "none" else -1, "train__eval_interval": -1}
    rows = ROWS // (dist.get_world_size() // degrees.get("tp", 1) // degrees.get("cp", 1))
    settings |= {"train__global_batch_size": ROWS, "data__seq_len": 16}
    settings |= {"train__micro_batch_size": rows if rows % 2 else rows // 2}
    settings |= {"experts__balance__bias_rate": 0.01}
    config = tiny_config(folder, dist.get_world_size(), **settings)
    run = Run(config, build_meshes(config.mesh))
    state, happened = state_of(run), []
    while run.progress["step"] < steps:
        record = run.train_step()
        shares = run.meshes.rank(Axis.CP) or run.meshes.rank(Axis.TP)  # rows that another rank read too
        mine = [] if shares else [tuple(piece) for piece in run.data.consumed_documents()]
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        happened.append((record.loss, sorted(piece for part in everyones for piece in part)))
        if load == "none" and record.step == STOP:
            state = state_of(run)
        run.checkpoints.maybe_save(run.progress["step"], run.state)
    run.checkpoints.close()
    run.close("done")
    return state, happened


def train(folder: Path, layout: str, load: str = "none", steps: int = STOP + FEW, **overrides: Any) -> Life:
    world, degrees = LAYOUTS[layout]
    results = run_ranks(go, world, str(folder), degrees, load, steps, overrides, timeout=600)
    assert all(result == results[0] for result in results), "ranks saw different runs"
    return results[0]


def checkpoint_of(folder: Path) -> str:
    return str(folder / f"checkpoints/step_{STOP:08d}")


def assert_follows(resumed: Life, whole: Life, tolerance: float) -> None:
    (loaded, steps), (saved, all_steps) = resumed, whole
    assert loaded.keys() == saved.keys()
    assert not {name for name in saved if loaded[name] != saved[name]}, "not what was saved"
    assert any(name.startswith("optimizer/") and name.endswith("/exp_avg_sq") for name in saved)
    assert any(name.endswith("e_score_correction_bias") for name in saved)
    assert len(steps) == len(all_steps) - STOP > 0
    for step, ((got, read), (want, meant)) in enumerate(zip(steps, all_steps[STOP:], strict=True), STOP + 1):
        assert read == meant, f"step {step} reads other documents"
        assert got == pytest.approx(want, rel=tolerance, abs=0.0), f"step {step}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Life, str]:
    """An uninterrupted run of four ranks, and its checkpoint after :data:`STOP` steps."""
    folder = tmp_path_factory.mktemp("whole")
    return train(folder, "4 hsdp ep2"), checkpoint_of(folder)


def test_the_same_layout_goes_on_bit_for_bit_and_reads_the_same_documents(
    tmp_path: Path, whole: tuple[Life, str]
) -> None:
    train(tmp_path, "4 hsdp ep2", steps=STOP)
    assert_follows(train(tmp_path, "4 hsdp ep2", load="latest"), whole[0], 0.0)


@pytest.mark.parametrize(
    "layout", ["4 cp2 tp2 ep4", *(pytest.param(name, marks=pytest.mark.full) for name in ("3", "4 etp2 ep2"))]
)
def test_another_layout_follows_the_uninterrupted_run(
    tmp_path: Path, whole: tuple[Life, str], layout: str
) -> None:
    assert_follows(train(tmp_path, layout, load=whole[1]), whole[0], 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("written", LAYOUTS)
def test_every_layout_follows_every_other_and_itself_bit_for_bit(tmp_path: Path, written: str) -> None:
    whole = train(tmp_path / "whole", written, steps=STOP + MORE)
    for layout in LAYOUTS:
        resumed = train(tmp_path / layout, layout, load=checkpoint_of(tmp_path / "whole"), steps=STOP + MORE)
        assert_follows(resumed, whole, 0.0 if layout == written else 1e-6)


def test_moments_in_bf16_and_a_model_only_start_are_possible(tmp_path: Path, whole: tuple[Life, str]) -> None:
    (_, steps), load = whole
    _, converted = train(tmp_path / "bf16", "1", load=load, optim__moment_dtype="bfloat16")
    assert len(converted) == FEW
    assert converted[0][0] == pytest.approx(steps[STOP][0], rel=1e-6)  # the model is the same
    assert converted[-1][0] != steps[-1][0]  # the moments were rounded
    assert converted[-1][0] == pytest.approx(steps[-1][0], rel=0.05)
    _, fresh = train(tmp_path / "fresh", "1", load=load, checkpoint__load_only_model="true")
    assert len(fresh) == STOP + FEW
    assert fresh[0][1] == steps[0][1]  # data from the beginning
    assert fresh[0][0] < steps[0][0]  # with weights that have learnt already
