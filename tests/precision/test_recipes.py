"""Recipes by name, and the keys around them."""

from typing import Any

import pytest

from fsdmoe.core.errors import ConfigError
from fsdmoe.precision import PrecisionConfig
from fsdmoe.precision.formats import E4M3, E5M2, FP8_BLOCKWISE, blockwise_scale
from fsdmoe.precision.recipes import RECIPES, build_recipe


def test_bf16_quantises_nothing() -> None:
    assert PrecisionConfig().build_recipe() is None


@pytest.mark.parametrize("name", RECIPES[1:])
def test_weights_have_the_same_blocks_in_forward_and_backward_but_for_formats_along_one_dim(
    name: str,
) -> None:
    """Square blocks mean that one copy of the codes serves both products."""
    recipe = build_recipe(name)  # type: ignore[arg-type]
    assert recipe is not None
    assert recipe.name == ("fp8_blockwise" if name == "fp8_fast" else name)
    rows, columns = recipe.forward.second.block
    is_square = rows == columns
    assert is_square == (name in ("fp8_blockwise", "fp8_fast", "fp8_tensorwise", "nvfp4"))
    assert recipe.forward.second.block == recipe.dgrad.second.block


def test_the_format_of_gradients_and_powers_of_two_are_keys() -> None:
    plain = PrecisionConfig(recipe="fp8_blockwise", emulate=True).build_recipe()
    changed = PrecisionConfig(
        recipe="fp8_blockwise", emulate=True, gradient_format="e5m2", power_of_two_scales=True
    ).build_recipe()
    assert plain is not None
    assert changed is not None
    assert (plain.dgrad.first.element, changed.dgrad.first.element) == (E4M3, E5M2)
    assert changed.wgrad.first.element == E5M2
    assert changed.wgrad.second.element == E4M3
    assert {p.scale for p in (changed.forward.first, changed.wgrad.second)} == {"power_of_two"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"recipe": "fp8"}, "nvfp4, got 'fp8'; did you mean fp8_blockwise"),
        ({"recipe": "mxfp8", "covers": ("expert",)}, "precision.covers: expected one of experts"),
        ({"recipe": "mxfp8", "keep_last_layers": -1}, "precision.keep_last_layers: expected 0 or more"),
        ({"recipe": "nvfp4", "gradient_format": "e5m2"}, "precision.gradient_format: expected an fp8 recipe"),
        ({"recipe": "mxfp8", "power_of_two_scales": True}, "precision.power_of_two_scales: expected an fp8"),
        ({"emulate": True}, "precision.emulate: expected a recipe that it says something of"),
        ({"keep": ("*.o_proj",)}, "precision.keep: expected a recipe"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        PrecisionConfig(**keys)


def test_kernels_of_experts_know_the_recipe_that_they_compute() -> None:
    kinds = {False: "float32", True: "power_of_two"}
    for name in RECIPES[1:]:
        for powers, kind in kinds.items():
            recipe = build_recipe(name, power_of_two_scales=powers)
            assert recipe is not None
            assert blockwise_scale(recipe) == (kind if name in ("fp8_blockwise", "fp8_fast") else None)
    in_e5m2 = build_recipe("fp8_blockwise", gradients=E5M2)
    assert in_e5m2 is not None
    assert blockwise_scale(in_e5m2) is None


def test_a_name_whose_kernels_went_is_computed_by_its_successor() -> None:
    assert PrecisionConfig(recipe="fp8_fast").build_recipe() == FP8_BLOCKWISE
