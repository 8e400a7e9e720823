"""What the Makefile must not do."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_clean_leaves_the_runs_of_its_user_alone() -> None:
    plan = subprocess.run(
        ["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    removed = [word for line in plan.splitlines() if line.startswith("rm") for word in line.split()[2:]]
    assert ".venv" in removed
    assert not any(word.strip("./").startswith("runs") or word in (".", "*") for word in removed)
