"""Moments in torchao's formats (``AdamW8bit``, ``AdamW4bit``, ``AdamWFp8``), stepped by torchao's function.

torchao shares a scale among blocks of 256 elements (128 in four bits), counted in the flattened parameter. No
slice may cut a block (``fsdp.granule_size = 256``). Then a rank's piece, a 1-D tensor, has the codes that
torchao makes of the whole parameter, on every mesh. Which parameters have codes is decided by their whole
shape; torchao decides by what each rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fsdmoe.kernels.adamw_step import CHUNK
from fsdmoe.optim.config import TORCHAO_BLOCKS

_MIN_NUMEL = 4096  # torchao leaves smaller parameters alone


def has_codes(kept: str, numel: int) -> bool:
    """Whether torchao keeps a parameter of so many elements, all ranks together, in codes."""
    return numel >= _MIN_NUMEL and numel % TORCHAO_BLOCKS[kept] == 0


def num_codes(kept: str, numel: int) -> int:
    """Bytes of codes."""
    return numel // 2 if kept == "torchao_4bit" else numel


@dataclass(frozen=True)
class TorchaoMoment:
    """A flat run of whole blocks."""

    kept: str
    codes: torch.Tensor
    """uint8: an element each, or two in four bits."""
    scales: torch.Tensor
    """float32, one a block."""
    state: torch.Tensor | None
    """torchao's tensor around both; none where the run is empty, which torchao has no state for."""

    @classmethod
    def zeros(cls, kept: str, numel: int, device: torch.device, *, signed: bool) -> TorchaoMoment:
        if numel == 0:
            codes = torch.zeros(0, dtype=torch.uint8, device=device)
            return cls(kept, codes, torch.zeros(0, device=device), None)
        state: Any = _zeros(kept, numel, device, signed)
        return cls(kept, state.codes.view(torch.uint8), state.scale, state)


def _zeros(kept: str, numel: int, device: torch.device, signed: bool) -> torch.Tensor:
    try:
        from torchao.optim.subclass_4bit import OptimState4bit
        from torchao.optim.subclass_8bit import OptimState8bit
        from torchao.optim.subclass_fp8 import OptimStateFp8
    except ImportError as error:
        raise ImportError(
            f"optim.moment_dtype: {kept} needs torchao: pip install 'fsdmoe[torchao]'"
        ) from error
    shape = (numel,)
    block = TORCHAO_BLOCKS[kept]
    if kept == "torchao_float8":
        return OptimStateFp8.zeros(shape, block, device, dtype=torch.float32)
    made = OptimState4bit if kept == "torchao_4bit" else OptimState8bit
    return made.zeros(shape, signed, block, device, dtype=torch.float32)


@cache
def _adam(device_type: str) -> Any:
    """torchao's update. On a GPU it is compiled, as torchao does: one kernel for each length of pieces, which
    layers that are alike share. On a CPU it stays plain torch, since a compiled one needs a C++ compiler."""
    from torchao.optim.adam import single_param_adam

    if device_type == "cpu":
        return single_param_adam
    compiled = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

    def run(*args: Any) -> None:
        with torch._dynamo.utils.disable_cache_limit():  # there are as many lengths as there are
            compiled(*args)

    return run


def update_by_torchao(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: TorchaoMoment,
    exp_avg_sq: TorchaoMoment,
    step: torch.Tensor,
    settings: dict[str, Any],
) -> None:
    """One AdamW update of a run of one parameter; ``step`` counts from 1."""
    first, second, numel = exp_avg.state, exp_avg_sq.state, main.numel()
    assert first is not None
    assert second is not None
    chunk = numel if main.is_cuda else CHUNK  # plain torch has many intermediate results
    adam = _adam(main.device.type)
    lr = torch.tensor(settings["lr"], dtype=torch.float32)
    rest = (
        *settings["betas"],
        settings["weight_decay"],
        settings["eps"],
        True,
        False,
    )  # AdamW, to the nearest
    for start in range(0, numel, chunk):
        part = slice(start, min(start + chunk, numel))
        moments = (first, second) if chunk >= numel else (first[part], second[part])
        adam(main[part], grad[part], step, *moments, None, lr, *rest)
