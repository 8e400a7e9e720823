"""The ``[memory]`` section: what backward computes again, what waits in host memory, and in which layers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.rules import at_least, numbers_in, one_of

Part = Literal[
    "norms", "activation", "mla_up", "attention_projections", "router", "shared_experts", "dispatch",
    "experts", "attention", "layer",
]  # fmt: skip
PartOrAuto = Literal[Part, "auto"]
Activation = Literal[
    "layer_input", "attention_input", "qkv", "attention_output", "mlp_norm_input", "mlp_input",
    "expert_input", "expert_pre_activation",
]  # fmt: skip

Kept = Literal["values", "codes", "rows"]

_RANGE = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What a step keeps from forward to backward, and where."""

    keep: Kept = "values"
    """What layers keep for backward (docs/memory.md). values: inputs and experts' pre-activations, in
    param_dtype. codes: with precision.recipe = "fp8_blockwise" and its kernels, the same in fp8 with a scale
    for each 128 elements, half the memory; inputs that another operation keeps anyway stay values. rows: in
    addition each expert's rows and activations, which backward else lays out and computes again: faster, for
    (hidden size + expert width) elements of each chosen expert of a token."""
    recompute: tuple[PartOrAuto, ...] = ()
    """Parts of a layer whose results backward computes again instead of keeping them: norms (with rotary
    positions), activation (built into routed experts in any case), mla_up, attention_projections, router,
    shared_experts (and the MLP of layers without experts), dispatch (rows as experts received them,
    which are sent once more), experts (their first product), attention, or layer: all of it, with its
    exchanges between ranks. auto, alone: train.py chooses by the GPUs' free memory when it starts. See
    docs/memory.md for what each frees."""
    layers: str = "all"
    """The layers that recompute, counted from 0: all, or ranges like 0-11 or 0-3,8; further prediction
    depths (MTP) count after the last layer."""
    offload: tuple[Activation, ...] = ()
    """Activations that wait in pinned host memory from forward to backward, copied during compute:
    layer_input, attention_input, qkv, attention_output, mlp_norm_input, mlp_input, expert_input,
    expert_pre_activation. What is recomputed is not copied."""
    offload_keep_last: int = 1
    """So many last layers keep their activations: backward wants them at once."""
    offload_limit_gib: float = 0.0
    """Most pinned host memory of a rank, in GiB; what does not fit stays on the device. 0: no limit."""

    def __post_init__(self) -> None:
        if self.recompute == "auto":
            object.__setattr__(self, "recompute", ("auto",))
        for key, names in (("recompute", PartOrAuto), ("offload", Activation)):
            chosen = getattr(self, key)
            if isinstance(chosen, str):
                raise ConfigError(
                    f'memory.{key}: expected a list of names, got {chosen!r}; write ["{chosen}"]'
                )
            for name in chosen:
                refuse(one_of("memory", {key: name}, {key: get_args(names)}))
        problems = at_least("memory", vars(self), {"offload_keep_last": 0, "offload_limit_gib": 0})
        problems += one_of("memory", {"keep": self.keep}, {"keep": get_args(Kept)})
        others = [name for name in self.recompute if name not in ("layer", "activation")]
        if "layer" in self.recompute and others:
            problems.append(
                f"memory.recompute: layer recomputes everything, got {others[0]} too; drop one of them"
            )
        if self.is_open and len(self.recompute) > 1:
            problems.append(
                f"memory.recompute: expected auto alone, or parts, got {list(self.recompute)}; drop auto"
            )
        if self.layers != "all" and not _RANGE.fullmatch(self.layers.replace(" ", "")):
            problems.append(
                f'memory.layers: expected all, or ranges of layers like "0-11" or "0-3,8", got '
                f"{self.layers!r}; write one of these"
            )
        refuse(problems)

    @property
    def is_open(self) -> bool:
        """Whether what is recomputed is yet to be decided."""
        return "auto" in self.recompute

    @property
    def wants_small_chunks(self) -> bool:
        """Whether the loss is computed in smaller chunks too: where layers keep next to nothing, the chunk's
        logits are the peak."""
        return "layer" in self.recompute or bool(self.offload)

    def parts_at(self, index: int, num_layers: int) -> frozenset[str]:
        """What the layer of this number recomputes."""
        return frozenset(self.recompute) if index in self._layers(num_layers) else frozenset()

    def offloads_at(self, index: int, num_layers: int) -> bool:
        """Whether activations of the layer of this number go to host memory."""
        return bool(self.offload) and index < num_layers - self.offload_keep_last

    def _layers(self, num_layers: int) -> frozenset[int]:
        if self.layers == "all":
            return frozenset(range(num_layers))
        found = numbers_in(self.layers)
        beyond = max(found, default=-1)
        if beyond >= num_layers:
            raise ConfigError(
                f"memory.layers: expected layers from 0 to {num_layers - 1}, got {beyond}; end the range at "
                f"{num_layers - 1}"
            )
        return frozenset(found)
