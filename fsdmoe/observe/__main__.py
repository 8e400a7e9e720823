"""What runs and traces have left, looked at afterwards or meanwhile::

python -m fsdmoe.observe compare runs/a runs/b      a table, and a page of curves in compare.html
python -m fsdmoe.observe watch runs/a               the page, served here and refreshed while the run goes
python -m fsdmoe.observe timeline runs/a            its starts, faults and saves, and its goodput
python -m fsdmoe.observe exposed trace.json.gz      hidden and exposed time of traces
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdmoe.config.kept import KEPT, kept_values
from fsdmoe.core import events
from fsdmoe.core.errors import ConfigError
from fsdmoe.observe.compare import ComparedRun, differences, notes, page, read_run, table
from fsdmoe.observe.console import print_table, suppress_broken_pipe
from fsdmoe.observe.exposed import exposure
from fsdmoe.observe.exposed import table as exposed_table
from fsdmoe.observe.exposed_trace import read_trace
from fsdmoe.observe.timeline import changes_of, timeline_lines
from fsdmoe.observe.watch import watch


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m fsdmoe.observe", description="Look at runs and traces.")
    commands = found.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare", help="runs next to each other: a table and a page of curves")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    compare.add_argument("--html", type=Path, default=Path("compare.html"), help="where the page is written")
    live = commands.add_parser("watch", help="the page of runs, refreshed while they go")
    live.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    live.add_argument("--port", type=int, default=8001, help="on this machine; 0 takes a free one")
    timeline = commands.add_parser("timeline", help="starts, faults and saves of runs, and their goodput")
    timeline.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    exposed = commands.add_parser("exposed", help="hidden and exposed time by kind of traffic")
    exposed.add_argument("traces", nargs="+", metavar="TRACE", help="PATH or NAME=PATH of a Chrome trace")
    exposed.add_argument("--svg", type=Path, help="draw them below each other")
    exposed.add_argument("--title", default="Compute and traffic")
    exposed.add_argument(
        "--window", type=float, nargs=2, metavar=("FROM_MS", "TO_MS"), help="this range only"
    )
    return found


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        with suppress_broken_pipe():
            if args.command == "compare":
                _compare(args.runs, args.html)
            elif args.command == "watch":
                return watch(lambda: page(read_runs(args.runs), is_live=True), args.runs, args.port)
            elif args.command == "timeline":
                _show_timelines(args.runs)
            else:
                _show_exposed(args)
    except (ConfigError, ImportError, OSError) as error:
        print(f"fsdmoe: {error}", file=sys.stderr)
        return 2
    return 0


def read_runs(folders: Sequence[str]) -> list[ComparedRun]:
    """Runs by the names of their folders, or by their paths where names are the same."""
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = list(folders)
    found = []
    for folder, name in zip(map(Path, folders), names, strict=True):
        kept = folder / KEPT
        try:
            config = kept_values(kept.read_text(encoding="utf-8")) if kept.is_file() else None
        except ValueError as error:
            raise ConfigError(f"{kept}: expected TOML, found: {error}; correct that place") from error
        found.append(read_run(folder, name, config, changes_of(events.read(folder))))
    return found


def _compare(folders: Sequence[str], html: Path) -> None:
    if not html.parent.is_dir():
        raise ConfigError(
            f"--html: expected a file in a folder that is there, got {str(html)!r}; make it first"
        )
    runs = read_runs(folders)
    columns = ["", *(run.name for run in runs)]
    print_table("Runs", columns, table(runs))
    for note in notes(runs):
        print(note)
    for run in runs:
        if run.config is None:
            print(f"{run.name} has no {KEPT}: it was made by an earlier version")
    if found := differences(runs):
        print_table("Configuration: keys that differ", columns, found)
    elif len(runs) > 1:
        print("Configuration: no key differs")
    html.write_text(page(runs), encoding="utf-8")
    print(f"page in {html}")


def _show_timelines(folders: Sequence[str]) -> None:
    for folder in folders:
        found = events.read(Path(folder))
        if not found:
            raise ConfigError(f"{folder}: expected a run's folder, found no {events.EVENTS}; name another")
        print("\n".join([folder, *timeline_lines(found)]))


def _show_exposed(args: argparse.Namespace) -> None:
    named = [trace.rpartition("=")[::2] for trace in args.traces]
    for _, path in named:
        if not Path(path).is_file():
            raise ConfigError(f"{path}: expected a trace, found no file; write PATH or NAME=PATH")
    runs = {name or Path(path).name: read_trace(path) for name, path in named}
    for name, timeline in runs.items():
        print("\n".join([name, *exposed_table(exposure(*timeline))]))
    if args.svg is not None:
        from fsdmoe.observe.charts import exposed_chart  # needs the extra

        window = None if args.window is None else (args.window[0] / 1e3, args.window[1] / 1e3)
        args.svg.write_text(exposed_chart(runs, title=args.title, window=window), encoding="utf-8")
        print(f"picture in {args.svg}")


if __name__ == "__main__":
    raise SystemExit(main())
