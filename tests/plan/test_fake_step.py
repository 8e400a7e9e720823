"""A training step without values, as one rank of a world that is not there, against its plan."""

import pytest

from fsdmoe.config import Config, build_config
from fsdmoe.errors import ConfigError
from fsdmoe.plan.fake_step import fake_step, planned_step


def config(world_size: int, **sections: dict[str, object]) -> Config:
    given: dict[str, dict[str, object]] = {
        "model": {"preset": "qwen3-30b-a3b", "num_hidden_layers": 2},
        "mesh": {"ep": 8},
        "data": {"seq_len": 4096},
        "precision": {"param_dtype": "float32"},
        "train": {"micro_batch_size": 1, "global_batch_size": world_size},
    }
    problems: list[str] = []
    built = build_config(given | sections, {}, world_size, problems, needs_data=False)
    assert built is not None, problems
    return built


@pytest.mark.full
def test_a_rank_of_1024_holds_and_keeps_what_is_planned() -> None:
    wanted = config(1024)
    found, plan = fake_step(wanted, 1024), planned_step(wanted, 1024)
    states = plan.states + plan.gather_slots + plan.grad_slots
    print(found, states, plan.activations, plan.total - plan.context - plan.slack)
    assert states == pytest.approx(found.states, rel=0.01)
    assert plan.activations == pytest.approx(found.kept, rel=0.1)  # what the loss keeps is counted too
    assert plan.total - plan.context - plan.slack == pytest.approx(found.peak, rel=0.05)


def test_memory_that_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected everything on the device"):
        fake_step(config(8, optim={"state_offload": 0.5}), 8)
