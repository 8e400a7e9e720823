"""Names of dtypes in files. A closed table: nothing that a file says is ever looked up in a module."""

from __future__ import annotations

import torch

from fsdmoe.checkpoint.errors import CheckpointError

# safetensors' names, which metadata uses as well
_BY_NAME = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}
KNOWN_DTYPES = tuple(_NAMES)


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    if dtype not in _NAMES:
        raise CheckpointError(f"{tensor}: tensors of {dtype} cannot be saved; convert it")
    return _NAMES[dtype]


def dtype_named(name: str, where: str) -> torch.dtype:
    if name not in _BY_NAME:
        raise CheckpointError(f"{where}: dtype {name!r} is not known to this version")
    return _BY_NAME[name]
