"""What a GPU and its links attain, by name.

Rates are attained, not advertised: those of ``h200`` were measured (``docs/results/``: dense and grouped
products under sustained power, attention, device copies, the host link); those of other GPUs are its shares
of the advertised peak, taken over. Rates between GPUs follow the report *Scalable Training of MoE Models
with Megatron Core*, table 7 (all-to-all of 8 ranks in one NVLink domain, and of 64 over several).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import nearest

GIB = 2**30
TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU and what connects it."""

    name: str
    memory: int
    """Bytes that a process can allocate."""
    matmul: float
    """Dense bf16 products, FLOP/s, sustained."""
    low_precision_gain: float
    """How much faster a product is in the 8-bit format of the GPU, casts included; 1: it has none."""
    attention: float
    """FLOP/s of attention, forward and backward together, causal half counted."""
    memory_bandwidth: float
    layer_start: float
    """Seconds of a layer's forward that do not shrink with its rows: its kernels fill and drain the GPU."""
    host_link: float
    """Bytes/s to or from host memory, each way."""
    host_memory: int
    """Bytes of host memory for each GPU of a machine."""
    host_bandwidth: float
    """Bytes/s of the host's memory for each GPU: what an optimizer on the host runs at."""
    nvlink: float
    """Bytes/s that a rank sends to others of its NVLink domain."""
    domain: int
    """GPUs of an NVLink domain."""
    network: float
    """Bytes/s that a rank sends beyond its domain."""
    has_fp8_kernels: bool = False
    """Recipes in fp8 have kernels on it; others, and all on other GPUs, are emulated."""
    is_measured: bool = False
    """The rates of the GPU itself were measured with this framework."""
    never_ran: bool = False
    """So did nothing of it: kernels of bf16 compile for the architecture at most."""


NEVER_RAN = "fsdmoe never ran on such a card"

_H200 = Gpu(
    name="h200",
    memory=int(139.8 * GIB),
    matmul=670 * TERA,
    low_precision_gain=1.3,  # docs/results/train_step.md: products and casts of experts and projections
    attention=400 * TERA,
    memory_bandwidth=4.2 * TERA,
    layer_start=0.38e-3,  # the one that is fitted: python benchmarks/step_time.py
    host_link=55 * GIGA,
    host_memory=220 * GIB,
    host_bandwidth=35 * GIGA,
    nvlink=325 * GIGA,
    domain=8,
    network=50 * GIGA,
    has_fp8_kernels=True,
    is_measured=True,
)


def _like_h200(name: str, gib: float, peak: float, bandwidth: float, **others: float | int) -> Gpu:
    """A GPU that attains the H200's shares of its own peaks (``peak``: dense bf16 TFLOP/s; H200: 989)."""
    scale = peak / 989
    return replace(
        _H200,
        name=name,
        memory=int(gib * GIB),
        matmul=_H200.matmul * scale,
        attention=_H200.attention * scale,
        memory_bandwidth=_H200.memory_bandwidth * bandwidth / 4.8,
        is_measured=False,
        **others,  # type: ignore[arg-type]
    )


_BLACKWELL: dict[str, float | int] = {
    "low_precision_gain": 1.4, "nvlink": 500 * GIGA, "has_fp8_kernels": False, "never_ran": True,
}  # fmt: skip
_RACK: dict[str, float | int] = {**_BLACKWELL, "domain": 64, "host_link": 180 * GIGA}


def _card(pcie: float, host_gib: int, network: float) -> dict[str, float | int]:
    """A card without NVLink: up to 8 in a machine reach each other, and the host, over PCIe (GB/s each way).
    That a collective attains half of it is assumed: nobody measured it here."""
    return {"host_link": 0.85 * pcie * GIGA, "nvlink": 0.5 * pcie * GIGA, "host_memory": host_gib * GIB,
            "network": network * GIGA, "has_fp8_kernels": False, "never_ran": True}  # fmt: skip


# Name, GiB that torch sees, dense bf16 TFLOP/s with sums in float32, TB/s of memory. From Ada and Hopper on,
# fp8 has twice the peak of bf16. Data sheets and white papers of NVIDIA:
#   rtx-4090                Ada architecture: 165.2 TFLOP/s, 24 GB, 1,008 GB/s, PCIe 4 (32 GB/s each way)
#   rtx-5090                RTX Blackwell architecture: 209.5 TFLOP/s, 32 GB, 1,792 GB/s, PCIe 5 (64 GB/s)
#   rtx-pro-6000            RTX PRO Blackwell architecture, workstation: 503.8 TFLOP/s, 96 GB, 1,792 GB/s
#   l40s                    L40S: 362 TFLOP/s, 48 GB, 864 GB/s, PCIe 4
#   a100, h100, h200        A100 80 GB, H100 and H200, SXM
#   h800, h20               H100 with 400 of its 900 GB/s of NVLink; H20, 96 GB, with 148 TFLOP/s
#   b200, b300              HGX B200 and B300, an eighth of a board
#   gb200, gb300            GB200 and GB300 NVL72, a 72nd of a rack
# Hosts of cards are assumed: workstations with 64 GiB for each GeForce and 100 Gbit/s for four of them,
# servers with 128 GiB and 100 Gbit/s for each GPU.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _like_h200("rtx-4090", 23.6, 165.2, 1.008, **_card(32, 64, 3)),
        _like_h200("rtx-5090", 31.4, 209.5, 1.792, **_card(64, 64, 3)),
        _like_h200("rtx-pro-6000", 94.9, 503.8, 1.792, **_card(64, 128, 10)),
        _like_h200("l40s", 44.4, 362, 0.864, **_card(32, 128, 10)),
        _like_h200("a100", 79.2, 312, 2.04, low_precision_gain=1.0, host_link=22 * GIGA,
                   nvlink=215 * GIGA, network=22 * GIGA, has_fp8_kernels=False, never_ran=True),
        _like_h200("h20", 95.1, 148, 4.0),
        _like_h200("h800", 79.1, 989, 3.35, nvlink=145 * GIGA),
        _like_h200("h100", 79.1, 989, 3.35),
        _H200,
        _like_h200("b200", 178.3, 2250, 8.0, **_BLACKWELL),
        _like_h200("b300", 267.7, 2250, 8.0, **_BLACKWELL, network=100 * GIGA),
        _like_h200("gb200", 184.3, 2500, 8.0, **_RACK),
        _like_h200("gb300", 276.0, 2500, 8.0, **_RACK),
    )
}  # fmt: skip
"""By name. A rack of GB200 or GB300 counts 64 GPUs of its 72: degrees are powers of two."""

FABRICS: dict[str, float] = {
    "infiniband-ndr": 50 * GIGA,
    "infiniband-xdr": 100 * GIGA,
    "infiniband-hdr": 22 * GIGA,
    "ethernet-400": 45 * GIGA,
    "ethernet-100": 10 * GIGA,
}
"""Bytes/s of a GPU's own network card, attained."""


def gpu_asked(text: str) -> Gpu:
    """By name, or by memory alone, as data sheets state it (``48``, ``48GB``): then its rates are not
    known, and those it has mean nothing."""
    memory = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(gb)?", text.lower())
    if memory is None or float(memory[1]) <= 0:
        if text in GPUS:
            return GPUS[text]
        raise ConfigError(
            f"--gpu: expected memory in GB (48), or one of {', '.join(GPUS)}, got {text!r}; "
            f"{_gpu_meant(text)}"
        )
    usable = int(float(memory[1]) * 0.99 * GIGA)  # the driver keeps a little
    return replace(_H200, name=f"a GPU of {float(memory[1]):g} GB", memory=usable, is_measured=False)


def _gpu_meant(text: str) -> str:
    """What to write for a GPU that is there under another spelling. A letter or digit that differs makes it
    another GPU, which is none's slip: V100, H100."""
    for name in GPUS:
        spelt = name.removeprefix("rtx-").replace("-", "[-_ ]?")
        if re.search(rf"(?<![a-z0-9])(rtx[-_ ]?)?{spelt}(?![a-z0-9])", text.lower()):
            return f"did you mean {name}?"
    return "choose one of them"


def gpu_named(name: str, fabric: str | None = None, host_gib: int | None = None) -> Gpu:
    """The preset, behind another network and with another host memory for each GPU where these are given."""
    if name.replace(".", "", 1).isdigit():
        raise ConfigError(
            f"--gpu: expected one of {', '.join(GPUS)}, whose speed is known, got {name!r}; whether a "
            f"configuration fits so many GB says train.py --dry-run --gpu {name}"
        )
    if name not in GPUS:
        raise ConfigError(f"--gpu: expected one of {', '.join(GPUS)}, got {name!r}; {_gpu_meant(name)}")
    if fabric is not None and fabric not in FABRICS:
        raise ConfigError(
            f"--fabric: expected one of {', '.join(FABRICS)}, got {fabric!r}; {nearest(fabric, FABRICS)}"
        )
    gpu = GPUS[name]
    return replace(
        gpu,
        network=gpu.network if fabric is None else FABRICS[fabric],
        host_memory=gpu.host_memory if host_gib is None else host_gib * GIB,
    )
