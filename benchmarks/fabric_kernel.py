"""A transfer of the emulated fabric on a GPU: blocks that copy bytes, then hold their multiprocessors until
the transfer's time is over.

Time begins when the first block of a transfer runs. That block books the links: a link is busy until some
nanosecond of the GPU's global timer, a new transfer begins there or now, whatever is later, and moves that
point on by its own time. The other blocks read when the transfer ends::

    state   nvlink busy until | network busy until | slot 0: end, blocks gone | slot 1: end, blocks gone | ...

A slot is zero before its transfer and after, so that transfers recorded in a CUDA graph can run again. The
kernel's name says what kind of traffic it stands for (``fabric_gather``): profiles need nothing else."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch.cuda._utils import _check_cuda, _get_gpu_runtime_library

NUM_SLOTS = 4096
THREADS = 512
SHARED_BYTES = 96 * 1024
"""With these a block of a large matrix product does not fit beside it, nor would it beside one of NCCL's."""

_SOURCE = """
typedef unsigned long long u64;

__device__ __forceinline__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__device__ u64 book(u64* busy, u64 nanoseconds) {
    u64 seen = atomicAdd(busy, 0ull), start;
    if (nanoseconds == 0) return now();
    while (true) {
        u64 t = now();
        start = seen > t ? seen : t;
        u64 found = atomicCAS(busy, seen, start + nanoseconds);
        if (found == seen) return start + nanoseconds;
        seen = found;
    }
}

template <typename T>
__device__ void repeat(T* out, const T* own, u64 out_size, u64 own_size) {
    const u64 stride = (u64)gridDim.x * blockDim.x, first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (u64 begin = 0; begin < out_size; begin += own_size) {
        const u64 size = out_size - begin < own_size ? out_size - begin : own_size;
        T* to = out + begin;
        if (to == own) continue;
        u64 i = first;
        for (; i + 7 * stride < size; i += 8 * stride) {
            T x[8];
            #pragma unroll
            for (int k = 0; k < 8; k++) x[k] = own[i + k * stride];
            #pragma unroll
            for (int k = 0; k < 8; k++) to[i + k * stride] = x[k];
        }
        for (; i < size; i += stride) to[i] = own[i];
    }
}

extern "C" __global__ void __launch_bounds__(512) KERNEL(
    char* out, char* own, u64* state, int slot_index, double out_bytes, double own_bytes, double nvlink_ns,
    double network_ns, double latency_ns
) {
    __shared__ u64 end;
    u64* slot = state + 2 + 2 * slot_index;
    if (threadIdx.x == 0) {
        u64 seen = atomicCAS(slot, 0ull, 1ull);
        if (seen == 0) {
            u64 near = book(state, (u64)nvlink_ns), far = book(state + 1, (u64)network_ns);
            seen = (near > far ? near : far) + (u64)latency_ns;
            atomicExch(slot, seen);
        }
        while (seen <= 1) seen = atomicAdd(slot, 0ull);
        end = seen;
    }
    __syncthreads();
    const u64 o = (u64)out_bytes, n = (u64)own_bytes;
    if (o > 0 && n > 0) {
        const u64 any = (u64)out | (u64)own | o | n;
        if (any % 16 == 0) repeat((int4*)out, (const int4*)own, o / 16, n / 16);
        else if (any % 4 == 0) repeat((int*)out, (const int*)own, o / 4, n / 4);
        else repeat(out, own, o, n);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        while (now() < end) __nanosleep(100);
        if (atomicAdd(slot + 1, 1ull) == gridDim.x - 1) {
            atomicExch(slot + 1, 0ull);
            atomicExch(slot, 0ull);
        }
    }
    __syncthreads();
}
"""


class Timed:
    """Launches transfers on the current stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._state = torch.zeros(2 + 2 * NUM_SLOTS, dtype=torch.int64, device=device)
        self._number = 0
        self._all_sms = 2 * torch.cuda.get_device_properties(device).multi_processor_count

    def run(
        self, stream: torch.cuda.Stream, kind: str, out: torch.Tensor | None, own: torch.Tensor | None, *,
        num_sms: int | None, seconds: tuple[float, float, float],
    ) -> None:  # fmt: skip
        """Fill ``out`` with repetitions of ``own``, and be done no sooner than the links allow: ``seconds``
        on NVLink, on the network, and of latency. Without ``num_sms`` the whole GPU copies."""
        self._number = (self._number + 1) % NUM_SLOTS
        pointers = (0, 0) if out is None or own is None else (out.data_ptr(), own.data_ptr())
        moved = (0, 0) if out is None or own is None else (out.nbytes, own.nbytes)
        nanoseconds = (1e9 * each for each in seconds)
        _kernel(kind).launch(
            stream, num_sms or self._all_sms, SHARED_BYTES if num_sms else 0,
            (*pointers, self._state.data_ptr(), self._number, *moved, *nanoseconds),
        )  # fmt: skip


_ARGUMENTS = (*[ctypes.c_void_p] * 3, ctypes.c_int, *[ctypes.c_double] * 5)


class _Kernel:
    """A compiled kernel, launched by the driver's own call: torch's opens the library again every time. The
    call copies its arguments, so their places are made once."""

    def __init__(self, name: str) -> None:
        self._kernel: Any = torch.cuda._compile_kernel(_SOURCE.replace("KERNEL", name), name)
        self._kernel.set_shared_memory_config(SHARED_BYTES)
        self._launch = _get_gpu_runtime_library().cuLaunchKernel
        self._places: list[Any] = [kind() for kind in _ARGUMENTS]
        self._addresses = (ctypes.c_void_p * len(_ARGUMENTS))(*map(ctypes.addressof, self._places))

    def launch(
        self, stream: torch.cuda.Stream, num_blocks: int, shared_bytes: int, arguments: tuple[float, ...]
    ) -> None:
        for place, value in zip(self._places, arguments, strict=True):
            place.value = value
        handle, function = ctypes.c_void_p(stream.cuda_stream), self._kernel.func
        grid = (num_blocks, 1, 1, THREADS, 1, 1)
        _check_cuda(self._launch(function, *grid, shared_bytes, handle, self._addresses, None))


@functools.cache
def _kernel(kind: str) -> _Kernel:
    return _Kernel(f"fabric_{kind}")
