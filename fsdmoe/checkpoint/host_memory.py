"""How much memory this host has left: what the kernel can give, within the control groups."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path("/")


def available_host_bytes(root: Path = _ROOT) -> int:
    """Bytes that can still be taken; as good as endless where the system does not say."""
    return min(_of_kernel(root / "proc/meminfo"), *map(_of_group, _groups(root)), sys.maxsize)


def _of_kernel(meminfo: Path) -> int:
    try:
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return sys.maxsize


def _groups(root: Path) -> list[Path]:
    """The control group of this process and those above it, in the second version of control groups: a
    container sees its own as the root, a job of Slurm lies below it."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = [line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")]
    folder = top / own[0] if own else top
    return [folder, *(parent for parent in folder.parents if parent == top or top in parent.parents)]


def _of_group(group: Path) -> int:
    """Pages of files are given back when memory is short."""
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit) - int(used) + int(rows["inactive_file"])
    except (OSError, KeyError, ValueError):  # ValueError: "max", no limit
        return sys.maxsize
