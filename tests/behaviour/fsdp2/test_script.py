"""An FSDP2 script with its import changed: the same losses, and each reads the other's checkpoints."""

import re
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdmoe.testing import run_ranks

SCRIPT = Path(__file__).parents[3] / "examples" / "fsdp2_script.py"
IMPORT = re.compile(r"^from fsdmoe\.fsdp2 import ", re.MULTILINE)


def script(package: str) -> Any:
    """The example with its one import line from ``package``."""
    source, num_changed = IMPORT.subn(f"from {package} import ", SCRIPT.read_text())
    assert num_changed == 1
    assert package == "fsdmoe.fsdp2" or "import fsdmoe" not in source
    module: Any = types.ModuleType("fsdp2_script")
    exec(compile(source, str(SCRIPT), "exec"), module.__dict__)
    return module


def run(package: str, folder: str, steps: int, dtype: torch.dtype) -> list[float]:
    return script(package).main(folder, steps, dtype)


@pytest.mark.full  # tests/fsdp2 has quick tests of each call that the script makes
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-3)])
def test_the_script_trains_and_resumes_as_it_does_under_fsdp2(
    tmp_path: Path, dtype: torch.dtype, tolerance: float
) -> None:
    losses = {}
    for package, other in (("torch.distributed.fsdp", "theirs"), ("fsdmoe.fsdp2", "ours")):
        folder = str(tmp_path / other)
        first = run_ranks(run, 2, package, folder, 2, dtype)
        shutil.copytree(folder, f"{folder}-2")
        second = run_ranks(run, 2, package, folder, 2, dtype)
        losses[package] = [a + b for a, b in zip(first, second, strict=True)]
    for ours, theirs in zip(losses["fsdmoe.fsdp2"], losses["torch.distributed.fsdp"], strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance)
        assert ours[-1] < ours[0]
    swapped = run_ranks(run, 2, "fsdmoe.fsdp2", str(tmp_path / "theirs-2"), 2, dtype)
    for ours, whole in zip(swapped, losses["torch.distributed.fsdp"], strict=True):
        assert ours == pytest.approx(whole[2:], rel=tolerance), "FSDP2's checkpoint, resumed by fsdmoe"
    back = run_ranks(run, 3, "torch.distributed.fsdp", str(tmp_path / "ours-2"), 1, dtype)
    again = run_ranks(run, 3, "fsdmoe.fsdp2", str(tmp_path / "ours"), 1, dtype)
    assert all(loss == loss for rank in (*back, *again) for loss in rank), "and the other way, on more ranks"
