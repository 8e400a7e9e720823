"""Is the planner's step time what was measured?

    python benchmarks/step_time.py      writes docs/results/step_time.md; no GPU, about a minute

Measured and emulated steps are read from the pages of docs/results, which have the commands that printed them
on a GPU. Every second of them, in the order of the list, fits the one constant of the planner that no
benchmark of a part measures (the start of a layer); the others check it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

from papers import of_page, table

from fsdmoe.config import build_config
from fsdmoe.plan import GPUS, Gpu, Job, Setting
from fsdmoe.plan.step_time import estimate_time

RESULTS = Path(__file__).parent.parent / "docs/results"
QWEN = {"preset": "qwen3-30b-a3b", "num_hidden_layers": 8}
ALL_BF16 = {
    "precision": {"main_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "optim": {"moment_dtype": "bfloat16"},
}
NO_NORM = {"optim": {"moment_dtype": "bfloat16", "grad_clip": 0.0}}
GRAPHS = {"train": {"graphs": "step"}}
FREE = 1e15
"""Bytes/s of a fabric that takes no time."""


@dataclass(frozen=True)
class Case:
    """A step that was measured, and how it is planned."""

    name: str
    kind: str
    page: str
    pattern: str
    """Of its milliseconds on the page."""
    tables: dict[str, Any]
    batch: int = 4
    seq_len: int = 4096
    world: int = 1
    nvlink: float = 300e9
    """Of the emulated fabric."""

    @cached_property
    def measured(self) -> float:
        return float(of_page(self.page, self.pattern))

    @cached_property
    def plan(self) -> tuple[Job, Setting]:
        train = {"micro_batch_size": self.batch, "global_batch_size": self.batch * self.world}
        tables = {**ALL_BF16, **self.tables, "data": {"seq_len": self.seq_len}}
        tables["train"] = {**train, **self.tables.get("train", {})}
        problems: list[str] = []
        config = build_config(tables, {}, self.world, problems, needs_data=False)
        if config is None:
            raise SystemExit(f"{self.name}: {problems}")
        setting = Setting.of(config, self.world)
        # measured with kernels, which a CPU refuses
        return Job.of(config), replace(setting, precision=replace(setting.precision, emulate=False))

    def planned(self, gpu: Gpu) -> float:
        """Milliseconds."""
        return 1e3 * estimate_time(*self.plan, replace(gpu, nvlink=self.nvlink, network=50e9)).total


def _memory(name: str, **memory: list[str]) -> Case:
    """A row of the page of memory."""
    row = rf"\| {name.replace('+', chr(92) + '+')} \| ([\d.]+) ms"
    return Case(f"8 layers, {name}", "measured", "memory", row, {"model": QWEN, "memory": memory, **NO_NORM})


def _node(chunks: int, fabric: str) -> Case:
    tables = {
        "model": {"preset": "qwen3-30b-a3b"},
        "mesh": {"ep": 8},
        "experts": {"dispatcher": "flex", "chunks": chunks},
        "train": {"graphs": "step"},
    }
    return Case(
        f"48 layers, one of 8, {chunks} chunks, {'NVLink' if fabric == 'node' else 'free fabric'}",
        "emulated", "emulated_run", rf"== {fabric}, chunks {chunks}: step ([\d.]+) ms", tables, world=8,
        nvlink=300e9 if fabric == "node" else FREE,
    )  # fmt: skip


def _nodes(key: str) -> Case:
    tables = {
        "model": {"preset": "deepseek-v3", "num_hidden_layers": 22, "num_nextn_predict_layers": 0},
        "mesh": {"ep": 64},
        "experts": {key: 2},
    }
    name = key.replace("_", "-")
    pattern = rf"== nodes, {name} 2: step ([\d.]+) ms"
    return Case(f"DeepSeek-V3, 22 layers, one of 64, 2 {name}", "emulated", "emulated_run", pattern, tables,
                batch=2, world=64)  # fmt: skip


WIDE = {"precision": {"main_dtype": "float32", "reduce_dtype": "bfloat16"}}
FP8 = {"recipe": "fp8_blockwise", "covers": ["experts", "attention"], "emulate": True}
CLIPPED = {"model": QWEN, "memory": {"recompute": ["norms"]}}
STEP = {**CLIPPED, **NO_NORM}
CASES = [
    _memory("all kept"),
    _memory("norms", recompute=["norms"]),
    _memory("attention_projections", recompute=["attention_projections"]),
    _memory("experts", recompute=["experts"]),
    _memory("attention", recompute=["attention"]),
    _memory("layer", recompute=["layer"]),
    _memory("router", recompute=["router"]),
    _memory("norms + router", recompute=["norms", "router"]),
    _memory("norms + router + attention_projections", recompute=["norms", "router", "attention_projections"]),
    _memory("offload: qkv", offload=["qkv"]),
    _memory("offload: expert_pre_activation", offload=["expert_pre_activation"]),
    _memory("offload: layer_input", offload=["layer_input"]),
    Case("8 layers, norms, float32 main weights, graphs", "measured", "train_step",
         r"\| float32 main weights, bf16 \| ([\d.]+)", {**STEP, **GRAPHS, **WIDE}),
    Case("8 layers, norms, compared with torchtitan", "measured", "train_step",
         r"\| fsdmoe \(norms recomputed\) \| ([\d.]+)", STEP),
    Case("8 layers, norms, fp8_blockwise, float32 main weights", "measured", "train_step",
         r"\| float32 main weights, `fp8_blockwise` \| ([\d.]+)",
         {**STEP, "precision": {**WIDE["precision"], **FP8}}),
    Case("8 layers, norms, fp8_blockwise, all bf16", "measured", "train_step",
         r"\| all bf16, `fp8_blockwise` \| ([\d.]+)",
         {**STEP, "precision": {**ALL_BF16["precision"], **FP8}}),
    Case("8 layers, norms, graphs, 1 x 2,048 tokens", "measured", "graphs",
         r"\| 1x2048 \| [\d.]+ \| ([\d.]+)",
         {**CLIPPED, **GRAPHS}, batch=1, seq_len=2048),
    Case("8 layers, norms, graphs, 4 x 4,096 tokens", "measured", "graphs",
         r"\| 4x4096 \| [\d.]+ \| ([\d.]+)",
         {**CLIPPED, **GRAPHS}),
    Case("6 layers, all of the step", "measured", "emulated_run", r"== node, chunks 1: step (163[\d.]+) ms",
         {"model": {**QWEN, "num_hidden_layers": 6}}),
    _nodes("chunks"),
    _node(3, "node"),
    _node(3, "free"),
    _node(4, "node"),
    _node(4, "free"),
    _node(6, "free"),
    _node(6, "node"),
    _nodes("sub_batches"),
]  # fmt: skip


def errors(gpu: Gpu, cases: Sequence[Case]) -> list[float]:
    """Planned over measured, less one."""
    return [case.planned(gpu) / case.measured - 1 for case in cases]


def fitted(gpu: Gpu, cases: Sequence[Case]) -> Gpu:
    """The GPU with the start of a layer that makes the sum of squared errors of these steps least."""

    def cost(of: Gpu) -> float:
        return sum(math.log1p(error) ** 2 for error in errors(of, cases))

    return min((replace(gpu, layer_start=1e-5 * number) for number in range(100)), key=cost)


def _summary(found: Sequence[float]) -> str:
    sizes = [abs(error) for error in found]
    return f"median {100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.1f} %"


def main() -> None:
    gpu = GPUS["h200"]
    fit = CASES[::2]
    better = fitted(gpu, fit)
    rows = []
    for number, (case, error) in enumerate(zip(CASES, errors(gpu, CASES), strict=True)):
        link = f"[{case.page}]({case.page}.md)"
        figures = (f"{case.measured:.1f}", f"{case.planned(gpu):.1f}", f"{100 * error:+.1f} %")
        rows.append((case.name, case.kind, "check" if number % 2 else "fit", *figures, link))
    halves = [
        (name, str(len(cases)), _summary(errors(gpu, cases)))
        for name, cases in (("fit", fit), ("check", CASES[1::2]), ("all", CASES))
    ]
    parts = {
        "fitted": f"{1e3 * better.layer_start:.2f} ms",
        "used": f"{1e3 * gpu.layer_start:.2f} ms",
        "halves": table(("half", "steps", "planned against measured"), halves),
        "cases": table(("step", "kind", "half", "measured, ms", "planned, ms", "", "by"), rows),
    }
    page = Template(Path(__file__).with_name("step_time_page.md").read_text(encoding="utf-8"))
    (RESULTS / "step_time.md").write_text(page.substitute(parts), encoding="utf-8")
    print("\n\n".join(parts.values()))


if __name__ == "__main__":
    main()
