"""Every case of ``support/triton/interpreted_*.py``, run by Triton's interpreter in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = sorted((Path(__file__).parents[2] / "support/triton").glob("interpreted_*.py"))
NAMES = [name for path in CASES for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)]


LONG = sorted((Path(__file__).parents[2] / "support/triton").glob("long_*.py"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Failures of each case (of all its parameters), by name; a case that did not run has no entry."""
    report = tmp_path_factory.mktemp("interpreter") / "report.xml"
    process = interpret([*CASES], f"--junitxml={report}")
    assert report.exists(), process.stdout + process.stderr
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failures = found.setdefault(case.get("name", "").split("[")[0], [])
        failures += [child.text or "" for child in case if child.tag in ("failure", "error", "skipped")]
    return found


def interpret(cases: list[Path], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *map(str, cases), *options]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", NAMES)
def test_in_the_interpreter(name: str, outcomes: dict[str, list[str]]) -> None:
    assert name in outcomes, "the case did not run"
    assert not outcomes[name], "\n\n".join(outcomes[name])


@pytest.mark.full
@pytest.mark.parametrize("path", LONG, ids=lambda path: path.stem)
def test_long_cases_in_the_interpreter(path: Path) -> None:
    process = interpret([path])
    assert process.returncode == 0, process.stdout + process.stderr
