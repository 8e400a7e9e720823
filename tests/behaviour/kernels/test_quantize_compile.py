"""The kernels that quantise both ways round build for Hopper and Blackwell; no GPU is needed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fsdmoe.kernels.fp8_operands import Wanted
from fsdmoe.kernels.triton.packed_rows_kernels import pack_rows_triton, unpack_rows_triton
from fsdmoe.kernels.triton.quantize_kernels import quantize_both_triton, transpose_codes_triton
from fsdmoe.precision.formats import E4M3, E5M2, Scaling
from tests.support.triton.compile_launches import compiling


@pytest.mark.parametrize("architecture", [90, pytest.param(100, marks=pytest.mark.full)])
def test_codes_are_converted_in_pairs_and_moved_sixteen_bytes_at_a_time(architecture: int) -> None:
    x = torch.zeros(256, 512, dtype=torch.bfloat16)
    with compiling(architecture) as compiled:
        quantize_both_triton(x, Wanted(Scaling(E4M3, (1, None))), Wanted(Scaling(E5M2, (1, None))), 256)
        transpose_codes_triton(x.to(torch.float8_e4m3fn))
    by_name = {key.split()[0]: kernel.asm["ptx"] for key, kernel in compiled.items()}
    assert set(by_name) == {"_measure_kernel", "_quantize_kernel", "_transpose_kernel"}
    for element in ("e4m3", "e5m2"):
        assert f"cvt.rn.satfinite.{element}x2.f32" in by_name["_quantize_kernel"]
    for name, ptx in by_name.items():
        assert "ld.global.v4.b32" in ptx, name
        assert "ld.global.b8" not in ptx, name
        assert "st.global.b8" not in ptx, name
        assert "st.global.v4.b32" in ptx or name == "_measure_kernel", name


@pytest.mark.parametrize("architecture", [pytest.param(90, marks=pytest.mark.full), 100])
def test_rows_that_travel_in_eight_bits_are_packed_and_unpacked(architecture: int) -> None:
    with compiling(architecture) as compiled:
        packed = pack_rows_triton(torch.zeros(4, 256, dtype=torch.bfloat16))
        unpack_rows_triton(packed, 256, torch.bfloat16)
    assert {key.split()[0] for key in compiled} == {"_pack_rows_kernel", "_unpack_rows_kernel"}
    assert all(kernel.asm["cubin"] for kernel in compiled.values())
