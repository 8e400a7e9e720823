"""The contenders of ``moe_layer.py``: one MoE layer each, router included, from the same weights.

=======================  ===================================================================================
fsdmoe                   the layer's fused kernels as they are
fsdmoe fp8_blockwise     the experts' products in fp8 (Hopper), weights quantised beforehand: once a step
transformers             Qwen3-MoE's block with grouped_mm experts
transformers compiled    the same under ``torch.compile``
torchtitan               0.2.2's MoE module
torchtitan compiled      the same under ``torch.compile``
torchao fp8              its differentiable fp8 grouped products, scaled row by row (``moe_layer_torchao``)
torchao fp8 compiled     the same under ``torch.compile``
SonicMoE                 its layer function, tuned by itself at the first call (100 to 500 s a shape)
=======================  ===================================================================================

Peers are optional packages, imported when a contender is built; ``missing`` says what is not there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fsdmoe.experts.scores import logits_and_input
from fsdmoe.kernels.backend import has_fp8_kernels
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.triton import TopKPolicy, experts_mlp_triton, router_topk_triton
from fsdmoe.precision.formats import FP8_BLOCKWISE
from fsdmoe.precision.quantized_weight import QuantizedWeight, WeightScales

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
        self.policy = TopKPolicy(top_k=data.shape.top_k, norm_topk=True)
        self.router = nn.Parameter(data.router)
        self.gate_up = nn.Parameter(data.gate_up)
        self.down = nn.Parameter(data.down)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        x_TD = x_BSD.view(-1, x_BSD.shape[-1])
        logits_TE, x_TD = logits_and_input(x_TD, self.router)
        routed = router_topk_triton(logits_TE, None, self.policy)
        return experts_mlp_triton(x_TD, routed.weights, routed.ids, self.gate_up, self.down).view_as(x_BSD)


class _Sink:
    """Where the gradient of a weight goes that is kept as codes."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.buffer = torch.empty_like(weight)

    def claim(self) -> tuple[torch.Tensor, bool]:
        return self.buffer, False


class Fp8Layer(FsdmoeLayer):
    """The same with the experts' products in fp8, of weights that are quantised once for a step."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        self.sinks = _Sink(self.gate_up), _Sink(self.down)
        self.coded = self.quantize()

    def quantize(self) -> ExpertWeights:
        """Both weights both ways round: the cost of a step's first micro-batch."""
        from fsdmoe.kernels.triton.fp8_weights import quantize_weight

        coded = []
        for weight, sink in zip((self.gate_up, self.down), self.sinks, strict=True):
            plain, transposed = quantize_weight(weight.detach(), power_of_two=False)
            scales = WeightScales(plain.scales, (128, 128), transposed.codes)
            coded.append(QuantizedWeight(plain.codes, scales=scales))
            coded[-1].grad_sink = sink  # type: ignore[attr-defined]
        return ExpertWeights(*coded)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        from fsdmoe.kernels.gluon import experts_mlp_fp8

        x_TD = x_BSD.view(-1, x_BSD.shape[-1])
        logits_TE, x_TD = logits_and_input(x_TD, self.router)
        routed = router_topk_triton(logits_TE, None, self.policy)
        rows = Rows(x_TD, routed.weights, routed.ids)
        return experts_mlp_fp8(rows, self.coded, ExpertPolicy(recipe=FP8_BLOCKWISE)).view_as(x_BSD)


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


def torchao_layer(data: Data) -> nn.Module:
    from moe_layer_torchao import TorchaoLayer

    return TorchaoLayer(data)


class SonicLayer(nn.Module):
    """SonicMoE's layer function. It takes gate and up rows in turn; its softmax is over the top k alone."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_TC_softmax_topk_layer

        shape = data.shape
        halves = data.gate_up.view(shape.num_experts, 2, shape.n, shape.d)
        self.layer, self.activation, self.top_k = (
            moe_TC_softmax_topk_layer,
            ActivationType.SWIGLU,
            shape.top_k,
        )
        self.router = nn.Parameter(data.router)
        self.gate_up = nn.Parameter(halves.transpose(1, 2).reshape(shape.num_experts, 2 * shape.n, shape.d))
        self.down = nn.Parameter(data.down)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.gate_up.permute(1, 2, 0), self.down.permute(1, 2, 0)
        stream = torch.cuda.current_stream().cuda_stream
        x_TD = x_BSD.view(-1, x_BSD.shape[-1])
        y_TD = self.layer(
            x_TD, self.router, gate_up, None, down, None, self.top_k, stream, self.activation, False
        )[0]
        return y_TD.view_as(x_BSD)


def _compiled(build: Callable[[Data], nn.Module]) -> Callable[[Data], nn.Module]:
    def build_compiled(data: Data) -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(build(data), dynamic=False)  # type: ignore[return-value]

    return build_compiled


@dataclass(frozen=True)
class Contender:
    build: Callable[[Data], nn.Module]
    module: str = ""
    """What must be importable."""
    install: str = ""
    """What to install for it."""


_TRANSFORMERS = ("transformers.models.qwen3_moe", "transformers")
_TORCHTITAN = ("torchtitan.models.moe", "torchtitan==0.2.2")
_TORCHAO = ("torchao.prototype.moe_training.fp8_grouped_mm", "torchao==0.18.0, a Hopper GPU")
_SONIC = (
    "sonicmoe.functional",
    "sonic-moe==0.1.2.post1 quack-kernels==0.3.11 (Python 3.12, Hopper or newer)",
)
CONTENDERS = {
    "fsdmoe": Contender(FsdmoeLayer),
    "fsdmoe fp8_blockwise": Contender(Fp8Layer, "triton.experimental.gluon", "triton>=3.6, a Hopper GPU"),
    "transformers": Contender(transformers_layer, *_TRANSFORMERS),
    "transformers compiled": Contender(_compiled(transformers_layer), *_TRANSFORMERS),
    "torchtitan": Contender(torchtitan_layer, *_TORCHTITAN),
    "torchtitan compiled": Contender(_compiled(torchtitan_layer), *_TORCHTITAN),
    "torchao fp8": Contender(torchao_layer, *_TORCHAO),
    "torchao fp8 compiled": Contender(_compiled(torchao_layer), *_TORCHAO),
    "SonicMoE": Contender(SonicLayer, *_SONIC),
}


def missing(name: str) -> str:
    """Why a contender cannot take part and what to install; empty where it can."""
    contender = CONTENDERS[name]
    if contender.build is Fp8Layer and not has_fp8_kernels():
        return f"{name} cannot run here: it needs {contender.install}"
    if contender.module:
        try:
            importlib.import_module(contender.module)
        except ImportError as problem:
            return f"{name} is not installed: {problem}; it needs {contender.install}"
    return ""


def choose(names: list[str] | None) -> dict[str, Contender]:
    """The named contenders, all of which must be there, or every one that is; fsdmoe always takes part."""
    found: dict[str, Contender] = {}
    for name in dict.fromkeys(["fsdmoe", *(names or CONTENDERS)]):
        if name not in CONTENDERS:
            raise SystemExit(f"--contenders: expected some of {', '.join(CONTENDERS)}, got {name!r}")
        reason = missing(name)
        if not reason:
            found[name] = CONTENDERS[name]
        elif names:
            raise SystemExit(f"--contenders: {reason}")
        else:
            print(f"{reason}; left out", flush=True)
    return found
