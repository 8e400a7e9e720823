"""Shared experts run between the start and the end of the dispatch, in forward and in backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdmoe.experts.dispatch.transfer import Link, Pending
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.shared import SharedExperts
from fsdmoe.kernels.activations import activate
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.coordinates import use_local_tensors
from tests.support.moe_case import Case, build_layer, loss_of


def test_shared_experts_are_a_gated_mlp() -> None:
    shared, x = SharedExperts(8, 12), torch.randn(5, 8)
    z = torch.cat([shared.gate_proj(x), shared.up_proj(x)], dim=-1)
    torch.testing.assert_close(shared(x), shared.down_proj(activate(z, "swiglu")))
    assert set(shared.state_dict()) == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}


def _order_of_events(dispatcher: str) -> list[str]:
    """Starts and ends of EP's collectives and the shared experts' forward and backward, as they happened."""
    layer = build_layer(Case(dispatcher, extras="shared"))
    parallelize_experts(layer, build_meshes(ep=2), dispatcher=dispatcher)
    use_local_tensors(layer)
    events: list[str] = []

    def watched(name: str):  # type: ignore[no-untyped-def]
        original = getattr(Link, name)

        def start(self: Link, rows: Tensor, *args: object) -> Pending:
            phase = str(args[-1])
            pending = original(self, rows, *args)
            if rows.shape[1:] != (16,):  # counts, ids and weights: rows alone are watched
                return pending
            events.append(f"start {phase}")

            def wait() -> Tensor:
                events.append(f"end {phase}")
                return pending()

            return wait

        return original, start

    originals = {}
    for name in ("gather", "reduce_scatter") if dispatcher == "allgather" else ("exchange", "gather"):
        originals[name], replacement = watched(name)
        setattr(Link, name, replacement)
    try:
        layer.shared_experts.register_forward_hook(lambda *_: events.append("shared forward"))
        layer.shared_experts.down_proj.weight.register_post_accumulate_grad_hook(
            lambda _: events.append("shared backward")
        )
        loss_of(layer(torch.randn(4, 16, requires_grad=True))[0]).backward()
    finally:
        for name, original in originals.items():
            setattr(Link, name, original)
    return events


@pytest.mark.parametrize("dispatcher", ["allgather", "all_to_all", "flex"])
def test_shared_experts_overlap_the_dispatch_both_ways(dispatcher: str) -> None:
    events = run_ranks(_order_of_events, 2, dispatcher)[0]
    print(" -> ".join(events))
    forward = ["start dispatch", "shared forward", "end dispatch", "start combine", "end combine"]
    assert events[:5] == forward
    backward = events[5:]
    started, done = backward.index("start dispatch.backward"), backward.index("end dispatch.backward")
    assert started < backward.index("shared backward") < done
