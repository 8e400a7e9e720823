"""What a model of transformers keeps in float32 whatever it computes in: biases that choose experts, routers.

Its classes name them (``_keep_in_fp32_modules_strict``), and ``from_pretrained`` follows; a model that is
built from its configuration alone has them in the dtype of all others. A selection bias of about 7 that is
rounded to bfloat16 has 4 values where it had 32, and most tokens get other experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from fsdmoe.checkpoint.adapter_names import is_adapter_name, stored_name

DtypeOf = Callable[[str, nn.Parameter], torch.dtype]
_HALF = (torch.bfloat16, torch.float16)


def names_in_float32(model: nn.Module) -> Callable[[str], bool]:
    """Whether the model keeps a tensor of this name in float32. Holds nothing of the model."""
    patterns = {
        pattern
        for module in model.modules()
        for pattern in getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    }
    if not patterns:
        return lambda name: False
    found = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)))
    return lambda name: not is_adapter_name(name) and found.search(stored_name(name)) is not None


@torch.no_grad()
def widen_buffers(model: nn.Module) -> None:
    """Keep its buffers of these names in float32, before they get or change their values."""
    is_kept = names_in_float32(model)
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in _HALF and is_kept(f"{path}.{name}"):
                module._buffers[name] = buffer.float()


def dtype_of(model: nn.Module, param_dtype: torch.dtype | None) -> DtypeOf | None:
    """What each parameter is computed in: ``param_dtype``, or its own where that is None, but for those that
    the model keeps in float32. None where ``param_dtype`` is that of all."""
    is_kept = names_in_float32(model)
    if param_dtype is not None and not any(is_kept(name) for name, _ in model.named_parameters()):
        return None

    def choose(name: str, parameter: nn.Parameter) -> torch.dtype:
        chosen = param_dtype or parameter.dtype
        return torch.float32 if chosen in _HALF and is_kept(name) else chosen

    return choose
