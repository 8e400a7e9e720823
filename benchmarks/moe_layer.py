"""One MoE layer, forward and backward, beside transformers and torchtitan, on one GPU.

Every contender gets the same weights, the same random input and the same routing, and must give the same
output. All of them are warmed up, then run in turn, in an order that is turned round every round, each for
long enough that the card's clock settles: what counts is the ratio within one run. Routing is that of a
random router ("balanced"), or of one whose logits fall off by expert like a power law ("skewed").
torchtitan takes part where it can be imported. Backward runs on the calling thread, for everybody, as in
fsdmoe's own training loop: where the host is the limit, a thread of the device's own only costs.

    --shapes 0 4        only these shapes         --json out.json      all figures
    --skewed            skewed routing as well    --chart out.png      bars (needs matplotlib)
    --graphs            also as CUDA graphs, where a contender can be captured
    --device-thread     torch's default: backward on a thread of the device's own
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from timing import alternate, graph_of
from torch import nn

from fsdmoe.experts.scores import logits_and_input, router_logits
from fsdmoe.kernels.triton import TopKPolicy, experts_mlp_triton, router_topk_triton

SKEW = 0.5
# One column of the input is this constant, so that a router without a bias can be given one.
BIAS_COLUMN = 4.0


@dataclass(frozen=True)
class Shape:
    d: int
    n: int
    num_experts: int
    top_k: int
    num_tokens: int

    def __str__(self) -> str:
        return f"d{self.d} n{self.n} E{self.num_experts} k{self.top_k} T{self.num_tokens}"

    @property
    def flops(self) -> int:
        """Of the experts' projections, forward and backward; the router's is not counted."""
        return 18 * self.num_tokens * self.top_k * self.d * self.n


SHAPES = (
    Shape(2048, 768, 128, 8, 16384),
    Shape(4096, 1536, 16, 8, 8192),
    Shape(7168, 2048, 32, 8, 4096),
    Shape(4096, 14336, 8, 2, 8192),
    Shape(2048, 768, 128, 8, 2048),
    Shape(2048, 768, 128, 8, 32768),
)


class Data:
    """Weights and input of one case, shared by all contenders."""

    def __init__(self, shape: Shape, skewed: bool) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*size: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(size, device="cuda", generator=generator) * scale).bfloat16()

        self.shape = shape
        d, n, num_experts = shape.d, shape.n, shape.num_experts
        self.router = random(num_experts, d, scale=d**-0.5)
        self.gate_up = random(num_experts, 2 * n, d, scale=d**-0.5)
        self.down = random(num_experts, d, n, scale=n**-0.5)
        self.x = random(1, shape.num_tokens, d)
        self.x[..., 0] = BIAS_COLUMN
        fall = SKEW * torch.arange(1, num_experts + 1, device="cuda").log() if skewed else 0.0
        self.router[:, 0] = -fall / BIAS_COLUMN
        self.x.requires_grad_()
        self.dy = random(1, shape.num_tokens, d)


class FsdmoeLayer(nn.Module):
    def __init__(self, data: Data) -> None:
        super().__init__()
        self.policy = TopKPolicy(top_k=data.shape.top_k)
        self.router = nn.Parameter(data.router)
        self.gate_up = nn.Parameter(data.gate_up)
        self.down = nn.Parameter(data.down)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        x_TD = x_BSD.view(-1, x_BSD.shape[-1])
        logits_TE, x_TD = logits_and_input(x_TD, self.router)
        routed = router_topk_triton(logits_TE, None, self.policy)
        return experts_mlp_triton(x_TD, routed.weights, routed.ids, self.gate_up, self.down).view_as(x_BSD)


def transformers_layer(data: Data) -> nn.Module:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    shape = data.shape
    config = Qwen3MoeConfig(
        hidden_size=shape.d,
        moe_intermediate_size=shape.n,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    block.experts.gate_up_proj = nn.Parameter(data.gate_up)
    block.experts.down_proj = nn.Parameter(data.down)
    block.gate.weight = nn.Parameter(data.router)
    return block


def torchtitan_layer(data: Data) -> nn.Module:
    from torchtitan.models.moe import MoE, MoEArgs

    shape = data.shape
    args = MoEArgs(
        num_experts=shape.num_experts,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        top_k=shape.top_k,
        load_balance_coeff=None,
    )
    with torch.device("meta"):
        layer = MoE(args, shape.d, shape.n)
    layer.experts.w1 = nn.Parameter(data.gate_up[:, : shape.n].contiguous())
    layer.experts.w3 = nn.Parameter(data.gate_up[:, shape.n :].contiguous())
    layer.experts.w2 = nn.Parameter(data.down)
    layer.router.gate.weight = nn.Parameter(data.router)
    layer.tokens_per_expert = torch.zeros(shape.num_experts, device="cuda")
    return layer


def contenders() -> dict[str, Callable[[Data], nn.Module]]:
    def compiled(build: Callable[[Data], nn.Module]) -> Callable[[Data], nn.Module]:
        def build_compiled(data: Data) -> nn.Module:
            torch._dynamo.reset()
            return torch.compile(build(data), dynamic=False)  # type: ignore[return-value]

        return build_compiled

    found: dict[str, Callable[[Data], nn.Module]] = {"fsdmoe": FsdmoeLayer}
    for name, build in (("transformers", transformers_layer), ("torchtitan", torchtitan_layer)):
        try:
            importlib.import_module(f"{name}.models.{'qwen3_moe' if name == 'transformers' else 'moe'}")
        except ImportError as problem:
            print(f"{name} cannot be imported, left out: {problem}")
            continue
        found[name] = build
        found[f"{name} compiled"] = compiled(build)
    return found


@dataclass
class Result:
    contender: str
    ms: float = 0.0
    tflops: float = 0.0
    ratio: float = 0.0
    saved_mib: float = 0.0
    peak_mib: float = 0.0
    error: float = 0.0
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
        return torch.autograd.grad(layer(data.x), parameters, data.dy)

    return graph_of(once)


def load_ratio(data: Data) -> float:
    """Rows of the busiest expert over the mean."""
    shape = data.shape
    logits = router_logits(data.x.detach().view(-1, shape.d), data.router)
    counts = logits.topk(shape.top_k).indices.flatten().bincount(minlength=shape.num_experts)
    return (counts.max() / counts.float().mean()).item()


def compare(shape: Shape, skewed: bool, args: argparse.Namespace) -> dict[str, object]:
    data = Data(shape, skewed)
    layers = {
        name: build(data) for name, build in contenders().items() if name == "fsdmoe" or args.only in name
    }
    results = {name: Result(name) for name in layers}
    expected = step(layers["fsdmoe"], data).float()
    for name, layer in layers.items():
        results[name].error = ((step(layer, data).float() - expected).norm() / expected.norm()).item()
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
    for name, times in alternate(runs, args.seconds, args.rounds).items():
        result = results[name]
        result.times, result.ms = times, statistics.median(times)
        result.tflops = shape.flops / result.ms / 1e9
    best = min(r.ms for name, r in results.items() if not name.startswith("fsdmoe"))
    for result in results.values():
        result.ratio = best / result.ms
    return {
        "shape": asdict(shape),
        "skewed": skewed,
        "load": load_ratio(data),
        "results": [asdict(result) for result in results.values()],
    }


def report(case: dict, shape: Shape) -> None:
    kind = "skewed" if case["skewed"] else "balanced"
    print(f"\n{shape}, {kind} routing, busiest expert {case['load']:.1f} × the mean")
    print(f"{'':26}{'ms':>8}{'TFLOP/s':>9}{'× best peer':>13}{'saved MiB':>11}{'peak MiB':>10}{'differs':>9}")
    for r in case["results"]:
        memory_part = (
            f"{r['saved_mib']:11.0f}{r['peak_mib']:10.0f}{r['error']:9.4f}" if r["saved_mib"] else ""
        )
        print(
            f"{r['contender']:26}{r['ms']:8.3f}{r['tflops']:9.0f}{r['ratio']:13.3f}{memory_part}", flush=True
        )


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=int, nargs="*", default=list(range(len(SHAPES))))
    parser.add_argument("--only", default="", help="peers whose name contains this, such as 'compiled'")
    parser.add_argument("--skewed", action="store_true")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--device-thread", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long a contender runs in each round")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    torch.autograd.set_multithreading_enabled(args.device_thread)
    cases = []
    for index in args.shapes:
        for skewed in (False, True) if args.skewed else (False,):
            cases.append(compare(SHAPES[index], skewed, args))
            report(cases[-1], SHAPES[index])
            gc.collect()
            torch.cuda.empty_cache()
            if args.json:
                args.json.write_text(json.dumps(cases, indent=1))
    if args.chart:
        draw(cases, args.chart)


if __name__ == "__main__":
    main()
