"""Random training programs: a model, a layout, a policy, optimizers and a list of operations, from a seed.

A program prints as the Python that makes it again. Operations are tuples, ``(name, *arguments)``; parameters
are told by their place among the trained ones, kept losses and gradients by the number of a shelf. An
operation that finds nothing on its shelf does nothing, so that operations can be left out of a program.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from fsdmoe.memory.config import Part
from tests.support.random_programs.layout import Layout
from tests.support.random_programs.model import ADAPTERS, Shape
from tests.support.random_programs.packed import PackedProgram, draw_packed

Op = tuple[Any, ...]
VARIANTS = ("full", "full", "full", "short", "twice", "headless")
SUBSETS = ("all", "all", "even", "odd", "layers", "others", "tail")
PARTS = tuple(name for name in get_args(Part) if name != "mla_up")
REPLACED = ("head", "norm", "layer", "parameter", "added parameter", "added module")


LAYOUTS = (
    (16, Layout(1)),
    (16, Layout(2)), (14, Layout(2, dp_outer=2)), (9, Layout(2, ep=2)),
    (1, Layout(4)), (2, Layout(4, dp_outer=2)), (2, Layout(4, dp_outer=4)), (2, Layout(4, ep=2)),
    (2, Layout(4, dp_outer=2, ep=2)), (1, Layout(4, ep=4)),
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    layout: Layout
    fsdp: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, str] = field(default_factory=dict)
    divisor: float | None = None
    shape: Shape = field(default_factory=Shape)
    optimizers: tuple[tuple[str, str], ...] = (("sgd", "all"),)
    """Kind and which parameters."""
    ops: tuple[Op, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Nothing is rounded to fewer bits than the plain model's numbers have."""
        rounded = self.fsdp.get("grad_exchange") == "bf16_all_to_all" or "bfloat16" in self.precision.values()
        return not rounded

    def features(self) -> list[str]:
        """What of its policy and model a pair of (operation, policy) is counted by."""
        found = [f"world={self.layout.world}", f"dp_outer={self.layout.dp_outer}", f"ep={self.layout.ep}"]
        found += [f"{key}={value}" for key, value in sorted(self.fsdp.items())]
        found += [f"{key}={value}" for key, value in sorted(self.precision.items())]
        found += ["divisor=default" if self.divisor is None else f"divisor={self.divisor:g}"]
        found += sorted({f"layer={kind}" for kind in self.shape.layers})
        found += [f"embed={self.shape.embed}", f"head={self.shape.head}"]
        found += [f"recompute={self.shape.recompute}"]
        named = {
            "tied": self.shape.tied, "frozen": bool(self.shape.frozen), "root parameter": self.shape.root,
            "layer twice": len(set(self.shape.plan)) < len(self.shape.plan), "sided": self.shape.sided,
            "layer never": len(set(self.shape.plan)) < len(self.shape.layers),
            "attention": self.shape.attention, "dropout": self.shape.dropout > 0,
            "adapters": self.shape.adapters,
        }  # fmt: skip
        found += [name for name, has in named.items() if has]
        found += [f"recomputes {part}" for part in self.shape.parts]
        slots, least_rows, keep = self.shape.clones
        found += [f"clones={slots}", f"clone_rows={least_rows}", f"clone_keep={keep}"] if slots else []
        found += [f"chunks={self.shape.chunks}"] if self.shape.chunks > 1 else []
        found += [f"flex_rows={self.shape.flex_rows:g}"] if self.shape.flex_rows else []
        return found + sorted({f"{kind} over {subset}" for kind, subset in self.optimizers})


def draw_cloned(seed: int, worlds: tuple[int, ...] = (2, 4)) -> Program:
    """One whose experts may be cloned: the first from ``seed`` on, a thousand seeds for each."""
    drawn = (draw_program(1000 * seed + number, worlds) for number in itertools.count())
    return next(program for program in drawn if program.shape.clones[0])


def draw_any(seed: int, worlds: tuple[int, ...] = (1, 2, 3, 4)) -> Program | PackedProgram:
    """Of either kind; one in twenty is of documents."""
    rng = random.Random(f"kind of {seed}")
    return draw_packed(rng, worlds) if rng.random() < 0.05 else draw_program(seed, worlds)


def draw_program(seed: int, worlds: tuple[int, ...] = (1, 2, 4)) -> Program:
    rng = random.Random(seed)
    choices = [(weight, layout) for weight, layout in LAYOUTS if layout.world in worlds]
    layout = rng.choices([c[1] for c in choices], [c[0] for c in choices])[0]
    shape = draw_shape(rng, layout)
    precision = {"param_dtype": "float32", "reduce_dtype": "float32"}
    # Where rounding would choose other experts, or attend elsewhere, the numbers would be others.
    if "moe" not in shape.layers and not shape.attention and rng.random() < 0.1:
        precision["param_dtype"] = "bfloat16"
    if rng.random() < 0.04:
        precision["reduce_dtype"] = "bfloat16"
    fsdp = draw_fsdp(rng)
    shape = draw_exchange(random.Random(f"exchange of {seed}"), shape, layout, fsdp)
    if precision["reduce_dtype"] == "bfloat16":
        fsdp.pop("grad_exchange", None)
    kinds = [("sgd",), ("momentum",), ("adamw",), ("fused",), ("sgd", "adamw")]
    optimizers = tuple(
        (kind, "all" if kind == "fused" else rng.choice(SUBSETS))
        for kind in rng.choices(kinds, [4, 2, 3, 3, 1])[0]
    )
    return Program(
        layout, fsdp, precision, rng.choice([None, 1.0, 3.0]), shape, optimizers,
        tuple(OpDraw(rng, shape, optimizers).draw(rng.randint(4, 10))),
    )  # fmt: skip


def draw_shape(rng: random.Random, layout: Layout) -> Shape:
    num = rng.choice([1, 2, 2, 3])
    kinds = [rng.choice(["plain", "sink"]) for _ in range(num)]
    if layout.ep > 1 or rng.random() < 0.12:
        kinds[rng.randrange(num)] = "moe"
    plan = list(range(num))
    if rng.random() < 0.3:
        plan.insert(rng.randrange(num + 1), rng.randrange(num))
    if num > 1 and rng.random() < 0.1:
        plan.remove(rng.randrange(num))
    frozen: list[str] = []
    if rng.random() < 0.1:  # a unit that backward reaches twice, with nothing to train in between
        kinds, num = ["moe" if "moe" in kinds else kinds[0], rng.choice(["plain", "sink"])], 2
        plan, frozen = rng.choice([([0, 1, 0], ["layers.1"]), ([0, 1], ["layers", "norm"])])
    elif rng.random() < 0.3:
        some = ["embed", "head", "norm", "scale", "layers.0", f"layers.{num - 1}.norm", "layers.0.up.bias"]
        frozen = rng.sample(some, rng.choice([1, 1, 2, 3]))
        if num == 1:
            frozen = [name for name in frozen if name != "layers.0"]
    drops = rng.random() < 0.25
    parts = rng.choices([(), ("layer",), tuple(rng.sample(PARTS[:-1], rng.choice([1, 1, 2, 4])))], [6, 1, 3])[
        0
    ]
    return Shape(
        layers=tuple(kinds),
        plan=tuple(plan) or (0,),
        embed=rng.choice(["plain", "sink"]),
        head=rng.choice(["plain", "sink", "fused"]),
        tied=rng.random() < 0.2,
        root=rng.random() < 0.3,
        frozen=tuple(sorted(frozen)),
        recompute=rng.choices(["none", "layer", "pairs"], [7, 2, 1])[0],
        x_grad=rng.random() < 0.8,
        # a recomputed layer stops at its last saved tensor: ranks that differ would not exchange tokens alike
        sided=rng.random() < 0.12 and "moe" not in kinds,
        attention=rng.random() < 0.25,
        dropout=0.25 if drops else 0.0,
        parts=tuple(sorted(parts)),
        adapters=rng.random() < 0.15,
    )


def draw_exchange(rng: random.Random, shape: Shape, layout: Layout, fsdp: dict[str, Any]) -> Shape:
    """How rows reach their experts, where these are on other ranks."""
    if layout.ep == 1:
        return shape
    clones = rng.choices([0, 1, 2, 3], [4, 1, 2, 1])[0]
    if fsdp.get("cpu_offload"):  # refused with clones
        clones = 0
    policy = clones, rng.choice([0, 0, 1]), rng.random() < 0.7
    chunks = rng.choice([1, 1, 2, 3])
    flex_rows = rng.choice([0.0, 8.0, 8.0, 0.7]) if clones else 0.0
    return replace(shape, clones=policy, chunks=chunks, flex_rows=flex_rows)


def draw_fsdp(rng: random.Random) -> dict[str, Any]:
    drawn: dict[str, tuple[float, Callable[[], Any]]] = {
        "shard": (0.3, lambda: rng.choice(["grads", "optimizer"])),
        "reshard_after_forward": (0.15, lambda: False),
        "reduce": (0.2, lambda: "last"),
        "grad_exchange": (0.08, lambda: "bf16_all_to_all"),
        "lean": (0.25, lambda: True),
        "cpu_offload": (0.15, lambda: True),
        "prefetch": (0.15, lambda: False),
        "granule": (0.1, lambda: rng.choice(["rows", "tensor"])),
        "debug": (0.15, lambda: True),
    }
    return {key: draw() for key, (chance, draw) in drawn.items() if rng.random() < chance}


class OpDraw:
    """Draws operations one after another, most of them such that they find something to act on."""

    def __init__(self, rng: random.Random, shape: Shape, optimizers: tuple[tuple[str, str], ...]) -> None:
        self.rng, self.shape, self.num_optimizers = rng, shape, len(optimizers)
        self.losses: set[int] = set()
        self.kept: set[int] = set()
        self.saved = False
        self.partial = self.has_grads = False

    def draw(self, num: int) -> list[Op]:
        ops: list[Op] = []
        while len(ops) < num:
            ops += self.next()
        if self.partial or self.losses:  # end on something that can be compared
            ops.append(("micro", self.seed(), "full", True))
        return [*ops, ("step", self.rng.randrange(self.num_optimizers))]

    def seed(self) -> int:
        return self.rng.randrange(100)

    def name(self) -> int:
        return self.rng.choice([0, 1, 2, *range(20)])

    def next(self) -> list[Op]:
        rng = self.rng
        if self.losses and rng.random() < 0.35:
            return self.use_loss(rng.choice(sorted(self.losses)))
        options: list[tuple[float, Callable[[], list[Op]]]] = [
            (6, self.train_step), (5, self.forward), (4, self.micro), (3, self.zero), (3, self.step),
            (1.2, self.drop), (1, self.fail_backward), (0.7, self.fail_forward), (1, self.evaluate),
            (0.8, self.write), (0.8 if self.has_grads else 0, self.change_gradient),
            (1 if self.has_grads else 0, self.keep), (1 if self.has_grads else 0, self.clip),
            (0.8, self.keep_over_a_step),
            (1 if self.kept else 0, self.read), (0.35, self.save), (0.8 if self.saved else 0, self.load),
            (0.4, self.replace), (1.5 if self.shape.adapters else 0, self.switch_adapter),
        ]  # fmt: skip
        return rng.choices([o[1] for o in options], [o[0] for o in options])[0]()

    def forward(self) -> list[Op]:
        shelf = self.rng.randrange(3)
        self.losses.add(shelf)
        return [("forward", shelf, self.seed(), self.rng.choice(VARIANTS))]

    def last(self) -> bool:
        return self.rng.random() < 0.85

    def use_loss(self, shelf: int) -> list[Op]:
        rng, retain = self.rng, self.rng.random() < 0.2
        kind = rng.choices(["backward", "both", "grad_x", "grad_params", "drop_loss"], [10, 2, 4, 1, 1])[0]
        if kind == "both" and len(self.losses) > 1:
            other = rng.choice(sorted(self.losses - {shelf}))
            self.losses -= {shelf, other}
            self.has_grads, self.partial = True, False
            return [("both", shelf, other, True)]
        if kind == "grad_x" and self.shape.x_grad:
            retain = rng.random() < 0.6
            if not retain:
                self.losses.discard(shelf)
            return [("grad_x", shelf, retain)]
        if kind == "grad_params":
            return [("grad_params", shelf, self.name())]
        if not retain:
            self.losses.discard(shelf)
        if kind == "drop_loss":
            self.losses.discard(shelf)
            return [("drop_loss", shelf)]
        last = self.last()
        self.has_grads, self.partial = True, not last
        return [("backward", shelf, retain, rng.choice([1.0, 1.0, 0.5]), last)]

    def train_step(self) -> list[Op]:
        """An ordinary step, one or more micro-batches."""
        num = self.rng.choice([1, 1, 2, 3])
        index = self.rng.randrange(self.num_optimizers)
        ops: list[Op] = [("micro", self.seed(), self.rng.choice(VARIANTS), i == num - 1) for i in range(num)]
        self.has_grads = self.partial = False
        zero: Op = self.rng.choice([("zero", "model", True), ("zero", f"opt{index}", True)])
        return [*ops, ("step", index), zero]

    def micro(self) -> list[Op]:
        last = self.rng.random() < 0.5
        self.has_grads, self.partial = True, not last
        return [("micro", self.seed(), self.rng.choice(VARIANTS), last)]

    def zero(self) -> list[Op]:
        who = ["model", "engine", *(f"opt{i}" for i in range(self.num_optimizers))]
        self.has_grads = self.partial = False
        return [("zero", self.rng.choice(who), self.rng.random() < 0.85)]

    def step(self) -> list[Op]:
        return [("step", self.rng.randrange(self.num_optimizers))]

    def drop(self) -> list[Op]:
        return [("drop", self.name())]

    def fail_backward(self) -> list[Op]:
        layer, last = self.rng.choice(self.shape.plan), self.last()
        zero = self.zero() if self.rng.random() < 0.8 else []
        return [("fail_backward", self.seed(), layer, last), *zero]

    def fail_forward(self) -> list[Op]:
        return [("fail_forward", self.seed(), self.rng.choice(self.shape.plan))]

    def evaluate(self) -> list[Op]:
        mode = self.rng.choice(["no_grad", "inference"])
        return [("eval", mode, self.seed(), self.rng.choice(VARIANTS))]

    def write(self) -> list[Op]:
        return [("write", self.name(), self.rng.choice(["scale", "copy", "data"]))]

    def change_gradient(self) -> list[Op]:
        return [(self.rng.choice(["scale_grad", "scale_grad", "assign_grad"]), self.name())]

    def clip(self) -> list[Op]:
        return [("clip", self.rng.choice([0.05, 10.0]), self.rng.choice(["torch", "ours"]))]

    def keep(self) -> list[Op]:
        shelf = self.rng.randrange(2)
        self.kept.add(shelf)
        return [("keep", shelf, self.name())]

    def keep_over_a_step(self) -> list[Op]:
        keep, (zero,) = self.keep(), self.zero()
        micro: list[Op] = [("micro", self.seed(), "full", True) for _ in range(2)]
        self.has_grads = True
        return [micro[0], *keep, *self.step(), zero, micro[1], ("read", keep[0][1])]

    def read(self) -> list[Op]:
        return [("read", self.rng.choice(sorted(self.kept)))]

    def replace(self) -> list[Op]:
        return [("replace", self.rng.choice(REPLACED), self.rng.choice(self.shape.plan))]

    def switch_adapter(self) -> list[Op]:
        return [("adapter", self.rng.choice([*ADAPTERS, ""]))]

    def save(self) -> list[Op]:
        self.saved = True
        return [("save",)]

    def load(self) -> list[Op]:
        return [("load",)]
