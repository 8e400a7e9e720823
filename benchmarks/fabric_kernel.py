"""A transfer of the emulated fabric on a GPU: blocks that copy bytes, then hold their multiprocessors until
the transfer's time is over.

Time begins when the first block of a transfer runs. That block books the links: a link is busy until some
nanosecond of the GPU's global timer, a new transfer begins there or now, whatever is later, and moves that
point on by its own time. The other blocks read when the transfer ends::

    state   nvlink busy until | network busy until | slot 0: end, blocks gone | slot 1: end, blocks gone | ...

A slot is zero before its transfer and after, so that transfers recorded in a CUDA graph can run again. The
kernel's name says what kind of traffic it stands for (``fabric_gather``): profiles need nothing else.

Where no host knows how many rows there are (``flex``), a second kernel reads it on the device."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.cuda._utils import _check_cuda, _get_gpu_runtime_library

NUM_SLOTS = 4096
THREADS = 512
SHARED_BYTES = 96 * 1024
"""With these a block of a large matrix product does not fit beside it, nor would it beside one of NCCL's."""

_COMMON = """
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

template <typename T>
__device__ void repeat_bytes(T* out, const T* own, u64 out_bytes, u64 own_bytes) {
    if (out_bytes == 0 || own_bytes == 0) return;
    const u64 any = (u64)out | (u64)own | out_bytes | own_bytes;
    if (any % 16 == 0) repeat((int4*)out, (const int4*)own, out_bytes / 16, own_bytes / 16);
    else if (any % 4 == 0) repeat((int*)out, (const int*)own, out_bytes / 4, own_bytes / 4);
    else repeat(out, own, out_bytes, own_bytes);
}

// The end of the transfer in this slot, booked by whoever asks first.
__device__ u64 booked(u64* state, u64* slot, u64 nvlink_ns, u64 network_ns, u64 latency_ns) {
    u64 seen = atomicCAS(slot, 0ull, 1ull);
    if (seen == 0) {
        u64 near = book(state, nvlink_ns), far = book(state + 1, network_ns);
        seen = (near > far ? near : far) + latency_ns;
        atomicExch(slot, seen);
    }
    while (seen <= 1) seen = atomicAdd(slot, 0ull);
    return seen;
}

__device__ void wait_until(u64 end, u64* slot) {
    while (now() < end) __nanosleep(100);
    if (atomicAdd(slot + 1, 1ull) == gridDim.x - 1) {
        atomicExch(slot + 1, 0ull);
        atomicExch(slot, 0ull);
    }
}
"""

_SOURCE = (
    _COMMON
    + """
extern "C" __global__ void __launch_bounds__(512) KERNEL(
    char* out, char* own, u64* state, int slot_index, double out_bytes, double own_bytes, double nvlink_ns,
    double network_ns, double latency_ns
) {
    __shared__ u64 end;
    u64* slot = state + 2 + 2 * slot_index;
    if (threadIdx.x == 0) end = booked(state, slot, (u64)nvlink_ns, (u64)network_ns, (u64)latency_ns);
    __syncthreads();
    repeat_bytes(out, own, (u64)out_bytes, (u64)own_bytes);
    __syncthreads();
    if (threadIdx.x == 0) wait_until(end, slot);
    __syncthreads();
}
"""
)

_ROWS_SOURCE = (
    _COMMON
    + """
// Rows of one rank by the plan of an exchange: counts[p] of them go to rank p, first[s + 1] - first[s] come
// from rank s; it keeps first[1] for itself. Two parts of a row lie in memory of their own.
extern "C" __global__ void __launch_bounds__(512) KERNEL(
    char* out, char* own, char* out_2, char* own_2, u64* state, u64* moved_bytes, int* counts, int* first,
    int slot_index, int num_ranks, int homeward, int only_books, double row_bytes, double row_bytes_2,
    double ns_per_byte, double latency_ns
) {
    __shared__ u64 end, rows_out, rows_own;
    u64* slot = state + 2 + 2 * slot_index;
    if (threadIdx.x == 0) {
        u64 sent = 0, received = first[num_ranks];
        for (int rank = 0; rank < num_ranks; rank++) sent += counts[rank];
        if (received == 0) sent = 0;
        rows_own = first[1];
        rows_out = homeward ? sent : received;
        const u64 moved = (u64)(((sent > received ? sent : received) - rows_own) * (row_bytes + row_bytes_2));
        end = booked(state, slot, (u64)(moved * ns_per_byte), 0, (u64)latency_ns);
        if (only_books) atomicAdd(moved_bytes, moved);
    }
    if (only_books) return;
    __syncthreads();
    repeat_bytes(out, own, rows_out * (u64)row_bytes, rows_own * (u64)row_bytes);
    repeat_bytes(out_2, own_2, rows_out * (u64)row_bytes_2, rows_own * (u64)row_bytes_2);
    __syncthreads();
    if (threadIdx.x == 0) wait_until(end, slot);
    __syncthreads();
}
"""
)

_CLONES_SOURCE = (
    _COMMON
    + """
// Clones by a plan: experts[c] is in slot c % num_slots of rank c / num_slots. Of this rank as many leave as
// slots of others hold its experts, and as many come as its own slots are taken.
extern "C" __global__ void __launch_bounds__(512) KERNEL(
    u64* state, u64* moved_bytes, int* experts, int slot_index, int num_ranks, int num_slots,
    int num_experts, double bytes, double ns_per_byte, double latency_ns
) {
    if (threadIdx.x == 0) {
        u64* slot = state + 2 + 2 * slot_index;
        u64 sent = 0, received = 0;
        for (int c = 0; c < num_ranks * num_slots; c++) {
            if (experts[c] < num_experts / num_ranks) sent++;
            if (c < num_slots && experts[c] < num_experts) received++;
        }
        const u64 moved = (u64)((sent > received ? sent : received) * bytes);
        const u64 end = booked(state, slot, (u64)(moved * ns_per_byte), 0, (u64)latency_ns);
        if (blockIdx.x == 0) atomicAdd(moved_bytes, moved);
        wait_until(end, slot);
    }
    __syncthreads();
}
"""
)


class Timed:
    """Launches transfers on the current stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._state = torch.zeros(2 + 2 * NUM_SLOTS, dtype=torch.int64, device=device)
        self._moved = torch.zeros(2, dtype=torch.int64, device=device)
        """Of rows, and of clones."""
        self._number = 0
        self._all_sms = 2 * torch.cuda.get_device_properties(device).multi_processor_count

    def run(
        self, stream: torch.cuda.Stream, kind: str, out: torch.Tensor | None, own: torch.Tensor | None, *,
        num_sms: int | None, seconds: tuple[float, float, float],
    ) -> None:  # fmt: skip
        """Fill ``out`` with repetitions of ``own``, and be done no sooner than the links allow: ``seconds``
        on NVLink, on the network, and of latency. Without ``num_sms`` the whole GPU copies."""
        number = self._next_slot()
        pointers = (0, 0) if out is None or own is None else (out.data_ptr(), own.data_ptr())
        moved = (0, 0) if out is None or own is None else (out.nbytes, own.nbytes)
        nanoseconds = (1e9 * each for each in seconds)
        _kernel(kind).launch(
            stream, num_sms or self._all_sms, SHARED_BYTES if num_sms else 0,
            (*pointers, self._state.data_ptr(), number, *moved, *nanoseconds),
        )  # fmt: skip

    def rows(
        self, stream: torch.cuda.Stream, kind: str, parts: Sequence[RowsPart], counts: torch.Tensor,
        first_S: torch.Tensor, *, homeward: bool, num_sms: int | None, seconds_per_byte: float,
        latency: float,
    ) -> Callable[[], None]:  # fmt: skip
        """Book the links for rows of an exchange, whose time begins now; what is returned fills each part's
        buffer with repetitions of this rank's own rows, and is done when that time is over."""
        none = RowsPart(0, 0, 0)
        one, two = (*parts, none)[:2]
        pointers = one.out, one.own, two.out, two.own, self._state.data_ptr(), self._moved.data_ptr()
        numbers = self._next_slot(), len(first_S) - 1, int(homeward)
        costs = one.row_bytes, two.row_bytes, 1e9 * seconds_per_byte, 1e9 * latency
        kernel = _rows_kernel(kind)

        def launch(num_blocks: int, shared_bytes: int, only_books: int) -> None:
            arguments = *pointers, counts.data_ptr(), first_S.data_ptr(), *numbers, only_books, *costs
            kernel.launch(stream, num_blocks, shared_bytes, arguments)

        launch(1, 0, 1)
        return lambda: launch(num_sms or self._all_sms, SHARED_BYTES if num_sms else 0, 0)

    def clones(
        self, stream: torch.cuda.Stream, kind: str, experts_PS: torch.Tensor, num_experts: int, *,
        num_bytes: int, num_sms: int | None, seconds_per_byte: float, latency: float,
    ) -> None:  # fmt: skip
        """Be done once clones of ``num_bytes`` each have come and gone."""
        pointers = self._state.data_ptr(), self._moved[1:].data_ptr(), experts_PS.data_ptr()
        numbers = self._next_slot(), *experts_PS.shape, num_experts
        costs = num_bytes, 1e9 * seconds_per_byte, 1e9 * latency
        shared_bytes = SHARED_BYTES if num_sms else 0
        _clones_kernel(kind).launch(stream, num_sms or 1, shared_bytes, (*pointers, *numbers, *costs))

    def moved_bytes(self) -> tuple[int, int]:
        """Of rows that only the device counted, and of clones, since it was last asked. The host waits."""
        rows, clones = self._moved.tolist()
        self._moved.zero_()
        return rows, clones

    def _next_slot(self) -> int:
        self._number = (self._number + 1) % NUM_SLOTS
        return self._number


class RowsPart(NamedTuple):
    """Addresses, and bytes of a row."""

    out: int
    own: int
    row_bytes: int


_ARGUMENTS = (*[ctypes.c_void_p] * 3, ctypes.c_int, *[ctypes.c_double] * 5)
_CLONES_ARGUMENTS = (*[ctypes.c_void_p] * 3, *[ctypes.c_int] * 4, *[ctypes.c_double] * 3)
_ROWS_ARGUMENTS = (*[ctypes.c_void_p] * 8, *[ctypes.c_int] * 4, *[ctypes.c_double] * 4)


class _Kernel:
    """A compiled kernel, launched by the driver's own call: torch's opens the library again every time. The
    call copies its arguments, so their places are made once."""

    def __init__(self, source: str, name: str, kinds: Sequence[Any]) -> None:
        self._kernel: Any = torch.cuda._compile_kernel(source.replace("KERNEL", name), name)
        self._kernel.set_shared_memory_config(SHARED_BYTES)
        self._launch = _get_gpu_runtime_library().cuLaunchKernel
        self._places: list[Any] = [kind() for kind in kinds]
        self._addresses = (ctypes.c_void_p * len(kinds))(*map(ctypes.addressof, self._places))

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
    return _Kernel(_SOURCE, f"fabric_{kind}", _ARGUMENTS)


@functools.cache
def _rows_kernel(kind: str) -> _Kernel:
    return _Kernel(_ROWS_SOURCE, f"fabric_{kind}", _ROWS_ARGUMENTS)


@functools.cache
def _clones_kernel(kind: str) -> _Kernel:
    return _Kernel(_CLONES_SOURCE, f"fabric_{kind}", _CLONES_ARGUMENTS)
