"""What was computed and what was sent, read from torch's profiler.

On a GPU every kernel, copy and fill is an event with a stream and a name. Which of them are traffic:

=====================  =======================================================================================
``nccl…`` kernels      named after their collective; their group is in the event's arguments (``Process Group
                       Description``, ``mesh_ep`` for the axis ``ep``), written since torch 2.5
``fabric_…`` kernels   of the emulated fabric (``benchmarks/fabric.py``), named after their kind
=====================  =======================================================================================

All else on the GPU computes. On a CPU the collectives of gloo are ranges of their own (``gloo:all_reduce``),
and everything else that torch runs computes.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsdmoe.core.errors import ConfigError
from fsdmoe.observe.exposed import KINDS, Interval, kind_of_traffic

EMULATED = "fabric_"
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


class Timeline(NamedTuple):
    """When things ran, in seconds of one clock."""

    compute: list[Interval]
    transfers: dict[str, list[Interval]]
    """By kind of traffic."""


def read_trace(path: str | Path) -> Timeline:
    """Of a Chrome trace that torch's profiler wrote, packed or not."""
    path = Path(path)
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            content = json.load(file)
        events = content["traceEvents"] if isinstance(content, dict) else content
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise ValueError("no list of events")
    except (ValueError, KeyError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(
            f"{path}: expected a whole Chrome trace, found another file or a part of one "
            f"({type(error).__name__}: {error}); name one of a run's profile/ folder"
        ) from error
    return timeline_of(events)


def timeline_of(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """Of the events of a Chrome trace: those of the GPU if there are any, else those of the host."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    on_device = [event for event in timed if event.get("cat") in _DEVICE_CATEGORIES]
    found = Timeline([], {})
    for event in on_device or [event for event in timed if _runs_on_host(event)]:
        kind = _kind(str(event["name"]), event.get("args", {}))
        interval = (float(event["ts"]) / 1e6, (float(event["ts"]) + float(event["dur"])) / 1e6)
        if kind is None:
            found.compute.append(interval)
        else:
            found.transfers.setdefault(kind, []).append(interval)
    return found


def _kind(name: str, args: Mapping[str, Any]) -> str | None:
    """Of traffic; None: it computes."""
    if name.startswith(EMULATED):
        kind = name.removeprefix(EMULATED)
        return kind if kind in KINDS else "other"
    if name.startswith(("nccl", "gloo:")):
        collective = str(args.get("Collective name") or name)
        return kind_of_traffic(collective, str(args.get("Process Group Description", "")))
    return None


def _runs_on_host(event: Mapping[str, Any]) -> bool:
    """An operator of torch, or a collective of gloo; calls that only start one are neither."""
    name = str(event["name"])
    if name.startswith("gloo:"):
        return True
    return event.get("cat") == "cpu_op" and not name.startswith(("c10d::", "record_param_comms"))
