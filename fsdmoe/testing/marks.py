"""Marks that skip a test on a machine without what it needs, and say so."""

import importlib.util
import os

import pytest
import torch

# Ask the driver's tools, not the driver: pooled ranks are forked, and CUDA refuses to start in the child of a
# process that has initialised it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""For the environment of several ranks that a test starts itself: one GPU would not do for them."""

_HIDDEN = ", of which CUDA_VISIBLE_DEVICES hides all" if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else ""
requires_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=f"needs a CUDA GPU{_HIDDEN}")
requires_nccl = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.distributed.is_nccl_available()),
    reason=f"needs NCCL and a CUDA GPU{_HIDDEN}",
)
requires_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install 'fsdmoe[hf]'"
)
requires_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None or importlib.util.find_spec("transformers") is None,
    reason="needs peft: pip install 'fsdmoe[adapters]'",
)
