"""Host memory that is left, by the kernel and by the control groups."""

import sys
from pathlib import Path

from fsdmoe.checkpoint.host_memory import available_host_bytes


def limit(group: Path, most: str, used: int, files: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {files}\n")


def test_the_smallest_of_kernel_and_groups_counts(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) == sys.maxsize
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       2000 kB\nMemAvailable:   1000 kB\n")
    assert available_host_bytes(tmp_path) == 1000 * 1024
    limit(tmp_path / "sys/fs/cgroup", "900000", 300000, 100000)  # as a container sees its own
    assert available_host_bytes(tmp_path) == 700000
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/x\n0::/slurm/job_7/step_0\n")
    limit(tmp_path / "sys/fs/cgroup/slurm/job_7", "500000", 300000, 100000)
    limit(tmp_path / "sys/fs/cgroup/slurm/job_7/step_0", "max", 300000, 100000)
    assert available_host_bytes(tmp_path) == 300000
    assert 0 < available_host_bytes() < sys.maxsize
