"""One estimate of a configuration, for the dry run, the search and the page alike: memory, traffic, time, and
the wall that binds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdmoe.models import training_flops_per_token
from fsdmoe.plan.hardware import GIB, Gpu
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.low_precision import why_no_price
from fsdmoe.plan.memory import MemoryEstimate, estimate_memory, offloaded_bytes
from fsdmoe.plan.step_time import TimeEstimate, estimate_time
from fsdmoe.plan.traffic import TrafficEstimate, estimate_traffic
from fsdmoe.precision.config import PrecisionConfig

Wall = Literal["memory", "communication", "compute"]
MEMORY_SHARE = 0.08
COMMUNICATION_SHARE = 0.2
"""Of a step, from which on what memory costs, or what ranks wait for each other, is called its wall."""


HEADROOM = 0.06
"""Of a GPU's memory, what a plan leaves free: routing is never quite even."""


def fits(memory: MemoryEstimate, gpu: Gpu) -> bool:
    """With headroom, and with the rank's share of the host's memory."""
    return filled(memory, gpu) <= 1


def filled(memory: MemoryEstimate, gpu: Gpu) -> float:
    """Of what a plan may fill of the GPU and of the rank's share of the host, the larger share."""
    return max(memory.total / ((1 - HEADROOM) * gpu.memory), memory.host / gpu.host_memory)


def shortage(memory: MemoryEstimate, gpu: Gpu) -> str:
    """What there is too little of for a setting that does not fit, and what it needs of both memories."""
    limit = (1 - HEADROOM) * gpu.memory
    device = f"{memory.total / GIB:.1f} GiB of the GPU, of which a plan fills {limit / GIB:.1f}"
    host = f"{memory.host / GIB:.1f} GiB of host memory for each GPU, which has {gpu.host_memory / GIB:.0f}"
    if memory.host <= gpu.host_memory:
        return f"needs {device}" + (f" (and {memory.host / GIB:.1f} of the host)" if memory.host else "")
    return f"needs {host}" + (f" (and {device})" if memory.total > limit else f"; {device}")


@dataclass(frozen=True)
class Estimate:
    """What a setting is expected to cost on one rank."""

    memory: MemoryEstimate
    traffic: TrafficEstimate
    time: TimeEstimate
    gpu: Gpu
    tokens_per_step: int
    num_ranks: int
    flops_per_token: float
    precision: PrecisionConfig

    @property
    def fits(self) -> bool:
        return fits(self.memory, self.gpu)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens_per_step / self.time.total

    @property
    def tflops(self) -> float:
        """Model TFLOP/s of one rank."""
        return self.tokens_per_second / self.num_ranks * self.flops_per_token / 1e12

    @property
    def why_no_price(self) -> str:
        """Why the time is not that of the run but of bf16; empty where it is the run's."""
        return why_no_price(self.precision, self.gpu)

    @property
    def wall(self) -> Wall:
        """What keeps the step from being faster: the device's memory, links, or arithmetic."""
        whole = self.time.total
        if not self.fits:
            return "memory"
        memory, links = self.time.memory / whole, self.time.communication / whole
        if max(memory / MEMORY_SHARE, links / COMMUNICATION_SHARE) < 1:
            return "compute"
        return "memory" if memory > links else "communication"


def estimate(
    job: Job,
    setting: Setting,
    gpu: Gpu,
    memory: MemoryEstimate | None = None,
    time: TimeEstimate | None = None,
) -> Estimate:
    """All of it for one setting; ``memory`` and ``time`` where they are known already."""
    return Estimate(
        memory=estimate_memory(job, setting) if memory is None else memory,
        traffic=estimate_traffic(job, setting, offloaded_bytes(job, setting)),
        time=estimate_time(job, setting, gpu) if time is None else time,
        gpu=gpu,
        tokens_per_step=job.tokens_per_step,
        num_ranks=setting.degrees.world_size,
        flops_per_token=training_flops_per_token(
            job.model, job.seq_len, frozen=job.has_adapters and job.adapter.freeze_base
        ),
        precision=setting.precision,
    )
