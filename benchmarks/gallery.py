"""Pictures of what was measured, in light and dark, each drawn from the tables of its page.

python benchmarks/gallery.py            all of them, to docs/results/gallery_*.svg
python benchmarks/gallery.py memory     one
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from inks import INK, style_of

RESULTS = Path(__file__).parent.parent / "docs/results"
OURS, PEER, PALE = "#2a7f9e", "#b8863b", "#8a8f98"


def rows(page: str, after: str) -> list[list[str]]:
    """The first table of the section with this title, without its head."""
    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8").partition(f"\n## {after}\n")[2]
    table = re.search(r"(?:^\|.*\|\n)+", text, re.M)
    if table is None:
        raise SystemExit(f"docs/results/{page}.md: no table under {after!r}")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def number(text: str) -> float:
    found = re.search(r"[\d,]+(?:\.\d+)?", text)
    assert found is not None, text
    return float(found[0].replace(",", ""))


def bars(axes: Any, names: list[str], values: list[float], colours: list[str], unit: str) -> None:
    """Horizontal, the first on top, each with its figure."""
    axes.barh(range(len(names)), values, color=colours, height=0.62)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.bar_label(axes.containers[0], fmt="{:,.0f}", padding=4)
    axes.margins(x=0.14)


def against(axes: Any, found: list[tuple[float, float]], unit: str, scale: str = "linear") -> None:
    """Measured against planned, with the line on which they are equal."""
    highest = max(max(pair) for pair in found) * 1.15
    lowest = min(min(pair) for pair in found) / 1.15
    axes.plot([lowest, highest], [lowest, highest], color=PALE, linewidth=1, label="equal")
    axes.scatter([m for m, _ in found], [p for _, p in found], color=OURS, s=28, zorder=3, label="a setting")
    axes.set(xscale=scale, yscale=scale, xlabel=f"measured, {unit}", ylabel=f"planned, {unit}")
    axes.legend(frameon=False, labelcolor="linecolor")


def throughput(axes: Any) -> None:
    """Training step: tokens/s compared with torchtitan"""
    found = rows("train_step", "Compared with torchtitan")
    names = [row[0].replace("`", "") for row in found]
    colours = [OURS if name.startswith("fsdmoe") else PEER for name in names]
    bars(axes, names, [number(row[2]) for row in found], colours, "tokens/s of one H200")


def layer(axes: Any) -> None:
    """MoE layer, forward and backward: TFLOP/s compared with compiled peers"""
    found = rows("moe_layer", "Compared with compiled peers, skewed routing")[:4]
    for place, (name, colour) in enumerate(
        (("fsdmoe", OURS), ("transformers compiled", PEER), ("torchtitan compiled", PALE))
    ):
        values = [number(row[place + 1].partition("(")[2]) for row in found]
        axes.bar([x + 0.27 * (place - 1) for x in range(len(found))], values, 0.25, color=colour, label=name)
    labels = ["hidden {}\nwidth {}\n{} experts".format(*row[0].split(", ")) for row in found]
    axes.set_xticks(range(len(found)), labels)
    axes.set_ylabel("TFLOP/s of one H200")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.0))
    axes.margins(y=0.2)


def memory(axes: Any) -> None:
    """Peak memory: planned before the run, and measured in it"""
    found = rows("planned_memory", "Planned and measured peaks")
    against(axes, [(number(row[3]), number(row[2])) for row in found], "GiB")


def time(axes: Any) -> None:
    """Time of a step: planned, and measured or emulated"""
    text = (RESULTS / "step_time.md").read_text(encoding="utf-8")
    found = re.findall(r"\| (?:fit|check) \| ([\d.]+) \| ([\d.]+) \|", text)
    against(axes, [(float(measured), float(planned)) for measured, planned in found], "ms", "log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")


def traffic(axes: Any) -> None:
    """All-to-all of a step on an emulated node: hidden behind compute, and exposed"""
    text = (RESULTS / "emulated_run.md").read_text(encoding="utf-8")
    pattern = r"== {}: step.*?all-to-all +[\d.]+ ms +([\d.]+) ms +([\d.]+) ms"
    names = {"node, no overlap": "in one piece", "node, chunks 3": "in three chunks, in a graph"}
    hidden: list[float] = []
    exposed: list[float] = []
    for name in names:
        found = re.search(pattern.format(name), text, re.S)
        assert found is not None, name
        hidden.append(float(found[1]))
        exposed.append(float(found[2]))
    places = range(len(names))
    axes.barh(places, exposed, color=PEER, height=0.55, label="exposed: the GPU waits")
    axes.barh(places, hidden, left=exposed, color=OURS, height=0.55, label="hidden")
    axes.set_yticks(places, list(names.values()))
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step (Qwen3-30B-A3B, one of 8 ranks)")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def recompute(axes: Any) -> None:
    """What recomputing and offloading parts frees, and what it costs"""
    found = rows("memory", "What each part frees and costs")
    for row in found:
        freed = -float(row[5].split()[0])
        cost = float(row[2].split()[0])
        is_moved = "offload" in row[0]
        axes.scatter(freed, cost, color=PEER if is_moved else OURS, s=28)
        if row[0] in ("norms", "experts", "layer"):
            place = {"xytext": (-7, -3), "textcoords": "offset points", "ha": "right"}
            axes.annotate(row[0], (freed, cost), fontsize=8, **place)
    axes.set(xlabel="activations freed, %", ylabel="step longer, %")
    axes.scatter([], [], color=OURS, label="recomputed")
    axes.scatter([], [], color=PEER, label="with copies in host memory")
    axes.legend(frameon=False)


def scaling(axes: Any) -> None:
    """Tokens/s of a fixed batch on more GPUs: planned, next to what was published"""
    found = [row for row in rows("papers", "MegaScale-MoE: scaling and ablation") if "table 3" in row[0]]
    gpus = [number(row[0].partition("tokens/s:")[2]) for row in found]
    lines = {
        "fsdmoe, planned": (OURS, [number(row[2]) for row in found]),
        "MegaScale-MoE, published": (PEER, [number(row[1].partition(",")[2]) for row in found]),
        "Megatron-LM, published": (PALE, [number(row[1]) for row in found]),
    }
    for name, (colour, values) in lines.items():
        style = "--" if "planned" in name else "-"
        axes.plot(gpus, values, style, marker="o", markersize=4, color=colour, label=name)
    axes.set(xlabel="GPUs, 720 rows a step", ylabel="thousand tokens/s", xticks=gpus)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, labelcolor="linecolor")


def graphs(axes: Any) -> None:
    """Time of a step without CUDA graphs and with them"""
    names: list[str] = []
    times: list[tuple[float, float]] = []
    for section in ("Qwen3-30B-A3B, one rank", "Qwen3-30B-A3B, one of eight ranks"):
        for row in rows("graphs", section):
            rank = section.partition(", ")[2].replace("one of eight ranks", "one of eight")
            names.append(f"{rank}\n{row[0].replace('x', ' x ')} tokens")
            times.append((number(row[1]), number(row[2])))
    for shift, colour, label in ((-0.2, PALE, "without"), (0.2, OURS, "with graphs")):
        values = [pair[shift > 0] for pair in times]
        drawn = axes.bar([x + shift for x in range(len(names))], values, 0.38, color=colour, label=label)
        axes.bar_label(drawn, fmt="{:.0f}", padding=2)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("ms of a step, one H200")
    axes.margins(y=0.12)
    axes.legend(frameon=False)


def goodput(axes: Any) -> None:
    """Share of the time that makes progress at the failure rate of Llama 3 (simulated)"""
    found = rows("goodput", "671 billion parameters, at the failure rate of Llama 3's training")
    gpus = [number(row[0]) for row in found]
    for column, colour, label in ((4, OURS, "copies in memory"), (2, PEER, "checkpoints on disk")):
        values = [100 * number(row[column]) for row in found]
        axes.plot(gpus, values, marker="o", markersize=4, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [f"{each:,.0f}" for each in gpus])
    axes.set(xlabel="GPUs", ylabel="goodput, %", ylim=(90, 100))
    axes.legend(frameon=False, labelcolor="linecolor", loc="lower left")


def precision(axes: Any) -> None:
    """Held-out loss of five seeds: bf16, the same with other rounding, FP8"""
    found = {row[0]: row[1].split(", ") for row in rows("convergence", "FP8 blockwise, five seeds")}
    settings = {"bf16": PALE, "other rounding": PEER, "fp8_blockwise": OURS}
    for place, (name, colour) in enumerate(settings.items()):
        values = [float(each) for each in found[name]]
        axes.scatter(values, [place] * len(values), color=colour, s=36, zorder=3)
        mean = sum(values) / len(values)
        axes.plot([mean, mean], [place - 0.28, place + 0.28], color=colour, linewidth=2)
        axes.annotate(f"mean {mean:.4f}", (mean, place - 0.3), ha="center", va="bottom", fontsize=8)
    axes.set_yticks(range(len(settings)), ["bf16", "bf16, other\nmicro-batches", "FP8"])
    axes.invert_yaxis()
    axes.margins(y=0.25)
    axes.set_xlabel("held-out loss after 1,500 steps, a dot a seed")


PICTURES: dict[str, Callable[[Any], None]] = {
    "throughput": throughput,
    "layer": layer,
    "memory": memory,
    "time": time,
    "traffic": traffic,
    "recompute": recompute,
    "scaling": scaling,
    "graphs": graphs,
    "goodput": goodput,
    "precision": precision,
}


def draw(name: str, mode: str) -> Path:
    """One picture, on no background of its own."""
    with plt.rc_context(style_of(mode, name)):  # type: ignore[arg-type]
        figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
        PICTURES[name](axes)
        figure.suptitle((PICTURES[name].__doc__ or "").strip(), fontsize=10)
        path = RESULTS / f"gallery_{name}_{mode}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PICTURES)}; else all")
    names = parser.parse_args().names or list(PICTURES)
    for name in names:
        for mode in INK:
            print(draw(name, mode))


if __name__ == "__main__":
    main()
