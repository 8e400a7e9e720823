"""Plans that are refused, and what splitting leaves on a rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import local_tensor, placement_of
from fsdmoe.mesh import Axis
from fsdmoe.models import build_model
from fsdmoe.tensor_parallel.divide import check_tensor_parallel
from fsdmoe.tensor_parallel.group import TensorGroup
from fsdmoe.tensor_parallel.split import TensorPlan, split_tensors
from tests.support.coordinates import At
from tests.support.parallel_case import MODELS

SECOND = At({Axis.TP: 2}, {Axis.TP: 1})


class Layer(nn.Module):
    def __init__(self, plan: TensorPlan) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.tensor, self._plan = TensorGroup(), plan

    def tensor_plan(self) -> TensorPlan:
        return self._plan


PLAN: TensorPlan = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": "tokens"}


def test_each_rank_keeps_its_slice_and_knows_where_it_stands() -> None:
    model = nn.Sequential(Layer(PLAN))
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    split_tensors(model, SECOND)
    layer = model[0]
    assert torch.equal(local_tensor(layer.up.weight), whole["0.up.weight"][4:])
    assert torch.equal(local_tensor(layer.down.weight), whole["0.down.weight"][:, 4:])
    assert torch.equal(layer.down.bias, whole["0.down.bias"])
    assert placement_of(layer.down.weight, SECOND).cuts == ((Axis.TP, Shard(1)),)
    assert layer.down.weight.placements == (Shard(1),)
    assert placement_of(layer.down.bias, SECOND).cuts == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down.bias": None}, r"plan of 0 does not say what becomes of down\.bias; name the dim"),
        ({"down.bias": "gathered"}, r"expected a dim, 'tokens' or 'heads' for down\.bias"),
        ({"gate.weight": 0}, r"names gate\.weight, which the module does not have"),
        ({}, r"plan of 0 does not say what becomes of down\.bias"),
    ],
)
def test_a_plan_that_would_count_gradients_twice_is_refused(change: dict[str, object], message: str) -> None:
    plan = {} if not change else {n: value for n, value in (PLAN | change).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        split_tensors(nn.Sequential(Layer(plan)), SECOND)  # type: ignore[arg-type]


def test_tied_weights_stay_tied() -> None:
    model = build_model(MODELS["mixtral"])
    split_tensors(model, SECOND)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert local_tensor(model.lm_head.weight).shape[0] == MODELS["mixtral"].vocab_size // 2


@pytest.mark.parametrize("family", MODELS)
def test_every_parameter_of_a_decoder_is_split_or_sees_its_own_tokens(family: str) -> None:
    model = build_model(MODELS[family])
    names = {name for name, _ in model.named_parameters()}
    split_tensors(model, SECOND)
    split = {name for name, p in model.named_parameters() if placement_of(p, SECOND).splits_over(Axis.TP)}
    assert names == {name for name, _ in model.named_parameters()}
    whole = ("norm", "experts", "gate.weight", "o_proj.bias", "q_a_", "kv_a_", "eh_proj")
    assert not [name for name in names - split if not any(part in name for part in whole)]


@pytest.mark.parametrize(
    ("tp", "message"), [(3, "got 3; choose 2 or 4"), (8, "got 8; choose 4"), (5, "got 5; choose 4")]
)
def test_a_degree_that_does_not_divide_names_the_nearest_that_does(tp: int, message: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"mesh\.tp: expected a divisor of 16 and 4 heads, 64 tokens .*{message}$"
    ):
        check_tensor_parallel(tp, heads=(16, 4), vocab_size=64, widths=(128,))
