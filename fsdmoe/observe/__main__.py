"""``python -m fsdmoe.observe TRACE ... --svg PICTURE``: hidden and exposed time of traces that exist."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdmoe.observe.exposed import exposure, table
from fsdmoe.observe.exposed_chart import exposed_chart
from fsdmoe.observe.exposed_trace import read_trace


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fsdmoe.observe", description="Hidden and exposed time by kind of traffic."
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="PATH or NAME=PATH of a Chrome trace")
    parser.add_argument("--svg", type=Path, help="draw them below each other")
    parser.add_argument("--title", default="Compute and traffic")
    parser.add_argument(
        "--window", type=float, nargs=2, metavar=("FROM_MS", "TO_MS"), help="this stretch only"
    )
    args = parser.parse_args(argv)
    named = [trace.partition("=")[::2] for trace in args.traces]
    runs = {name if path else Path(name).name: read_trace(path or name) for name, path in named}
    for name, timeline in runs.items():
        print("\n".join([name, *table(exposure(*timeline))]))
    if args.svg is not None:
        window = None if args.window is None else (args.window[0] / 1e3, args.window[1] / 1e3)
        args.svg.write_text(exposed_chart(runs, title=args.title, window=window), encoding="utf-8")
        print(f"picture in {args.svg}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
