"""A tape of routing decisions: record them in one run, enforce them in another.

Reinforcement learning wants training to route each token as generation did; debugging wants two runs to
differ in nothing but what is debugged. A tape holds, for every micro-batch and layer, which experts each
token of this rank chose, the weights it gave them, and which choices capacity dropped. It is keyed, not
appended to, so recomputing a layer in backward records the same entry again.

What a replay enforces is the reader's choice: ``ids`` alone (weights come from the current router: the usual
case) or ``ids_and_weights`` (weights take the recorded values, while gradients reach the router as if it had
produced them). Either way the router keeps learning.

Legend: T tokens, K choices a token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fsdmoe.errors import ConfigError

Enforce = Literal["ids", "ids_and_weights"]
_FORMAT = "fsdmoe-routing-tape-1"  # also the only metadata key: with several, their order would vary


class Decision(NamedTuple):
    """One layer's routing of one micro-batch, as chosen before any dropping."""

    ids_TK: Tensor
    weights_TK: Tensor
    kept_TK: Tensor | None
    """Which choices capacity let through; none when there was no capacity."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Decision:
        kept_TK = None if self.kept_TK is None else fn(self.kept_TK)
        return Decision(fn(self.ids_TK), fn(self.weights_TK), kept_TK)


class RoutingTape:
    """Decisions by (micro-batch, layer). A new tape records; a loaded one replays."""

    def __init__(self, num_experts: int, *, enforce: Enforce | None = None) -> None:
        self.num_experts = num_experts
        self.enforce = enforce
        """None while recording."""
        self._decisions: dict[tuple[int, int], Decision] = {}

    @property
    def replays(self) -> bool:
        return self.enforce is not None

    def __len__(self) -> int:
        return len(self._decisions)

    def replaying(self, enforce: Enforce = "ids") -> RoutingTape:
        """The same decisions as a tape that replays."""
        tape = RoutingTape(self.num_experts, enforce=enforce)
        tape._decisions = dict(self._decisions)
        return tape

    def record(self, micro_batch: int, layer: int, decision: Decision) -> None:
        self._decisions[micro_batch, layer] = decision.map(lambda part: part.detach().to("cpu", copy=True))

    def decision(self, micro_batch: int, layer: int, *, like: Tensor, num_experts: int) -> Decision:
        """The recorded decision for a ``[T, K]`` choice like ``like``, on its device; ConfigError where there
        is none."""
        found = self._decisions.get((micro_batch, layer))
        if found is None:
            raise ConfigError(
                f"replay: nothing was recorded for layer {layer} of micro-batch {micro_batch}; "
                f"the tape holds {self._extent()}: replay the recorded batches and layers only"
            )
        recorded = (*found.ids_TK.shape, self.num_experts)
        wanted = (*like.shape, num_experts)
        if recorded != wanted:
            raise ConfigError(
                f"replay: layer {layer} of micro-batch {micro_batch} was recorded for "
                f"{_shape_text(recorded)}, got {_shape_text(wanted)}; "
                f"replay with the recorded model, batch and layout of ranks"
            )
        return found.map(lambda part: part.to(like.device))

    def save(self, path: str | Path) -> None:
        """Write this rank's tape as one safetensors file."""
        tensors: dict[str, Tensor] = {}
        for (micro_batch, layer), decision in self._decisions.items():
            prefix = f"micro_batch.{micro_batch}.layer.{layer}."
            tensors[prefix + "ids"] = decision.ids_TK.to(torch.int32)
            tensors[prefix + "weights"] = decision.weights_TK
            if decision.kept_TK is not None:
                tensors[prefix + "kept"] = decision.kept_TK
        save_file(tensors, str(path), {_FORMAT: str(self.num_experts)})

    @classmethod
    def load(cls, path: str | Path, enforce: Enforce = "ids") -> RoutingTape:
        """Read a tape that replays."""
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"replay: {str(path)!r} is not readable as a tape: {error}; record it again"
            ) from error
        if _FORMAT not in metadata:
            raise ConfigError(
                f"replay: expected a file of format {_FORMAT}, got metadata {metadata} in {str(path)!r}; "
                f"pass a file that RoutingTape.save wrote"
            )
        tape = cls(int(metadata[_FORMAT]), enforce=enforce)
        for name in tensors:
            prefix, _, kind = name.rpartition(".")
            if kind == "ids":
                _, micro_batch, _, layer = prefix.split(".")
                tape._decisions[int(micro_batch), int(layer)] = Decision(
                    tensors[name].long(), tensors[prefix + ".weights"], tensors.get(prefix + ".kept")
                )
        return tape

    def _extent(self) -> str:
        if not self._decisions:
            return "nothing"
        batches, layers = ({key[i] for key in self._decisions} for i in (0, 1))
        return (
            f"micro-batches {min(batches)} to {max(batches)} of layers {', '.join(map(str, sorted(layers)))}"
        )


def _shape_text(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} tokens with {shape[1]} choices of {shape[2]} experts"
