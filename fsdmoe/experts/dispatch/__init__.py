"""How tokens reach their experts and come back: five dispatchers behind one interface of six phases."""

from __future__ import annotations

from typing import Any

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import one_of
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.dispatch.all_to_all import AllToAllDispatcher
from fsdmoe.experts.dispatch.allgather import AllGatherDispatcher
from fsdmoe.experts.dispatch.base import UNPACKED, Dispatcher, DispatchPlan, Links, Packing, Rows
from fsdmoe.experts.dispatch.by_node import NodeDispatcher
from fsdmoe.experts.dispatch.cloning import NO_CLONES, ClonePolicy, CloningDispatcher
from fsdmoe.experts.dispatch.flex import FlexDispatcher
from fsdmoe.experts.dispatch.flex_cloning import FlexCloningDispatcher
from fsdmoe.experts.dispatch.flex_state import FlexPolicy
from fsdmoe.experts.dispatch.local import LocalDispatcher
from fsdmoe.experts.dispatch.resending import sending_again
from fsdmoe.experts.dispatch.traffic import DispatchTraffic
from fsdmoe.experts.dispatch.volume import Choice, ExpertLayout, choose_dispatcher

__all__ = [
    "CLONING", "DISPATCHERS", "UNPACKED", "Choice", "ClonePolicy", "CloningDispatcher", "DispatchPlan",
    "DispatchTraffic", "Dispatcher", "ExpertLayout", "FlexCloningDispatcher", "FlexDispatcher", "FlexPolicy",
    "Links", "Packing", "Rows", "build_dispatcher", "choose_dispatcher", "options_of", "sending_again",
]  # fmt: skip

DISPATCHERS: dict[str, type[Dispatcher]] = {
    kind.name: kind
    for kind in (LocalDispatcher, AllGatherDispatcher, AllToAllDispatcher, NodeDispatcher, FlexDispatcher)
}

CLONING = (CloningDispatcher, FlexCloningDispatcher)
"""Those that clone experts."""


def options_of(experts: ExpertsConfig) -> dict[str, Any]:
    """What :func:`build_dispatcher` is told by a configuration, apart from the name."""
    flex = experts.flex if experts.dispatcher == FlexDispatcher.name else None
    return {
        "packing": Packing(experts.dispatch_dtype == "float8", experts.dispatch_grad_dtype == "float8"),
        "flex": flex and FlexPolicy(flex.rows, flex.blocks, flex.domain),
        "clones": ClonePolicy(experts.clones, experts.clone_rows, experts.clone_keep),
    }


def build_dispatcher(
    name: str,
    links: Links,
    *,
    num_experts: int,
    top_k: int,
    packing: Packing = UNPACKED,
    flex: FlexPolicy | None = None,
    clones: ClonePolicy = NO_CLONES,
) -> tuple[Dispatcher, Choice]:
    """The dispatcher called ``name``, or the one that ``auto`` picks, with the reason."""
    choice = Choice(name, "as configured")
    if clones.slots and links.ep.size > 1:
        if name not in ("auto", AllToAllDispatcher.name, FlexDispatcher.name) or links.etp.size > 1:
            raise AssertionError(f"clones by {name}, which fsdmoe.config.compatibility refuses")
        if name == FlexDispatcher.name:
            in_slots = FlexCloningDispatcher(
                links, num_experts, packing, top_k=top_k, policy=flex, clones=clones
            )
            return in_slots, Choice(name, in_slots.describe())
        choice = choose_dispatcher(ExpertLayout(num_experts, top_k, links.ep.size), clones.slots)
        return CloningDispatcher(links, num_experts, packing, policy=clones), choice
    if name == "auto":
        choice = choose_dispatcher(ExpertLayout(num_experts, top_k, links.ep.size, links.etp.size))
    elif name not in DISPATCHERS:
        raise ConfigError(*one_of("experts", {"dispatcher": name}, {"dispatcher": ("auto", *DISPATCHERS)}))
    if choice.dispatcher == FlexDispatcher.name:
        made = FlexDispatcher(links, num_experts, packing, top_k=top_k, policy=flex)
        return made, Choice(choice.dispatcher, made.describe())
    if choice.dispatcher == NodeDispatcher.name:
        by_node = NodeDispatcher(links, num_experts, packing)
        return by_node, Choice(choice.dispatcher, by_node.describe())
    return DISPATCHERS[choice.dispatcher](links, num_experts, packing), choice
