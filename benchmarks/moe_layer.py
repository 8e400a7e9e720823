"""One MoE layer, forward and backward, compared with transformers, torchtitan and SonicMoE, on one GPU.

Every contender gets the same weights, the same random input and the same routing, and must give the same
output and the same gradient of its input. All of them are warmed up, then run in turn, in an order that
changes every round, each for long enough that the card's clock settles: what counts is the ratio within one
run. Routing is that of a random router ("balanced"), or of one whose logits fall off by expert like a
power law ("skewed"). Peers take part where they are installed (see ``moe_layer_contenders``); naming one that
is not is an error. SonicMoE tunes itself for 100 to 500 s at each shape. Backward runs on the calling thread,
for everybody, as in fsdmoe's own training loop: where the host is the limit, a thread of the device's own
only costs. Without a peer, ratios are those to fsdmoe's own layer in bf16.

    --shapes 0 4        only these shapes         --json out.json      all figures
    --contenders fsdmoe "transformers compiled" SonicMoE               only these
    --contenders "fsdmoe fp8_blockwise"      rows "weights": to quantise them, once a step
    --skewed            skewed routing as well    --chart out.png      bars (needs matplotlib)
    --graphs            also as CUDA graphs, where a contender can be captured
    --before TREE       the kernels of another tree as well (git archive COMMIT | tar x --one-top-level=TREE);
                        without a peer, ratios are those to them
    --turns             contenders take turns call by call: differences of a percent, such as to --before
    --device-thread     torch's default: backward on a thread of the device's own
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from moe_layer_before import contender as contender_before
from moe_layer_contenders import CONTENDERS, SHAPES, Contender, Data, Fp8Layer, Shape, choose
from timing import alternate, graph_of, require_gpu, take_turns
from torch import nn

from fsdmoe.experts.scores import router_logits

MAX_DIFFERENCE = 0.15
"""Of outputs and of the input's gradient to fsdmoe's, relative norms: a layer that computes something else
is far beyond it, near-ties between experts stay below (peers compute router logits in bf16)."""


@dataclass
class Result:
    contender: str
    ms: float = 0.0
    tflops: float = 0.0
    ratio: float = 0.0
    saved_mib: float = 0.0
    peak_mib: float = 0.0
    error: float = 0.0
    grad_error: float = 0.0
    setup_s: float = 0.0
    times: list[float] = field(default_factory=list)


def step(layer: nn.Module, data: Data) -> torch.Tensor:
    """One forward and backward; gradients are dropped first, so nothing is accumulated."""
    data.x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None
    y = layer(data.x)
    y.backward(data.dy)
    return y.detach()


def memory(layer: nn.Module, data: Data) -> tuple[float, float]:
    """MiB kept from forward to backward beside the output, and MiB at the peak beyond what was there."""
    step(layer, data)
    data.x.grad = None
    layer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = layer(data.x)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    y.backward(data.dy)
    torch.cuda.synchronize()
    return kept / 2**20, (torch.cuda.max_memory_allocated() - before) / 2**20


def captured(layer: nn.Module, data: Data) -> Callable[[], object]:
    parameters = [data.x, *layer.parameters()]

    def once() -> object:
        return torch.autograd.grad(layer(data.x), parameters, data.dy, allow_unused=True)  # codes have sinks

    return graph_of(once)


def load_ratio(data: Data) -> float:
    """Rows of the busiest expert over the mean."""
    shape = data.shape
    logits = router_logits(data.x.detach().view(-1, shape.d), data.router)
    counts = logits.topk(shape.top_k).indices.flatten().bincount(minlength=shape.num_experts)
    return (counts.max() / counts.float().mean()).item()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def compare(
    shape: Shape, skewed: bool, chosen: dict[str, Contender], args: argparse.Namespace
) -> dict[str, object]:
    data = Data(shape, skewed)
    layers = {name: contender.build(data) for name, contender in chosen.items()}
    results = {name: Result(name) for name in layers}
    expected, expected_grad = step(layers["fsdmoe"], data), data.x.grad
    for name, layer in layers.items():
        began = time.perf_counter()
        results[name].error = difference(step(layer, data), expected)
        assert data.x.grad is not None
        assert expected_grad is not None
        results[name].grad_error = difference(data.x.grad, expected_grad)
        results[name].setup_s = time.perf_counter() - began
        print(f"  {name}: first call after {results[name].setup_s:.1f} s", flush=True)
        results[name].saved_mib, results[name].peak_mib = memory(layer, data)
    runs: dict[str, Callable[[], object]] = {
        name: functools.partial(step, layer, data) for name, layer in layers.items()
    }
    if args.graphs:
        for name, layer in layers.items():
            try:
                runs[f"{name} graph"] = captured(layer, data)
                results[f"{name} graph"] = Result(f"{name} graph")
            except RuntimeError as problem:
                print(f"{name} cannot be captured: {str(problem).splitlines()[0]}")
    for name, layer in layers.items():
        if isinstance(layer, Fp8Layer):
            runs[f"{name} weights"] = layer.quantize
            results[f"{name} weights"] = Result(f"{name} weights")
    time_all = take_turns if args.turns else alternate
    for name, times in time_all(runs, args.seconds, args.rounds).items():
        result = results[name]
        result.times, result.ms = times, statistics.median(times)
        if not name.endswith(" weights"):
            result.tflops = shape.flops / result.ms / 1e9
    peers = [r.ms for name, r in results.items() if not name.startswith("fsdmoe")]
    base = "fsdmoe before" if "fsdmoe before" in results else "fsdmoe"
    plain = results[base]
    for name, result in results.items():
        ours = results.get(f"{base} graph", plain) if name.endswith(" graph") else plain
        result.ratio = min(peers, default=ours.ms) / result.ms if result.tflops else 0.0
    return {
        "shape": asdict(shape),
        "skewed": skewed,
        "load": load_ratio(data),
        "base": "best peer" if peers else base.split()[-1],
        "results": [asdict(result) for result in results.values()],
    }


def report(case: dict, shape: Shape) -> bool:
    """Print the table; whether all contenders computed the same."""
    kind = "skewed" if case["skewed"] else "balanced"
    print(f"\n{shape}, {kind} routing, busiest expert {case['load']:.1f} × the mean")
    print(
        f"{'':26}{'ms':>8}{'TFLOP/s':>9}{'× ' + case['base']:>13}{'saved MiB':>11}{'peak MiB':>10}"
        f"{'y, dx differ':>16}"
    )
    for r in case["results"]:
        memory_part = (
            f"{r['saved_mib']:11.0f}{r['peak_mib']:10.0f}{r['error']:9.4f}{r['grad_error']:7.4f}"
            if r["saved_mib"]
            else ""
        )
        print(
            f"{r['contender']:26}{r['ms']:8.3f}{r['tflops']:9.0f}{r['ratio']:13.3f}{memory_part}", flush=True
        )
    # Not max() of the two: it drops a nan. A nan is below nothing, so it counts as apart.
    apart = [
        r["contender"]
        for r in case["results"]
        if not (r["error"] <= MAX_DIFFERENCE and r["grad_error"] <= MAX_DIFFERENCE)
    ]
    if apart:
        print(f"OTHER RESULTS than fsdmoe's by more than {MAX_DIFFERENCE}: {', '.join(apart)}")
    return not apart


def draw(cases: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(cases), 1, figsize=(8, 2.2 * len(cases)), squeeze=False)
    for axis, case in zip(axes[:, 0], cases):
        names = [r["contender"] for r in case["results"]]
        rates = [r["tflops"] for r in case["results"]]
        bars = axis.barh(
            names, rates, color=["#d1495b" if n.startswith("fsdmoe") else "#8d99ae" for n in names]
        )
        axis.bar_label(bars, fmt="%.0f", padding=3)
        axis.invert_yaxis()
        kind = "skewed" if case["skewed"] else "balanced"
        axis.set_title(f"{Shape(**case['shape'])}, {kind}: TFLOP/s, forward + backward", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=int, nargs="*", default=list(range(len(SHAPES))))
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"of: {', '.join(CONTENDERS)}; "
                        "all that are installed if left out")  # fmt: skip
    parser.add_argument("--before", type=Path, metavar="TREE")
    parser.add_argument("--skewed", action="store_true")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--device-thread", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long a contender runs in each round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    return parser.parse_args()


def main() -> int:
    args = parse()
    require_gpu()
    chosen = choose(args.contenders)
    if args.before:
        chosen["fsdmoe before"] = contender_before(args.before)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    torch.autograd.set_multithreading_enabled(args.device_thread)
    cases, agree = [], True
    for index in args.shapes:
        for skewed in (False, True) if args.skewed else (False,):
            cases.append(compare(SHAPES[index], skewed, chosen, args))
            agree &= report(cases[-1], SHAPES[index])
            gc.collect()
            torch.cuda.empty_cache()
            if args.json:
                args.json.write_text(json.dumps(cases, indent=1))
    if args.chart:
        draw(cases, args.chart)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
