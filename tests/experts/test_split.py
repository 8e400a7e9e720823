"""EP and ETP as placements: slices that cover the whole once, with gates and ups on every rank."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import local_tensor, placement_of
from fsdmoe.experts.moe import GroupedExperts
from fsdmoe.experts.parallel import split_experts
from fsdmoe.mesh import Axis
from tests.support.coordinates import At

NUM_EXPERTS, HIDDEN, WIDTH = 8, 8, 12


def at(ep: int, etp: int, ep_rank: int = 0, etp_rank: int = 0) -> At:
    return At({Axis.EP: ep, Axis.ETP: etp}, {Axis.EP: ep_rank, Axis.ETP: etp_rank})


def whole_experts(*, bias: bool = True, device: str = "cpu") -> GroupedExperts:
    with torch.device(device):
        experts = GroupedExperts(NUM_EXPERTS, HIDDEN, WIDTH, bias=bias)
    for number, parameter in enumerate(experts.parameters()):
        if not parameter.is_meta:
            with torch.no_grad():
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + 1000 * number)
    return experts


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (8, 1), (1, 4), (4, 2)])
def test_slices_cover_every_parameter_exactly_once(ep: int, etp: int) -> None:
    whole = whole_experts()
    rebuilt = {name: torch.full_like(p, -1) for name, p in whole.named_parameters()}
    for ep_rank, etp_rank in itertools.product(range(ep), range(etp)):
        here = at(ep, etp, ep_rank, etp_rank)
        local = whole_experts()
        split_experts(local, here)
        for name, parameter in local.named_parameters():
            placement, held = placement_of(parameter, here), local_tensor(parameter)
            assert placement.mesh == "expert"
            assert placement.global_shape == tuple(parameter.shape)
            assert placement.local_shape(here) == tuple(held.shape)
            for box in placement.boxes(here):
                target = box.slice_of(rebuilt[name])
                assert (target == -1).all(), "no element may live on two ranks"
                target.copy_(box.view_of(held.flatten()))
    for name, parameter in whole.named_parameters():
        assert torch.equal(rebuilt[name], parameter), name


def test_every_etp_member_has_its_share_of_gates_and_of_ups() -> None:
    whole, local = whole_experts(bias=False), whole_experts(bias=False)
    split_experts(local, at(2, 3, ep_rank=1, etp_rank=2))
    gates, ups = whole.gate_up_proj[4:].split(WIDTH, dim=1)
    expected = torch.cat([gates[:, 8:12], ups[:, 8:12]], dim=1)
    assert torch.equal(local_tensor(local.gate_up_proj), expected)
    assert torch.equal(local_tensor(local.down_proj), whole.down_proj[4:, :, 8:12])


def test_a_meta_module_is_split_by_shape_alone() -> None:
    local = whole_experts(device="meta")
    split_experts(local, at(4, 2))
    assert local.gate_up_proj.is_meta
    assert local_tensor(local.gate_up_proj).shape == (2, WIDTH, HIDDEN)
    assert local.down_proj_bias is not None
    assert local_tensor(local.down_proj_bias).shape == (2, HIDDEN // 2)
    assert local.gate_up_proj.shape == (NUM_EXPERTS, 2 * WIDTH, HIDDEN)
    assert local.gate_up_proj.placements == (Shard(0), _StridedShard(1, split_factor=2))


def test_frozen_experts_stay_frozen() -> None:
    local = whole_experts().requires_grad_(False)
    split_experts(local, at(2, 1))
    assert not any(parameter.requires_grad for parameter in local.parameters())


def test_experts_that_ep_or_etp_cannot_divide_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        split_experts(whole_experts(), at(3, 5))
    assert caught.value.problems == (
        "mesh.ep: expected a divisor of the 8 experts, got 3; choose one of 1, 2, 4, 8",
        "mesh.etp: expected a divisor of the 12 columns of an expert's width, got 5; "
        "choose one of 1, 2, 3, 4, 6, 12",
        "mesh.etp: expected a divisor of the 8 hidden elements of the experts' bias, got 5; "
        "choose one of 1, 2, 4, 8",
    )


def test_weights_that_modules_share_are_shared_when_they_are_split() -> None:
    experts, others = whole_experts(), whole_experts()
    others.down_proj = experts.down_proj
    split_experts(experts, at(2, 1))
    split_experts(others, at(2, 1))
    assert others.down_proj is experts.down_proj
    assert others.gate_up_proj is not experts.gate_up_proj


def test_experts_are_split_once_only() -> None:
    experts = whole_experts()
    split_experts(experts, at(2, 1))
    with pytest.raises(AssertionError, match="split already"):
        split_experts(experts, at(2, 1))
