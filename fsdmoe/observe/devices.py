"""What a device can do at best, and how much of its memory the run has used."""

import re
import resource
import sys
from dataclasses import dataclass

import torch

from fsdmoe.observe.config import ObserveConfig

GIB = 2**30


@dataclass(frozen=True)
class DevicePeak:
    """Peak dense TFLOP/s from the vendor's data sheet (structured sparsity would double it on paper).

    ``fp32`` is that of plain single precision, without TF32; None where the device has no such unit.
    """

    bf16: float | None
    fp8: float | None
    fp32: float | None


# The first pattern found in the device's name wins, so narrower names stand before wider ones. Patterns match
# whole words: H20 is not H200, L4 is not L40.
_PEAKS: tuple[tuple[str, DevicePeak], ...] = (
    ("GB300", DevicePeak(2500.0, 5000.0, 80.0)),
    ("GB200", DevicePeak(2500.0, 5000.0, 80.0)),
    ("B300", DevicePeak(2250.0, 4500.0, 75.0)),
    ("B200", DevicePeak(2250.0, 4500.0, 75.0)),
    ("H200 NVL", DevicePeak(835.5, 1671.0, 60.0)),
    ("H200", DevicePeak(989.5, 1979.0, 67.0)),
    ("GH200", DevicePeak(989.5, 1979.0, 67.0)),
    ("H100 PCIe", DevicePeak(756.0, 1513.0, 51.0)),
    ("H100 NVL", DevicePeak(835.5, 1671.0, 60.0)),
    ("H100", DevicePeak(989.5, 1979.0, 67.0)),
    ("H800 PCIe", DevicePeak(756.0, 1513.0, 51.0)),
    ("H800", DevicePeak(989.5, 1979.0, 67.0)),
    ("H20", DevicePeak(148.0, 296.0, 44.0)),
    ("A100", DevicePeak(312.0, None, 19.5)),
    ("A800", DevicePeak(312.0, None, 19.5)),
    ("A40", DevicePeak(149.7, None, 37.4)),
    ("A30", DevicePeak(165.0, None, 10.3)),
    ("A10", DevicePeak(125.0, None, 31.2)),
    ("L40S", DevicePeak(362.0, 733.0, 91.6)),
    ("L40", DevicePeak(181.0, 362.0, 90.5)),
    ("L4", DevicePeak(121.0, 242.0, 30.3)),
    ("RTX 6000 Ada", DevicePeak(364.0, 728.5, 91.1)),
    ("RTX A6000", DevicePeak(154.8, None, 38.7)),
    ("RTX 5090", DevicePeak(209.5, 419.0, 104.8)),
    ("RTX 4090", DevicePeak(165.2, 330.3, 82.6)),
    ("RTX 3090", DevicePeak(71.0, None, 35.6)),
    ("MI355X", DevicePeak(2516.0, 5033.0, 157.3)),
    ("MI325X", DevicePeak(1307.4, 2614.9, 163.4)),
    ("MI300X", DevicePeak(1307.4, 2614.9, 163.4)),
)


def find_peak(device_name: str) -> DevicePeak | None:
    """The table's row for a device name such as ``NVIDIA H100 80GB HBM3``; None when it is not in the
    table."""
    for pattern, peak in _PEAKS:
        # A dash ends a word here ("A100-SXM4-80GB"), a space of the pattern may be one ("RTX-4090").
        words = r"[\s-]+".join(re.escape(word) for word in pattern.split())
        if re.search(rf"(?<![A-Za-z0-9]){words}(?![A-Za-z0-9])", device_name, re.IGNORECASE):
            return peak
    return None


def device_name(device: torch.device) -> str:
    """Name of the device as its driver reports it; ``CPU`` for the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


@dataclass(frozen=True)
class PeakFigure:
    """The peak that MFU is measured against; ``tflops`` None means that MFU is unknown, and ``reason`` says
    why."""

    tflops: float | None
    reason: str = ""


def peak_for(config: ObserveConfig, name: str) -> PeakFigure:
    """The configured peak, or the table's for device ``name``, or none with the reason."""
    if config.peak_tflops is not None:
        return PeakFigure(config.peak_tflops)
    if name == "CPU":
        return PeakFigure(None, "a CPU has no entry in the table of device peaks")
    peak = find_peak(name)
    if peak is None:
        return PeakFigure(None, f"the peak of {name!r} is unknown; set observe.peak_tflops to see MFU")
    tflops: float | None = getattr(peak, config.peak_precision)
    if tflops is None:
        return PeakFigure(None, f"{name!r} has no {config.peak_precision} units; set observe.peak_precision")
    return PeakFigure(tflops)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use so far: of the device's allocator on a GPU, of the whole process on a CPU.

    Both are read from counters on the host: nothing waits for the device.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage returns bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
