"""The ``fsdp`` section, and the policy that :func:`fsdmoe.fsdp.fully_shard` takes: that section, the number
formats, and what only Python can say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from fsdmoe.core.errors import refuse
from fsdmoe.core.features import CANNOT, NOT_BUILT, Feature, Row, choice, refused_rows, switch
from fsdmoe.core.rules import one_of
from fsdmoe.precision.config import PrecisionConfig, torch_dtype

if TYPE_CHECKING:
    import torch
    from torch import nn

Shard = Literal["params", "grads", "optimizer"]
GranuleKind = Literal["elements", "rows", "tensor"]
Reduce = Literal["each", "last"]
GradExchange = Literal["reduce_scatter", "bf16_all_to_all"]
FrozenSubclasses = Literal["shard", "whole"]


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """How weights, gradients and optimizer state are spread over the ranks."""

    shard: Shard = "params"
    """What a rank keeps only its slice of: params (and gradients and optimizer state; ZeRO-3), grads (and
    optimizer state, ZeRO-2), or optimizer state alone (ZeRO-1). What is not sharded costs a full buffer on
    every rank."""
    reshard_after_forward: bool = True
    """Give the gathered weights' memory to the next layer after forward and gather them again in backward.
    False gathers once a step and keeps every layer whole."""
    reduce: Reduce = "each"
    """With several micro-batches a step: reduce gradients after each of them (two layers' worth of buffers),
    or only after the last (less traffic, but whole gradients of the whole model on every rank)."""
    grad_exchange: GradExchange = "reduce_scatter"
    """How gradients are summed across ranks: a reduce-scatter in precision.reduce_dtype, or bf16_all_to_all,
    which sends them rounded to bfloat16 and adds them up in float32, in place in the float32 buffers."""
    lean: bool = False
    """Less memory, for a little more time: no sharded weights in precision.param_dtype next to the main
    weights (each gather casts a rank's slice), and the memory of gradient shards is given back from the
    forward after a step to its backward. With one micro-batch a step that is when activations are at their
    peak."""
    cpu_offload: bool = False
    """Keep slices of weights, gradients and optimizer state in host memory and step there."""
    granule: GranuleKind = "elements"
    """What a slice boundary must not cut: groups of granule_size elements (next to no padding), groups of
    granule_size rows, or whole tensors."""
    granule_size: int | None = None
    """How many elements or rows stay together (see granule); none means 64 elements, or one row."""
    prefetch: bool = True
    """Gather the next layer while this one computes, in the order recorded in the first step."""
    register_buffers: bool = True
    """Register the buffers with NCCL, so that it reads and writes them in place."""
    frozen_subclasses: FrozenSubclasses = "shard"
    """Frozen parameters that are tensor subclasses (torchao's quantised weights): shard spreads the tensors
    inside over the ranks, as those of other parameters; whole leaves them on every rank as they are."""
    units: tuple[str, ...] = ()
    """Class names of the modules that are gathered as one unit each. Empty: every element of the outermost
    module lists (the decoder layers), every embedding, and the head."""
    debug: bool = False
    """Fill released buffers with NaN, check each weight that backward reads against its buffer's tenant, and
    gradients that ranks should have alike against each other. Slow."""

    def __post_init__(self) -> None:
        kinds = {
            "shard": Shard, "granule": GranuleKind, "reduce": Reduce, "grad_exchange": GradExchange,
            "frozen_subclasses": FrozenSubclasses,
        }  # fmt: skip
        problems = one_of("fsdp", vars(self), {key: get_args(kind) for key, kind in kinds.items()})
        if self.granule_size is not None and self.granule_size < 1:
            problems.append(
                f"fsdp.granule_size: expected 1 or more, got {self.granule_size}; drop it for the default"
            )
        refuse(problems)

    @property
    def keeps_params(self) -> bool:
        """Every unit has gathered buffers of its own: nothing is evicted between forward and backward."""
        return self.shard != "params" or not self.reshard_after_forward

    @property
    def keeps_grads(self) -> bool:
        """Every unit has a full gradient buffer of its own, reduced only after the last micro-batch."""
        return self.shard == "optimizer" or self.reduce == "last"

    def lends_grads(self, micro_batches: int) -> bool:
        """Gradients are there only from a backward to its step, while activations are freed."""
        return self.lean and not self.cpu_offload and micro_batches == 1


LEAN = switch("shards that are cast when they are gathered", "fsdp.lean")
CPU_OFFLOAD = switch("states in host memory", "fsdp.cpu_offload")
BF16_EXCHANGE = choice(
    "gradients sent in bfloat16", "fsdp.grad_exchange", "bf16_all_to_all", "reduce_scatter"
)
REDUCED_IN_16_BITS = Feature(
    name="gradients reduced in 16 bits", key="precision.reduce_dtype", shown='"bfloat16" or "float16"',
    off='"float32"', is_on=lambda chosen: chosen["precision.reduce_dtype"] != "float32",
)  # fmt: skip
QUANTIZED_WEIGHTS = switch("weights sharded in codes", "precision.quantized_weights")
FROZEN_CODES = Feature(
    name="frozen weights kept in codes", key="precision.frozen_dtype", shown="not none", off='"none"',
    is_on=lambda chosen: chosen["precision.frozen_dtype"] is not None,
)  # fmt: skip

SHARDING_ROWS = (
    Row(BF16_EXCHANGE, REDUCED_IN_16_BITS, CANNOT, "the exchange rounds float32 gradients on their way"),
    Row(LEAN, QUANTIZED_WEIGHTS, CANNOT, "codes are kept from step to step, and lean keeps no shards"),
    Row(CPU_OFFLOAD, QUANTIZED_WEIGHTS, NOT_BUILT, "codes are made and kept on the device"),
    Row(CPU_OFFLOAD, FROZEN_CODES, NOT_BUILT, "frozen weights in codes stay on the device"),
)
"""Of the table in :mod:`fsdmoe.config.compatibility`: what ``fully_shard`` refuses by itself."""

UnitPredicate = Callable[[str, "nn.Module"], bool]


@dataclass(frozen=True, kw_only=True)
class FSDPPolicy:
    """Everything that ``fully_shard`` decides by, apart from the meshes."""

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """What is sharded, when it is gathered and reduced."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats of weights, gradients and main weights."""
    units: UnitPredicate | tuple[type[nn.Module], ...] | None = None
    """Which modules are units: a predicate on (name, module), or classes; None follows ``fsdp.units``, and an
    empty tuple gathers the whole model at once."""
    keeps: UnitPredicate | None = None
    """Which units keep their gathered weights from forward to backward, each in memory of its own; None
    follows ``fsdp.reshard_after_forward``, for all alike."""
    dtype_of: Callable[[str, nn.Parameter], torch.dtype] | None = None
    """What dtype a parameter is computed in; None takes ``precision.param_dtype`` for all."""
    grad_divisor: float | None = None
    """Summed gradients are divided by this. 1 for a loss that is already global; None takes the number of
    ranks that compute a loss, so that a per-rank mean loss behaves as under data parallelism."""
    param_dtype: torch.dtype = field(init=False)
    """What modules compute with."""
    reduce_dtype: torch.dtype = field(init=False)
    """What gradients are summed in."""
    main_dtype: torch.dtype = field(init=False)
    """What the optimizer updates."""
    grad_dtype: torch.dtype = field(init=False)
    """What main gradients are kept in."""
    keeps_params: bool = field(init=False)
    """Every unit has gathered buffers of its own."""
    keeps_grads: bool = field(init=False)
    """Every unit has a full gradient buffer of its own."""
    has_codes: bool = field(init=False)
    """Some weights may be sharded as codes: parameters are asked for it."""

    def __post_init__(self) -> None:
        precision = self.precision
        resolved = {
            "param_dtype": torch_dtype(precision.param_dtype),
            "reduce_dtype": torch_dtype(precision.reduce_dtype),
            "main_dtype": torch_dtype(precision.main_dtype),
            "grad_dtype": torch_dtype(precision.grad_dtype or precision.main_dtype),
            "keeps_params": self.fsdp.keeps_params,
            "keeps_grads": self.fsdp.keeps_grads,
            "has_codes": precision.quantized_weights or precision.frozen_dtype is not None,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        chosen = {f"fsdp.{key}": value for key, value in vars(self.fsdp).items()}
        chosen |= {f"precision.{key}": value for key, value in vars(self.precision).items()}
        problems = [row.problem(chosen) for row in refused_rows(SHARDING_ROWS, chosen)]
        if self.grad_divisor is not None and not self.grad_divisor > 0:
            problems.append(
                f"fsdp.grad_divisor: expected a number above 0, got {self.grad_divisor}; 1 means a plain sum"
            )
        refuse(problems)

    @property
    def sent_grad_bytes(self) -> int:
        """Of one element of a gradient, on its way to other ranks."""
        return 2 if self.fsdp.grad_exchange == "bf16_all_to_all" else self.reduce_dtype.itemsize
