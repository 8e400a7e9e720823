"""The two interpreters of a program: the plain model, which stands for all ranks, and one sharded rank.

What an operation means is written once, in :class:`Side`; the sides differ in which ranks' data they compute
with, and where torch and the engine are called by different names. The plain side is torch's semantics and
nothing else: the loss it goes backward from is the sum of all ranks' losses over the divisor.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdmoe import checkpoint
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.mesh import Meshes
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.precision.config import PrecisionConfig
from tests.support.random_programs.draw import Op, Program
from tests.support.random_programs.model import (
    VOCAB,
    Block,
    H,
    Model,
    TieWatch,
    batch_of,
    build_model,
    recompute_parts,
    split_layers,
)

ADAM = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-2}
"""A large eps: a gradient that is zero on one side and rounding on the other must not step by its sign."""


@dataclass
class Told:
    """What an operation gave back."""

    skipped: bool = False
    value: float = 0.0
    """A loss, or a norm."""
    values: list[float] = field(default_factory=list)
    """The same of every rank, where the side stands for all."""
    tensors: list[Tensor] | None = None
    error: str = ""


class Side:
    """A model, its optimizers, and what the program has put on its shelves."""

    def __init__(self, program: Program, model: Model, ranks: Sequence[int], device: torch.device) -> None:
        self.program, self.model, self.ranks, self.device = program, model, ranks, device
        self.params = dict(sorted(model.named_parameters()))
        self.trained = [name for name, parameter in self.params.items() if parameter.requires_grad]
        self.divisor = 1.0
        self.losses: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.kept: dict[int, Tensor] = {}
        self.subsets = [subset_of(self.trained, which) for _, which in program.optimizers]
        self.optimizers = [
            self.make_optimizer(kind, names)
            for (kind, _), names in zip(program.optimizers, self.subsets, strict=True)
        ]

    # Where the sides differ

    def make_optimizer(self, kind: str, names: list[str]) -> torch.optim.Optimizer:
        params = [self.params[name] for name in names]
        if kind == "adamw":
            return torch.optim.AdamW(params, **ADAM, weight_decay=0.1)
        return torch.optim.SGD(params, lr=0.1, momentum=0.9 if kind == "momentum" else 0.0)

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def read(self, gradient: Tensor) -> Tensor:
        """The values of a gradient that are compared."""
        return gradient

    def discard(self, losses: set[int], kept: set[int]) -> None:
        for shelf in losses:
            self.losses.pop(shelf, None)
        for shelf in kept:
            self.kept.pop(shelf, None)

    # Operations

    def run(self, op: Op) -> Told:
        told = getattr(self, f"do_{op[0]}")(*op[1:])
        return Told() if told is None else told

    def name(self, index: int) -> str:
        return self.trained[index % len(self.trained)]

    def compute(self, seed: int, variant: str) -> tuple[Told, list[tuple[Tensor, Tensor]]]:
        made = []
        for rank in self.ranks:
            tokens, x = batch_of(seed, rank, self.device)
            if torch.is_grad_enabled():
                x.requires_grad_(self.program.shape.x_grad)
            if self.program.shape.dropout:
                seed_generators(1000 * seed + rank)
            made.append((self.model(tokens, x, rank, variant), x))
        values = [loss.item() for loss, _ in made]
        return Told(value=values[0], values=values), made

    def total(self, made: Iterable[tuple[Tensor, Tensor]], scale: float = 1.0) -> Tensor:
        return torch.stack([loss for loss, _ in made]).sum() * (scale / self.divisor)

    def do_forward(self, shelf: int, seed: int, variant: str) -> Told:
        self.losses.pop(shelf, None)
        told, self.losses[shelf] = self.compute(seed, variant)
        return told

    def do_backward(self, shelf: int, retain: bool, scale: float, last: bool) -> Told | None:
        if shelf not in self.losses:
            return Told(skipped=True)
        with self.micro_batch(last):
            self.total(self.losses[shelf], scale).backward(retain_graph=retain)
        return None

    def do_both(self, shelf: int, other: int, last: bool) -> Told | None:
        if shelf not in self.losses or other not in self.losses:
            return Told(skipped=True)
        with self.micro_batch(last):
            (self.total(self.losses[shelf]) + self.total(self.losses[other])).backward()
        return None

    def do_micro(self, seed: int, variant: str, last: bool) -> Told:
        with self.micro_batch(last):
            told, made = self.compute(seed, variant)
            self.total(made).backward()
        return told

    def do_grad_x(self, shelf: int, retain: bool) -> Told:
        if shelf not in self.losses or not self.program.shape.x_grad:
            return Told(skipped=True)
        made = self.losses[shelf]
        total = torch.stack([loss for loss, _ in made]).sum()
        grads = torch.autograd.grad(total, [x for _, x in made], retain_graph=retain)
        return Told(tensors=[gradient.flatten() for gradient in grads])

    def do_grad_params(self, shelf: int, index: int) -> Told:
        if shelf not in self.losses:
            return Told(skipped=True)
        parameter = self.params[self.name(index)]
        (gradient,) = torch.autograd.grad(self.total(self.losses[shelf]), [parameter], retain_graph=True)
        return Told(tensors=[self.read(gradient)])

    def do_drop_loss(self, shelf: int) -> None:
        self.losses.pop(shelf, None)

    def do_zero(self, who: str, to_none: bool) -> None:
        if who.startswith("opt"):
            index = int(who[3:])
            is_fused = self.program.optimizers[index][0] == "fused"  # fsdmoe's drops gradients either way
            self.optimizers[index].zero_grad(set_to_none=to_none or is_fused)
        elif who == "engine":
            self.zero_by_engine()
        else:
            self.model.zero_grad(set_to_none=to_none)

    def zero_by_engine(self) -> None:
        self.model.zero_grad()

    def do_drop(self, index: int) -> None:
        self.params[self.name(index)].grad = None

    def do_keep(self, shelf: int, index: int) -> Told | None:
        gradient = self.params[self.name(index)].grad
        if gradient is None:
            return Told(skipped=True)
        self.kept[shelf] = gradient
        return None

    def do_read(self, shelf: int) -> Told:
        if shelf not in self.kept:
            return Told(skipped=True)
        return Told(tensors=[self.read(self.kept[shelf]).clone()])

    def do_scale_grad(self, index: int) -> None:
        gradient = self.params[self.name(index)].grad
        if gradient is not None:
            gradient.mul_(0.5)

    def do_assign_grad(self, index: int) -> None:
        parameter = self.params[self.name(index)]
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5

    def do_clip(self, max_norm: float, which: str) -> Told:
        norm = self.clip(max_norm, which)
        return Told(value=norm, values=[norm] * len(self.ranks))

    def clip(self, max_norm: float, which: str) -> float:
        return torch.nn.utils.clip_grad_norm_(self.params.values(), max_norm).item()

    def do_step(self, index: int) -> None:
        self.optimizers[index].step()

    def do_fail_backward(self, seed: int, layer: int, last: bool) -> None:
        self.model.layers[layer].breaks = True
        try:
            self.do_micro(seed, "full", last)
        finally:
            self.model.layers[layer].breaks = False

    def do_fail_forward(self, seed: int, layer: int) -> None:
        self.model.layers[layer].fails = True
        try:
            self.compute(seed, "full")
        finally:
            self.model.layers[layer].fails = False

    def do_eval(self, mode: str, seed: int, variant: str) -> Told:
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            return self.compute(seed, variant)[0]

    def do_adapter(self, name: str) -> None:
        self.model.adapter = name

    def do_replace(self, what: str, layer: int) -> None:
        """A module or a parameter is put in another's place, and back."""

    @torch.no_grad()
    def do_write(self, index: int, how: str) -> None:
        parameter = self.params[self.name(index)]
        if how == "scale":
            parameter.mul_(0.9)
        elif how == "data":
            parameter.data.mul_(0.9)
        else:
            generator = torch.Generator().manual_seed(index)
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator).to(parameter.device))

    @property
    def saved_optimizer(self) -> torch.optim.Optimizer | None:
        return self.optimizers[0] if len(self.optimizers) == 1 else None


class PlainSide(Side):
    """The oracle: one process, torch alone."""

    def __init__(self, program: Program, device: torch.device, tolerance: float) -> None:
        model = build_model(program.shape).to(device)
        super().__init__(program, model, range(program.layout.world), device)
        self.divisor = float(program.layout.world) if program.divisor is None else program.divisor
        self.ties = TieWatch(model, tolerance)
        self.alternatives: dict[str, tuple[Tensor, Any]] = {}
        """What else a parameter may be after the last step, and its optimizer state then."""
        self._saved: tuple[Any, Any] | None = None

    def make_optimizer(self, kind: str, names: list[str]) -> torch.optim.Optimizer:
        if kind != "fused":
            return super().make_optimizer(kind, names)
        params = [self.params[name] for name in names]
        groups = [
            {"params": [p for p in params if (p.dim() >= 2) == decayed], "weight_decay": 0.1 * decayed}
            for decayed in (True, False)
        ]
        return torch.optim.AdamW(groups, **ADAM)

    def do_step(self, index: int) -> None:
        """fsdmoe's AdamW may take a parameter without a gradient, in a unit that has some, for one whose
        gradient is zero."""
        optimizer, self.alternatives = self.optimizers[index], {}
        before: dict[str, tuple[Tensor, Any]] = {}
        if self.program.optimizers[index][0] == "fused":
            reached = {unit_of(name, self.model) for name, p in self.params.items() if p.grad is not None}
            for name in self.trained:
                parameter = self.params[name]
                if parameter.grad is None and unit_of(name, self.model) in reached:
                    before[name] = self._state_of(name, optimizer)
                    parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for name, state in before.items():
            self.alternatives[name] = self._state_of(name, optimizer)
            self.take(name, state, optimizer)
            self.params[name].grad = None

    def _state_of(self, name: str, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Any]:
        parameter = self.params[name]
        return parameter.detach().clone(), copy.deepcopy(optimizer.state.get(parameter))

    @torch.no_grad()
    def take(
        self, name: str, state: tuple[Tensor, Any], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        parameter, optimizer = self.params[name], optimizer or self.optimizers[0]
        parameter.copy_(state[0])
        optimizer.state.pop(parameter, None)
        if state[1] is not None:
            optimizer.state[parameter] = state[1]

    def do_save(self) -> None:
        optimizer = self.saved_optimizer
        state = None if optimizer is None else optimizer.state_dict()
        self._saved = copy.deepcopy((self.model.state_dict(), state))

    def do_load(self) -> Told | None:
        if self._saved is None:
            return Told(skipped=True)
        weights, state = copy.deepcopy(self._saved)
        self.model.load_state_dict(weights)
        if self.saved_optimizer is not None:
            self.saved_optimizer.load_state_dict(state)
        return None


class ShardedSide(Side):
    """One rank of the sharded model."""

    def __init__(self, program: Program, meshes: Meshes, rank: int, folder: str) -> None:
        model = build_model(program.shape)
        recompute_parts(model)
        split_layers(model, meshes)
        policy = FSDPPolicy(
            fsdp=FSDPConfig(**program.fsdp),
            precision=PrecisionConfig(**program.precision),  # type: ignore[arg-type]
            grad_divisor=program.divisor,
        )
        fully_shard(model.to(meshes.device), meshes, policy)
        self.meshes = meshes
        super().__init__(program, model, [rank], meshes.device)
        self._folder, self._num_saved = folder, 0

    def make_optimizer(self, kind: str, names: list[str]) -> torch.optim.Optimizer:
        return (
            AdamW(self.model, **ADAM, weight_decay=0.1)
            if kind == "fused"
            else super().make_optimizer(kind, names)
        )

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if last else engine_of(self.model).micro_batch(last=False)

    def do_micro(self, seed: int, variant: str, last: bool) -> Told:
        with engine_of(self.model).micro_batch(last=last):
            return super().do_micro(seed, variant, last)

    def do_replace(self, what: str, layer: int) -> None:
        with replaced(self.model, what, layer) as name:
            try:
                self.compute(0, "full")
            except (ConfigError, RuntimeError) as error:
                if name in str(error):
                    return
                raise AssertionError(f"{name} was replaced, and the refusal names another") from error
            raise AssertionError(f"{name} was replaced, and forward went on")

    def read(self, gradient: Tensor) -> Tensor:
        return gradient.piece

    def zero_by_engine(self) -> None:
        engine_of(self.model).zero_grad()

    def clip(self, max_norm: float, which: str) -> float:
        if which == "torch":
            return super().clip(max_norm, which)
        return clip_grad_norm(self.model, max_norm).total.item()

    def do_save(self) -> None:
        self._num_saved += 1
        checkpoint.save(f"{self._folder}/{self._num_saved}", self.model, self.saved_optimizer)

    def do_load(self) -> Told | None:
        if not self._num_saved:
            return Told(skipped=True)
        checkpoint.load(f"{self._folder}/{self._num_saved}", self.model, self.saved_optimizer)
        return None


@contextlib.contextmanager
def replaced(model: Model, what: str, layer: int) -> Iterator[str]:
    """Put something else into the model for this block; gives the name of what its forward must refuse."""
    block = model.layers[layer]
    holder, attribute, name, new = {
        "head": (model, "head", "head.weight", nn.Linear(H, VOCAB, bias=False)),
        "norm": (model, "norm", "norm.weight", nn.RMSNorm(H)),
        "layer": (model.layers, str(layer), f"layers.{layer}.", Block("plain", model.shape)),
        "parameter": (block.norm, "weight", f"layers.{layer}.norm.weight", nn.Parameter(torch.ones(H))),
        "added parameter": (block, "extra", f"layers.{layer}.extra", nn.Parameter(torch.ones(H))),
        "added module": (block, "extra", f"layers.{layer}.extra.weight", nn.Linear(H, 2, bias=False)),
    }[what]
    old = getattr(holder, attribute, None)
    setattr(holder, attribute, new)
    try:
        yield name
    finally:
        delattr(holder, attribute) if old is None else setattr(holder, attribute, old)


def seed_generators(seed: int) -> None:
    """As ``torch.manual_seed``, which without a GPU writes down three stacks for devices that may come."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def subset_of(names: list[str], which: str) -> list[str]:
    chosen = {
        "all": names, "even": names[::2], "odd": names[1::2], "tail": names[len(names) // 2 :],
        "layers": [name for name in names if name.startswith("layers")],
        "others": [name for name in names if not name.startswith("layers")],
    }[which]  # fmt: skip
    return chosen or names


def unit_of(name: str, model: nn.Module) -> str:
    """The unit that a parameter is gathered with; what two units share belongs to the root."""
    if name.startswith("layers."):
        return ".".join(name.split(".")[:2])
    if name.startswith(("embed", "head")) and not model.shape.tied:
        return name.split(".")[0]
    return "root"
