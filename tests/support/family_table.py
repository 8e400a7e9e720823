"""Writes ``docs/families.md``: ``python -m tests.support.family_table``, about ten minutes on two cores.

The test of the page (``tests/behaviour/huggingface/test_families.py``) computes the same verdicts.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

from fsdmoe.huggingface.adapters import find_experts
from fsdmoe.huggingface.expert_spec import ExpertsSpec
from fsdmoe.testing import run_ranks
from tests.support.family_runs import trained_over, trained_over_ep
from tests.support.moe_families import MODEL_TYPES, is_installed, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
COLUMNS = ("family", "experts", "ep 4", "tp 2", "cp 2")
_REASONS = (
    r"form is not known here \(([^,)]+)",  # the first parameter of it
    r"got (sliding_window|attention_chunk_size|\w+_attention|hybrid\w*|\w+_sparse|conv)\b",
    r"without (sinks)",
    r"but [\w.]+ \((\w+)\)",  # a class whose module looks at other rows
    r"got a (\w+)$",  # a class without a plain embedding and head
)
_HEAD = """# MoE families of transformers

Written by `python -m tests.support.family_table` with transformers {version}. The test compares the page with
what a run finds: `pytest -m "full or not full" tests/behaviour/huggingface/test_families.py`.

Each family is a tiny model with random weights that has every kind of its layers.

- *Equal*: all gradients are those of the unwrapped model in one process, within 1e-5 of each tensor's largest
  element (in float32; HY-V4 in float64).
- *Split*: each rank holds and computes its part of the experts.
- *Refused*: `parallelize`, or the first call, raises a `ConfigError` that names what is in the way, here
  shortened. Sliding windows are in the way only of rows longer than the window. Linear attention, state
  spaces and convolutions pass no state between the ranks of `cp`.

How experts are recognised, and how to describe others:
[which MoE blocks are known](huggingface.md#which-moe-blocks-are-known).

"""


def row_of(family: str) -> dict[str, str]:
    """The family's row of the table."""
    cells = {axis: cell_of(axis, family) for axis in ("ep", "tp", "cp")}
    return dict(zip(COLUMNS, (f"`{family}`", _experts(family), *cells.values()), strict=True))


def cell_of(axis: str, family: str) -> str:
    verdicts = (
        run_ranks(trained_over_ep, 4, family) if axis == "ep" else run_ranks(trained_over, 2, axis, family)
    )
    if len(set(verdicts)) > 1:
        raise AssertionError(f"{family}, {axis}: ranks disagree: {verdicts}")
    return shortened(verdicts[0])


def shortened(verdict: str) -> str:
    """The refusal without the parts that are alike for all families."""
    if not verdict.startswith("refused: "):
        return verdict
    reason = verdict.removeprefix("refused: ").partition("; ")[0].partition("\n")[0]
    for pattern in _REASONS:
        if found := re.search(pattern, reason):
            return f"refused: `{found[1].removeprefix('model.')}`"
    return f"refused: {reason}"


def read_page() -> dict[str, dict[str, str]]:
    """Rows by family."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0].strip("`"): dict(zip(COLUMNS, cells, strict=True)) for cells in rows}


def _experts(family: str) -> str:
    """The experts' form in a few words."""
    specs = list(find_experts(tiny_model(family)).values())
    if not specs:
        return "not known"
    spec: ExpertsSpec = specs[0]
    words = [spec.activation]
    words += ["transposed"] * spec.transposed + ["interleaved"] * spec.interleaved
    words += ["biases"] * (spec.gate_up_bias is not None) + ["gates and ups apart"] * (spec.up is not None)
    words += ["identity experts"] * (spec.num_identity > 0) + ["weighted inputs"] * spec.weights_inputs
    return ", ".join(words)


def main(families: list[str]) -> None:
    """All families, or those that are named; the others keep their rows."""
    rows = read_page() if families else {}
    for family in families or [name for name in MODEL_TYPES if is_installed(name)]:
        rows[family] = row_of(family)
        print(rows[family], flush=True)
    table = [COLUMNS, ("---",) * len(COLUMNS), *(rows[name].values() for name in sorted(rows))]
    text = "".join(f"| {' | '.join(row)} |\n" for row in table)
    PAGE.write_text(_HEAD.format(version=version("transformers")) + text)


if __name__ == "__main__":
    main(sys.argv[1:])
