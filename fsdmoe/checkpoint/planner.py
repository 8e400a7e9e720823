"""Who writes which box of a live state.

Every rank lists the boxes it holds; the coordinator gives each box that several ranks hold (replicas over
``dp_outer``, plain tensors) to the one with the fewest bytes so far, and checks that all boxes together make
up every tensor once. While nothing changes, ranks say so instead of sending their lists again, and the
coordinator's answer is reused: from the second save on, planning costs one small message a rank.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.saved_box import SavedBox, check_whole
from fsdmoe.checkpoint.tree import Tree

logger = logging.getLogger(__name__)


class Proposal(NamedTuple):
    """What one rank tells the coordinator."""

    signature: str
    """Of the boxes that it holds."""
    boxes: list[SavedBox] | None
    """None: as of the last plan that was carried out."""
    digests: dict[str, str]
    """Of the plain values, by section."""
    checksums: dict[str, int]
    """Of the tensors that are no part of a larger one, with the boxes."""


@dataclass
class PlanCache:
    """What one rank remembers between the saves of one run."""

    signature: str = ""
    """Of this rank's own boxes, as of the last plan that was carried out."""
    proposed: str = ""
    """The same of the plan that is being made."""
    mine: list[SavedBox] | None = None
    """What this rank writes."""
    all_signatures: list[str] = field(default_factory=list)
    """Coordinator: every rank's signature, and the boxes it holds."""
    all_boxes: list[list[SavedBox]] = field(default_factory=list)
    hits: int = 0

    def names(self) -> set[str] | None:
        """The tensors of which this rank writes anything; None when there is no plan yet."""
        return None if self.mine is None else {box.name for box in self.mine}

    def clear(self) -> None:
        self.signature = ""
        self.mine = None
        self.all_signatures, self.all_boxes = [], []

    def propose(
        self, boxes: Iterable[SavedBox], values: Tree, checksums: Callable[[], dict[str, int]] = dict
    ) -> Proposal:
        """For the coordinator: this rank's boxes, unless they are those of the last save. ``checksums`` is
        asked with them, when all of the tensors are copies or keep still."""
        held = list(boxes)
        self.proposed = _digest(repr(held))
        is_known = self.mine is not None and self.signature == self.proposed
        digests = {key: _digest(json.dumps(value, sort_keys=True)) for key, value in values.items()}
        if is_known:
            return Proposal(self.proposed, None, digests, {})
        return Proposal(self.proposed, held, digests, checksums())

    def decide(self, proposals: list[Proposal]) -> list[list[SavedBox] | None]:
        """On the coordinator: what each rank writes; None everywhere where nothing changed."""
        _check_values_agree([proposal.digests for proposal in proposals])
        _warn_of_differing([proposal.checksums for proposal in proposals])
        signatures = [proposal.signature for proposal in proposals]
        is_same = all(proposal.boxes is None for proposal in proposals)
        if is_same and signatures == self.all_signatures:
            self.hits += 1
            return [None] * len(proposals)
        held = []
        for rank, proposal in enumerate(proposals):
            if proposal.boxes is not None:
                held.append(proposal.boxes)
            elif self.all_signatures[rank : rank + 1] == [proposal.signature]:
                held.append(self.all_boxes[rank])
            else:
                raise CheckpointError(f"rank {rank} and the coordinator remember different plans; save again")
        decided = _assign(held)
        check_whole(box for boxes in decided for box in boxes)
        self.all_signatures = signatures
        self.all_boxes = held
        return [*decided]

    def accept(self, decided: list[SavedBox] | None) -> list[SavedBox]:
        """What this rank writes, as the coordinator decided."""
        if decided is not None:
            self.signature = self.proposed
            self.mine = decided
        assert self.mine is not None
        return self.mine


def _assign(held: list[list[SavedBox]]) -> list[list[SavedBox]]:
    """Every box to one of the ranks that hold it, so that bytes come out even."""
    holders: dict[SavedBox, list[int]] = {}
    first: dict[tuple[str, tuple[int, ...]], SavedBox] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            holders.setdefault(box, []).append(rank)
            other = first.setdefault((box.name, box.offsets), box)
            if other != box:
                raise CheckpointError(
                    f"{box.name}: ranks {holders[other][0]} and {rank} hold different boxes at "
                    f"{box.offsets}: a plain tensor must be the same on every rank"
                )
    load = [0] * len(held)
    decided: list[list[SavedBox]] = [[] for _ in held]
    for box in sorted(holders, key=lambda box: len(holders[box])):  # boxes without a choice first
        rank = min(holders[box], key=lambda rank: load[rank])
        load[rank] += box.num_bytes
        decided[rank].append(box)
    return decided


def _check_values_agree(digests: list[dict[str, str]]) -> None:
    for rank, other in enumerate(digests):
        differing = sorted(
            key for key in digests[0].keys() | other.keys() if digests[0].get(key) != other.get(key)
        )
        if differing:
            raise CheckpointError(
                f"values under {', '.join(map(repr, differing))} differ between rank 0 and rank {rank}; "
                "a checkpoint holds one value for all ranks, so that it can be loaded on any number of them"
            )


def _warn_of_differing(checksums: list[dict[str, int]]) -> None:
    """Of tensors that are plain on every rank, such as a random state of each."""
    for rank, other in enumerate(checksums):
        names = [name for name, found in other.items() if found != checksums[0].get(name, found)]
        if names:
            logger.warning(
                "%s%s: rank %d has other values than rank 0; a checkpoint holds one tensor for all ranks, "
                "which a load gives to each. To keep each rank's own, save all of them as one tensor",
                names[0],
                f" and {len(names) - 1} more" if len(names) > 1 else "",
                rank,
            )
            return


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
