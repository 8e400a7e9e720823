"""Wrapped models of every family through the kernels equal transformers' own, in Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fsdmoe.kernels import triton as fused_kernels
from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.triton import launch
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel import ParallelPolicy, parallelize
from tests.huggingface.test_fused_layers import EVERY, WIDE, assert_same, outcome, tiny

NO_ROTATION = ("deepseek_v2",)  # complex numbers
NO_ROUTER = ("llama", "llama dynamic")


@pytest.mark.parametrize("family", EVERY)
def test_a_wrapped_model_equals_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: Counter[str] = Counter()
    original = launch.QuickLaunch.__getitem__

    def counted(self: Any, grid: Any) -> Any:
        launched[self.function.__name__] += 1
        return original(self, grid)

    monkeypatch.setattr(launch.QuickLaunch, "__getitem__", counted)
    monkeypatch.setattr(fused_kernels, "supports", lambda *_: False)  # experts have cases of their own
    expected = outcome(tiny(family), family)
    with kernels("triton"):
        assert_same(outcome(parallelize(tiny(family), build_meshes()), family), expected)
    # Evaluation and training, with queries and keys in each of two layers, and backward.
    assert launched["_rope_kernel"] == (0 if family in NO_ROTATION else 12)
    assert launched["_rms_norm_kernel"] >= 2 * launched["_rms_norm_backward_kernel"] > 0
    assert (launched["_forward_kernel"] > 0) == (family not in NO_ROUTER)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_norms_and_rotary_positions_are_made_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_kernels, "supports", lambda *_: False)
    expected = outcome(tiny(family), family)
    policy = ParallelPolicy(precision=WIDE, recompute="norms", grad_divisor=1.0)
    with kernels("triton"):
        assert_same(outcome(parallelize(tiny(family), build_meshes(), policy), family), expected)
