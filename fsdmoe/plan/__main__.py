"""``python -m fsdmoe.plan MODEL --gpus 64 --gpu h100 --seq 8192``: which mesh fits and which is fastest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.hush import hush_libraries
from fsdmoe.core.rules import unreachable
from fsdmoe.observe.console import suppress_broken_pipe
from fsdmoe.plan.answer import answer
from fsdmoe.plan.hardware import FABRICS, GPUS
from fsdmoe.plan.report import print_ranking, ranking_values
from fsdmoe.plan.serve import serve
from fsdmoe.plan.source import Fixed, Request
from fsdmoe.plan.winner import check, tables_of, toml_text


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when something fits, 1 when nothing does, 2 for a wrong command line."""
    options = parser().parse_args(arguments)
    hush_libraries()
    if options.serve:
        return serve(options.port)
    if options.model is not None and options.config is not None:
        print("fsdmoe: --config: expected a model or --config, got both; drop one", file=sys.stderr)
        return 2
    options.model = options.model or options.config
    missing = [name for name, value in (("model", options.model), ("--gpus", options.gpus)) if value is None]
    if missing:
        print(f"fsdmoe: {' and '.join(missing)}: expected, got none; see --help", file=sys.stderr)
        return 2
    fixed = Fixed(**{name: getattr(options, name) for name in Fixed._fields})
    request = Request(
        options.model, options.gpus, options.gpu, options.seq, options.tokens_per_step, options.fabric, fixed,
        options.host_memory, options.skew, options.loads,
    )  # fmt: skip
    try:
        wanted, ranking = answer(request)
    except (ConfigError, ImportError) as error:
        return _refuse(error, 2)
    except OSError as error:
        return _refuse(ConfigError(unreachable(error, {"model": options.model, "--loads": options.loads})), 2)
    try:
        best = ranking.best
        check(tables_of(best, wanted), request.num_gpus)
    except ConfigError as error:
        return _refuse(error, 1)
    if options.toml is not None:
        try:
            Path(options.toml).write_text(toml_text(best, wanted, request, ranking), encoding="utf-8")
        except OSError as error:
            return _refuse(ConfigError(f"--toml: cannot write {options.toml!r} ({error.strerror})"), 2)
    with suppress_broken_pipe():
        if options.json:
            print(json.dumps(ranking_values(ranking, wanted, request, options.top), indent=2))
        else:
            print_ranking(ranking, wanted, request, options.top)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m fsdmoe.plan", description=__doc__)
    made.add_argument(
        "model",
        nargs="?",
        help="a .toml file or the name of a packaged one, a Hugging Face folder, a config.json, or a preset",
    )
    made.add_argument("--config", metavar="FILE", help="the same, as train and launch take it")
    made.add_argument("--gpus", type=int, help="how many")
    made.add_argument("--gpu", default="h100", help=f"their kind: {', '.join(GPUS)}")
    made.add_argument("--seq", type=int, help="tokens of a row; else the file's, or 4096")
    made.add_argument("--tokens-per-step", type=int, help="else the file's batch, or about four million")
    made.add_argument("--fabric", help=f"network between domains: {', '.join(FABRICS)}")
    made.add_argument(
        "--host-memory", type=int, metavar="GIB", help="of the host, for each GPU; else what is usual for it"
    )
    made.add_argument(
        "--skew", type=float, help="what the busiest rank of a layer gets of its rows, in even shares"
    )
    made.add_argument("--loads", metavar="PATH", help="the same from recorded routing (experts.record)")
    for axis in ("tp", "cp", "ep", "dp-outer"):
        made.add_argument(f"--{axis}", type=int, help=f"fix mesh.{axis.replace('-', '_')}")
    made.add_argument("--micro-batch", type=int, help="fix train.micro_batch_size")
    made.add_argument("--recompute", metavar="PARTS", help="fix what is recomputed: none, norms, layer, …")
    made.add_argument("--top", type=int, default=10, help="so many settings are listed")
    made.add_argument("--json", action="store_true", help="print all figures as JSON")
    made.add_argument("--toml", metavar="FILE", help="write the first setting's configuration")
    made.add_argument("--serve", action="store_true", help="the same as a page, on this machine alone")
    made.add_argument("--port", type=int, default=8765, help="of the page; 0 takes a free one")
    return made


def _refuse(error: Exception, code: int) -> int:
    print(f"fsdmoe: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
