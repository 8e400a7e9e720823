"""The papers' own tables, theirs next to ours: which of them can one GPU, the emulated fabric or the planner
answer, and with what?

    python -m benchmarks.papers                  writes docs/results/papers.md; no GPU, some minutes
    python -m benchmarks.papers folding          prints one section

A row of ours is *measured* (one GPU), *emulated* (one GPU as a rank of an emulated world) or *planned* (by
arithmetic). Measured and emulated figures are read from the pages of docs/results, which have the commands
that printed them on a GPU. Planned ones are made here, with the planner as it is: nothing is fitted to a
figure of theirs, but for the rates of links, which the planner takes from two rows of one table (said there).
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from fsdmoe.config import Config, build_config
from fsdmoe.config.toml import read_toml
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.models.config import preset_config
from fsdmoe.plan import GPUS, Estimate, Gpu, Job, Setting, estimate
from fsdmoe.plan.activations import KeptTensor, LayerView, kept_bytes, layer_tensors
from fsdmoe.plan.estimate import fits
from fsdmoe.plan.job import engine_plan
from fsdmoe.plan.memory import estimate_memory
from fsdmoe.plan.traffic import exchange_seconds, expert_legs

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
GIB = 2**30
PEAK = {"h100": 989.0, "h800": 989.0, "a100": 312.0, "h20": 148.0}
"""Dense bf16 TFLOP/s by the data sheet, of which MFU is a share."""
NO_FIT = "does not fit"
Row = Sequence[str]
Mesh = dict[str, int]


# Planning


@dataclass(frozen=True)
class Best:
    """The fastest way that fits."""

    found: Estimate
    setting: Setting

    @property
    def mesh(self) -> str:
        """Degrees above 1, and what else was chosen."""
        sizes = [f"{axis} {size}" for axis, size in vars(self.setting.degrees).items() if size > 1]
        overlap = max(self.setting.experts.chunks, self.setting.experts.sub_batches)
        name = "sub-batches" if self.setting.experts.sub_batches > 1 else "chunks"
        again = ", ".join(self.setting.memory.recompute)
        return ", ".join(
            [*sizes, f"micro-batch {self.setting.micro_batch_size}"]
            + [f"{name} {overlap}"] * (overlap > 1)
            + [f"recompute {again}"] * bool(again)
        )

    def mfu(self, gpu: str) -> float:
        return 100 * self.found.tflops / PEAK[gpu]


RECOMPUTE: tuple[tuple[str, ...], ...] = ((), ("norms",), ("experts", "norms"), ("layer",))
OVERLAP = ((1, 1), (2, 1), (4, 1), (1, 2))
"""Chunks and sub-batches."""


def configured(model: dict[str, Any], mesh: Mesh, world: int, seq_len: int, rows: int) -> Config | None:
    """A checked configuration; none where the model or the batch cannot be divided so."""
    tables: dict[str, Any] = {
        "model": model,
        "mesh": mesh,
        "optim": {"moment_dtype": "bfloat16"},
        "fsdp": {"lean": True},
        "data": {"seq_len": seq_len},
        "train": {"global_batch_size": rows, "micro_batch_size": 1},
    }
    problems: list[str] = []
    return build_config(tables, {}, world, problems, needs_data=False)


def settings(job: Job, base: Setting, overlap: Iterable[tuple[int, int]]) -> Iterable[Setting]:
    """All that are tried for a mesh."""
    rows = job.global_batch_size // (base.degrees.dp_outer * base.degrees.dp_shard)
    for micro_batch in (size for size in (1, 2, 3, 4, 6, 8) if rows % size == 0):
        for parts in RECOMPUTE:
            for chunks, sub_batches in overlap:
                if max(chunks, sub_batches) > 1 and base.degrees.ep * base.degrees.etp == 1:
                    continue
                if sub_batches > 1 and (micro_batch % sub_batches or base.degrees.cp * base.degrees.tp > 1):
                    continue
                yield replace(
                    base,
                    micro_batch_size=micro_batch,
                    memory=MemoryConfig(recompute=parts),  # type: ignore[arg-type]
                    experts=replace(base.experts, chunks=chunks, sub_batches=sub_batches),
                )


def best_of(
    model: dict[str, Any],
    gpu: Gpu,
    world: int,
    meshes: Iterable[Mesh],
    *,
    seq_len: int = 4096,
    rows: int = 256,
    overlap: Iterable[tuple[int, int]] = OVERLAP,
) -> Best | None:
    """The fastest of these meshes that fits the GPU's memory."""
    best: Best | None = None
    for mesh in meshes:
        config = configured(model, mesh, world, seq_len, rows)
        if config is None:
            continue
        job = Job.of(config)
        for setting in settings(job, Setting.of(config, world), tuple(overlap)):
            memory = estimate_memory(job, setting)
            if not fits(memory, gpu):
                continue
            found = estimate(job, setting, gpu, memory)
            if best is None or found.time.total < best.found.time.total:
                best = Best(found, setting)
    return best


# Figures of our own pages


def of_page(page: str, pattern: str) -> str:
    """The figure that the pattern's group finds on a page of docs/results, so that none is copied by hand."""
    found = re.search(pattern, (RESULTS / f"{page}.md").read_text(encoding="utf-8"), re.S)
    if found is None:
        raise SystemExit(f"docs/results/{page}.md has no figure like {pattern!r}; correct papers.py")
    return found[1]


def link(page: str) -> str:
    return f"[{page}]({page}.md)"


def planned(section: str) -> str:
    return f"`python -m benchmarks.papers {section}`"


def table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


HEAD = ("", "theirs", "ours", "kind", "by")


# Scalable Training of MoE Models with Megatron Core


def memory_of_the_report() -> str:
    """Tables 3 and 4."""
    config = configured({"preset": "deepseek-v3"}, {}, 1, 4096, 1)
    assert config is not None
    layer = engine_plan(Job.of(config), Setting.of(config, 1)).layers[3]
    sizes = {"dense": 0, "expert": 0}
    for param in layer.params:
        sizes[param.placement.mesh] += 16 * param.numel
    dense = sizes["dense"]
    experts = sizes["expert"] // 64
    model = preset_config("deepseek-v3")
    ours = [t for t in layer_tensors(model, "moe", LayerView()) if not t.name.startswith("values")]
    rows = model.num_experts_per_tok
    hidden = model.hidden_size * 2
    tensors = (
        *(t._replace(fixed=0) for t in ours),
        KeptTensor("values", model.num_attention_heads * model.v_head_dim * 2, ("mla_up",)),
        KeptTensor("rows of experts", rows * hidden),
        KeptTensor("activated rows of experts", rows * model.moe_intermediate_size * 2, ("activation",)),
        KeptTensor("outputs of experts", rows * hidden),
    )
    in_flight = 15 * 4 * 4096  # tokens of layers: the third of four pipeline ranks, 15 chunks of 4 layers
    whole = kept_bytes(tensors, 1, frozenset())
    freed = {p: whole - kept_bytes(tensors, 1, frozenset({p})) for p in ("mla_up", "activation", "norms")}
    by = ("planned", planned("memory"))
    figures = [
        ("table 3: weights and gradients", "36.4", 6 * (dense + experts)),
        ("table 3: main weights and optimizer states", "32.1", 12 * (dense / 64 + experts)),
        ("table 3: activations", "131.0", in_flight * whole),
        ("table 4: latent up-projections recomputed", "30.4", in_flight * freed["mla_up"]),
        ("table 4: activation function recomputed", "3.8", in_flight * freed["activation"]),
        ("table 4: norms recomputed", "8.2", in_flight * freed["norms"]),
    ]
    text = table(
        ("GiB on a GPU", *HEAD[1:]),
        [(name, theirs, f"{ours / GIB:.1f}", *by) for name, theirs, ours in figures],
    )
    peak, lean = (
        of_page("memory", rf"\| {row} \|[^|]*\|[^|]*\| ([\d.]+) GiB")
        for row in ("all kept", "offload: layer_input, mlp_norm_input, attention_output")
    )
    slower = of_page(
        "memory", r"\| offload: layer_input, mlp_norm_input, attention_output \|[^|]*\| ([^|]*?) \|"
    )
    offload = table(
        HEAD,
        [
            (
                "table 5: activations offloaded, DeepSeek-V3 on GB200, theirs of the whole memory",
                "-10.7 %, -1.6 % throughput",
                f"{peak} -> {lean} GiB above the states, {slower} time",
                "measured",
                link("memory"),
            ),
        ],
    )
    return f"{text}\n\n{offload}"


def links() -> str:
    """Table 7."""
    theirs = {"h100": {8: (1265, 661), 16: (5774, 1485), 32: (8059, 3064), 64: (9164, 4626)},
              "gb200": {8: (735, 391), 16: (743, 578), 32: (769, 612), 64: (930, 675)}}  # fmt: skip
    rows = []
    for gpu, sizes in theirs.items():
        for ep, (all_to_all, hybrid) in sizes.items():
            config = configured({"preset": "deepseek-v3"}, {"ep": ep}, 64, 4096, 64)
            assert config is not None
            job = Job.of(config)
            setting = Setting.of(config, 64)
            setting = replace(setting, experts=replace(setting.experts, dispatcher="all_to_all"))
            copies = 4096 * 8 * (ep - 1) / ep * 7168 * 2
            each, once = (
                f"{1e6 * exchange_seconds(GPUS[gpu], nbytes, ep):.0f}"
                for nbytes in (copies, expert_legs(job, setting).out)
            )
            theirs_text = f"{all_to_all} ({hybrid} HybridEP)"
            ours = f"{each} with a row for each expert; {once}"
            rows.append((f"{gpu}, EP {ep}", theirs_text, ours, "planned", planned("links")))
    head = ("table 7: dispatch of 4,096 rows of 7,168 to 8 of 256 experts, us", *HEAD[1:])
    return table(head, rows)


def attention() -> str:
    """Table 9."""
    flops = 8 * 4 * 4 * 4096**2 * 32 * 128 / 2  # 8 layers, 4 rows, 32 heads of 128, causal
    forward, backward = (
        float(of_page("train_step", rf"attention \(cuDNN\): forward, backward \| {pattern}"))
        for pattern in (r"([\d.]+) \+", r"[\d.]+ \+ ([\d.]+)")
    )
    ours = f"{flops / forward / 1e9:.0f} forward, {2.5 * flops / backward / 1e9:.0f} backward"
    by = f"{link('train_step')}: profile in CUDA graphs"
    name = "table 9: attention on Hopper, 4,096 tokens, TFLOP/s"
    row = (name, "553 forward, 422 backward", ours, "measured", by)
    return table(HEAD, [row])


def clusters() -> str:
    """Tables 11 and 20."""
    theirs = {
        "deepseek-v3-256xgb300-mxfp8": (1233, 4730, "PP4 EP64 VPP4"),
        "deepseek-v3-256xgb200-mxfp8": (1048, 4020, "PP4 EP64 VPP4"),
        "deepseek-v3-256xgb200-bf16": (857, 3298, "PP8 EP32 VPP4"),
        "deepseek-v3-1024xh100-fp8": (368, 1412, "TP2 PP4 EP64 VPP4"),
        "qwen3-235b-a22b-256xgb300-mxfp8": (974, 6583, "PP4 EP64 VPP6"),
        "qwen3-235b-a22b-256xgb200-mxfp8": (919, 6212, "PP4 EP64 VPP6"),
        "qwen3-235b-a22b-256xgb200-bf16": (750, 5100, "PP4 EP32 VPP12"),
        "qwen3-235b-a22b-256xh100-bf16": (320, 2132, "TP2 PP8 EP32 VPP4"),
        "qwen3-235b-a22b-128xgb300-mxfp8-128k": (1150, 1556, "TP4 PP4 CP4 EP32 VPP12"),
    }
    rows = []
    for name, (tflops, tokens, mesh) in theirs.items():
        world, gpu = re.search(r"-(\d+)x(\w+?)-", name).groups()  # type: ignore[union-attr]
        problems: list[str] = []
        tables = read_toml(str(ROOT / f"configs/clusters/{name}.toml"), problems)
        config = build_config(tables, {}, int(world), problems, needs_data=False)
        assert config is not None, problems
        setting = Setting.of(config, int(world))
        found = estimate(Job.of(config), setting, GPUS[gpu])
        note = "planned, in bf16's time" if found.why_no_price else "planned"
        degrees = ", ".join(f"{axis} {size}" for axis, size in vars(setting.degrees).items() if size > 1)
        speed = found.tokens_per_second / int(world)
        rows.append((name, f"{tflops} ({tokens:,} tokens/s; {mesh})",
                     f"{found.tflops:.0f} ({speed:,.0f} tokens/s; {degrees})", note,
                     f"`fsdmoe plan configs/clusters/{name}.toml --gpus {world} --gpu {gpu}`"))  # fmt: skip
    return table(("tables 11 and 20: TFLOP/s of a GPU", *HEAD[1:]), rows)


# Optimizing DeepSeek-V3 training on GB200


def ladder() -> str:
    """Each feature added in turn."""
    page = "emulated_run"

    def tflops(start: str) -> str:
        return of_page(page, rf"== {start}: step [^\n]*?([\d.]+) model TFLOP/s")

    theirs = [("baseline, all-to-all", 494.46), ("fused permutation and allocations", 529.55),
              ("router fusion", 540.00), ("DeepEP", 566.07), ("no recompute of up-projections", 610.71),
              ("CUDA graphs", 663.27), ("DeepEP tuned", 691.49), ("host side", 762.12),
              ("quantisation kernels", 797.67), ("graphs with shared experts", 829.93),
              ("HybridEP", 943.56), ("host side", 956.21), ("quantisation in norms", 970.01)]  # fmt: skip
    step = "train_step"
    plain, fused = (of_page(step, rf"\| transformers, {name} \| ([\d.]+) \|") for name in (
        "eager, wrapped by fsdmoe", "wrapped by fsdmoe"))  # fmt: skip
    eager = of_page(step, r"\| transformers, eager \| ([\d.]+) \|")
    bf16, fp8 = (
        of_page(step, rf"\| float32 main weights, {name} \| ([\d.]+) \|")
        for name in ("bf16", "`fp8_blockwise`")
    )
    one_gpu = [
        ("transformers, eager", eager, "measured", link(step)),
        ("+ flat FSDP, fused experts, router and loss", plain, "measured", link(step)),
        ("+ fused norms, projections, positions", fused, "measured", link(step)),
        ("own decoder in graphs, float32 main weights", bf16, "measured", link(step)),
        ("+ fp8_blockwise", fp8, "measured", link(step)),
    ]
    node = [
        (
            "all-to-all, nothing computed while rows travel",
            tflops("node, no overlap"),
            "emulated",
            link(page),
        ),
        ("+ three chunks, flex, in a graph", tflops("node, chunks 3"), "emulated", link(page)),
        ("the same on a fabric that takes no time", tflops("free, chunks 3"), "emulated", link(page)),
    ]
    far = [
        (
            "all-to-all, nothing computed while rows travel",
            tflops("nodes, no overlap"),
            "emulated",
            link(page),
        ),
        ("+ two chunks", tflops("nodes, chunks 2"), "emulated", link(page)),
        ("two sub-batches instead", tflops("nodes, sub-batches 2"), "emulated", link(page)),
    ]
    head = ("ours, TFLOP/s of a GPU", "kind", "by")
    tables: list[tuple[Row, Iterable[Row]]] = [
        (
            ("DeepSeek-V3 on 256 GB200, MXFP8, each feature added", "theirs, TFLOP/s"),
            [(n, f"{t:.0f}") for n, t in theirs],
        ),
        (("one GPU", "ours, ms a step", "kind", "by"), one_gpu),
        (("one of 8 ranks", *head), node),
        (("one of 64 ranks", *head), far),
    ]
    return "\n\n".join(table(*each) for each in tables)


# MegaScale-MoE


MEGASCALE = {
    "preset": "mixtral-8x22b", "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 3, "moe_intermediate_size": 14_336,
    "vocab_size": 65_536,
}  # fmt: skip
H800 = replace(GPUS["h100"], name="h800", nvlink=GPUS["h100"].nvlink * 400 / 900)
H20 = replace(
    GPUS["h100"],
    name="h20",
    memory=int(94.5 * GIB),
    matmul=GPUS["h100"].matmul * 148 / 989,
    attention=GPUS["h100"].attention * 148 / 989,
    memory_bandwidth=GPUS["h100"].memory_bandwidth * 4.0 / 3.35,
)


def _scaled(world: int, rows: int) -> Best | None:
    meshes = [{"ep": ep, "tp": tp, "cp": cp} for ep in (8, 16) for tp in (1, 2, 4) for cp in (1, 2)]
    fitting = [m for m in meshes if rows % (world // m["tp"] // m["cp"]) == 0]
    return best_of(MEGASCALE, H800, world, fitting, seq_len=8192, rows=rows)


def megascale() -> str:
    """Tables 3 and 5, figures 12 and 13."""
    by = ("planned", planned("megascale"))
    rows: list[Row] = []
    strong = {240: (151.1, 272.9), 480: (301.1, 498.6), 720: (430.5, 740.1), 960: (550.2, 963.8)}
    for world, (megatron, mega) in (strong | {1440: (746.6, 1407.7)}).items():
        best = _scaled(world, 720)
        theirs = f"{megatron} k Megatron-LM, {mega} k MegaScale-MoE"
        ours = f"{best.found.tokens_per_second / 1e3:.1f} k ({best.mesh})" if best else NO_FIT
        rows.append((f"table 3, tokens/s: {world} GPUs, 720 rows", theirs, ours, *by))
    theirs = "-0.2 % from 480 to 1,440 GPUs (Megatron-LM -2.7 %)"
    base: float | None = None
    for world, batch in ((480, 360), (960, 720), (1440, 1080)):
        best = _scaled(world, batch)
        each = best.found.tokens_per_second / world if best else 0.0
        base = base or each
        ours = f"{each:,.0f}, {100 * (each / base - 1):+.1f} %"
        rows.append((f"figure 12, tokens/s of a GPU: {world} GPUs, {batch} rows", theirs, ours, *by))
    return table(HEAD, [*rows, *_ablation(by), *_other_gpus(by)])


def _ablation(by: Row) -> Iterable[Row]:
    ways: list[tuple[str, str, Mesh, list[tuple[int, int]]]] = [
        ("TP + TP, no overlap", "1", {"tp": 8, "etp": 8}, [(1, 1)]),
        ("SP + EP", "1.13", {"ep": 8}, [(1, 1)]),
        ("overlap", "1.22 between operators, 1.28 inside of them too", {"ep": 8}, [(2, 1), (4, 1), (1, 2)]),
    ]
    first: float | None = None
    for name, theirs, mesh, overlap in ways:
        best = best_of(MEGASCALE, H800, 240, [mesh], seq_len=8192, rows=720, overlap=overlap)
        speed = best.found.tokens_per_second if best else 0.0
        first = first or speed
        ours = f"{speed / first:.2f}" if best else NO_FIT
        yield (f"table 5, throughput: {name}, 240 GPUs", theirs, ours, *by)


def _other_gpus(by: Row) -> Iterable[Row]:
    for gpu in (H800, GPUS["a100"], H20):
        best = best_of({"preset": "mixtral-8x7b"}, gpu, 32, [{"ep": 8}, {"ep": 4}], seq_len=8192, rows=128)
        ours = f"{best.mfu(gpu.name):.1f} % ({best.mesh})" if best else NO_FIT
        theirs = "a picture: falls with the GPU's peak; up to 1.58 x Megatron-LM's"
        yield (f"figure 13, MFU: Mixtral-8x7B, 32 {gpu.name.upper()}", theirs, ours, *by)


# MoE Parallel Folding


LLAMA = {
    "preset": "mixtral-8x22b", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "moe_intermediate_size": 28_672, "vocab_size": 128_256,
}  # fmt: skip
QWEN2 = {
    "preset": "qwen3-30b-a3b", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560,
    "n_shared_experts": 8, "shared_expert_gate": True, "vocab_size": 151_936,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {"preset": "mixtral-8x22b"}
FINE = {**MIXTRAL, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
FOLDED: list[Mesh] = [
    {"ep": 4}, {"ep": 8}, {"ep": 16}, {"ep": 8, "etp": 2}, {"ep": 8, "tp": 2}, {"ep": 8, "tp": 2, "etp": 2},
]  # fmt: skip
WAYS: dict[str, tuple[list[Mesh], Sequence[tuple[int, int]]]] = {
    "FSDP": ([{}], [(1, 1)]),
    "FSDP + EP": ([{"ep": 8}], [(1, 1)]),
    "TP + EP + DP": ([{"tp": 4, "ep": 8}], [(1, 1)]),
    "folding": (FOLDED, OVERLAP),
}


@dataclass(frozen=True)
class Folding:
    """One of their models: its published MFU, by strategy at its own size, and folded by number of GPUs."""

    model: dict[str, Any]
    world: int
    ways: tuple[str, str, str, str]
    sizes: dict[int, float]


FOLDINGS = {
    "Mixtral-8x22B": Folding(
        MIXTRAL, 128, ("4.3 %", "23.4 %", "36.6 %", "49.3 %"), {128: 52.2, 256: 50.7, 512: 48.9, 1024: 44.9}
    ),
    "Llama3-8x70B": Folding(LLAMA, 256, ("OOM", "19.6 %", "OOM", "41.6 %"), {512: 42.7, 1024: 41.5}),
    "Qwen2-57B-A14B": Folding(
        QWEN2, 64, ("9.9 %", "25.4 %", "23.1 %", "39.0 %"),
        {64: 39.9, 128: 39.7, 256: 38.1, 512: 36.6, 1024: 33.4},
    ),
    "Mixtral-8x22B-G8T8": Folding(
        FINE, 128, ("2.2 %", "9.0 %", "8.7 %", "28.8 %"), {128: 30.0, 256: 29.3, 512: 26.7, 1024: 25.5}
    ),
}  # fmt: skip


def _ours(best: Best | None) -> str:
    return NO_FIT if best is None else f"{best.mfu('h100'):.1f} % ({best.mesh})"


def folding() -> str:
    """Tables 1, 3, 4 and 5, figures 3 and 4, and weak scaling, which they do not print."""
    by = ("planned", planned("folding"))
    h100 = GPUS["h100"]
    ways: list[Row] = []
    strong: list[Row] = []
    for name, case in FOLDINGS.items():
        best: Best | None = None
        for (way, (meshes, overlap)), theirs in zip(WAYS.items(), case.ways, strict=True):
            best = best_of(case.model, h100, case.world, meshes, overlap=overlap)
            ways.append((f"tables 1, 3: {name}, {case.world} GPUs: {way}", theirs, _ours(best), *by))
        if best is not None:  # folded
            degrees = best.setting.degrees
            mesh = {"ep": degrees.ep, "etp": degrees.etp, "tp": degrees.tp}
            for world, mfu in case.sizes.items():
                found = best_of(case.model, h100, world, [mesh], rows=1024)
                strong.append((f"table 4: {name}, {world} GPUs", f"{mfu} %", _ours(found), *by))
    weak: list[Row] = []
    for world in (128, 256, 512, 1024):
        found = best_of(MIXTRAL, h100, world, [{"ep": 8}], rows=8 * world)
        weak.append((f"weak: Mixtral-8x22B, {world} GPUs, 8 rows each", "not printed", _ours(found), *by))
    parts = {
        "MFU, H100, bf16, 256 rows of 4,096": ways,
        "MFU, 1,024 rows of 4,096": strong,
        "MFU, rows of 4,096": weak,
        "MFU, 16.8 million tokens": list(_long_context(by)),
    }
    return "\n\n".join(table((title, *HEAD[1:]), rows) for title, rows in parts.items())


def _long_context(by: Row) -> Iterable[Row]:
    theirs = {128: (16384, 47.6), 256: (32768, 45.1), 512: (65536, 44.5), 1024: (131072, 42.9)}
    for world, (seq_len, mfu) in theirs.items():
        meshes = [
            {"ep": 8, "tp": tp, "cp": seq_len // 8192 // tp} for tp in (1, 2, 4) if seq_len // 8192 >= tp
        ]
        found = best_of(
            MIXTRAL, GPUS["h100"], world, meshes, seq_len=seq_len, rows=2**24 // seq_len, overlap=OVERLAP[:3]
        )
        name = f"table 5: Mixtral-8x22B, {seq_len // 1024}k tokens, {world} GPUs"
        yield (name, f"{mfu} %", _ours(found), *by)


# The page


SECTIONS: dict[str, Callable[[], str]] = {
    "memory": memory_of_the_report,
    "links": links,
    "attention": attention,
    "clusters": clusters,
    "ladder": ladder,
    "megascale": megascale,
    "folding": folding,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "section", nargs="?", choices=SECTIONS, help="print the tables of one section instead"
    )
    chosen = parser.parse_args().section
    if chosen:
        print(SECTIONS[chosen]())
        return
    tables = {}
    for name, write in SECTIONS.items():
        began = time.perf_counter()
        tables[name] = write()
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    page = Template(Path(__file__).with_name("papers_page.md").read_text(encoding="utf-8"))
    (RESULTS / "papers.md").write_text(page.substitute(tables), encoding="utf-8")
    print("written to docs/results/papers.md")


if __name__ == "__main__":
    main()
