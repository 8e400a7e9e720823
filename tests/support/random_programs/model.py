"""The models that random programs train: small, made of everything that a gradient can come from.

::

    tokens ─ embed (+ x) ─ * scale ─ layers in the order of the plan ─ norm ─ head ─ loss of this rank

A layer is torch's own linears, linears that write their gradients into the engine's buffers, or a real MoE
layer; attention may stand before them, adapters beside the first. ``x`` is a float input that gradients can
be asked for. With dropout every part of a layer that ``memory.recompute`` names draws random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdmoe.experts.dispatch import ClonePolicy, FlexPolicy
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.router import Router
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.huggingface.attention import attended
from fsdmoe.kernels import linear
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.memory.layers import keep_less
from fsdmoe.memory.recompute import drawing_part
from fsdmoe.mesh import Meshes
from fsdmoe.models.head import LMHead
from fsdmoe.models.memory_parts import recompute_experts

VOCAB, H, WIDTH, EXPERTS, TOP_K = 24, 16, 16, 4, 2
ROWS, LENGTH = 2, 3
ADAPTERS = ("a", "b")


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
    attention: bool = False
    dropout: float = 0.0
    parts: tuple[str, ...] = ()
    """What the sharded model recomputes by fsdmoe's own means (``memory.recompute``), and the plain one does
    not."""
    adapters: bool = False
    """Layers hold two adapters, of which one is used, or none."""
    clones: tuple[int, int, bool] = (0, 0, True)
    """As the fields of ``ClonePolicy``: slots a rank, of more rows than so many, kept for backward."""
    chunks: int = 1
    """In how many the sharded model sends rows to experts."""
    flex_rows: float = 0.0
    """The bound of ``flex``, by which clones are sent then; 0: by ``all_to_all``."""


class Block(nn.Module):
    """One layer; ``fails`` raises in forward, ``breaks`` in the middle of the layer's backward."""

    def __init__(self, kind: str, shape: Shape) -> None:
        super().__init__()
        self.fails = self.breaks = False
        self.dropout = shape.dropout
        self.norm = nn.RMSNorm(H, eps=1e-5)
        self.qkv = nn.Linear(H, 3 * H, bias=False) if shape.attention else None
        self.adapters = nn.ModuleDict()
        if kind == "moe":
            gate = Router(RouterSpec(num_experts=EXPERTS, top_k=TOP_K, norm_topk=True), H)
            self.moe = MoE(gate, GroupedExperts(EXPERTS, H, WIDTH))
        else:
            make = linear.Linear if kind == "sink" else nn.Linear
            self.up, self.down = make(H, 2 * WIDTH), make(2 * WIDTH, H, bias=False)
            for name in ADAPTERS if shape.adapters else ():
                low = nn.Linear(H, 2, bias=False), nn.Linear(2, 2 * WIDTH, bias=False)
                self.adapters[name] = nn.Sequential(Drop(shape.dropout), *low)
        self.side = nn.Linear(H, H, bias=False) if shape.sided else None

    def forward(self, x: Tensor, rank: int, adapter: str = "") -> Tensor:
        if self.qkv is not None:
            x = x + self.attend(x)
        y = drawing_part("norms", self.normed, x)
        if self.fails:
            raise ValueError("boom")
        if self.breaks and y.requires_grad:
            y.register_hook(boom)
        if hasattr(self, "moe"):
            y = self.moe(y)[0]
        else:
            y = self.down(drawing_part("shared_experts", self.hidden, y, adapter))
        if self.side is not None and rank == 0:
            y = y + self.side(x)
        return x + y

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = drawing_part("attention_projections", self.project, x)
        # A mild softmax: a sharp one would make much of rounding.
        given = {"dropout_p": self.dropout, "is_causal": True, "scale": 0.1, "draws": self.dropout > 0}
        out = attended(F.scaled_dot_product_attention, query, key, value, **given)
        return out.transpose(1, 2).flatten(2)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        assert self.qkv is not None
        x = drop(self.qkv(F.rms_norm(x, (H,), eps=1e-5)), self.dropout)
        return tuple(x.unflatten(-1, (3, 2, H // 2)).permute(2, 0, 3, 1, 4).unbind())

    def normed(self, x: Tensor) -> Tensor:
        return drop(self.norm(x), self.dropout)

    def hidden(self, y: Tensor, adapter: str) -> Tensor:
        z = self.up(y)
        if adapter and adapter in self.adapters:
            z = z + self.adapters[adapter](y)
        return drawing_part("activation", self.activated, z)

    def activated(self, z: Tensor) -> Tensor:
        return drop(torch.tanh(z), self.dropout)


class Drop(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.share if self.training else 0.0)


def drop(x: Tensor, share: float) -> Tensor:
    """Dropout whose choice is the same in every dtype; that of CUDA's own kernel is not."""
    if not share:
        return x
    kept = torch.rand(x.shape, device=x.device) >= share
    return x * kept / (1 - share)


def boom(gradient: Tensor) -> None:
    raise ValueError("boom")


class Model(nn.Module):
    """Returns the loss of one rank's tokens; ``variant`` chooses another way through the model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = (linear.Embedding if shape.embed == "sink" else nn.Embedding)(VOCAB, H)
        self.layers = nn.ModuleList(Block(kind, shape) for kind in shape.layers)
        self.adapter = ADAPTERS[0]
        """The one that is used; empty: none."""
        self.norm = nn.RMSNorm(H, eps=1e-5)
        if shape.head == "fused":
            self.head: nn.Module = LMHead(H, VOCAB)
        else:
            self.head = (linear.Linear if shape.head == "sink" else nn.Linear)(H, VOCAB, bias=False)
        if shape.root:
            self.scale = nn.Parameter(torch.empty(H))
        if shape.tied:
            self.head.weight = self.embed.weight

    def run(self, x: Tensor, rank: int, adapter: str, *indices: int) -> Tensor:
        """``adapter`` as it is now: what runs again in backward must not look it up then."""
        for index in indices:
            x = self.layers[index](x, rank, adapter)
        return x

    def forward(self, tokens_BS: Tensor, x_BSD: Tensor, rank: int, variant: str = "full") -> Tensor:
        x = self.embed(tokens_BS)
        x = x + x_BSD.to(x.dtype)
        if self.shape.root:
            x = x * self.scale
        plan = self.shape.plan[:-1] if variant == "short" else self.shape.plan
        step = 2 if self.shape.recompute == "pairs" else 1
        for start in range(0, len(plan), step):
            given = x, rank, self.adapter, *plan[start : start + step]
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


@functools.cache
def initial(name: str, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(name)))
    value = torch.randn(shape, generator=generator)
    return 1 + 0.2 * value if len(shape) == 1 else 0.4 * value


def build_model(shape: Shape) -> Model:
    """The same values wherever it is built, drawn from each parameter's name."""
    model = Model(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial(name, parameter.shape))
            parameter.requires_grad_(not name.startswith(shape.frozen) if shape.frozen else True)
    return model


def recompute_parts(model: Model) -> None:
    """As ``parallelize`` does it."""
    memory = MemoryConfig(recompute=model.shape.parts)  # type: ignore[arg-type]
    if "experts" in memory.recompute:
        for layer in model.layers:
            recompute_experts(layer)
    keep_less(list(model.layers), memory)


def split_layers(model: Model, meshes: Meshes) -> None:
    """Give each rank its experts."""
    for layer in model.layers:
        if hasattr(layer, "moe"):
            trained = {name: p.requires_grad for name, p in layer.moe.experts.named_parameters()}
            clones = ClonePolicy(*model.shape.clones)
            parallelize_experts(
                layer.moe,
                meshes,
                dispatcher=dispatcher_of(model.shape),
                chunks=model.shape.chunks,
                clones=clones,
                flex=FlexPolicy(model.shape.flex_rows),
            )
            for name, is_trained in trained.items():
                layer.moe.experts.get_parameter(name).requires_grad_(is_trained)
            if "dispatch" in model.shape.parts and not model.shape.flex_rows:
                layer.moe.send_again()


def dispatcher_of(shape: Shape) -> str:
    """One that takes chunks, where there are some; clones have one of their own."""
    if shape.flex_rows:
        return "flex"
    return "all_to_all" if shape.chunks > 1 else "auto"


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
