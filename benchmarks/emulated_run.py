"""A whole training step as one rank of a world that is not there, with every transfer taking its time.

Qwen3-30B-A3B, all 48 layers, 4 x 4,096 tokens a rank, experts over 8 ranks of one node; or DeepSeek-V3's
shapes with as many layers as fit and experts over 64 ranks of 8 nodes. The other ranks are clones (see
``fabric_group.py``), transfers last ``latency + bytes / bandwidth`` (``fabric.py``). Printed, for the fabric
asked for and for the same step on one that is free:

    step       milliseconds, tokens/s, model TFLOP/s per GPU, peak memory
    time       compute, and hidden and exposed time of each kind of traffic, from a profile of one step
    traffic    bytes and transfers of a step, by kind

    python benchmarks/emulated_run.py                                    about 60 s on one H200
    python benchmarks/emulated_run.py --chunks 1 2 4                     rows in so many chunks
    python benchmarks/emulated_run.py --chunks 2 --no-overlap            and one without any overlap
    python benchmarks/emulated_run.py --chunks 3 --set experts.dispatcher=flex train.graphs=step   in a graph
    python benchmarks/emulated_run.py --layers 8 --set experts.dispatcher=allgather   any key of a run
    python benchmarks/emulated_run.py --model deepseek-v3 --layers 6 --fabric nodes --ep 64 --sub-batches 2
    python benchmarks/emulated_run.py --model deepseek-v3 --layers 22 --fabric nodes --ep 64 --batch 2 \
        --sub-batches 2 --dispatcher all_to_all by_node                  rows once a rank, and once a node
    python benchmarks/emulated_run.py --loads 1.5 2 --clones 2           uneven loads, without and with clones
    python benchmarks/emulated_run.py --loads runs/loads/bias-128-50 --clones 2      as loads.py recorded them
    python benchmarks/emulated_run.py --loads 2 --clones 2 --set experts.dispatcher=flex \
        experts.flex.rows=1.25 train.graphs=step                         clones without a host, in a graph
    python benchmarks/emulated_run.py --tiny                             on a CPU, to see that it works
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from even_routing import routed_by
from fabric import FABRICS_BY_NAME, Fabric
from fabric_flex import connect
from fabric_group import Record, World, emulated_fabric, fabric_meshes
from timing import require_gpu, wait
from uneven_loads import BUSIEST, HOST, MEAN, Ranks, emulated_clones, loads_of, seen_by

from fsdmoe.config.build import build_config
from fsdmoe.config.schema import Config
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.dispatch import ClonePolicy, FlexDispatcher, options_of
from fsdmoe.experts.moe import MoE
from fsdmoe.graphs import build_micro_batches
from fsdmoe.mesh import Axis
from fsdmoe.models import build_model, training_flops_per_token
from fsdmoe.models.causal_lm import StepCounts
from fsdmoe.observe.exposed import Exposure, exposure, table
from fsdmoe.observe.exposed_trace import read_trace
from fsdmoe.optim import build_optimizer, clip_grad_norm
from fsdmoe.parallel.build import ParallelPolicy, flex_state_of, must_repeat, parallelize
from fsdmoe.precision.loss_scale import LossScaler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GIB = 2**30
BIAS_RATE = 5e-4
GRAPH_WARM_UP = 5
"""Steps until all of a step is a graph."""
LR = 1e-12
"""Steps are taken and move nothing: loads would not stay even."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is measured: one way to run under one fabric."""

    fabric: Fabric
    keys: tuple[tuple[str, Any], ...] = ()
    """Of ``experts``: ``chunks`` or ``sub_batches``, and ``dispatcher``."""
    hides_rows: bool = True
    """False: nothing is computed while rows travel."""
    loads: str = ""
    """See :func:`uneven_loads.loads_of`; even ones, if not given."""
    role: str = ""
    """Which rank this one is: see :mod:`uneven_loads`."""

    @property
    def name(self) -> str:
        if not self.hides_rows:
            return f"{self.fabric.name}, no overlap"
        uneven = [f"loads {Path(self.loads).name}", f"{self.role} rank"] if self.loads else []
        return ", ".join(
            [self.fabric.name, *uneven, *(f"{key.replace('_', '-')} {value}" for key, value in self.keys)]
        )


def config_of(args: argparse.Namespace, case: Case, world_size: int) -> Config:
    """A whole configuration from the options; what an option sets, ``--set`` may not."""
    model: dict[str, Any] = {"preset": args.model}
    if args.layers is not None:
        model["num_hidden_layers"] = args.layers
    dtype = "float32" if args.tiny else "bfloat16"
    by_option = {
        "model": model,
        "mesh": {"ep": args.ep, "tp": args.tp, "cp": args.cp},
        "memory": {"recompute": args.recompute},
        "data": {"seq_len": args.length},
        "train": {"micro_batch_size": args.batch, "global_batch_size": args.batch * world_size},
    }
    mapping = by_option | {
        "precision": {"param_dtype": dtype, "reduce_dtype": dtype, "main_dtype": dtype},
        "optim": {"moment_dtype": dtype, "lr": LR},
        "experts": {"balance": {"bias_rate": BIAS_RATE}},
    }
    overrides = {f"experts.{key}": str(value) for key, value in case.keys}
    set_by_hand = dict(pair.partition("=")[::2] for pair in args.set)
    options = {f"{section}.{key}" for section, keys in by_option.items() for key in keys}
    if taken := {*set_by_hand} & {*overrides, *options}:
        raise SystemExit(f"--set: {', '.join(sorted(taken))} is set by an option of its own (see --help)")
    overrides |= set_by_hand
    problems: list[Any] = []
    config = build_config(mapping, overrides, world_size, problems, needs_data=False)
    if config is None:
        raise SystemExit("\n".join(map(str, problems)))
    return config


class Step:
    """A model under a fabric, and one step of it as ``train.py`` makes it."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.meshes = fabric_meshes(config.mesh, DEVICE.type)
        model = build_model(config.model, config.experts)
        self.model = parallelize(model, self.meshes, ParallelPolicy.from_config(config))
        self._connect_flex()
        scaler = LossScaler(enabled=False)
        self.micro_batches = build_micro_batches(self.model, self.model, scaler, config.train)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.loads_LE: torch.Tensor | None = None
        self.grad_norm = torch.zeros(())
        self.records: list[Record] = []
        """Of the last step that was not replayed."""

    def __call__(self) -> torch.Tensor:
        self.world.records.clear()
        tokens_BS, labels_BS = self._batch()
        mask_BS = torch.ones_like(labels_BS, dtype=torch.bool)
        counts = self.model.count_tokens(labels_BS, mask_BS, None)
        dist.all_reduce(counts, group=self.meshes.group(Axis.LOSS))
        inputs = {"tokens_BS": tokens_BS, "labels_BS": labels_BS, "loss_mask_BS": mask_BS}
        while True:
            out = self.micro_batches.run(inputs, StepCounts.from_vector(counts), RoutingContext(), last=True)
            norm = clip_grad_norm(self.model, self.config.optim.grad_clip or float("inf"))
            if not must_repeat(self.model, self.optimizer, (out.cross_entropy + norm.total).item()):
                break
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loads_LE, self.grad_norm = out.loads_LE, norm.total
        self.records = max(self.world.records.copy(), self.records, key=len)
        return out.cross_entropy * self.meshes.size(Axis.LOSS)  # all clones have the same share

    def _connect_flex(self) -> None:
        """On a GPU rows of ``flex`` are written to memory, which no process group sees."""
        state, world = flex_state_of(self.model), self.world
        if state is None or DEVICE.type != "cuda":
            return
        layer = next(each for each in self.model.modules() if isinstance(each, MoE))
        dispatcher = layer.dispatcher
        assert isinstance(dispatcher, FlexDispatcher)
        if dispatcher.links.expert.size <= world.fabric.domain:
            connect(state, dispatcher, world, self.config.train.micro_batch_size * self.config.data.seq_len)

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Random tokens, and the token after each; the same in every row and every time. Layers of random
        weights route other tokens far less evenly than those that their biases were made for, and each row
        of tokens to a few experts of its own: its chunk would be as uneven as no chunk of many ranks is."""
        train, length = self.config.train, self.config.data.seq_len
        vocab, generator = self.config.model.vocab_size, torch.Generator().manual_seed(1)
        stream = torch.randint(0, vocab, (1, length + 1), generator=generator)
        stream = stream.to(DEVICE, non_blocking=True).expand(train.micro_batch_size, -1)
        return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()

    @torch.no_grad()
    def route(self, case: Case, passes: int, known: list[torch.Tensor]) -> None:
        """Give routers biases for the case's loads. Even ones are ``known`` after the first time."""
        routers = list(self.model.routers())
        biases = [bias for router in routers if (bias := router.e_score_correction_bias) is not None]
        if case.loads or not known:
            num_experts = len(biases[0]) if biases else 1
            wanted_LE = torch.ones(len(routers), num_experts)
            if case.loads:
                wanted_LE = loads_of(case.loads, len(routers), num_experts, self.ranks)
                wanted_LE = seen_by(case.role, wanted_LE, self.ranks, self.clones)
                print(f"\n{case.name}: {self.ranks.describe(wanted_LE, self.clones)}")
            with routed_by(routers, wanted_LE.to(DEVICE)):
                for _ in range(passes):
                    tokens_BS, labels_BS = self._batch()
                    self.model(tokens_BS, labels_BS=labels_BS, loss_mask_BS=torch.ones_like(labels_BS).bool())
        if not case.loads:
            known += [bias_E.clone() for bias_E in biases[len(known) :]]
            torch._foreach_copy_(biases, known)

    @property
    def ranks(self) -> Ranks:
        config = self.config
        tokens = config.train.micro_batch_size * config.data.seq_len
        return Ranks(self.meshes.size(Axis.EP), config.model.num_experts_per_tok, tokens)

    @property
    def clones(self) -> ClonePolicy:
        return options_of(self.config.experts)["clones"]

    def received_shares(self) -> list[float]:
        """Of each layer: rows that this rank computes, its clones' too, over those of an even routing."""
        if self.loads_LE is None or not self.loads_LE.numel():
            return [1.0]
        loads_LE = self.loads_LE.cpu()
        if self.clones.slots:
            return self.ranks.after_cloning(loads_LE, self.clones)[0][:, 0].tolist()
        return self.ranks.by_rank(loads_LE)[:, 0].tolist()

    def clone_gb(self) -> dict[str, float]:
        """Of a step: what this rank sends as weights of clones, and as gradients of its own clones; what is
        counted on the device is both, or what comes to this rank where that is more."""
        layers = [each for each in self.model.modules() if isinstance(each, MoE)]
        counters = {id(each.dispatcher.traffic): each.dispatcher.traffic for each in layers}.values()
        for counter in counters:
            counter.clear()
        if DEVICE.type == "cuda":
            self.world.device_side(DEVICE).moved_bytes()
        self()
        phases = ("clones", "clones.backward")
        found = {phase: sum(counter.bytes_sent[phase] for counter in counters) / 1e9 for phase in phases}
        if DEVICE.type == "cuda":
            found["clones both ways"] = self.world.device_side(DEVICE).moved_bytes()[1] / 1e9
        return found


@dataclasses.dataclass
class Outcome:
    """What one case gave."""

    name: str
    is_free: bool
    step_ms: list[float]
    tokens_per_s: float
    tflops: float
    peak_gib: float
    reserved_gib: float
    setup_s: float
    loss: float
    grad_norm: float
    received_shares: list[float]
    traffic: dict[str, dict[str, float]]
    clone_gb: dict[str, float]
    """That this rank sends in a step for clones."""
    exchange: dict[str, float] | None
    """How full the buffers of ``flex`` were, and how often that was not enough."""
    exposure: Exposure | None

    @property
    def ms(self) -> float:
        return statistics.median(self.step_ms)


def measure(args: argparse.Namespace, case: Case, world_size: int, biases: list[torch.Tensor]) -> Outcome:
    """``biases`` of the routers are those of the first case in all others."""
    config, began = config_of(args, case, world_size), time.perf_counter()
    with emulated_fabric(case.fabric, world_size) as world, emulated_clones():
        world.hides_rows = case.hides_rows
        step = Step(config, world)
        step.route(case, args.even_passes, biases)
        if DEVICE.type == "cuda":  # a step that is replayed allocates nothing: its memory was counted before
            torch.cuda.reset_peak_memory_stats()
        loss = step()
        wait(DEVICE)
        setup = time.perf_counter() - began
        for _ in range(max(args.warm_up, GRAPH_WARM_UP if config.train.graphs != "none" else 0) - 1):
            step()
        wait(DEVICE)
        if DEVICE.type == "cuda":
            world.device_side(DEVICE).moved_bytes()
        times = [_timed(step) for _ in range(args.steps)]
        counted = world.device_side(DEVICE).moved_bytes()[0] / args.steps if DEVICE.type == "cuda" else 0.0
        traffic = by_kind([*step.records, *world.unseen(counted)])
        exposed = _profiled(step, args, case.name) if args.profile else None
        tokens = args.batch * args.length
        rate = tokens / statistics.median(times) * 1e3
        flops = training_flops_per_token(config.model, args.length)
        flex = flex_state_of(step.model)
        found = Outcome(
            case.name, case.fabric.is_free, times, rate, rate * flops / 1e12, *_peaks(), setup, loss.item(),
            float(step.grad_norm), step.received_shares(), traffic, step.clone_gb(),
            None if flex is None else flex.figures(), exposed,
        )  # fmt: skip
        step.micro_batches.close()
        del step
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _timed(step: Step) -> float:
    wait(DEVICE)
    began = time.perf_counter()
    step()
    wait(DEVICE)
    return (time.perf_counter() - began) * 1e3


def _peaks() -> tuple[float, float]:
    if DEVICE.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB


def _profiled(step: Step, args: argparse.Namespace, name: str) -> Exposure:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        wait(DEVICE)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.trace or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name.replace(', ', '-').replace(' ', '')}.json"
        profile.export_chrome_trace(str(path))
        return exposure(*read_trace(path))


def by_kind(records: list[Record]) -> dict[str, dict[str, float]]:
    """Bytes, transfers and seconds of a step on links that nobody else uses."""
    sums: dict[str, defaultdict[str, float]] = {}
    for record in records:
        kind = sums.setdefault(record.kind, defaultdict(float))
        kind["transfers"] += 1
        kind["nvlink_gb"] += record.load.nvlink / 1e9
        kind["network_gb"] += record.load.network / 1e9
        kind["seconds"] += record.seconds
    return {kind: dict(found) for kind, found in sorted(sums.items())}


def report(found: Outcome) -> None:
    shares = found.received_shares
    print(
        f"\n== {found.name}: step {found.ms:.1f} ms ({min(found.step_ms):.1f} to {max(found.step_ms):.1f})"
        f", {found.tokens_per_s:.0f} tokens/s, {found.tflops:.1f} model TFLOP/s per GPU\n"
        f"peak {found.peak_gib:.1f} GiB allocated, {found.reserved_gib:.1f} reserved; set up in "
        f"{found.setup_s:.0f} s; loss {found.loss:.4f}, gradient norm {found.grad_norm:.5g}; this rank's "
        f"experts get {statistics.mean(shares):.3f} of an even share, {min(shares):.2f} to "
        f"{max(shares):.2f} by layer"
    )
    if found.exchange is not None:
        print("buffers of rows: " + ", ".join(f"{name} {value:g}" for name, value in found.exchange.items()))
    for kind, sums in found.traffic.items():
        print(
            f"{kind.replace('_', '-'):14}{sums['nvlink_gb']:9.3f} GB NVLink{sums['network_gb']:9.3f} GB "
            f"network{sums['transfers']:8.0f} transfers{1e3 * sums['seconds']:10.1f} ms if alone"
        )
    if found.exposure is not None:
        print("a profiled step:")
        for line in table(found.exposure):
            print(f"  {line}")


def compare(found: Outcome, free: Outcome) -> None:
    """The step against that of the free fabric, whose own copies are taken off again."""
    ratio = found.ms / free.ms
    print(f"\n{found.name} / {free.name}: {ratio:.3f}", end="")
    if free.exposure is not None:
        bare = free.ms - 1e3 * free.exposure.exposed
        print(f"; without the {free.ms - bare:.1f} ms that the free fabric's copies are exposed: "
              f"{found.ms / bare:.3f}", end="")  # fmt: skip
    print()


def compare_rows(first: Outcome, other: Outcome) -> None:
    """The times of two steps, and what their rows put on the network."""
    sent = [each.traffic.get("all_to_all", {}).get("network_gb", 0.0) for each in (first, other)]
    share = f"; rows between nodes {sent[1] / sent[0]:.3f}" if sent[0] else ""
    print(f"\n{first.name} / {other.name}: {first.ms / other.ms:.3f} in speed{share}")


def compare_loads(cases: list[Case], outcomes: list[Outcome]) -> None:
    """Speeds over that of the even step, for each of the loads without and with clones. A layer ends when its
    slowest rank does, so the slowest of the measured ranks counts."""
    even = {case.keys: found for case, found in zip(cases, outcomes, strict=True) if not case.loads}
    slowest: dict[tuple[str, tuple[tuple[str, Any], ...]], Outcome] = {}
    for case, found in zip(cases, outcomes, strict=True):
        if case.loads:
            before = slowest.get((case.loads, case.keys), found)
            slowest[case.loads, case.keys] = max(before, found, key=lambda each: each.ms)
    print()
    for (_, keys), found in slowest.items():
        base = even[tuple(each for each in keys if each[0] != "clones")]
        sent = ", ".join(f"{phase} {gb:.2f} GB" for phase, gb in found.clone_gb.items() if gb)
        print(f"{found.name}: {found.ms:.1f} ms, {base.ms / found.ms:.3f} of the speed of the even step "
              f"({base.ms:.1f} ms)" + (f"; sent in a step: {sent}" if sent else ""))  # fmt: skip


def cases_of(args: argparse.Namespace, fabrics: list[Fabric]) -> list[Case]:
    """In the order in which they are measured."""
    keys = [("chunks", each) for each in args.chunks] + [("sub_batches", each) for each in args.sub_batches]
    ways: list[tuple[tuple[str, Any], ...]] = [(key,) for key in keys] or [()]
    ways = [(*way, ("dispatcher", name)) for way in ways for name in args.dispatcher] or ways
    if args.loads:
        fabrics = fabrics[:1]
    cases = [Case(fabric, way) for fabric in fabrics for way in ways]
    for loads in args.loads:
        for way in ways:
            cases += [Case(fabrics[0], way, loads=loads, role=role) for role in (BUSIEST, MEAN)]
            cloned = [(*way, ("clones", each)) for each in args.clones]
            cases += [
                Case(fabrics[0], each, loads=loads, role=role) for each in cloned for role in (BUSIEST, HOST)
            ]
    if args.no_overlap:
        cases.append(Case(fabrics[0], hides_rows=False))
    return cases


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a preset of fsdmoe's own decoders")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--fabric", choices=FABRICS_BY_NAME, nargs="+", default=["node", "free"])
    parser.add_argument("--world", type=int, help="ranks; if left out those of the first fabric")
    parser.add_argument("--ep", type=int, default=8)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--recompute", nargs="*", default=["norms"], help="memory.recompute")
    parser.add_argument("--chunks", type=int, nargs="+", default=[], help="experts.chunks, each in turn")
    parser.add_argument(
        "--sub-batches", type=int, nargs="+", default=[], help="experts.sub_batches, each in turn"
    )
    parser.add_argument("--dispatcher", nargs="+", default=[], help="experts.dispatcher, each in turn")
    parser.add_argument("--loads", nargs="+", default=[], help="of experts: recordings, or what the busiest "
                        "rank has over the mean")  # fmt: skip
    parser.add_argument("--clones", type=int, nargs="+", default=[], help="with --loads: experts.clones, "
                        "each in turn, next to none")  # fmt: skip
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="any key of a run")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--even-passes", type=int, default=1, help="forwards that even out expert loads")
    parser.add_argument("--sms", type=int, help="multiprocessors of a transfer, instead of the preset's")
    parser.add_argument("--no-overlap", action="store_true", help="also in one piece, with nothing computed "
                        "while rows travel")  # fmt: skip
    parser.add_argument("--no-profile", dest="profile", action="store_false")
    parser.add_argument("--trace", type=Path, help="folder for Chrome traces of the profiled steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny:
        require_gpu("try --tiny")
    if args.tiny:
        is_latent = args.model.startswith("deepseek")
        args.model, args.layers = "tiny-deepseek-v3" if is_latent else "tiny-qwen3", None
        args.batch = max([1, *args.sub_batches])
        args.length = 32
        args.steps, args.warm_up = min(args.steps, 2), 1
    return args


def main() -> None:
    args = parse()
    fabrics = [FABRICS_BY_NAME[name] for name in args.fabric]
    if args.sms is not None:
        fabrics = [dataclasses.replace(fabric, num_sms=args.sms) for fabric in fabrics]
    world_size = args.world or fabrics[0].world
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}: rank 0 of {world_size}, {args.batch} x {args.length} tokens")
    cases = cases_of(args, fabrics)
    outcomes: list[Outcome] = []
    biases: list[torch.Tensor] = []
    for case in cases:
        outcomes.append(measure(args, case, world_size, biases))
        report(outcomes[-1])
    if args.no_overlap:
        for outcome in outcomes[:-1]:
            print(f"\n{outcomes[-1].name} / {outcome.name}: {outcomes[-1].ms / outcome.ms:.3f}")
    for outcome in outcomes[1:] if len(args.dispatcher) > 1 else []:
        compare_rows(outcomes[0], outcome)
    if args.loads:
        compare_loads(cases, outcomes)
    bare = [outcome for outcome in outcomes if outcome.is_free]
    for outcome in outcomes:
        for free in bare if not outcome.is_free else []:
            compare(outcome, free)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1))


if __name__ == "__main__":
    main()
