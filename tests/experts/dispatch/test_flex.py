"""Keys of ``flex``, what it says at start-up, and the state that layers share."""

from __future__ import annotations

import os
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import CapacityConfig, ExpertChoiceConfig, ExpertsConfig, FlexConfig
from fsdmoe.experts.dispatch import FlexDispatcher, FlexPolicy, Links, build_dispatcher, options_of
from fsdmoe.experts.dispatch.flex import share_state
from fsdmoe.experts.dispatch.flex_peer import SharedMemory
from fsdmoe.experts.dispatch.flex_state import build_transport
from fsdmoe.experts.dispatch.flex_transport import SetupError
from fsdmoe.experts.dispatch.local import LocalDispatcher
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks


def test_keys_that_make_no_sense_are_refused_with_a_fix() -> None:
    with pytest.raises(ConfigError) as caught:
        FlexConfig(rows=0, blocks=0, domain=-1)
    assert caught.value.problems == (
        "experts.flex.rows: expected a number above 0, got 0; write 2.0",
        "experts.flex.blocks: expected 1 or more, got 0; write 32",
        "experts.flex.domain: expected 0 or more, got -1; write 0 for the ranks of a node",
    )


@pytest.mark.parametrize("dispatcher", ["auto", "all_to_all"])
def test_keys_of_a_dispatcher_that_was_not_chosen_are_refused(dispatcher: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ExpertsConfig(dispatcher=dispatcher, flex=FlexConfig(rows=3.0, blocks=8, domain=4))
    assert caught.value.problems == tuple(
        f"experts.flex.{key}: expected experts.dispatcher = flex, which alone has it, got {dispatcher}; "
        "choose flex, or drop the line"
        for key in ("rows", "blocks", "domain")
    )


def test_the_keys_reach_the_dispatcher() -> None:
    for flex, policy in (
        (FlexConfig(rows=3.0, blocks=7, domain=2), FlexPolicy(rows=3.0, blocks=7, domain=2)),
        (FlexConfig(), FlexPolicy()),
    ):
        options = options_of(ExpertsConfig(dispatcher="flex", flex=flex))
        made, _ = build_dispatcher("flex", Links.alone(), num_experts=8, top_k=2, **options)
        assert isinstance(made, FlexDispatcher)
        assert made.state.policy == policy


def _reasons() -> list[str]:
    links = Links.of(build_meshes(ep=2))
    found = []
    for domain in (0, 1):
        _, choice = build_dispatcher("flex", links, num_experts=8, top_k=2, flex=FlexPolicy(domain=domain))
        assert choice.dispatcher == "flex"
        found.append(choice.reason)
    return found


def test_the_start_up_report_says_how_rows_move() -> None:
    within, across = run_ranks(_reasons, 2)[0]
    assert within == "ep 2, etp 1 within one NVLink domain: rows are written into each other's memory"
    assert across == (
        "ep 2, etp 1 spans several NVLink domains: equal pieces by all-to-all, no waits for counts"
    )


def _transport(node_sizes: list[str | None]) -> str:
    if (size := node_sizes[dist.get_rank()]) is not None:
        os.environ["LOCAL_WORLD_SIZE"] = size
    links = Links.of(build_meshes(ep=dist.get_world_size()))
    try:
        return build_transport(links, torch.device("cpu"), FlexPolicy()).name
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("node_sizes", "wanted"),
    [
        ([None, None, None], "reference"),
        (["3", "3", "3"], "reference"),
        (["2", "2", "1"], "padded"),
        (["3", None, "1"], r"LOCAL_WORLD_SIZE: expected the number of ranks on a rank's node"),
        (["many", "3", "3"], r"LOCAL_WORLD_SIZE: .* got 'many' on rank 0, '3' on ranks 1-2"),
    ],
    ids=str,
)
def test_all_ranks_take_one_transport_whatever_they_were_told(
    node_sizes: list[str | None], wanted: str
) -> None:
    found = run_ranks(_transport, 3, node_sizes)
    assert found == [found[0]] * 3, "ranks that take different transports hang or mix their bytes"
    assert re.match(wanted, found[0])


def _share_memory() -> str:
    """Rank 1 has none to share; the others must not wait for it to meet them."""
    group, device = build_meshes(ep=2).expert.get_group("ep"), torch.device("cpu")

    def empty(size: int, **options: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory")
        return torch.empty(size, **options)

    def rendezvous(*_: object) -> None:
        raise AssertionError("not all ranks would come")

    patched = mock.patch.multiple(symmetric_memory, empty=empty, rendezvous=rendezvous)
    with patched, pytest.raises(SetupError) as caught:
        SharedMemory({"rows": 64}, group, device)
    return str(caught.value)


def test_memory_that_one_rank_cannot_share_is_refused_on_all() -> None:
    assert run_ranks(_share_memory, 2) == ["it failed on another rank", "out of memory"]


def test_layers_of_a_model_share_one_state_and_others_have_none() -> None:
    links = Links.alone()
    flex = [FlexDispatcher(links, 8, top_k=2) for _ in range(3)]
    local = LocalDispatcher(links, 8)
    assert share_state([local]) is None
    state = share_state([local, *flex])
    assert all(each.state is state for each in flex)
    assert state is not None
    assert not dist.is_initialized()
    assert not state.must_repeat(is_finite=False), "no layer has run yet: nothing to ask others"


def test_rows_that_would_never_fit_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"experts\.flex\.rows: expected at least experts\.expert_choice\.factor"
    ):
        ExpertsConfig(
            dispatcher="flex", selection="expert_choice", expert_choice=ExpertChoiceConfig(factor=3.0)
        )
    padded = CapacityConfig(factor=3.0, pad_to_max=True)
    with pytest.raises(
        ConfigError, match=r"experts\.flex\.rows: expected at least experts\.capacity\.factor"
    ):
        ExpertsConfig(dispatcher="flex", capacity=padded)
    ExpertsConfig(dispatcher="flex", capacity=padded, flex=FlexConfig(rows=3.0))
