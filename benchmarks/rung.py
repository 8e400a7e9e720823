"""A MoE of 0.50 B parameters, trained for minutes on one GPU by ``train.py`` itself. 22 M of them are active,
embedding and head left out.

8 layers of width 512 with 144 experts of 256, of which a token takes 4; a vocabulary of 32,768, rows of
2,048 packed tokens. Three runs of the same rows, learning rates and number of steps:

    bf16      bf16 with fp32 main weights
    fp8       the same with precision.recipe = "fp8_blockwise"
    halves    bf16 in micro-batches of half the size, killed in the middle and started again

What ``halves`` is from ``bf16`` is the noise that rounding and the order of sums make; ``fp8`` should be no
further. MFU is that of the whole run, evaluations and saves included, from its first step's end to its end:

    model FLOPs of a token, forward and backward (products of active parameters, the head's and attention
    included, the embedding's look-up not)  x  tokens  /  seconds  /  the GPU's dense bf16 peak

    python benchmarks/corpus.py runs/corpus                                 the text, once
    python benchmarks/rung.py --corpus runs/corpus --only bf16              8 minutes; tells how many steps
    python benchmarks/rung.py --corpus runs/corpus --steps N --only fp8 halves
    python benchmarks/rung.py --report runs/rung                            table, and docs/results/rung_*.svg
    python benchmarks/rung.py --tiny                                        on a CPU, to see that it works

Runs that are in the folder already go on where they stopped. Any key of train.py may follow:
``--optim.lr=1e-3``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inks import INK, style_of
from timing import child_environment, require_gpu

from fsdmoe.checkpoint.catalog import entries
from fsdmoe.checkpoint.storage import open_storage
from fsdmoe.core import events
from fsdmoe.models.config import preset_config
from fsdmoe.models.flops import idle_expert_params, num_parameters, training_flops_per_token
from fsdmoe.observe.metrics import Row, read_metrics

ROOT = Path(__file__).parent.parent
MODEL = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 144, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    "vocab_size": 32_768,
}  # fmt: skip
TINY_MODEL = MODEL | {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "vocab_size": 264,
}  # fmt: skip
SEQ_LEN = {False: 2048, True: 32}
ROWS = {False: 64, True: 8}
"""Of a step."""
VARIANTS: dict[str, dict[str, str]] = {
    "bf16": {},
    "fp8": {"precision.recipe": "fp8_blockwise"},
    "halves": {},
}
PROBED_STEPS = 60
EVALUATIONS = 12
FIGURES = {
    "max_over_mean": "busiest expert over mean",
    "dead_fraction": "experts without tokens",
    "entropy": "entropy",
}
COLOURS = {"bf16": "#b8863b", "fp8": "#2a7f9e", "halves": "#9a9a9a"}


def options(variant: str, steps: int, args: argparse.Namespace) -> list[str]:
    """The command line of a run."""
    tiny, rows = args.tiny, ROWS[args.tiny]
    model = TINY_MODEL if tiny else MODEL
    keys: dict[str, Any] = {f"model.{name}": value for name, value in model.items()}
    keys |= {
        "data.seq_len": SEQ_LEN[tiny], "data.holdout": 0.02,
        "precision.param_dtype": "float32" if tiny else "bfloat16",
        "experts.balance.sequence": 1e-3, "experts.balance.bias_rate": 1e-3,
        "optim.lr": 2e-3, "optim.warmup_steps": max(1, steps // 20),
        "memory.keep": "values" if variant == "fp8" else "rows",
        "train.global_batch_size": rows, "train.micro_batch_size": rows // (2 if variant == "halves" else 1),
        "train.steps": steps, "train.eval_interval": max(1, steps // EVALUATIONS), "train.eval_batches": 4,
        "train.graphs": "none" if tiny else "step", "train.output_dir": args.folder / variant,
        "checkpoint.interval": interval_of(steps), "observe.tensorboard": "false", "observe.progress": "off",
        "observe.log_interval": 1 if tiny else 10,
    }  # fmt: skip
    if args.corpus is not None:
        keys |= {"data.kind": "tokens", "data.path": args.corpus / "train.bin", "data.vocab_size": 32_768}
    keys |= VARIANTS[variant] if not tiny else {}
    keys |= args.others
    return [
        "--config",
        str(ROOT / "configs/quickstart.toml"),
        *(f"--{key}={value}" for key, value in keys.items()),
    ]


def interval_of(steps: int) -> int:
    """Steps between saves."""
    return max(1, steps // 4)


def start(variant: str, steps: int, args: argparse.Namespace, **changes: Any) -> subprocess.Popen[str]:
    """A run of train.py that writes its log next to its folder."""
    command = [sys.executable, str(ROOT / "train.py"), *options(variant, steps, args)]
    command += [f"--{key.replace('__', '.')}={value}" for key, value in changes.items()]
    log = (args.folder / f"{variant}.log").open("a", encoding="utf-8")
    return subprocess.Popen(command, stdout=log, stderr=log, text=True, env=child_environment(), cwd=ROOT)


def finish(variant: str, running: subprocess.Popen[str], args: argparse.Namespace) -> None:
    if running.wait():
        log = (args.folder / f"{variant}.log").read_text(encoding="utf-8")
        raise SystemExit(f"{variant} failed:\n{log[-3000:]}")


def rows_of(folder: Path, key: str = "loss") -> list[Row]:
    path = folder / "metrics.jsonl"
    return [row for row in read_metrics(path) if row.get(key) is not None] if path.exists() else []


def steps_in(minutes: float, args: argparse.Namespace) -> int:
    """How many steps fit, by a run of the first ones."""
    folder = args.folder / "probe"
    running = start(
        "bf16", PROBED_STEPS, args, train__output_dir=folder, train__eval_interval=-1, checkpoint__interval=-1
    )
    finish("bf16", running, args)
    settled = [row["tokens_per_s"] for row in rows_of(folder)][2:]
    speed = statistics.median(settled)
    seconds = ROWS[args.tiny] * SEQ_LEN[args.tiny] / speed
    print(
        f"bf16, {PROBED_STEPS} steps: {speed:,.0f} tokens/s, MFU {mfu(speed, args):.1%} without evaluations "
        "and saves",
        flush=True,
    )
    return round(0.97 * minutes * 60 / seconds)  # evaluations and saves take the rest


def train(variant: str, steps: int, args: argparse.Namespace) -> None:
    """Start a run and wait for it; ``halves`` is killed once, in the middle."""
    folder, is_killed = args.folder / variant, (args.folder / f"{variant}.killed").exists()
    running = start(variant, steps, args)
    while variant == "halves" and not is_killed and running.poll() is None:
        time.sleep(0.2)
        saved = entries(open_storage(str(folder / "checkpoints")))
        rows = rows_of(folder)
        if saved and rows and saved[0].step >= interval_of(steps) * 2:
            running.kill()
            running.wait()
            (args.folder / f"{variant}.killed").write_text(f"{rows[-1]['step']}\n", encoding="utf-8")
            print(f"{variant}: killed behind step {rows[-1]['step']}, {saved[0].name} is whole", flush=True)
            is_killed, running = True, start(variant, steps, args)
    finish(variant, running, args)
    print(figures_text(variant, folder, args), flush=True)


def seconds_of(folder: Path) -> float:
    """From the end of the first step to the end of the run; of a killed one from the first step's end of each
    start to its last event."""
    seconds, began, last = 0.0, None, None
    for event in events.read(folder):
        if event["event"] in ("start", "restart"):
            seconds += 0.0 if began is None or last is None else last - began
            began = None
        elif event["event"] == "ready":
            began = event["time"]
        last = event["time"]
    return seconds + (0.0 if began is None or last is None else last - began)


def mfu(tokens_per_s: float, args: argparse.Namespace) -> float:
    model = preset_config("quickstart", **(TINY_MODEL if args.tiny else MODEL))
    return tokens_per_s * training_flops_per_token(model, SEQ_LEN[args.tiny]) / (args.peak * 1e12)


def figures_of(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Tokens/s and MFU over the whole run, and its losses at the end."""
    rows, evaluated = rows_of(folder), rows_of(folder, "eval_loss")
    speed = rows[-1]["tokens"] / seconds_of(folder)
    tail = rows[-max(1, len(rows) // 10) :]
    return {
        "steps": rows[-1]["step"],
        "tokens": rows[-1]["tokens"],
        "seconds": seconds_of(folder),
        "tokens_per_s": speed,
        "mfu": mfu(speed, args),
        "loss": statistics.fmean(row["loss"] for row in tail),
        "held_out": evaluated[-1]["eval_loss"] if evaluated else float("nan"),
    }


def figures_text(variant: str, folder: Path, args: argparse.Namespace) -> str:
    found = figures_of(folder, args)
    return (
        f"{variant}: {found['steps']:,} steps, {found['tokens'] / 1e6:.0f} M tokens in "
        f"{found['seconds']:.0f} s, {found['tokens_per_s']:,.0f} tokens/s, MFU {found['mfu']:.1%}, "
        f"held-out loss {found['held_out']:.4f}"
    )


def report(args: argparse.Namespace) -> bool:
    """Print what is in the folder; whether fp8 is within the noise, and MFU as high as is wanted."""
    folders = {name: args.folder / name for name in VARIANTS if rows_of(args.folder / name)}
    config = preset_config("quickstart", **(TINY_MODEL if args.tiny else MODEL))
    flops = training_flops_per_token(config, SEQ_LEN[args.tiny])
    total = num_parameters(config)
    active = total - idle_expert_params(config)
    print(
        f"{total / 1e6:.0f} M parameters, {active / 1e6:.1f} M active with embedding and head, "
        f"{flops / 1e6:.0f} MFLOP a token\n"
    )
    print("| run | steps | M tokens | minutes | tokens/s | MFU | loss, last tenth | held-out loss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    found = {name: figures_of(folder, args) for name, folder in folders.items()}
    for name, each in found.items():
        print(
            f"| {name} | {each['steps']:,} | {each['tokens'] / 1e6:.0f} | {each['seconds'] / 60:.1f} "
            f"| {each['tokens_per_s']:,.0f} | {each['mfu']:.1%} | {each['loss']:.4f} "
            f"| {each['held_out']:.4f} |"
        )
    good = all(each["mfu"] >= 0.24 for each in found.values())
    if {"bf16", "fp8", "halves"} <= found.keys():
        apart = {name: distance(folders["bf16"], folders[name]) for name in ("halves", "fp8")}
        good &= apart["fp8"] <= apart["halves"]
        print(
            f"\nmean distance of the loss from bf16's, second half: halves {apart['halves']:.4f}, fp8 "
            f"{apart['fp8']:.4f}"
        )
        show_held_out(folders)
    for name, folder in folders.items():
        over_time = load_over_time(rows_of(folder))
        marks = [round(share * (len(over_time["step"]) - 1)) for share in (0.02, 0.25, 0.5, 1)]
        told = [
            f"step {over_time['step'][at]:,}: " + ", ".join(f"{over_time[key][at]:.3f}" for key in FIGURES)
            for at in marks
        ]
        print(f"{name}, {', '.join(FIGURES.values())} (mean of layers): {'; '.join(told)}")
    return good


def show_held_out(folders: Mapping[str, Path]) -> None:
    """Of each evaluation, the held-out loss in bf16, and how far the others are from it."""
    losses = {name: {row["step"]: row["eval_loss"] for row in rows_of(folder, "eval_loss")}
              for name, folder in folders.items()}  # fmt: skip
    print("\n| step | held-out loss in bf16 | halves | fp8 |\n| --- | --- | --- | --- |")
    for step, loss in losses["bf16"].items():
        others = [f"{losses[name][step] - loss:+.4f}" for name in ("halves", "fp8")]
        print(f"| {step:,} | {loss:.4f} | {' | '.join(others)} |")
    print()


def distance(one: Path, other: Path) -> float:
    """Of two runs' losses in the same steps, the mean of the absolute differences, smoothed over ten rows."""
    losses = [{row["step"]: row["loss"] for row in rows_of(folder)} for folder in (one, other)]
    steps = sorted(losses[0].keys() & losses[1].keys())
    steps = steps[len(steps) // 2 :]
    gaps = [losses[1][step] - losses[0][step] for step in steps]
    means = [statistics.fmean(gaps[at : at + 10]) for at in range(0, max(1, len(gaps) - 9), 10)]
    return statistics.fmean(map(abs, means))


def load_over_time(rows: list[Row]) -> Mapping[str, list[Any]]:
    """Steps, and of each the mean over layers of the figures of loads."""
    found: dict[str, list[Any]] = {"step": [row["step"] for row in rows]}
    for key in FIGURES:
        found[key] = [
            statistics.fmean(figures[key] or 0.0 for figures in row["experts"].values()) for row in rows
        ]
    return found


def draw(args: argparse.Namespace) -> None:
    """Losses of all runs, and loads of experts in the first, in light and dark; needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    runs = {name: rows_of(args.folder / name) for name in VARIANTS if rows_of(args.folder / name)}
    for mode in INK:
        with plt.rc_context(style_of(mode, "rung")):  # type: ignore[arg-type]
            figure, axes = plt.subplots(1, 1, figsize=(6.4, 3.2), layout="constrained")
            for name, rows in runs.items():
                tokens = [row["tokens"] / 1e6 for row in rows if row["step"] > 20]
                losses = [row["loss"] for row in rows if row["step"] > 20]
                axes.plot(tokens, losses, color=COLOURS[name], linewidth=0.9, label=name)
            axes.set(xlabel="million tokens", ylabel="training loss")
            axes.legend(frameon=False, labelcolor="linecolor")
            figure.suptitle("A MoE of 0.50 B parameters on one GPU", fontsize=10)
            save(figure, args.pictures / f"rung_loss_{mode}.svg")
            figure, all_axes = plt.subplots(1, len(FIGURES), figsize=(6.4, 2.4), layout="constrained")
            over_time = load_over_time(next(iter(runs.values())))
            for axes, (key, name) in zip(all_axes, FIGURES.items(), strict=True):
                axes.plot(over_time["step"], over_time[key], color=COLOURS["fp8"], linewidth=0.9)
                axes.set(xlabel="step", title=name, ylim=(0, None))
                axes.title.set_fontsize(9)
            save(figure, args.pictures / f"rung_experts_{mode}.svg")
            plt.close("all")


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, transparent=True, metadata={"Date": None})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, help="a folder of benchmarks/corpus.py")
    parser.add_argument("--folder", type=Path, default=Path("runs/rung"), help="of the runs")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="of the first run, which --steps follow from"
    )
    parser.add_argument("--steps", type=int, help="of each run; without it as many as fit")
    parser.add_argument("--peak", type=float, default=989.5, help="TFLOP/s of the GPU, dense bf16")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only tell and draw what it holds")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs/results")
    parser.add_argument("--tiny", action="store_true")
    args, others = parser.parse_known_args()
    if wrong := [other for other in others if not (other.startswith("--") and "=" in other)]:
        raise SystemExit(f"{' '.join(wrong)}: expected keys of train.py as --section.key=value")
    args.others = dict(other.removeprefix("--").split("=", 1) for other in others)
    return args


def main() -> int:
    args = parse()
    if args.report:
        args.folder = args.report
        if not any(rows_of(args.folder / name) for name in VARIANTS):
            raise SystemExit(f"--report: expected a folder of runs, found none in {args.folder}")
        draw(args)
        return 0 if report(args) or args.tiny else 1
    if not args.tiny:
        require_gpu("try --tiny")
        if args.corpus is None:
            raise SystemExit("--corpus: expected a folder that benchmarks/corpus.py has written")
    args.folder = args.folder.absolute()
    args.folder.mkdir(parents=True, exist_ok=True)
    steps = args.steps or (24 if args.tiny else steps_in(args.minutes, args))
    print(f"{steps:,} steps each: give --steps {steps} to other calls", flush=True)
    for variant in args.only:
        train(variant, steps, args)
    return 0 if report(args) or args.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
