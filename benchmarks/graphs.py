"""Training steps with their micro-batches as CUDA graphs and without, on one GPU: 8 layers of 30B-A3B shapes.

For each shape of a micro-batch, in one process and on one model: the losses of ``--steps`` steps from the
same weights without graphs and with them, with deterministic kernels (where they differ, without graphs once
more, which tells how far two equal runs come apart); then times with the usual kernels, in turn; and the
memory that each way holds (reserved, since what graphs hold is not counted as allocated). Times depend on the
host: graphs gain what it lags behind the device in forward and backward. Clipping and the optimizer are no
part of them.

    python benchmarks/graphs.py                              1 x 2048 and 4 x 4096 tokens, on one rank
    python benchmarks/graphs.py --world 8                    as one rank of an emulated world of 8
    python benchmarks/graphs.py --micro-batches 3            so many micro-batches a step
    python benchmarks/graphs.py --wrapped                    transformers' Qwen3-MoE in fsdmoe.parallelize
    python benchmarks/graphs.py --graphs layer               attention alone in graphs; nothing recomputed
    python benchmarks/graphs.py --tiny                       two layers, narrow: to see that it works
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from fsdp_world import emulated_meshes, emulated_world
from torch import nn

from fsdmoe.config.train import TrainConfig
from fsdmoe.data.batch import Batch
from fsdmoe.feed import Feed
from fsdmoe.fsdp import engine_of
from fsdmoe.graphs import MicroBatches, build_micro_batches
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.models import build_model, preset_config
from fsdmoe.models.config import ModelConfig
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.loss_scale import LossScaler

MIN_SPEED, MAX_MEMORY = 1.3, 1.03
GIB = 2**30


@dataclass
class Outcome:
    shape: str
    ms_plain: float
    ms_graphs: float
    host_plain: float
    """Milliseconds until forward and backward of a step are issued."""
    host_graphs: float
    passes_plain: float
    """Milliseconds from the start of a step to the end of its backward on the device."""
    passes_graphs: float
    gib_plain: float
    gib_graphs: float
    losses_equal: bool
    loss_gap: float
    """The largest difference of a loss with graphs to the same without."""
    spread: float
    """The same of two runs without graphs; 0 where there is no gap to compare it with."""
    last_loss: float


class Passes(NamedTuple):
    """Milliseconds of a step's forward and backward."""

    host: float
    """Until they were issued."""
    device: float
    """Until they were done."""


class Figures(NamedTuple):
    """Of steps that go one way."""

    ms: float
    host: float
    passes: float
    gib: float


class Training:
    """One model, trained in several ways from the same weights."""

    def __init__(self, args: argparse.Namespace, meshes: Meshes) -> None:
        self.args, self.meshes = args, meshes
        tiny = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 4096}
        size = tiny if args.tiny else {}
        self.config = preset_config("qwen3-30b-a3b", **({"num_hidden_layers": args.layers} | size))
        # One rank cannot hold float32 states of it all; a rank of eight holds those of a usual run.
        formats = {"reduce_dtype": "float32", "main_dtype": "float32"}
        if not args.world:
            formats = dict.fromkeys(formats, "bfloat16")
        policy = ParallelPolicy(
            precision=PrecisionConfig(**formats),  # type: ignore[arg-type]
            memory=MemoryConfig(recompute=("norms",) if args.graphs == "step" else ()),
            grad_divisor=1.0,
        )
        bare = foreign_model(self.config) if args.wrapped else build_model(self.config)
        self.model: nn.Module = parallelize(bare, meshes, policy)
        self.causal_lm = as_causal_lm(self.model)
        self.feed = Feed(meshes, own_attention=args.wrapped)
        self.engine = engine_of(self.model)
        self.first = [group.weights.main.clone() for group in self.engine.groups]
        self.optimizer = AdamW(
            self.model, lr=1e-4, moment_dtype=torch.float32 if args.world else torch.bfloat16
        )

    def restart(self) -> None:
        """The first weights, no moments."""
        for group, first in zip(self.engine.groups, self.first, strict=True):
            group.weights.main.copy_(first)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.engine.mark_changed()
        self.optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()

    def micro_batches(self, graphs: str) -> MicroBatches:
        config = TrainConfig(graphs=graphs)  # type: ignore[arg-type]
        return build_micro_batches(self.model, self.causal_lm, LossScaler(enabled=False), config)

    def batches(self, rows: int, length: int) -> Iterator[list[Batch]]:
        """New random tokens every step, the same in every run: 97 different ones, so that there is something
        to learn."""
        generator = torch.Generator().manual_seed(1)
        positions = torch.arange(length).repeat(rows, 1)  # pinned: an expanded one cannot be
        while True:
            found = []
            for _ in range(self.args.micro_batches):
                stream = torch.randint(0, 97, (rows, length + 1), generator=generator)
                found.append(
                    Batch(
                        tokens_BS=stream[:, :-1].contiguous(), labels_BS=stream[:, 1:].contiguous(),
                        positions_BS=positions, document_ids_BS=torch.zeros_like(positions),
                        loss_mask_BS=torch.ones_like(positions, dtype=torch.bool),
                    ).pin_memory()
                )  # fmt: skip
            yield found

    def step(self, runner: MicroBatches, batches: list[Batch]) -> tuple[float, Passes]:
        """As ``train.py`` does it: the loss, and how long forward and backward took."""
        began, events = time.perf_counter(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        inputs = self.feed.inputs(self.feed.prepare(batches))
        counts = self.feed.count(self.causal_lm, inputs)
        loss, loads = torch.zeros((), device=self.meshes.device), None
        for index, each in enumerate(inputs):
            routing = self.feed.routing(prior_load_LE=loads)
            out = runner.run(each, counts, routing, last=index == len(inputs) - 1)
            loss += out.cross_entropy
            loads = out.loads_LE if loads is None else loads + out.loads_LE
        host = time.perf_counter() - began
        events[1].record()
        norm = clip_grad_norm(self.model, 1.0)
        value, _ = torch.stack((loss, norm.total)).tolist()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value, Passes(host * 1e3, events[0].elapsed_time(events[1]))

    def losses(self, graphs: str, rows: int, length: int, num_steps: int) -> list[float]:
        self.restart()
        runner, batches = self.micro_batches(graphs), self.batches(rows, length)
        found = [self.step(runner, next(batches))[0] for _ in range(num_steps)]
        runner.close()
        return found

    def timed(self, graphs: str, rows: int, length: int, seconds: float) -> Figures:
        """Medians of steps, and the memory held meanwhile."""
        self.restart()
        runner, batches = self.micro_batches(graphs), self.batches(rows, length)
        for _ in range(6):  # graphs are captured in the fourth
            self.step(runner, next(batches))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times: list[float] = []
        passes: list[Passes] = []
        while sum(times) < seconds or len(times) < 5:
            batch = next(batches)
            began = time.perf_counter()
            passes.append(self.step(runner, batch)[1])
            torch.cuda.synchronize()  # as train.py, which asks every rank for signals after a step
            times.append(time.perf_counter() - began)
        held = torch.cuda.max_memory_reserved() - sum(first.nbytes for first in self.first)
        runner.close()
        host, device = (statistics.median(column) for column in zip(*passes, strict=True))
        return Figures(statistics.median(times) * 1e3, host, device, held / GIB)


def foreign_model(config: ModelConfig) -> nn.Module:
    """transformers' model of the same shape, with weights of its own."""
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
             "rms_norm_eps", "max_position_embeddings")  # fmt: skip
    shape = {name: getattr(config, name) for name in names}
    own = AutoConfig.for_model("qwen3_moe", rope_theta=config.rope_theta, tie_word_embeddings=False, **shape)
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(own).bfloat16().train()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that have a choice take the deterministic one. Attention's backward has it in the strict mode
    only: told to warn, it warns and adds gradients up in any order."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def compare(training: Training, shape: str, args: argparse.Namespace) -> Outcome:
    rows, length = map(int, shape.split("x"))
    with deterministic():
        plain, graphs = (training.losses(way, rows, length, args.steps) for way in ("none", args.graphs))
        again = plain if graphs == plain else training.losses("none", rows, length, args.steps)
    found: dict[str, list[Figures]] = {"none": [], args.graphs: []}
    for way in ("none", args.graphs, args.graphs, "none"):
        found[way].append(training.timed(way, rows, length, args.seconds))
    of = {way: Figures(*map(statistics.median, zip(*runs, strict=True))) for way, runs in found.items()}
    return Outcome(
        shape, of["none"].ms, of[args.graphs].ms, of["none"].host, of[args.graphs].host, of["none"].passes,
        of[args.graphs].passes, of["none"].gib, of[args.graphs].gib,
        losses_equal=plain == graphs,
        loss_gap=max(abs(a - b) for a, b in zip(plain, graphs, strict=True)),
        spread=max(abs(a - b) for a, b in zip(plain, again, strict=True)),
        last_loss=plain[-1],
    )  # fmt: skip


def header(steps: int) -> str:
    pairs = ("ms a step", "x"), ("forward and backward",), ("issued in",), ("GiB held", "x")
    columns = [name for first, *rest in pairs for name in (f"{first}, plain", "graphs", *rest)]
    columns = ["micro-batch", *columns, f"losses of {steps} steps"]
    return f"\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"


def line(o: Outcome) -> str:
    apart = f"apart by up to {o.loss_gap:.1e} (two plain runs: {o.spread:.1e})"
    row = (
        o.shape, f"{o.ms_plain:.1f}", f"{o.ms_graphs:.1f}", f"{o.ms_plain / o.ms_graphs:.2f}",
        f"{o.passes_plain:.1f}", f"{o.passes_graphs:.1f}", f"{o.host_plain:.1f}", f"{o.host_graphs:.1f}",
        f"{o.gib_plain:.2f}", f"{o.gib_graphs:.2f}", f"{o.gib_graphs / o.gib_plain:.3f}",
        f"equal bit for bit, {o.last_loss:.4f} at last" if o.losses_equal else apart,
    )  # fmt: skip
    return f"| {' | '.join(row)} |"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["1x2048", "4x4096"], metavar="ROWSxTOKENS")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--world", type=int, default=0, help="ranks of the emulated world; 0: one real rank")
    parser.add_argument("--micro-batches", type=int, default=1, help="of one step")
    parser.add_argument("--graphs", choices=("step", "layer"), default="step")
    parser.add_argument("--wrapped", action="store_true")
    parser.add_argument("--steps", type=int, default=50, help="whose losses are compared")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each of the four timed runs")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if not torch.cuda.is_available():
        print("graphs are CUDA's: this benchmark needs a GPU")
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or no product is called deterministic
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    with emulated_world(args.world) if args.world else contextlib.nullcontext():
        meshes = emulated_meshes(args.world, 1, "cuda") if args.world else build_meshes()
        training = Training(args, meshes)
        outcomes = []
        print(header(args.steps))
        for shape in args.shapes:
            outcomes.append(compare(training, shape, args))
            print(line(outcomes[-1]), flush=True)
        print(f"\nWanted: {MIN_SPEED} x at 1x2048, no slower at 4x4096, at most {MAX_MEMORY} of the memory.")
    if args.json:
        args.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    return 0 if all(o.losses_equal or o.loss_gap <= 2 * o.spread for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
