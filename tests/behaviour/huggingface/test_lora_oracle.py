"""Gradients of adapters in bfloat16, next to those of peft on plain transformers, both against float64.

All have the same weights, which are rounded to bfloat16 beforehand. Every token goes to all experts: a router
that rounds may choose others than the oracle's. What is left is the rounding of the arithmetic.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_peft, run_ranks
from tests.support.hf_tiny import batch
from tests.support.lora_case import EXPERTS
from tests.support.peft_table import ATTENTION, Target, Tensors

pytestmark = requires_peft

NEAR = 1.5
"""The error may be so many times that of peft's gradients, over all batches. 1.27 was seen."""
BATCHES, ROWS, LENGTH = 2, 4, 16
SCALE = 0.4
_WIDE = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 48, "num_experts_per_tok": 4}


def _target(**settings: Any) -> Target:
    chosen: dict[str, Any] = {"target_modules": list(ATTENTION), "target_parameters": list(EXPERTS)}
    return Target(chosen | settings, changes={**_WIDE, "num_experts": 4})


_SHARED = ["gate_proj", "up_proj", "down_proj"]
CASES = {
    **{f"rank {rank}": _target(r=rank, lora_alpha=rank) for rank in (4, 8, 32, 64, 128)},
    "rsLoRA": _target(r=16, lora_alpha=4, use_rslora=True),
    "one weight of experts": _target(target_modules=[], target_parameters=[EXPERTS[0]]),
    "embedding and head by name": _target(target_modules=[*ATTENTION, "embed_tokens", "lm_head"]),
    "modules to save": _target(modules_to_save=["lm_head", "norm"]),
    "shared experts": dataclasses.replace(
        _target(target_modules=[*ATTENTION, *_SHARED]),
        family="qwen2_moe",
        changes={**_WIDE, "num_experts": 4, "shared_expert_intermediate_size": 48},
    ),
    "gpt-oss": dataclasses.replace(
        _target(), family="gpt_oss", changes={**_WIDE, "intermediate_size": 48, "num_local_experts": 4}
    ),
    "train one, keep one": dataclasses.replace(
        _target(r=8),
        further=({"r": 4, "target_modules": list(ATTENTION), "target_parameters": list(EXPERTS)},),
        active=("default", "second"),
    ),
}
SAMPLE = ("train one, keep one",)


def built(name: str) -> Any:
    """With weights that bfloat16 holds, small enough that rounding does not grow from layer to layer."""
    model = CASES[name].build()
    for key, parameter in model.named_parameters():
        scale = SCALE if parameter.ndim > 1 else 1.0
        parameter.data = (scale * parameter.data).bfloat16().float()
        if name == "train one, keep one" and ".default" in key:
            parameter.requires_grad_(False)
    return model


def plain(name: str, dtype: torch.dtype) -> Tensors:
    """Gradients of each batch by peft on plain transformers."""
    model = built(name).to(dtype)
    model.base_model.model.config._experts_implementation = "eager"  # grouped products know no float64
    found: dict[str, list[torch.Tensor]] = {}
    for number in range(BATCHES):
        tokens, labels = (batch(2 * number + i, 0, rows=ROWS, length=LENGTH) for i in (0, 1))
        logits = model(tokens).logits.to(torch.promote_types(dtype, torch.float32))
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                found.setdefault(key, []).append(parameter.grad.double())
        model.zero_grad()
    return {key: torch.stack(grads) for key, grads in found.items()}


def sharded(name: str) -> Tensors:
    """The same of a model that :func:`parallelize` took. That other meshes compute the same is compared in
    float32 (``test_lora_layouts.py``)."""
    policy = ParallelPolicy(precision=PrecisionConfig(param_dtype="bfloat16"))
    model = parallelize(built(name), build_meshes(), policy)
    decoder, found = as_causal_lm(model), {}
    for number in range(BATCHES):
        tokens, labels = (batch(2 * number + i, 0, rows=ROWS, length=LENGTH) for i in (0, 1))
        mask = torch.ones_like(labels, dtype=torch.bool)
        decoder(tokens, labels_BS=labels, loss_mask_BS=mask).loss.backward()
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                found.setdefault(key, []).append(parameter.grad.full_tensor().double())
        model.zero_grad()
    return {key: torch.stack(grads) for key, grads in found.items()}


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_gradients_are_as_near_to_float64_as_those_of_peft(name: str) -> None:
    ours = run_ranks(sharded, 1, name)[0]
    exact, theirs = plain(name, torch.float64), plain(name, torch.bfloat16)
    assert ours.keys() == exact.keys() == theirs.keys()
    for key, right in exact.items():
        error, allowed = (float((each[key] - right).norm() / right.norm()) for each in (ours, theirs))
        assert error <= NEAR * allowed, f"{key} is off by {error:.1e}, peft's by {allowed:.1e}"
