"""A training step without values, as one rank of a world that is not there, against its plan."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fsdmoe.config import Config, build_config
from fsdmoe.core import labels
from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.linear import add_product_
from fsdmoe.plan.fake_kernels import kernels_left_out
from fsdmoe.plan.fake_step import fake_step, planned_step


def config(world_size: int, **sections: dict[str, object]) -> Config:
    given: dict[str, dict[str, object]] = {
        "model": {"preset": "qwen3-30b-a3b", "num_hidden_layers": 2},
        "mesh": {"ep": 8},
        "data": {"seq_len": 4096},
        "train": {"micro_batch_size": 1, "global_batch_size": world_size},
    }
    problems: list[str] = []
    built = build_config(given | sections, {}, world_size, problems, needs_data=False)
    assert built is not None, problems
    return built


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        ({"preset": "qwen3-30b-a3b", "num_hidden_layers": 4}, ()),
        ({"preset": "mixtral-8x22b", "num_hidden_layers": 3}, ("norms", "experts")),
        ({"preset": "deepseek-v3", "num_hidden_layers": 5}, ("norms", "mla_up")),
        ({"preset": "deepseek-v3", "num_hidden_layers": 5}, ("layer",)),
    ],
    ids=["qwen3", "mixtral", "latents", "whole-layers"],
)
def test_a_rank_of_1024_holds_and_keeps_what_is_planned(
    model: dict[str, object], recompute: tuple[str, ...]
) -> None:
    wanted = config(1024, model=model, memory={"recompute": recompute})
    found, plan = fake_step(wanted, 1024), planned_step(wanted, 1024)
    print(found, plan)
    assert plan.states == pytest.approx(found.states, rel=0.01)
    assert plan.kept == pytest.approx(found.kept, rel=0.02)
    assert plan.peak == pytest.approx(found.peak, rel=0.05)


@pytest.mark.full
def test_sub_batches_hold_no_more_than_whole_micro_batches() -> None:
    """So a plan need not tell them apart."""
    pytest.importorskip("triton", reason="layers are those of a GPU")
    train: dict[str, object] = {"micro_batch_size": 2, "global_batch_size": 16}
    model: dict[str, object] = {"preset": "qwen3-30b-a3b", "num_hidden_layers": 1}
    whole, halves = (
        fake_step(config(8, model=model, train=train, experts={"sub_batches": number}), 8)
        for number in (1, 2)
    )
    assert halves.kept == pytest.approx(whole.kept, rel=0.01)
    assert halves.peak < 1.01 * whole.peak


def test_products_into_float32_gradients_are_left_out() -> None:
    """Torch 2.11 fails at them on fake tensors, whatever is asked of a GPU."""
    pytest.importorskip("triton", reason="layers are those of a GPU")
    with FakeTensorMode(), kernels_left_out(), mock.patch.object(torch, "addmm") as product:
        factors = torch.zeros(2, 8, 8, dtype=torch.bfloat16)
        add_product_(torch.zeros(8, 8), *factors, accumulate=True)
    assert product.call_count == 0, f"torch was asked for {product.call_args}"


def test_memory_that_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected everything on the device"):
        fake_step(config(8, optim={"state_offload": 0.5}), 8)


def test_what_is_replaced_for_a_fake_step_is_put_back() -> None:
    launch = pytest.importorskip("fsdmoe.kernels.triton.launch", reason="Triton is not installed")
    before = F.scaled_dot_product_attention, launch.QuickLaunch._launch, labels._notes
    with kernels_left_out():
        assert F.scaled_dot_product_attention is not before[0]
    assert before == (F.scaled_dot_product_attention, launch.QuickLaunch._launch, labels._notes)
    assert "data_ptr" not in vars(FakeTensor)
