"""What all ``flex`` layers of a model share: their transport, how much fits, and what happens otherwise.

Buffers have a fixed size, so the host never has to read one from the device. Rows that do not fit are never
dropped. Who notices them depends on who runs the steps::

    checked    (any loop) each layer's host reads the flag, and a layer that does not fit takes all_to_all
               there and then: always right, one wait for the device in a layer
    deferred   (a loop that asks must_repeat after every step) nobody waits: the layer's output becomes NaN,
               the flag stays raised on the device, and is read where the loop reads its loss anyway
    repeating  the step after such a flag, run again: every layer takes all_to_all

Evaluation is always checked. All ranks of a group know the mode and the flag
(:mod:`fsdmoe.kernels.exchange_plan`), so they always take the same path.

The step is repeated and not the layer. A second round inside of a layer, without the host, would need memory
for its buffers and for all that its experts keep, in every layer and step, for rows that hardly ever come. A
repeated step costs one step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdmoe.core.autograd import is_in_backward
from fsdmoe.core.process_group import TIMEOUT
from fsdmoe.experts.dispatch.base import Links
from fsdmoe.experts.dispatch.flex_peer import WrittenTransport
from fsdmoe.experts.dispatch.flex_transport import (
    PaddedTransport,
    ReferenceTransport,
    SetupError,
    Transport,
    agree,
)

logger = logging.getLogger(__name__)


class FlexPolicy(NamedTuple):
    """``experts.flex`` as a dispatcher needs it."""

    rows: float = 2.0
    blocks: int = 32
    domain: int = 0
    seconds: float = TIMEOUT.total_seconds()
    """For another rank to answer."""


@dataclass
class FlexState:
    """See the module's text."""

    policy: FlexPolicy
    world: dist.ProcessGroup | None = None
    """All ranks that train together; None: those of the default group."""
    defers: bool = False
    """The loop asks :meth:`must_repeat` after every step."""
    is_repeating: bool = False
    num_repeated: int = 0
    """Steps that were run again."""
    num_rerouted: int = 0
    """Layers that were checked and took ``all_to_all``."""
    tokens: int = 0
    """The most that a rank brought so far, and that the buffers are sized for."""
    num_ids: int = 0
    transport: Transport | None = None
    _wanted: tuple[object, tuple[int, int]] | None = field(default=None, repr=False)
    """Tokens and ids that did not fit, and the first layer that saw them."""
    _hinted: bool = field(default=False, repr=False)

    @property
    def waits(self) -> bool:
        """A layer that runs now is checked."""
        return not self.defers or not torch.is_grad_enabled()

    def connect(self, links: Links, device: torch.device) -> Transport:
        """The transport, made by the first layer that runs. Collective."""
        if self.transport is None:
            with torch.inference_mode(False):  # or training could not write its notes
                self.transport = build_transport(links, device, self.policy)
            logger.info("experts: flex, transport %s", self.transport.name)
        return self.transport

    def want(self, layer: object, tokens: int, num_ids: int, links: Links, device: torch.device) -> None:
        """Note what every rank brings. Collective, and the host waits: for the first layer that runs, and
        where something did not fit."""
        most = agree((tokens, num_ids), links.expert.group, device)
        if self._wanted is not None:
            layer, (tokens, num_ids) = self._wanted
            most = [max(most[0], tokens), max(most[1], num_ids)]
        self._wanted = layer, (most[0], most[1])

    def grow(self, layer: object) -> None:
        """Raise the bounds to what was noted, once the layer that noted it first begins another forward: a
        layer that is recomputed in backward must find the bounds of its forward."""
        if self._wanted is not None and self._wanted[0] is layer and not is_in_backward():
            tokens, num_ids = self._wanted[1]
            self.tokens, self.num_ids = max(self.tokens, tokens), max(self.num_ids, num_ids)
            self._wanted = None

    def reroute(self) -> None:
        """Count a layer that takes ``all_to_all``, and say once what would help."""
        self.num_rerouted += not is_in_backward()  # recomputed, it was counted in forward
        self.hint()

    def hint(self) -> None:
        """Say once what would help."""
        if not self._hinted:
            self._hinted = True
            logger.warning(
                "experts.flex.rows = %g: a rank was sent more rows than its buffers hold; they took "
                "all_to_all instead, and nothing was dropped. Raise experts.flex.rows if it happens often",
                self.policy.rows,
            )

    def must_repeat(self, is_finite: bool) -> bool:
        """Whether the step that has just been run has to be run again, from zeroed gradients. ``is_finite``:
        its loss and gradient norm are, on all ranks; they are not where something did not fit. Collective."""
        if self.is_repeating or is_finite or self.transport is None:
            self.is_repeating = False
            return False
        self.transport.check()
        flag = self.transport.notes.flag
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.world)
        self.is_repeating = bool(flag.item())
        flag.zero_()
        if self.is_repeating:
            self.num_repeated += 1
            self.hint()
        return self.is_repeating

    def figures(self) -> dict[str, float]:
        """For a step that is logged: of all ranks, since the last time. Collective, and the host waits."""
        fill = 0.0
        if self.transport is not None:
            self.transport.check()
            notes = self.transport.notes
            dist.all_reduce(notes.fill, op=dist.ReduceOp.MAX, group=self.world)
            fill = notes.fill.item()
            notes.fill.zero_()
        return {"fill": fill, "repeated": self.num_repeated, "rerouted": self.num_rerouted}


def stays_in_domain(links: Links, policy: FlexPolicy) -> bool:
    """Whether all ranks of this rank's EP x ETP group reach each other's memory: they get the same answer."""
    if links.expert.group is None:
        return True
    ranks = dist.get_process_group_ranks(links.expert.group)
    domains = [rank // policy.domain if policy.domain else links.node_of(rank) for rank in ranks]
    return len(set(domains)) == 1


def build_transport(links: Links, device: torch.device, policy: FlexPolicy) -> Transport:
    """By topology. Collective."""
    if not stays_in_domain(links, policy):
        return PaddedTransport(links, device)
    if device.type == "cpu":
        return ReferenceTransport(links, device)
    try:
        return WrittenTransport(links, device, policy.blocks, policy.seconds)
    except SetupError as error:
        logger.warning("experts: flex: memory is not shared among these ranks (%s): padded exchanges", error)
        return PaddedTransport(links, device)
