"""Wrapped models of every family through the kernels equal transformers' own, in Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fsdmoe.kernels import triton as fused_kernels
from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.triton import launch
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import parallelize
from tests.huggingface.test_fused_layers import EVERY, assert_same, outcome, tiny

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
