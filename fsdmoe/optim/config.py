"""The ``optim`` section: which optimizer, its numbers, and how the learning rate moves."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Literal, get_args

from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.features import CANNOT, NOT_BUILT, Feature, Row, above, choice, refuse_together
from fsdmoe.core.rules import one_of
from fsdmoe.fsdp.config import CPU_OFFLOAD, FSDPConfig
from fsdmoe.optim.ema_config import EMAConfig
from fsdmoe.optim.group_config import GroupConfig, group_problems
from fsdmoe.optim.muon_config import MuonConfig
from fsdmoe.precision.config import PrecisionConfig

TorchaoFormat = Literal["torchao_8bit", "torchao_4bit", "torchao_float8"]
MomentDtype = Literal["float32", "bfloat16", "float8", "torchao_8bit", "torchao_4bit", "torchao_float8"]
TORCHAO_BLOCKS: dict[str, int] = {"torchao_8bit": 256, "torchao_4bit": 128, "torchao_float8": 256}
"""Elements that share a scale, as torchao's optimizers have them."""
MAX_BETA2: dict[str, float] = {"bfloat16": 0.995, "float8": 0.99}
"""The slowest second moment that each format follows."""
ADAMW_ONLY = (
    "beta1",
    "beta2",
    "eps",
    "moment_dtype",
    "first_moment_dtype",
    "second_moment_dtype",
    "state_offload",
)
"""Settings that plain SGD does not read."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """Optimizer. muon: matrices by orthogonalised momentum, the rest by AdamW. sgd (no momentum) is for
    comparing layouts: AdamW does not depend on the scale of gradients."""
    lr: float = 3e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW: added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors (norms, biases) are never decayed."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    moment_dtype: MomentDtype = "float32"
    """AdamW: how the moments are kept. float8: eight bits an element and one exponent for each block of 64,
    counted in the whole tensor, so that no mesh changes a number. torchao_8bit, torchao_4bit, torchao_float8:
    as torchao's AdamW8bit, AdamW4bit and AdamWFp8 keep them, with fsdp.granule_size = 256
    (docs/small_states.md)."""
    first_moment_dtype: MomentDtype | None = None
    """AdamW: the first moment's own; none takes moment_dtype."""
    second_moment_dtype: MomentDtype | None = None
    """AdamW: the second moment's own; none takes moment_dtype."""
    state_offload: float = 0.0
    """AdamW: the share of the moments, 0 to 1, that lives in host memory; each step streams it through the
    device in chunks."""
    state_prefetch: float = 0.65
    """With state_offload: of the moments in host memory, the share, 0 to 1, that the device has space for. It
    is copied during backward, the rest during forward. Less saves more memory, and costs time."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    qk_clip: float = 0.0
    """The largest attention logit of a head past which its query and key weights are scaled down after the
    step (MuonClip; Kimi K2 has 100); 0 is off."""
    qk_clip_rows: int = 128
    """With qk_clip: queries of each row that logits are taken of, evenly spaced; the length of a row takes
    all of them."""
    groups: tuple[GroupConfig, ...] = ()
    """Parameters with settings of their own, chosen by patterns over their names: a table [[optim.groups]] a
    group (docs/optimizers.md)."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine to the floor, warm-up-stable-decay, or constant."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    min_lr_ratio: float = 0.1
    """The floor, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """wsd: the last fraction of all steps in which the rate falls linearly to the floor."""

    def __post_init__(self) -> None:
        share = "0 to 1"
        bounds = {
            "lr": (0 < self.lr < inf, "above 0"),
            "eps": (0 < self.eps < inf, "above 0"),
            "weight_decay": (0 <= self.weight_decay < inf, "0 or more"),
            "grad_clip": (self.grad_clip >= 0, "0 or more"),
            "qk_clip": (0 <= self.qk_clip < inf, "0 or more"),
            "qk_clip_rows": (self.qk_clip_rows >= 1, "1 or more"),
            "warmup_steps": (self.warmup_steps >= 0, "0 or more"),
            "beta1": (0 <= self.beta1 < 1, "0 to below 1"),
            "beta2": (0 <= self.beta2 < 1, "0 to below 1"),
            "min_lr_ratio": (0 <= self.min_lr_ratio <= 1, share),
            "state_offload": (0 <= self.state_offload <= 1, share),
            "state_prefetch": (0 <= self.state_prefetch <= 1, share),
            "decay_fraction": (0 < self.decay_fraction <= 1, "above 0, at most 1"),
        }
        problems = [
            f"optim.{key}: expected a number {wanted}, got {getattr(self, key)}; change it "
            "or drop the line to take the default"
            for key, (holds, wanted) in bounds.items()
            if not holds
        ]
        dtypes = ("moment_dtype", "first_moment_dtype", "second_moment_dtype")
        choices = dict.fromkeys(dtypes[1:], (*get_args(MomentDtype), None))
        problems += one_of("optim", vars(self), {dtypes[0]: get_args(MomentDtype)} | choices)
        problems += torchao_problems(self.moment_dtypes)
        if self.state_prefetch != OptimConfig.state_prefetch and not self.state_offload:
            problems.append(
                "optim.state_prefetch: expected optim.state_offload above 0, which it says something of, got "
                "0; set that, or drop the line"
            )
        problems += group_problems(self.groups, self.name)
        if not self.ema.decay and self.ema != EMAConfig():
            problems.append(
                "optim.ema: expected optim.ema.decay above 0, which its other keys are about, got 0; set "
                "that, or drop [optim.ema]"
            )
        if self.name != "muon" and self.muon != MuonConfig():
            problems.append(
                f'optim.muon: expected optim.name = "muon", which it is about, got "{self.name}"; '
                "set that, or drop [optim.muon]"
            )
        if self.name == "sgd":
            unread = [k for k in ADAMW_ONLY if getattr(self, k) != getattr(OptimConfig, k)]
            unread += ["weight_decay"] if self.weight_decay not in (0, OptimConfig.weight_decay) else []
            problems += [
                f'optim.{key}: expected optim.name = "adamw" or "muon", which read it, got "sgd"; drop '
                "the line"
                for key in unread
            ]
        else:
            betas = [group.betas[1] for group in self.groups if group.betas is not None]
            for beta2 in dict.fromkeys(beta2 for beta2 in (self.beta2, *betas) if beta2 < 1):
                problems += beta2_problems(beta2, self.moment_dtypes[1])
        refuse(problems)

    @property
    def moment_dtypes(self) -> tuple[MomentDtype, MomentDtype]:
        """How the first and the second moment are kept."""
        return self.first_moment_dtype or self.moment_dtype, self.second_moment_dtype or self.moment_dtype


def beta2_problems(beta2: float, kept: str) -> list[str]:
    """What is wrong with a ``beta2`` that a second moment in the format ``kept`` cannot follow."""
    if beta2 <= MAX_BETA2.get(kept, 1):
        return []
    return [
        f"optim.beta2: {beta2} moves a second moment by less than {kept} can hold; choose at "
        f"most {MAX_BETA2[kept]}, or optim.moment_dtype = float32 (or second_moment_dtype alone)"
    ]


def torchao_problems(formats: tuple[object, object]) -> list[str]:
    """What is wrong with the formats of both moments if one is torchao's."""
    chosen = [kept for kept in formats if kept in TORCHAO_BLOCKS]
    if not chosen:
        return []
    if formats[0] != formats[1]:
        first, second = (str(kept).removeprefix("torch.") for kept in formats)
        return [
            f"optim.moment_dtype: expected {chosen[0]} for both moments, stepped by one update, got "
            f"{first} and {second}; set moment_dtype alone"
        ]
    if importlib.util.find_spec("torchao") is None:
        return [
            f"optim.moment_dtype: expected torchao to be installed, which {chosen[0]} is of, found no such "
            "package; pip install 'fsdmoe[torchao]', or choose float8"
        ]
    return []


STATE_OFFLOAD = above("moments streamed from host memory", "optim.state_offload", 0)
STOCHASTIC_ROUNDING = choice("stochastic rounding", "precision.main_rounding", "stochastic", "nearest")
SGD = choice("SGD", "optim.name", "sgd", "adamw")
MUON = choice("Muon", "optim.name", "muon", "adamw")
QK_CLIP = above("QK-clip", "optim.qk_clip", 0)
EMA = above("averaged weights", "optim.ema.decay", 0)
SMALL_MOMENTS = Feature(
    name="moments in eight bits", key="optim.moment_dtype", shown='"float8"', off='"float32"',
    is_on=lambda chosen: "float8" in chosen["optim"].moment_dtypes,
)  # fmt: skip

TORCHAO_MOMENTS = Feature(
    name="moments in torchao's formats", key="optim.moment_dtype", shown='"torchao_8bit" and its like',
    off='"float8"', is_on=lambda chosen: chosen["optim"].moment_dtypes[0] in TORCHAO_BLOCKS,
)  # fmt: skip
SMALL_GRANULES = Feature(
    name="slices that cut torchao's blocks", key="fsdp.granule_size", shown="no multiple of 256", off="256",
    is_on=lambda chosen: (
        chosen["fsdp.granule"] == "elements" and (chosen["fsdp.granule_size"] or 64) % 256 != 0
    ),
)  # fmt: skip

OFFLOADED_TWICE = Row(
    STATE_OFFLOAD, CPU_OFFLOAD, CANNOT, "all moments are in host memory already, where steps are taken"
)
ROUNDED_ROWS = (
    Row(STOCHASTIC_ROUNDING, SGD, NOT_BUILT, "it is part of AdamW's step"),
    Row(STOCHASTIC_ROUNDING, MUON, NOT_BUILT, "it is part of AdamW's step"),
)
TORCHAO_ROWS = (
    Row(TORCHAO_MOMENTS, STOCHASTIC_ROUNDING, NOT_BUILT, "torchao rounds main weights to the nearest"),
    Row(TORCHAO_MOMENTS, STATE_OFFLOAD, NOT_BUILT, "torchao's update takes the moments of whole pieces"),
)
"""Rows of the table in :mod:`fsdmoe.config.compatibility` that optimizers refuse by themselves."""


def check_torchao(formats: tuple[object, object], share: float, precision: PrecisionConfig) -> None:
    """Refuse moments in torchao's formats with what torchao's update does not do."""
    refuse(torchao_problems(formats))
    chosen = {
        "optim": SimpleNamespace(moment_dtypes=formats),
        "optim.state_offload": share,
        "precision.main_rounding": precision.main_rounding,
    }
    refuse_together(TORCHAO_ROWS, chosen)


def check_rounding(name: str, precision: PrecisionConfig) -> None:
    """Refuse stochastic rounding of an optimizer that rounds to the nearest."""
    chosen = {"optim.name": name, "precision.main_rounding": precision.main_rounding}
    refuse_together(ROUNDED_ROWS, chosen)


def check_offload(share: float, fsdp: FSDPConfig, prefetched: float = 0.0) -> None:
    """Refuse a share of moments that cannot live in host memory."""
    for key, given in {"state_offload": share, "state_prefetch": prefetched}.items():
        if not 0 <= given <= 1:
            raise ConfigError(f"optim.{key}: expected a number 0 to 1, got {given}; choose a share")
    chosen = {"optim.state_offload": share, "fsdp.cpu_offload": fsdp.cpu_offload}
    refuse_together((OFFLOADED_TWICE,), chosen)
