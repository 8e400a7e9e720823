"""``python -m fsdmoe.observe TRACE ... --svg PICTURE``: hidden and exposed time of traces that exist."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdmoe.observe.exposed import exposure, table
from fsdmoe.observe.exposed_chart import exposed_chart
from fsdmoe.observe.exposed_trace import read_trace


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m fsdmoe.observe", description="Hidden and exposed time by kind of traffic."
    )
    found.add_argument("traces", nargs="+", metavar="TRACE", help="PATH or NAME=PATH of a Chrome trace")
    found.add_argument("--svg", type=Path, help="draw them below each other")
    found.add_argument("--title", default="Compute and traffic")
    found.add_argument("--window", type=float, nargs=2, metavar=("FROM_MS", "TO_MS"), help="this range only")
    return found


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    named = [trace.rpartition("=")[::2] for trace in args.traces]
    for _, path in named:
        if not Path(path).is_file():
            raise SystemExit(f"fsdmoe: {path}: expected a trace, found no file; write PATH or NAME=PATH")
    runs = {name or Path(path).name: read_trace(path) for name, path in named}
    for name, timeline in runs.items():
        print("\n".join([name, *table(exposure(*timeline))]))
    if args.svg is not None:
        window = None if args.window is None else (args.window[0] / 1e3, args.window[1] / 1e3)
        args.svg.write_text(exposed_chart(runs, title=args.title, window=window), encoding="utf-8")
        print(f"picture in {args.svg}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
