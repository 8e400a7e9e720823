"""Nothing in a training step waits for Python's garbage collector: what is no longer needed is gone when the
last reference goes. A reference cycle through an autograd node keeps a layer's activations until the
collector runs, which counts Python objects and not gigabytes."""

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config

SMALL = {
    "data__seq_len": 16, "data__prefetch": 0, "data__max_bytes": 20_000, "train__global_batch_size": 1,
    "train__steps": 100_000, "model__num_hidden_layers": 1,
}  # fmt: skip
"""Prefetching holds one batch more or less, as threads happen to run."""
WARM_UP = 30


LOOKS = 200
MORE = 25
"""Objects that may be new at the end: single tuples come and go from step to step, ten at most."""


def live(frozen: int) -> tuple[int, int]:
    """Tensors, and other objects that the collector knows of, the frozen ones among them."""
    found = gc.get_objects()
    tensors = sum(issubclass(type(each), Tensor) for each in found)
    return tensors, len(found) - tensors + frozen


def live_at_last(expected: tuple[int, int] | None = None) -> tuple[int, int]:
    """The fewest in many looks, or ``expected``: gloo's threads let go of what a finished collective held
    when they come to it."""
    frozen = gc.get_freeze_count()  # slow: it counts them one by one
    least = live(frozen)
    for _ in range(LOOKS if expected is not None else LOOKS // 10):
        if expected is not None and least[0] <= expected[0] and least[1] <= expected[1] + MORE:
            break
        time.sleep(0.005)
        least = min(least, live(frozen))
    return least


def counts_around(output_dir: str, steps: int, overrides: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """Live objects after the first steps and at the end, with no collection in between. The steps are those
    of train.py; its log, which grows, is left out."""
    config = tiny_config(output_dir, dist.get_world_size(), **SMALL, **overrides)
    gc.collect()
    gc.freeze()  # what was here before is counted, and not looked at in every look
    run = Run(config, build_meshes(config.mesh))
    try:
        for _ in range(WARM_UP):
            run.train_step()
        gc.collect()
        gc.disable()
        run.train_step()  # the collector gave up tuples of numbers, which are new in every step
        before = live_at_last()
        for _ in range(steps - WARM_UP - 1):
            run.train_step()
        return before, live_at_last(before)
    finally:
        gc.enable()
        run.close("finished")


def check(counts: tuple[tuple[int, int], ...], name: str) -> None:
    (tensors, others), (tensors_then, others_then) = counts
    assert tensors_then == tensors, (
        f"{name}: {tensors} live tensors after step {WARM_UP}, {tensors_then} at the end"
    )
    assert others_then <= others + MORE, (
        f"{name}: {others} objects after step {WARM_UP}, {others_then} at the end"
    )


EP_AND_CP = {"mesh__ep": 2, "mesh__cp": 2}


# One object in every second step is found.
@pytest.mark.full
@pytest.mark.parametrize("steps", [90, 2000])
def test_training_at_ep_2_and_cp_2_leaves_nothing_to_the_garbage_collector(
    tmp_path: Path, steps: int
) -> None:
    ranks = run_ranks(counts_around, 2, str(tmp_path), steps, EP_AND_CP, timeout=60 + 0.6 * steps)
    for rank, counts in enumerate(ranks):
        check(counts, f"rank {rank}")


LAYOUTS: dict[str, dict[str, Any]] = {
    "etp": {"mesh__etp": 2},
    "all_to_all": {"mesh__ep": 2, "experts__dispatcher": "all_to_all"},
    "flex": {"mesh__ep": 2, "experts__dispatcher": "flex", "experts__flex__rows": 8.0},
    "heads exchanged": {"mesh__ep": 2, "mesh__cp": 2, "context_parallel__mode": "all_to_all"},
    "keys gathered": {"mesh__ep": 2, "mesh__cp": 2, "context_parallel__mode": "all_gather"},
    "tp": {"mesh__ep": 2, "mesh__tp": 2},
    "recompute": {"mesh__ep": 2, "memory__recompute": "layer"},
    "deepseek": {"mesh__ep": 2, "model__preset": "tiny-deepseek-v3", "memory__recompute": "norms"},
    "capacity": {"mesh__ep": 2, "experts__capacity__factor": 1.0},
}


TORCH_PYTREE = {"GenericAlias", "cell", "function", "tuple"}
"""``torch.utils._pytree``, which torch's checkpoint calls, defines a function that calls itself."""


def garbage_of(output_dir: str, names: list[str]) -> dict[str, list[str]]:
    """In these layouts: types of what only the collector frees of three steps, one forward without a backward
    and an evaluation, and how many tensors that forward left."""
    found = {}
    for name in names:
        overrides = LAYOUTS[name]
        batch = {"train__global_batch_size": 2 // overrides.get("mesh__cp", overrides.get("mesh__tp", 1))}
        config = tiny_config(output_dir, dist.get_world_size(), **(SMALL | batch | overrides))
        run = Run(config, build_meshes(config.mesh))
        for _ in range(2):
            run.train_step()
            abandon_forward(run)
        gc.collect()
        gc.disable()
        try:
            run.train_step()
            run.feed.held_out_loss(run.decoder, run.data.eval_batches(1))
            before = live_at_last()
            abandon_forward(run)
            left = live_at_last(before)[0] - before[0]
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            types = sorted({type(each).__qualname__ for each in gc.garbage} - TORCH_PYTREE)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            run.close("finished")
        found[name] = types + [f"{left} tensors"] * (left != 0)
    return found


def abandon_forward(run: Run) -> None:
    """A forward with gradients whose backward never comes."""
    (inputs,) = run.feed.inputs(run.data.next_step())
    counts = run.feed.count(run.decoder, [inputs])
    with engine_of(run.model).micro_batch(last=False):
        run.decoder(**inputs, counts=counts, routing=run.feed.routing())


@pytest.mark.parametrize(
    "names",
    [
        ["etp", "heads exchanged", "tp", "deepseek"],
        pytest.param(
            ["all_to_all", "flex", "keys gathered", "recompute", "capacity"], marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_no_layout_of_a_step_makes_reference_cycles(tmp_path: Path, names: list[str]) -> None:
    for found in run_ranks(garbage_of, 2, str(tmp_path), names):
        assert not any(found.values()), found
