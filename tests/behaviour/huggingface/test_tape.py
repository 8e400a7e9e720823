"""``train.py`` on a Hugging Face folder records its routing and follows it under another mesh."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe.config import build_config
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import requires_transformers, run_ranks
from fsdmoe.train import Run
from tests.support.hf_tiny import tiny_hf
from tests.support.tiny_run import TINY
from tests.support.token_run import write_documents

pytestmark = requires_transformers
STEPS = 2


def course(hf: str, folder: str, data: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Losses and loads, and the gradients of the first step."""
    mapping = copy.deepcopy(TINY) | {"model": {"hf": hf}, "experts": {}, "optim": {"name": "sgd", "lr": 0.5}}
    mapping["data"] = {
        "kind": "tokens", "path": data, "shuffle": False, "document_end": 1, "holdout": 0.0,
        "tokenizer": "bytes", "seq_len": 32,
    }  # fmt: skip
    mapping["train"] |= {"steps": STEPS, "eval_interval": -1, "micro_batch_size": 2, "output_dir": folder}
    problems: list[str] = []
    dotted = {key.replace("__", "."): str(value) for key, value in overrides.items()}
    config = build_config(mapping, dotted, dist.get_world_size(), problems)
    assert config is not None, problems
    run = Run(config, build_meshes(config.mesh))
    found: dict[str, Any] = {"losses": [], "loads": [], "gradients": {}}
    step = run.optimizer.step

    def look_and_step() -> None:
        named = dict(run.model.named_parameters())
        found["gradients"] = found["gradients"] or {
            name: p.grad.full_tensor().clone()  # type: ignore[attr-defined]
            for name, p in named.items()
            if p.grad is not None
        }
        step()

    run.optimizer.step = look_and_step  # type: ignore[method-assign,assignment]
    for _ in range(STEPS):
        record = run.train_step()
        found["losses"].append(record.loss)
        found["loads"].append(torch.stack([torch.as_tensor(load) for load in record.loads.values()]))
    run.close("finished")
    return found


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, {"mesh__ep": 4, "mesh__tp": 2, "data__seq_len": 64, "train__global_batch_size": 4}),
        (4, {"mesh__cp": 2, "mesh__ep": 2, "memory__recompute": "layer"}),
    ],
)
def test_a_recording_of_a_wrapped_model_is_followed_under_another_mesh(
    tmp_path: Path, family: str, ranks: int, layout: dict[str, Any]
) -> None:
    data, changes = write_documents(tmp_path), {"vocab_size": 264, "output_router_logits": False}
    first, second = tmp_path / "first", tmp_path / "second"
    tiny_hf(family, **changes).save_pretrained(first)  # type: ignore[operator]
    other = tiny_hf(family, **changes)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    other.save_pretrained(second)  # type: ignore[operator]
    record, replay = {"experts__record": tmp_path / "routing"}, {"experts__replay": tmp_path / "routing"}
    (recorded,) = run_ranks(course, 1, str(first), str(tmp_path / "a"), data, record)
    (alone,) = run_ranks(course, 1, str(second), str(tmp_path / "b"), data, replay)
    (free,) = run_ranks(course, 1, str(second), str(tmp_path / "c"), data, {})
    for one, two in zip(alone["loads"], recorded["loads"], strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(free["loads"][0], recorded["loads"][0])
    layout = layout | ({"train__micro_batch_size": 1} if "data__seq_len" in layout else {})
    split = run_ranks(course, ranks, str(second), str(tmp_path / "d"), data, replay | layout)[0]
    assert split["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    for one, two in zip(split["loads"], alone["loads"], strict=True):
        assert torch.equal(one, two)
    for name, gradient in alone["gradients"].items():
        bound = 1e-5 * gradient.abs().max() + 1e-7
        assert (split["gradients"][name] - gradient).abs().max() <= bound, name
