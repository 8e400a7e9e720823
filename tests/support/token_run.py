"""``train.py`` on documents of equal length, so that rows of any multiple of it cut none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdmoe.mesh import build_meshes
from fsdmoe.train import Run
from tests.support.tiny_run import tiny_config

DOCUMENT, NUM_DOCUMENTS, STEPS = 16, 96, 2
_SETTINGS = {
    "data__kind": "tokens", "data__max_bytes": "none",
    "data__shuffle": False, "data__document_end": 1, "data__holdout": 0,
    "train__eval_interval": -1, "train__steps": STEPS, "train__global_batch_size": 8,
    "train__micro_batch_size": 2, "optim__name": "sgd", "optim__lr": 0.5, "experts__balance__sequence": 0,
    "experts__balance__z_loss": 0.01, "model__initializer_range": 0.3,
}  # fmt: skip


def write_documents(folder: Path) -> str:
    """The path of a file of tokens."""
    tokens = np.random.default_rng(0).integers(4, 96, (NUM_DOCUMENTS, DOCUMENT))
    tokens[:, -1] = 1
    np.save(folder / "tokens.npy", tokens.astype(np.uint16).reshape(-1))
    return str(folder / "tokens.npy")


def course(folder: str, data: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Losses and expert loads of a few steps, and the gradients of the first, from all ranks."""
    settings = _SETTINGS | {"data__path": data, "train__output_dir": folder} | overrides
    config = tiny_config(folder, dist.get_world_size(), **settings)
    run = Run(config, build_meshes(config.mesh))
    found: dict[str, Any] = {"losses": [], "loads": [], "gradients": {}}
    step = run.optimizer.step

    def look_and_step() -> None:
        if not found["gradients"]:
            named = dict(run.model.named_parameters())
            found["gradients"] = {
                n: p.grad.full_tensor().clone() for n, p in named.items() if p.grad is not None
            }  # type: ignore[attr-defined]
        step()

    run.optimizer.step = look_and_step  # type: ignore[method-assign,assignment]
    for _ in range(STEPS):
        record = run.train_step()
        found["losses"].append(record.loss)
        found["loads"].append(torch.stack([torch.as_tensor(load) for load in record.loads.values()]))
    run.close("finished")
    return found


def assert_same(
    found: dict[str, Any], wanted: dict[str, Any], bound: float = 1e-5, steps: int = STEPS
) -> None:
    """Losses and loads of the first steps, and every gradient."""
    for one, other in zip(found["losses"][:steps], wanted["losses"][:steps], strict=True):
        assert abs(one - other) <= bound * abs(other), (found["losses"], wanted["losses"])
    for one, other in zip(found["loads"][:steps], wanted["loads"][:steps], strict=True):
        assert torch.equal(one, other)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for name, gradient in wanted["gradients"].items():
        scale = gradient.abs().max()
        assert (found["gradients"][name] - gradient).abs().max() <= bound * scale, name
