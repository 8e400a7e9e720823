"""Chunks of rows: how large they are, and that each is exchanged while another one is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.dispatch import Dispatcher, Links, Rows
from fsdmoe.experts.dispatch.chunks import chunk_limits, chunk_sizes
from fsdmoe.experts.dispatch.local import LocalDispatcher
from fsdmoe.experts.dispatch.transfer import Link, Pending
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.routed import RoutedExperts
from fsdmoe.kernels.late_grads import LateGrads
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.coordinates import use_local_tensors
from tests.support.moe_case import HIDDEN, Case, build_layer, loss_of


def split_layer(dispatcher: str, chunks: int, **degrees: int) -> MoE:
    layer = build_layer(Case(dispatcher, extras="shared"))
    parallelize_experts(layer, build_meshes(**degrees), dispatcher=dispatcher, chunks=chunks)
    use_local_tensors(layer)
    return layer


def test_the_first_and_the_last_chunk_have_half_the_rows_and_none_is_lost() -> None:
    assert chunk_sizes(24, 4) == [4, 8, 8, 4]
    assert chunk_sizes(24, 2) == [12, 12]
    assert chunk_sizes(2, 4) == [0, 1, 0, 1]
    assert all(sum(chunk_sizes(rows, n)) == rows for rows in range(20) for n in range(1, 7))
    for most, n in ((9, 2), (24, 3), (5, 6)):
        limits = chunk_limits(most, n)
        sizes = [chunk_sizes(rows, n) for rows in range(most + 1)]
        assert all(size <= limit for each in sizes for size, limit in zip(each, limits, strict=True))
        assert sum(limits) < most + n


class Events:
    """Starts and ends of exchanges of rows, and the experts' compute, as they happen on this rank."""

    def __init__(self, layer: MoE) -> None:
        self.said: list[str] = []
        self._counts: dict[str, int] = {}
        layer.experts.register_forward_pre_hook(self._before)
        layer.experts.register_forward_hook(self._after)
        shared = layer.shared_experts
        assert shared is not None
        shared.register_forward_hook(lambda *_: self.said.append("shared"))
        shared.down_proj.weight.register_post_accumulate_grad_hook(lambda _: self.said.append("shared'"))

    def number(self, what: str) -> int:
        self._counts[what] = self._counts.get(what, -1) + 1
        return self._counts[what]

    def _before(self, _: object, args: tuple[Tensor, ...]) -> None:
        chunk = self.number("compute")
        args[0].register_hook(lambda _: self.said.append(f"computed {chunk}'"))

    def _after(self, _: object, __: object, y: Tensor) -> None:
        chunk = self._counts["compute"]
        self.said.append(f"computed {chunk}")
        y.register_hook(lambda _: self.said.append(f"compute {chunk}'"))

    def watch(self, name: str, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
        original = getattr(Link, name)

        def start(link: Link, rows: Tensor, *args: object) -> Pending:
            pending = original(link, rows, *args)
            if rows.shape[1:] != (HIDDEN,):  # counts, ids and weights: rows alone are watched
                return pending
            phase, _, backward = str(args[-1]).partition(".")
            chunk = self.number(str(args[-1]))
            if backward:
                chunk = chunks - 1 - chunk
            which = f"{phase} {chunk}" + "'" * bool(backward)
            self.said.append(f"start {which}")

            def wait() -> Tensor:
                self.said.append(f"end {which}")
                return pending()

            return wait

        monkeypatch.setattr(Link, name, start)

    def watch_weights(self, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
        original = LateGrads.take

        def take(late: LateGrads) -> object:
            self.said.append(f"weights {chunks - 1 - self.number('weights')}'")
            return original(late)

        monkeypatch.setattr(LateGrads, "take", take)


FORWARD = """
    start dispatch 0, start dispatch 1, shared, end dispatch 0, computed 0, start combine 0, start dispatch 2,
    end dispatch 1, computed 1, start combine 1, end dispatch 2, computed 2, start combine 2,
    end combine 0, end combine 1, end combine 2
"""
BACKWARD = """
    start combine 2', start combine 1', start combine 0', end combine 2', compute 2', computed 2',
    start dispatch 2', weights 2', end combine 1', compute 1', computed 1', start dispatch 1', weights 1',
    end dispatch 2', end combine 0', compute 0', computed 0', start dispatch 0', weights 0', shared',
    end dispatch 1', end dispatch 0'
"""


def _events(dispatcher: str, ep: int, etp: int) -> list[str]:
    layer = split_layer(dispatcher, 3, ep=ep, etp=etp)
    events = Events(layer)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("exchange",) if dispatcher == "all_to_all" else ("gather", "reduce_scatter"):
            events.watch(name, monkeypatch, 3)
        events.watch_weights(monkeypatch, 3)
        loss_of(layer(torch.randn(8, HIDDEN, requires_grad=True))[0]).backward()
    return events.said


@pytest.mark.parametrize(
    ("dispatcher", "ep", "etp"), [("all_to_all", 2, 1), ("allgather", 2, 1), ("local", 1, 2)]
)
def test_a_chunk_is_under_way_while_another_is_computed_forward_and_back(
    dispatcher: str, ep: int, etp: int
) -> None:
    wanted = [" ".join(event.split()) for event in f"{FORWARD},{BACKWARD}".split(",")]
    if dispatcher == "local":  # the same phases over ETP
        wanted = [event.replace("dispatch", "gather").replace("combine", "reduce") for event in wanted]
    for events in run_ranks(_events, 2, dispatcher, ep, etp):
        assert events == wanted


def _counts(chunks: int) -> tuple[dict[str, int], int]:
    layer = split_layer("all_to_all", chunks, ep=2)
    layer(torch.randn(8, HIDDEN))
    return dict(layer.dispatcher.traffic.calls), layer.dispatcher.traffic.host_syncs


def test_counts_of_all_chunks_are_exchanged_at_once() -> None:
    calls, waits = run_ranks(_counts, 2, 3)[0]
    assert calls == {"counts": 1, "dispatch": 6, "combine": 3}  # rows, and their ids with weights
    assert waits == 1


def _recomputed(dispatcher: str, chunks: int) -> tuple[dict[str, int], bool]:
    layer, found = split_layer(dispatcher, chunks, ep=2), []
    x = torch.randn(8, HIDDEN)
    for again in (False, True):
        layer.zero_grad()
        layer.dispatcher.traffic.clear()
        rows = x.clone().requires_grad_()
        y = checkpoint(lambda x: layer(x)[0], rows, use_reentrant=False) if again else layer(rows)[0]
        loss_of(y).backward()
        found.append([rows.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    same = all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    return dict(layer.dispatcher.traffic.calls), same


@pytest.mark.parametrize("dispatcher", ["all_to_all", "allgather"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_layer_that_is_run_again_sends_rows_to_the_experts_again_but_not_back(
    dispatcher: str, chunks: int
) -> None:
    for calls, same in run_ranks(_recomputed, 2, dispatcher, chunks):
        assert same
        assert (calls["dispatch"], calls["combine"]) == (2 * 2 * chunks, chunks)


def test_where_nothing_is_sent_rows_stay_together() -> None:
    dispatcher = LocalDispatcher(Links.alone(), 2)
    sizes: list[int] = []

    def compute(rows: Rows, max_rows: int | None) -> Tensor:
        sizes.append(len(rows.x_RD))
        return rows.x_RD

    x = torch.randn(6, 4)
    RoutedExperts(dispatcher, 3).run(Rows(x, torch.ones(6, 1), torch.zeros(6, 1)), lambda: compute)
    assert sizes == [6]


class OneAtATime(LocalDispatcher):
    name = "single"
    takes_chunks = False


def test_no_chunks_are_less_than_one_or_go_through_a_dispatcher_that_takes_none() -> None:
    with pytest.raises(ConfigError, match=r"experts\.chunks: expected 1 or more, got 0"):
        ExpertsConfig(chunks=0)
    dispatcher: Dispatcher = OneAtATime(Links.alone(), 2)
    RoutedExperts(dispatcher, 1)
    with pytest.raises(ConfigError, match=r"experts\.chunks: expected 1 with the dispatcher single, got 2"):
        RoutedExperts(dispatcher, 2)
