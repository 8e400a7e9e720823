"""One of several ranks: runs with graphs beside runs without, by layout. Arguments: a folder, names."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.experts.dispatch.flex_state import FlexState
from fsdmoe.graphs import GraphedMicroBatches, LayeredMicroBatches, MicroBatches
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import flex_state_of
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config

COMMON: dict[str, Any] = {
    "precision__param_dtype": "bfloat16", "data__seq_len": 128, "model__hidden_size": 128,
    "model__moe_intermediate_size": 64, "model__num_hidden_layers": 2, "model__num_attention_heads": 4,
    "model__num_key_value_heads": 2, "model__head_dim": 32, "train__steps": 8, "train__eval_interval": 6,
    "train__eval_batches": 1, "train__global_batch_size": 16, "train__micro_batch_size": 2,
}  # fmt: skip
FLEX: dict[str, Any] = {"mesh__ep": 4, "experts__dispatcher": "flex", "experts__flex__rows": 8.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "tp": {"mesh__tp": 2},
    "replicas": {"mesh__dp_outer": 2},
    "flex": FLEX,
    "tight": FLEX | {"experts__flex__rows": 2.0, "optim__lr": 1e-4, "train__steps": 12},
    "clones": FLEX | {"experts__clones": 2, "experts__clone_rows": 0},
    "crowded, clones": FLEX
    | {
        "experts__flex__rows": 1.5,
        "optim__lr": 1e-4,
        "train__steps": 12,
        "experts__clones": 2,
        "experts__clone_rows": 0,
    },
    "padded": FLEX | {"experts__flex__domain": 1},
    "layers": {"mesh__ep": 4, "experts__dispatcher": "all_to_all", "train__graphs": "layer"},
    "cloned layers": {
        "mesh__ep": 4,
        "experts__clones": 2,
        "experts__clone_rows": 0,
        "train__graphs": "layer",
    },
}
_CROWDED_STEP = 8
"""In which all tokens go to the same two experts of eight, 2.15 times an even share of rows; those of "tight"
and "crowded, clones" alone run so long."""


@contextlib.contextmanager
def crowded(run: Run) -> Iterator[None]:
    """The first router sees no difference between experts."""
    weight = run.decoder.routers()[0].weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
    yield
    with torch.no_grad():
        weight.copy_(kept)


def _counts(runner: MicroBatches, flex: FlexState | None) -> tuple[int, int]:
    """Micro-batches that were replayed, and steps that were repeated."""
    replays = runner.num_replays if isinstance(runner, GraphedMicroBatches) else 0
    return replays, 0 if flex is None else flex.num_repeated


def losses(folder: str, changes: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Of every step, with evaluations in between; and what was replayed and repeated."""
    config = tiny_config(folder, dist.get_world_size(), **COMMON | changes)
    run = Run(config, build_meshes(config.mesh))
    runner, flex = run.micro_batches, flex_state_of(run.model)
    found: list[float] = []
    num_both = 0
    while run.progress["step"] < config.train.steps:
        before = _counts(runner, flex)
        with crowded(run) if run.progress["step"] == _CROWDED_STEP else contextlib.nullcontext():
            record = run.train_step()
        num_both += all(map(int.__gt__, _counts(runner, flex), before))
        found += [record.loss, record.grad_norm]
        if config.train.evaluates_at(record.step):
            found.append(run.evaluate())
    figures: dict[str, Any] = {} if flex is None else flex.figures()
    if isinstance(runner, GraphedMicroBatches | LayeredMicroBatches):
        figures["replayed and repeated"] = num_both
        figures |= {"graphs": runner.num_graphs, "replays": runner.num_replays}
    run.close("finished")
    return found, figures


def main() -> None:
    folder, *names = sys.argv[1:]
    build_meshes()  # the ranks know each other from here on
    for name in names:
        began, way = time.monotonic(), LAYOUTS[name].get("train__graphs", "step")
        both = {
            graphs: losses(str(Path(folder) / name / graphs), LAYOUTS[name] | {"train__graphs": graphs})
            for graphs in ("none", way)
        }
        (plain, before), (replayed, figures) = both["none"], both[way]
        worst = max(abs(a - b) / abs(a) for a, b in zip(plain, replayed, strict=True))
        if dist.get_rank() == 0:
            seconds = time.monotonic() - began
            print(
                f"{name}: worst difference {worst:.1e}; plain {before}; graphs {figures}; {seconds:.0f} s",
                flush=True,
            )
        assert figures["replays"] > 0
        assert figures.get("repeated", 0) == before.get("repeated", 0)
        assert name != "tight" or figures["repeated"] > 0
        assert "clones" not in name or figures["repeated"] == 0
        assert all(map(math.isfinite, replayed)), replayed
        assert worst < 1e-3, (plain, replayed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
