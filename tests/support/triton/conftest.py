"""Shared by the cases that run in Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


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
