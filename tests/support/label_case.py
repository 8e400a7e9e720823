"""A step of train.py with a label outside of the vocabulary on one rank. Run as a module: one of several NCCL
ranks that share a GPU."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fsdmoe.mesh import build_meshes
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config

ROW, TOKEN = 1, 3
VOCABULARY = 264
OVERRIDES: dict[str, Any] = {
    "data__seq_len": 16, "data__max_bytes": 20_000, "train__micro_batch_size": 2,
    "train__global_batch_size": 4,
}  # fmt: skip


def step_with_a_label(output_dir: str, label: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """A good step, then one in whose first micro-batch the last rank (under tp: all) finds ``label``: what
    came of it, and whether the optimizer ran."""
    config = tiny_config(output_dir, dist.get_world_size(), **(OVERRIDES | overrides))
    run = Run(config, build_meshes(config.mesh))
    run.train_step()
    before = [parameter.detach().full_tensor().clone() for parameter in run.model.parameters()]  # type: ignore[attr-defined]
    inputs_of = run.feed.inputs

    def inputs(prepared: Any) -> Any:
        made = inputs_of(prepared)
        if config.mesh.tp > 1 or dist.get_rank() == dist.get_world_size() - 1:
            made[0]["labels_BS"][ROW, TOKEN] = label
            made[0]["loss_mask_BS"][ROW, TOKEN] = True
        return made

    try:
        with mock.patch.object(run.feed, "inputs", inputs):
            outcome = f"loss {run.train_step().loss}"
    except RuntimeError as error:
        outcome = str(error)
    after = [parameter.detach().full_tensor() for parameter in run.model.parameters()]  # type: ignore[attr-defined]
    run.close("finished")
    return {"outcome": outcome, "unchanged": all(map(torch.equal, before, after))}


def main() -> None:
    build_meshes()  # the process group
    with tempfile.TemporaryDirectory() as folder:
        found = step_with_a_label(folder, int(sys.argv[1]), json.loads(sys.argv[2]))
    print(f"RESULT {json.dumps(found)}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # a device that reported an error may not let its process group be taken down


if __name__ == "__main__":
    main()
