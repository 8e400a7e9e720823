"""How much memory this host has left: what the kernel can give without swapping, within the control group."""

from __future__ import annotations

import sys
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available_host_bytes(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> int:
    """Bytes that can still be taken; as good as endless where the system does not say."""
    return min(_of_kernel(meminfo), _of_group(group))


def _of_kernel(meminfo: Path) -> int:
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return sys.maxsize


def _of_group(group: Path) -> int:
    """Of the second version of control groups, as containers and Slurm set them; pages of files are given
    back when memory is short."""
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - int(used) + int(rows["inactive_file"])
    except (OSError, KeyError, ValueError):  # ValueError: "max", no limit
        return sys.maxsize
