"""Main weights in bfloat16 that are rounded by chance: right on average, the same bits on every mesh."""

import pytest
import torch

from fsdmoe.core.errors import ConfigError
from fsdmoe.kernels.adamw_step import AdamWStep, adamw_small_reference_
from fsdmoe.optim import AdamW
from fsdmoe.precision import PrecisionConfig
from fsdmoe.precision.block_floats import ElementPlace
from fsdmoe.testing import run_ranks
from tests.support.moment_case import State, build, state_of, step

BY_CHANCE = PrecisionConfig(main_dtype="bfloat16", main_rounding="stochastic")


def train(degrees: dict[str, int], share: float = 0.0) -> State:
    model = build(degrees, BY_CHANCE)
    optimizer = AdamW(model, lr=1e-3, betas=(0.9, 0.95), moment_dtype=torch.bfloat16, state_offload=share)
    for number in range(2):
        step(model, optimizer, number)
    return state_of(model, optimizer)


def test_no_mesh_and_no_place_of_moments_changes_a_bit() -> None:
    wanted = run_ranks(train, 1, {})[0]
    assert run_ranks(train, 2, {"ep": 2}, 0.5)[0] == wanted
    assert run_ranks(train, 2, {"tp": 2})[0] == wanted


@pytest.mark.full
@pytest.mark.parametrize(("world", "degrees"), [(3, {}), (4, {"ep": 2}), (4, {"ep": 2, "etp": 2})])
def test_nor_does_any_other_mesh(world: int, degrees: dict[str, int]) -> None:
    assert run_ranks(train, world, degrees)[0] == run_ranks(train, 1, {})[0]


def moved(*, stochastic: bool) -> torch.Tensor:
    """Of 64K weights of 1, after ten updates by 2^-12 each: a sixteenth of what bfloat16 can tell apart below
    1."""
    count, place = 1 << 16, ElementPlace(salt=7, start=0, run=1 << 16, stride=1 << 16, offset=0)
    main, grad = torch.ones(count, dtype=torch.bfloat16), torch.ones(count)
    first, second = torch.ones(count), torch.ones(count)
    for number in range(10):
        numbers = AdamWStep(
            lr=2**-12, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, step=torch.tensor(number + 1.0)
        )
        adamw_small_reference_(main, grad, first, second, numbers, place, stochastic=stochastic)
    return 1 - main.float()


def test_updates_that_are_too_small_for_the_format_are_right_on_average() -> None:
    assert not moved(stochastic=False).any()
    found = moved(stochastic=True)
    assert found.mean().item() == pytest.approx(10 * 2**-12, rel=0.03)
    assert set(found.unique().tolist()) <= {n * 2**-8 for n in range(11)}


def test_it_is_refused_where_it_would_do_nothing() -> None:
    with pytest.raises(ConfigError, match=r"precision\.main_rounding: stochastic is for .* got float32"):
        PrecisionConfig(main_rounding="stochastic")
