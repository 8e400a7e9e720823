"""Initial weights depend on the seed and on names, never on the layout."""

import torch
from torch import nn
from torch.distributed.tensor import Shard

from fsdmoe.core.placement import Placement, halves, placed_parameter
from fsdmoe.mesh import Axis
from fsdmoe.models import Initializer, build_model, materialize, preset_config
from tests.support.coordinates import At


def weights(seed: int) -> dict[str, torch.Tensor]:
    model = build_model(preset_config("tiny-qwen3"))
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, torch.device("cpu"), Initializer(seed, 0.02, At()))
    return dict(model.named_parameters())


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, again, other = weights(0), weights(0), weights(1)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        if value.ndim > 1:
            assert not torch.equal(value, other[name]), name
            assert abs(value.std().item() - 0.02) < 0.004, name
        else:
            assert torch.equal(value, torch.ones_like(value)), name


def test_parameters_of_the_same_shape_differ() -> None:
    layers = [value for name, value in weights(0).items() if name.endswith("q_proj.weight")]
    assert len(layers) == 2
    assert not torch.equal(*layers)


def test_expert_and_width_splits_hold_their_piece_of_the_same_tensor() -> None:
    num_experts, width, hidden = 4, 6, 5
    placement = Placement((num_experts, 2 * width, hidden), ((Axis.EP, Shard(0)), (Axis.ETP, halves(1))))
    whole = torch.empty(placement.global_shape)
    Initializer(0, 0.02, At())("gate_up", nn.Parameter(whole), whole)
    for ep in range(2):
        for etp in range(3):
            at = At({Axis.EP: 2, Axis.ETP: 3}, {Axis.EP: ep, Axis.ETP: etp})
            local = torch.full(placement.local_shape(at), float("nan"))
            Initializer(0, 0.02, at)("gate_up", placed_parameter(local, placement, at), local)
            expected = whole.view(num_experts, 2, width, hidden)[
                2 * ep : 2 * ep + 2, :, 2 * etp : 2 * etp + 2
            ]
            assert torch.equal(local.view(2, 2, 2, hidden), expected)
