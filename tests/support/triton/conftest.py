"""Shared by the cases that run in Triton's interpreter."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.support.triton import older_interpreter

older_interpreter.correct()


@pytest.fixture(autouse=True, scope="session")
def _language_patched_once() -> Iterator[None]:
    """The interpreter patches the language anew in every call of a device function: a quarter of its
    time. A launch has done so for our kernels already; Triton's own functions, which see another module,
    need it once."""
    patched: set[bool] = {False}
    monkeypatch = pytest.MonkeyPatch()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self.sees_core not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.sees_core)
        return self.rewrite()(*args, **options)

    def sees_core(self: Any) -> bool:
        return any(value is tl.core for value in self.fn.__globals__.values())

    cached = functools.cached_property(sees_core)
    cached.__set_name__(interpreter.InterpretedFunction, "sees_core")
    monkeypatch.setattr(interpreter.InterpretedFunction, "sees_core", cached, raising=False)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    yield
    monkeypatch.undo()


def _by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Computed once for each type, of which some cannot be hashed."""
    found: dict[str, Any] = {}

    def look_up(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = function(kind)
        return found[kind.name]

    return look_up


@pytest.fixture(autouse=True, scope="session")
def _nothing_computed_for_nobody() -> Iterator[None]:
    """Every sum and product of integers is computed again in int64, and whether it overflowed is told to an
    assertion that is off: a third of the time. The tables of types are built anew whenever one is asked."""
    monkeypatch = pytest.MonkeyPatch()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "with it, overflows are asserted"
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(builder, "options", options)
    monkeypatch.setattr(interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype))
    yield
    monkeypatch.undo()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every fresh tensor holds NaN, or the largest integer: what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fp8_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses the carry of a number that is rounded up to the next power of two."""
    original, types = (
        interpreter._convert_float,
        {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2},
    )

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target not in types:
            return original(values, source, target, rounding)
        return torch.from_numpy(values).float().to(types[target]).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def bf16_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bf16 as if they were numbers, and rounds to it by cutting."""
    convert_any, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != tl.bfloat16 or source != tl.float32:
            return convert_any(values, source, target, rounding)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype("uint32") << 16).view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
