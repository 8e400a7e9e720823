"""From a request to a ranking, for the command and for the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdmoe.plan.hardware import gpu_named
from fsdmoe.plan.job import Job
from fsdmoe.plan.loads import read_loads
from fsdmoe.plan.search import Ranking, search
from fsdmoe.plan.source import Reading, Request, read_request


def answer(request: Request, changes: dict[str, dict[str, Any]] | None = None) -> tuple[Reading, Ranking]:
    """Read a request and rank everything that can be done; ``changes`` are keys in place of the model's."""
    gpu = gpu_named(request.gpu, request.fabric, request.host_memory)
    wanted = read_request(request, changes)
    loads = read_loads(request.skew, request.loads, wanted.config.model.num_experts)
    job = replace(Job.of(wanted.config), loads=loads)
    return wanted, search(wanted.config, job, gpu, request.num_gpus, request.fixed)
