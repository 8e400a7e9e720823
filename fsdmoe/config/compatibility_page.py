"""The page of the documentation that the table of what goes with what makes::

python -m fsdmoe.config.compatibility_page docs/compatibility.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from fsdmoe.config.compatibility import REFUSED, TABLE
from fsdmoe.core.features import CANNOT, NOT_BUILT, Feature, Row, Verdict

_HEAD = """# What goes with what

Some features exclude each other. A configuration that has both is refused before anything is built, by
`train.py`, by `--dry-run` and by `fsdmoe.parallelize`; `python -m fsdmoe.plan` never proposes it. The message
says why, and how to switch off either.

## What to set first

What you want to use, and ask before the run whether it goes together:

```bash
python train.py --config configs/quickstart.toml --mesh.ep 2 --fsdp.lean true --dry-run --world 2
```

You see the plan, or a line for each pair that is refused.

## Verdicts

This page is written from the table in `fsdmoe/config/compatibility.py`, which all of them read
(`python -m fsdmoe.config.compatibility_page docs/compatibility.md`).

A pair has one of three verdicts:

- **right, tested**: a test trains with both, and finds the losses of a run without them;
- **refused: cannot**: one of them rules the other out;
- **refused: not built**: they could go together, but nobody has built it.

A pair that is not on this page has no test of its own. Keys of one section that exclude each other are
refused by that section, and sizes that do not divide each other by the part that would have to divide them.
"""


def page() -> str:
    """All of it, as Markdown."""
    parts = [_HEAD, "## Refused: cannot\n", *_refused(CANNOT)]
    parts += ["", "## Refused: not built\n", *_refused(NOT_BUILT)]
    parts += ["", "## Right, tested\n", *_tested(row for row in TABLE if not row.is_refused)]
    return "\n".join(parts) + "\n"


def _refused(verdict: Verdict) -> list[str]:
    lines = ["| feature | does not go with | why |", "| --- | --- | --- |"]
    for row in REFUSED:
        if row.verdict == verdict:
            lines.append(f"| {_named(row.feature)} | {_named(row.other)} | {row.reason} |")
    return lines


def _tested(rows: Iterable[Row]) -> list[str]:
    lines = ["| feature | goes with | test |", "| --- | --- | --- |"]
    found: dict[tuple[Feature, str], list[str]] = {}
    for row in rows:
        found.setdefault((row.feature, row.reason), []).append(row.other.name)
    for (feature, test), others in found.items():
        lines.append(f"| {_named(feature)} | {', '.join(others)} | `{test}` |")
    return lines


def _named(feature: Feature) -> str:
    return f"{feature.name} (`{feature.setting}`)"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
