"""The models that random programs train: small, made of everything that a gradient can come from.

::

    tokens ─ embed (+ x) ─ * scale ─ layers in the order of the plan ─ norm ─ head ─ loss of this rank

A layer is torch's own linears, linears that write their gradients into the engine's buffers, or a real MoE
layer. ``x`` is a float input that gradients can be asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdmoe.experts.context import RouterSpec
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.router import Router
from fsdmoe.kernels import linear
from fsdmoe.mesh import Meshes
from fsdmoe.models.head import LMHead

VOCAB, H, WIDTH, EXPERTS, TOP_K = 24, 16, 16, 4, 2
ROWS, LENGTH = 2, 3


@dataclass(frozen=True)
class Shape:
    """A drawn model."""

    layers: tuple[str, ...] = ("plain", "plain")
    """``plain``: torch's linears; ``sink``: those that write gradients themselves; ``moe``."""
    plan: tuple[int, ...] = (0, 1)
    """Which layers run, in this order; one may run twice, or never."""
    embed: str = "plain"
    head: str = "plain"
    """``plain``, ``sink``, or ``fused``: the loss head that makes its weight's gradient in forward."""
    tied: bool = False
    root: bool = False
    """A parameter that belongs to no unit."""
    frozen: tuple[str, ...] = ()
    """Prefixes of names."""
    recompute: str = "none"
    """``layer`` or ``pairs``: torch.utils.checkpoint around so many layers."""
    x_grad: bool = True
    sided: bool = False
    """Layers hold a linear that only rank 0 uses."""


class Block(nn.Module):
    """One layer; ``fails`` raises in forward, ``breaks`` in the middle of the layer's backward."""

    def __init__(self, kind: str, sided: bool) -> None:
        super().__init__()
        self.fails = self.breaks = False
        self.norm = nn.RMSNorm(H, eps=1e-5)
        if kind == "moe":
            gate = Router(RouterSpec(num_experts=EXPERTS, top_k=TOP_K, norm_topk=True), H)
            self.moe = MoE(gate, GroupedExperts(EXPERTS, H, WIDTH))
        else:
            make = linear.Linear if kind == "sink" else nn.Linear
            self.up, self.down = make(H, 2 * WIDTH), make(2 * WIDTH, H, bias=False)
        self.side = nn.Linear(H, H, bias=False) if sided else None

    def forward(self, x: Tensor, rank: int) -> Tensor:
        y = self.norm(x)
        if self.fails:
            raise ValueError("boom")
        if self.breaks and y.requires_grad:
            y.register_hook(boom)
        y = self.moe(y)[0] if hasattr(self, "moe") else self.down(torch.tanh(self.up(y)))
        if self.side is not None and rank == 0:
            y = y + self.side(x)
        return x + y


def boom(gradient: Tensor) -> None:
    raise ValueError("boom")


class Model(nn.Module):
    """Returns the loss of one rank's tokens; ``variant`` chooses another way through the model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = (linear.Embedding if shape.embed == "sink" else nn.Embedding)(VOCAB, H)
        self.layers = nn.ModuleList(Block(kind, shape.sided) for kind in shape.layers)
        self.norm = nn.RMSNorm(H, eps=1e-5)
        if shape.head == "fused":
            self.head: nn.Module = LMHead(H, VOCAB)
        else:
            self.head = (linear.Linear if shape.head == "sink" else nn.Linear)(H, VOCAB, bias=False)
        if shape.root:
            self.scale = nn.Parameter(torch.empty(H))
        if shape.tied:
            self.head.weight = self.embed.weight

    def run(self, x: Tensor, rank: int, *indices: int) -> Tensor:
        for index in indices:
            x = self.layers[index](x, rank)
        return x

    def forward(self, tokens_BS: Tensor, x_BSD: Tensor, rank: int, variant: str = "full") -> Tensor:
        x = self.embed(tokens_BS)
        x = x + x_BSD.to(x.dtype)
        if self.shape.root:
            x = x * self.scale
        plan = self.shape.plan[:-1] if variant == "short" else self.shape.plan
        step = 2 if self.shape.recompute == "pairs" else 1
        for start in range(0, len(plan), step):
            given = x, rank, *plan[start : start + step]
            if self.shape.recompute == "none" or not torch.is_grad_enabled():
                x = self.run(*given)
            else:
                x = checkpoint(self.run, *given, use_reentrant=False)
        if variant == "headless":
            return x.float().square().mean()
        x = self.norm(x)
        losses = [self.loss(x, tokens_BS.roll(1))]
        if variant == "twice":  # as multi-token prediction does: embedding and head run a second time
            again = self.embed(tokens_BS.roll(1)) + x
            losses.append(self.loss(again, tokens_BS.roll(2)))
        return torch.stack(losses).sum()

    def loss(self, x: Tensor, labels_BS: Tensor) -> Tensor:
        if self.shape.head == "fused":
            return self.head(x, labels_BS, divisor=float(labels_BS.numel()))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), labels_BS.flatten())


def build_model(shape: Shape) -> Model:
    """The same values wherever it is built, drawn from each parameter's name."""
    model = Model(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(name)))
            value = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * value if parameter.dim() == 1 else 0.4 * value)
            parameter.requires_grad_(not name.startswith(shape.frozen) if shape.frozen else True)
    return model


def split_layers(model: Model, meshes: Meshes) -> None:
    """Give each rank its experts."""
    for layer in model.layers:
        if hasattr(layer, "moe"):
            trained = {name: p.requires_grad for name, p in layer.moe.experts.named_parameters()}
            parallelize_experts(layer.moe, meshes)
            for name, is_trained in trained.items():
                layer.moe.experts.get_parameter(name).requires_grad_(is_trained)


def batch_of(seed: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens, and the float input."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    return tokens.to(device), torch.randn(ROWS, LENGTH, H, generator=generator).to(device)


class TieWatch:
    """Whether any token's choice of experts was too close to call: rounding may choose, not the program."""

    def __init__(self, model: Model, tolerance: float) -> None:
        self.seen = False
        self._near = min(5 * tolerance, 0.05)
        for layer in model.layers:
            if hasattr(layer, "moe"):
                layer.moe.gate.register_forward_pre_hook(self._look)

    @torch.no_grad()
    def _look(self, gate: nn.Module, inputs: Sequence[Tensor]) -> None:
        logits = inputs[0].float() @ gate.weight.float().t()
        best = logits.topk(TOP_K + 1).values
        self.seen |= bool((best[:, TOP_K - 1] - best[:, TOP_K]).min() < self._near)
