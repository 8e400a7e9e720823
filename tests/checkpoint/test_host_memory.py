"""Host memory that is left, by the kernel and by the control group."""

import sys
from pathlib import Path

from fsdmoe.checkpoint.host_memory import available_host_bytes

NOWHERE = Path("/nowhere")


def test_the_smaller_of_kernel_and_group_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       2000 kB\nMemAvailable:   1000 kB\n")
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("300000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert available_host_bytes(meminfo, NOWHERE) == 1000 * 1024
    assert available_host_bytes(meminfo, tmp_path) == 300000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes(meminfo, tmp_path) == 1000 * 1024
    assert available_host_bytes(NOWHERE, NOWHERE) == sys.maxsize
    assert 0 < available_host_bytes() < sys.maxsize
