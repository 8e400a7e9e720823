"""What transformers keeps in float32 stays in it, however the model is built and whatever it computes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint import to_hf
from fsdmoe.fsdp import ShardedTensor
from fsdmoe.huggingface.accelerator import whole_weights
from fsdmoe.huggingface.refit import iterate_weights
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.moe_families import tiny_model

pytestmark = requires_transformers
KEPT = ("e_score_correction_bias", "gate.weight")


def kept_of(family: str) -> tuple[str, ...]:
    return KEPT if family == "ernie4_5_moe" else KEPT[:1]  # a router's weight has no fine differences


def values(model: nn.Module, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {name: value.detach() for name, value in state.items() if name.endswith(names)}
    return {n: v.full_tensor() if isinstance(v, ShardedTensor) else v.clone() for n, v in found.items()}


def save_folder(family: str, folder: Path) -> None:
    """As those models are published: bfloat16, and biases whose differences bfloat16 cannot tell."""
    model = tiny_model(family).bfloat16()
    for seed, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items()):
        if name.endswith(kept_of(family)):
            random = torch.Generator().manual_seed(seed)
            tensor.data = 7 + 0.02 * torch.randn(tensor.shape, generator=random)
    model.config.dtype = torch.bfloat16  # type: ignore[union-attr]
    model.save_pretrained(folder)  # type: ignore[operator]


def loaded(family: str, folder: str) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """What each way of building gives, with what from_pretrained gives."""
    from transformers import AutoConfig, AutoModelForCausalLM

    meshes, pairs = build_meshes(), []
    config = AutoConfig.from_pretrained(folder)
    expected = values(AutoModelForCausalLM.from_pretrained(folder), kept_of(family))
    for device in ("meta", "cpu"):
        for policy in (None, ParallelPolicy()):
            with torch.device(device):
                model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            pairs.append((values(parallelize(model, meshes, policy, load=folder), kept_of(family)), expected))
    sent: dict[str, torch.Tensor] = {}
    for bucket in iterate_weights(model, names="memory", dtype=torch.bfloat16):
        sent |= bucket
    whole = whole_weights(model, keep=True, dtype=torch.bfloat16)
    checkpoint.save(f"{folder}_saved", model)
    to_hf(f"{folder}_saved", f"{folder}_again")
    pairs += [({name: each[name] for name in expected}, expected) for each in (sent, whole)]
    again = AutoModelForCausalLM.from_pretrained(f"{folder}_again")
    return [*pairs, (values(again, kept_of(family)), expected)]


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_biases_and_routers_are_what_from_pretrained_gives(family: str, tmp_path: Path) -> None:
    save_folder(family, tmp_path / "hf")
    for found, expected in run_ranks(loaded, 1, family, str(tmp_path / "hf"))[0]:
        assert expected
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == torch.float32, name
            torch.testing.assert_close(found[name], value, atol=0, rtol=0)
            assert not torch.equal(value, value.bfloat16().float()), "it shows"
