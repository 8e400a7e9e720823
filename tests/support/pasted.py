"""Commands of the documentation, pasted into bash as a reader does, in a folder like the repository's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from fsdmoe.testing import NO_GPU
from tests.support.one_gpu import free_port
from tests.support.snippets import ROOT


def clone(folder: Path) -> Path:
    """What a fresh clone has, changes that are not committed yet included, with this environment as .venv."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # not so: deleted, and not committed yet
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".installed":
            (folder / ".venv" / entry.name).symlink_to(entry)
    (folder / ".venv/.installed").touch()  # as `make setup` leaves it, which would ask a package index
    return folder


def run_pasted(folder: Path, script: str, timeout: float = 1800) -> str:
    """What bash prints of it in this folder, whose package is the one that is imported."""
    imported = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": imported, "OMP_NUM_THREADS": "1"} | NO_GPU
    environment["PET_MASTER_PORT"] = free_port()  # torchrun's own is one for all that run at once
    bash = subprocess.Popen(
        ["bash", "-e"], cwd=folder, env=environment, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        printed, complaints = bash.communicate(script, timeout=timeout)
    except BaseException:
        os.killpg(bash.pid, signal.SIGTERM)  # launchers among what it started end their ranks then
        bash.communicate()
        raise
    assert bash.returncode == 0, printed + complaints
    return printed
