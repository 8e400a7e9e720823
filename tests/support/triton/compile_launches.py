"""Compile every kernel launch for a GPU that is not there.

Inside :func:`compiling`, launching a kernel compiles it for the given architecture with the very arguments,
options and specialisations of that launch, and runs nothing: outputs stay as they were allocated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}


def _type_of(value: Any) -> str:
    if isinstance(value, GluonDescriptor):
        block = ",".join(str(size) for size in value.block_shape)
        return f"tensordesc<{_TYPES[value.base.dtype]}[{block}],{value.layout!r}>"
    if isinstance(value, TensorDescriptor):
        block = ",".join(str(size) for size in value.block_shape)
        return f"tensordesc<{_TYPES[value.base.dtype]}[{block}]>"
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def _source(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ASTSource:
    values = dict(zip(kernel.arg_names, args)) | {k: v for k, v in kwargs.items() if k in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        signature[parameter.name] = _type_of(value)
        is_whole = isinstance(value, int) and not parameter.do_not_specialize and value % 16 == 0
        if isinstance(value, torch.Tensor) or is_whole:
            attributes[(index,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return kind(kernel, signature, constants, attributes)


@contextlib.contextmanager
def compiling(architecture: int) -> Iterator[dict[str, Any]]:
    """Yields the compiled kernels, by name and by whatever tells launches of one kernel apart."""
    target = GPUTarget("cuda", architecture, 32)
    compiled: dict[str, Any] = {}

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
        source = _source(kernel, args, kwargs)
        key = f"{kernel.__name__} {source.signature} {source.constants} {options}"
        if key not in compiled:
            compiled[key] = triton.compile(source, target=target, options=options)

    with mock.patch.object(JITFunction, "run", run):
        yield compiled
