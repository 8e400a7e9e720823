"""A tape of routing decisions: record them in one run, enforce them in another.

Reinforcement learning wants training to route each token as generation did; debugging wants two runs to
differ in nothing but what is debugged. A tape holds, for every token and MoE layer, which experts it chose,
the weights it gave them, and which choices capacity dropped. Tokens are named by document and position
(``RoutingContext.origin``), so a recording serves any mesh and any packing; where they have no names, by
micro-batch and place in it, which serves the recorded layout alone. Recomputing a layer in backward records
the same entry again.

What a replay enforces is the reader's choice: ``ids`` alone (weights come from the current router: the usual
case) or ``ids_and_weights`` (weights take the recorded values, while gradients reach the router as if it had
produced them). Either way the router keeps learning. Padding keeps its own choice.

Files: :mod:`fsdmoe.experts.routing_file`.

Legend: T tokens, L MoE layers, K choices a token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fsdmoe.core.autograd import is_in_backward
from fsdmoe.core.errors import ConfigError
from fsdmoe.data.origin import Origin
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.routing_file import Recording, RoutingTable

Enforce = Literal["ids", "ids_and_weights"]


class Decision(NamedTuple):
    """One layer's routing of one micro-batch, as chosen before any dropping."""

    ids_TK: Tensor
    weights_TK: Tensor
    kept_TK: Tensor | None
    """Which choices capacity let through; none when there was no capacity."""

    def map(self, fn: Callable[[Tensor], Tensor]) -> Decision:
        kept_TK = None if self.kept_TK is None else fn(self.kept_TK)
        return Decision(fn(self.ids_TK), fn(self.weights_TK), kept_TK)


class DecisionPlace(NamedTuple):
    """Where in a run a decision is made."""

    micro_batch: int
    layer: int
    origin: Origin | None
    """Of the tokens ``[T]``."""

    def named(self, num_tokens: int) -> Origin:
        """The tokens' own names, or those that the micro-batch gives them."""
        if self.origin is not None:
            return self.origin
        offset_T = torch.arange(num_tokens)
        return Origin((f"micro-batch {self.micro_batch}",), torch.zeros_like(offset_T), offset_T)


class RoutingTape:
    """A new tape records; a loaded one replays."""

    def __init__(self, num_experts: int | None = None, *, enforce: Enforce | None = None) -> None:
        self.num_experts = num_experts
        """None: that of the first decision."""
        self.enforce = enforce
        """None while recording."""
        self._pending: dict[int, tuple[Origin, dict[int, Decision]]] = {}
        self._recording: Recording | None = None
        self._last: tuple[Origin, dict[str, Tensor]] | None = None
        """What was read for the tokens of the last layer: the next layer asks for the same."""

    @property
    def replays(self) -> bool:
        return self.enforce is not None

    @property
    def top_k(self) -> int | None:
        """Choices a token of what is replayed; None while recording."""
        return None if self._recording is None else self._recording.top_k

    @classmethod
    def load(cls, path: str | Path, enforce: Enforce = "ids") -> RoutingTape:
        """A tape that replays a file, or a folder of files."""
        return cls._of(Recording.open(path), enforce)

    @classmethod
    def from_config(cls, config: ExpertsConfig) -> RoutingTape | None:
        """The tape of a run; None where it neither records nor replays."""
        if config.replay is not None:
            return cls.load(config.replay, "ids_and_weights" if config.replay_weights else "ids")
        return None if config.record is None else cls()

    @classmethod
    def _of(cls, recording: Recording, enforce: Enforce) -> RoutingTape:
        tape = cls(recording.num_experts, enforce=enforce)
        tape._recording = recording
        return tape

    def replaying(self, enforce: Enforce = "ids") -> RoutingTape:
        """What this tape has recorded, as a tape that replays."""
        return self._of(Recording({"the tape": self._table()}), enforce)

    def record(self, place: DecisionPlace, decision: Decision, num_experts: int) -> None:
        """Keep a decision, on the host."""
        if num_experts != (self.num_experts or num_experts):
            raise ConfigError(f"record: expected {self.num_experts} experts, got a layer of {num_experts}")
        self.num_experts = num_experts
        num_tokens = len(decision.ids_TK)
        origin = place.named(num_tokens)
        if len(origin.document) != num_tokens:
            raise ConfigError(
                f"record: expected {num_tokens} tokens in origin, as many as the call has, got "
                f"{len(origin.document)}; name the tokens of each call, and record no generation"
            )
        known, layers = self._pending.setdefault(place.micro_batch, (origin, {}))
        is_next_call = place.origin is None and place.layer in layers and not is_in_backward()
        if is_next_call or not _same(known, origin):
            raise ConfigError(
                f"record: expected a micro_batch of its own for each call, got {place.micro_batch} for two; "
                "pass micro_batch= with another number, or record on a new tape"
            )
        layers[place.layer] = decision.map(lambda part: part.detach().to("cpu", copy=True))

    def decision(self, place: DecisionPlace, *, like: Tensor, num_experts: int) -> Decision:
        """The recorded decision in place of the choice ``like [T, K]``, on its device; ConfigError where
        there is none."""
        origin = place.named(len(like))
        columns = self._columns(origin)
        if not columns:  # padding alone
            return Decision(like, torch.zeros_like(like, dtype=torch.float32), None)
        _, num_layers, top_k = columns["ids"].shape
        if (top_k, self.num_experts) != (like.shape[1], num_experts) or place.layer >= num_layers:
            raise ConfigError(
                f"replay: recorded for {num_layers} MoE layers with {top_k} choices of {self.num_experts} "
                f"experts, got layer {place.layer} with {like.shape[1]} choices of {num_experts} experts; "
                "replay with the recorded model"
            )
        if self.enforce == "ids_and_weights" and "weights" not in columns:
            raise ConfigError("replay: expected recorded weights and ids, got ids alone; enforce ids")
        parts = {name: column[:, place.layer].to(like.device) for name, column in columns.items()}
        is_padding_T1 = (origin.document < 0).to(like.device)[:, None]
        ids_TK = torch.where(is_padding_T1, like, parts["ids"])
        weights_TK = parts.get("weights", torch.zeros_like(ids_TK, dtype=torch.float32))
        kept_TK = parts["kept"] | is_padding_T1 if "kept" in parts else None
        return Decision(ids_TK, weights_TK, kept_TK)

    def save(self, path: str | Path) -> None:
        """Write what this rank recorded as one file."""
        self._table().write(Path(path))

    def flush(self, path: str | Path) -> None:
        """Write what was recorded since the last time, if anything, and start from empty."""
        if self._pending:
            self.save(path)
        self._pending = {}

    def _columns(self, origin: Origin) -> dict[str, Tensor]:
        if self._last is None or not _same(self._last[0], origin):
            assert self._recording is not None, "a tape that records was asked for a decision"
            self._last = origin, self._recording.columns(origin)
        return self._last[1]

    def _table(self) -> RoutingTable:
        """All that is recorded, token by token."""
        origins, columns = [], []
        for origin, layers in self._pending.values():
            if sorted(layers) != list(range(len(layers))):
                raise AssertionError(f"expected decisions of all MoE layers, got those of {sorted(layers)}")
            decisions = [layers[number] for number in range(len(layers))]
            column = {
                "ids": torch.stack([each.ids_TK for each in decisions], 1),
                "weights": torch.stack([each.weights_TK.float() for each in decisions], 1),
            }
            kept = [each.kept_TK for each in decisions if each.kept_TK is not None]
            if kept:
                column["kept"] = torch.stack(kept, 1)
            origins.append(origin)
            columns.append(column)
        if not origins:
            raise AssertionError("nothing was recorded")
        joined = {name: torch.cat([each[name] for each in columns]) for name in columns[0]}
        assert self.num_experts is not None
        return RoutingTable.build(self.num_experts, Origin.join(origins), joined)


def _same(one: Origin, other: Origin) -> bool:
    return one is other or (
        one.names == other.names
        and torch.equal(one.document, other.document)
        and torch.equal(one.offset, other.offset)
    )
