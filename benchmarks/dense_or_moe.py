"""A dense model and a MoE with the same active FLOPs on one GPU: tokens/s of both, and the MoE's tax.

18 layers of width 1,152, a vocabulary of 32,768, rows of 2,048 packed tokens, bf16 with fp32 main weights:
a dense MLP of 3,072, or 64 experts of 384 of which a token takes 8. Both are runs of ``train.py`` with the
same kernels, attention and CUDA graphs, in one process. They take turns, in a changing order, and each warms
the card up before it is timed. A step is all of it: data, forward, backward, clipping, optimizer. The tax is
the MoE's time of a step by the dense model's; at equal FLOPs a MoE pays where it learns more than that in a
step. The MoE keeps the rows of its experts for backward (``memory.keep = "rows"``); the table has the peak of
memory of both.

Curves have steps of 32,768 tokens: the dense model learns more in four minutes of these than of larger ones.
The MoE's routers are balanced by a bias there, and by a small term for each sequence.

    python benchmarks/dense_or_moe.py                         about 5 minutes on one H200
    python benchmarks/dense_or_moe.py --profile               and where a step's GPU time goes
    python benchmarks/dense_or_moe.py --compare               and the MoE with memory.keep = "values"
    python benchmarks/dense_or_moe.py --corpus CORPUS --curves 4 --seeds 3 --json curves.json
                                                              held-out loss over minutes of training
    python benchmarks/dense_or_moe.py --draw curves.json      to docs/results/dense_or_moe_*.svg
    python benchmarks/dense_or_moe.py --tiny                  on a CPU, to see that it works

``--corpus`` is a folder that ``benchmarks/corpus.py`` has written; without it two bytes (``--tiny``: one) of
the sources of Python's standard library are a token and a file is a document. Routers of a new model send
most tokens to few experts, which settles within some 60 steps of text (on random tokens it does not): both
models train so many before they are timed. ``--curves`` trains one model after the other and skips what the
JSON holds already, so that a table may be filled in several calls (``--budget``: seconds of one). Any key of
train.py may follow, for both: ``--optim.lr=1e-3``; or for one of them: ``--moe optim.lr=4e-4``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from dense_or_moe_curves import Curve, add_curves, draw, report
from step_parts import Work, by_part, largest_kernels, largest_others, profile_step
from timing import changing_orders, require_gpu, wait

from fsdmoe import train as program
from fsdmoe.config import load_config, start_meshes
from fsdmoe.models.config import ModelConfig
from fsdmoe.models.flops import idle_expert_params, num_parameters, training_flops_per_token

ROOT = Path(__file__).parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE = {
    "precision.param_dtype": "bfloat16", "model.hidden_size": "1152", "model.num_hidden_layers": "18",
    "model.num_attention_heads": "9", "model.num_key_value_heads": "9", "model.head_dim": "128",
    "model.intermediate_size": "3072", "model.num_experts": "64", "model.num_experts_per_tok": "8",
    "model.moe_intermediate_size": "384", "model.vocab_size": "32768", "data.seq_len": "2048",
    "optim.lr": "2e-3", "optim.warmup_steps": "100",
}  # fmt: skip
LEARNING = {"experts.balance.sequence": "1e-3", "experts.balance.bias_rate": "1e-3"}
"""Of the MoE whose loss counts."""
TINY = {
    "precision.param_dtype": "float32", "model.hidden_size": "32", "model.num_hidden_layers": "2",
    "model.num_attention_heads": "2", "model.num_key_value_heads": "2", "model.head_dim": "16",
    "model.intermediate_size": "64", "model.num_experts": "8", "model.num_experts_per_tok": "2",
    "model.moe_intermediate_size": "32", "model.vocab_size": "256", "data.seq_len": "32",
}  # fmt: skip
MODELS = ("dense", "MoE")
NOTHING_MORE = "MoE with values"
"""The MoE with ``memory.keep = "values"``, for ``--compare``."""
WANTED = {65_536: 1.14, 16_384: 1.25}
"""The highest tax, by tokens of a step."""
CURVE_TOKENS = 32_768
WARM_UP_STEPS = 4
SETTLING_STEPS = 60
"""Until routers have spread their tokens."""


@dataclass(frozen=True)
class Size:
    """What a run is asked for, apart from its model."""

    tokens: int
    seed: int = 0
    optimizer: str = "adamw"
    steps: int = 100_000
    """Of the schedule; whoever steps the run decides when it ends."""


def options(model: str, size: Size, folder: Path, args: argparse.Namespace) -> list[str]:
    """The command line of a run, as train.py takes it."""
    keys = dict(TINY if args.tiny else LARGE)
    rows = size.tokens // int(keys["data.seq_len"])
    keys |= {
        "data.kind": "tokens", "data.path": str(args.corpus / "train.bin"),
        "data.vocab_size": keys["model.vocab_size"], "data.holdout": "0",
        "train.global_batch_size": str(rows), "train.micro_batch_size": str(args.rows or rows),
        "train.steps": str(size.steps), "train.seed": str(size.seed), "train.eval_interval": "-1",
        "train.output_dir": str(folder / model), "train.graphs": "step" if DEVICE.type == "cuda" else "none",
        "optim.name": size.optimizer, "checkpoint.interval": "-1", "observe.tensorboard": "False",
    }  # fmt: skip
    if model == "dense":
        keys["model.first_k_dense_replace"] = keys["model.num_hidden_layers"]
    elif model == "MoE":
        keys["memory.keep"] = "rows"
    if model != "dense" and args.curves:
        keys |= LEARNING
    own = args.dense if model == "dense" else args.moe
    keys |= args.others | dict(each.split("=", 1) for each in own)
    return ["--config", str(ROOT / "configs/quickstart.toml"), *(f"--{k}={v}" for k, v in keys.items())]


@contextlib.contextmanager
def built(model: str, size: Size, args: argparse.Namespace) -> Iterator[program.Run]:
    """A run of train.py; what it prints of itself is left out. One at a time: two would not fit."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(None):
            config = load_config(options(model, size, Path(folder), args)).config
            args.meshes = args.meshes or start_meshes(config)
            run = program.Run(config, args.meshes)
        try:
            yield run
        finally:
            with contextlib.redirect_stdout(None):
                run.checkpoints.close()
                run.close("ended")


def seconds_of(run: program.Run, num_steps: int) -> float:
    """Of a step, over so many in a row."""
    wait(DEVICE)
    began = time.perf_counter()
    for _ in range(num_steps):
        run.train_step()
    wait(DEVICE)
    return (time.perf_counter() - began) / num_steps


def measure(size: Size, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step of each model, once a round."""
    models = [*MODELS, NOTHING_MORE] if args.compare else [*MODELS]
    times: dict[str, list[float]] = {model: [] for model in models}
    for turn, order in enumerate(changing_orders(models, args.rounds)):
        for model in order:
            is_first = turn == 0 and size.tokens == args.tokens[0]
            times[model].append(measure_one(model, size, args, tell=is_first))
    return times


def measure_one(model: str, size: Size, args: argparse.Namespace, *, tell: bool) -> float:
    """Seconds of a step, once the card's clock has settled."""
    with built(model, size, args) as run:
        if tell:
            print(about(model, run), flush=True)
        seconds_of(run, WARM_UP_STEPS if args.tiny else SETTLING_STEPS)
        repeats = max(2, round(args.seconds / seconds_of(run, 2)))
        seconds_of(run, 1 + repeats // 2)
        seconds = seconds_of(run, repeats)
        peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
        print(f"{size.tokens:,} tokens, {model}: {seconds * 1e3:.1f} ms, peak {peak:.1f} GiB", flush=True)
        return seconds


def about(model: str, run: program.Run) -> str:
    config = run.config.model
    active = num_parameters(config) - idle_expert_params(config)
    flops = training_flops_per_token(config, run.config.data.seq_len)
    return (
        f"{model}: {num_parameters(config) / 1e6:,.0f} M parameters, {active / 1e6:,.0f} M active, "
        f"{flops / 1e9:.2f} GFLOP a token in training"
    )


def table(args: argparse.Namespace) -> bool:
    """Print tokens/s and tax at each number of tokens; whether every tax is as low as is wanted."""
    rows, good = [], True
    for tokens in args.tokens:
        times = measure(Size(tokens), args)
        seconds = {model: statistics.median(found) for model, found in times.items()}
        taxes = [moe / dense for dense, moe in zip(times["dense"], times["MoE"], strict=True)]
        tax = seconds["MoE"] / seconds["dense"]
        wanted = WANTED.get(tokens)
        good = good and (wanted is None or tax <= wanted)
        if args.compare:
            values = seconds[NOTHING_MORE]
            print(f"{tokens:,} tokens, {NOTHING_MORE}: tax {values / seconds['dense']:.3f}", flush=True)
        rows.append(
            f"| {tokens:,} | {tokens / seconds['dense']:,.0f} | {tokens / seconds['MoE']:,.0f} "
            f"| {seconds['dense'] * 1e3:.1f} | {seconds['MoE'] * 1e3:.1f} | {tax:.3f} "
            f"| {min(taxes):.3f} to {max(taxes):.3f} | {wanted or ''} |"
        )
    print(
        "\n| tokens a step | dense, tokens/s | MoE, tokens/s | dense, ms | MoE, ms | tax | rounds | wanted |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(rows), flush=True)
    return good


def show_parts(args: argparse.Namespace) -> None:
    """Print the GPU time of a step of both models by part, without graphs (see ``step_parts``)."""
    parts: dict[str, dict[str, float]] = {}
    others: dict[str, list[tuple[str, float]]] = {}
    kernels: dict[str, list[tuple[str, int, float]]] = {}
    args.others = args.others | {"train.graphs": "none"}
    for model in MODELS:
        found, config = profiled(model, args)
        parts[model] = by_part(found, config)
        others[model] = largest_others(found, config)
        kernels[model] = largest_kernels(found)
    print(f"\n| ms of a step of {args.tokens[0]:,} tokens | dense | MoE | more |")
    print("| --- | --- | --- | --- |")
    for each in parts.values():
        each["all"] = sum(each.values())
    for part, moe in parts["MoE"].items():
        dense = parts["dense"][part]
        print(f"| {part} | {dense:.1f} | {moe:.1f} | {moe - dense:+.1f} |")
    for model, names in others.items():
        print(f"\n{model}, others: " + "; ".join(f"{name[:60]} {spent:.2f}" for name, spent in names))
    for model, rows in kernels.items():
        print(f"\n| {model}: kernel | launches | ms |\n| --- | --- | --- |")
        for name, launches, spent in rows:
            print(f"| `{name[:90]}` | {launches} | {spent:.2f} |")


def profiled(model: str, args: argparse.Namespace) -> tuple[list[Work], ModelConfig]:
    with built(model, Size(args.tokens[0]), args) as run:
        seconds_of(run, WARM_UP_STEPS if args.tiny else SETTLING_STEPS)
        return profile_step(run.train_step, on_gpu=DEVICE.type == "cuda"), run.config.model


def standard_library(folder: Path, num_tokens: int, vocab_size: int) -> Path:
    """Sources of the standard library as tokens of one byte, or, where the vocabulary is larger, of two, the
    first of seven bits: below 32,768."""
    tokens, ends = [], [0]
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        text = np.frombuffer(path.read_bytes(), np.uint8)
        if "site-packages" in path.parts or len(text) < 1000 or ends[-1] > num_tokens:
            continue
        pairs = text[: len(text) // 2 * 2].reshape(-1, 2).astype("<u2")
        tokens.append(text.astype("<u2") if vocab_size == 256 else pairs[:, 0] % 128 * 256 + pairs[:, 1])
        ends.append(ends[-1] + len(tokens[-1]))
    for name in ("train", "held_out"):
        np.concatenate(tokens).tofile(folder / f"{name}.bin")
        np.save(folder / f"{name}.offsets.npy", np.array(ends))
    return folder


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="of a step")
    parser.add_argument("--rows", type=int, help="of a micro-batch; without it all of a step's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each model in each round")
    parser.add_argument("--profile", action="store_true", help="also GPU time by part and by kernel")
    parser.add_argument("--compare", action="store_true", help='also the MoE with memory.keep = "values"')
    parser.add_argument("--corpus", type=Path, help="a folder of benchmarks/corpus.py")
    parser.add_argument("--curves", type=float, metavar="MINUTES", help="train both for so long instead")
    parser.add_argument("--stop-after", type=float, default=float("inf"), metavar="MINUTES",
                        help="end curves early, on their schedule; they are only printed")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--points", type=int, default=8, help="evaluations of a curve")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--only", choices=MODELS, help="with --curves: train this model alone")
    parser.add_argument(
        "--dense", nargs="+", default=[], metavar="KEY=VALUE", help="of the dense model alone"
    )
    parser.add_argument("--moe", nargs="+", default=[], metavar="KEY=VALUE", help="of the MoE alone")
    parser.add_argument("--budget", type=float, default=float("inf"), help="start no curve that would not "
                        "end within so many seconds")  # fmt: skip
    parser.add_argument("--json", type=Path, default=Path("runs/dense_or_moe.json"))
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw and tell what it holds")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs/results")
    parser.add_argument("--tiny", action="store_true")
    args, others = parser.parse_known_args()
    args.tokens = args.tokens or ([CURVE_TOKENS] if args.curves else [*WANTED])
    args.others = dict(other.removeprefix("--").split("=", 1) for other in others)
    if args.tiny:
        args.seconds, args.tokens, args.rounds = 0.0, [128, 64], 2
    args.meshes = None  # built with the first run, and shared
    return args


def main() -> int:
    args = parse()
    if args.draw:
        curves = [Curve(**each) for each in json.loads(args.draw.read_text(encoding="utf-8"))]
        draw(curves, args.pictures)
        return 0 if report(curves) else 1
    if not args.tiny:
        require_gpu("try --tiny")
    if args.curves and args.corpus is None and not args.tiny:
        raise SystemExit("--curves: expected --corpus, a folder that benchmarks/corpus.py has written")
    with tempfile.TemporaryDirectory() as folder:
        if args.corpus is None:
            vocab_size = int((TINY if args.tiny else LARGE)["model.vocab_size"])
            args.corpus = standard_library(Path(folder), 20_000 if args.tiny else 16_000_000, vocab_size)
        if args.curves:
            return 0 if report(add_curves(built, Size, args)) else 1
        good = table(args)
        if args.profile:
            show_parts(args)
    return 0 if good or args.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
