"""Recipes by name, and the keys around them."""

from typing import Any

import pytest

from fsdmoe.errors import ConfigError
from fsdmoe.formats import E4M3, E5M2, blockwise_scale, fast_scale
from fsdmoe.precision import PrecisionConfig
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
    assert recipe.name == name
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
        ({"recipe": "fp8"}, "precision.recipe: expected one of bf16"),
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


@pytest.mark.parametrize(("name", "scale_of"), [("fp8_blockwise", blockwise_scale), ("fp8_fast", fast_scale)])
def test_kernels_know_the_recipe_that_they_compute(name: str, scale_of: Any) -> None:
    kinds = {False: "float32", True: "power_of_two"}
    for other in RECIPES[1:]:
        for powers, kind in kinds.items():
            recipe = build_recipe(other, power_of_two_scales=powers)
            assert recipe is not None
            assert scale_of(recipe) == (kind if other == name else None)
    in_e5m2 = build_recipe(name, gradients=E5M2)  # type: ignore[arg-type]
    assert in_e5m2 is not None
    assert scale_of(in_e5m2) is None


def test_in_experts_of_fp8_fast_one_delayed_scale_serves_all_products_of_what_passes_between() -> None:
    recipe = build_recipe("fp8_fast", gradients=E5M2, power_of_two_scales=True)
    assert recipe is not None
    first, second = recipe.of_experts()
    assert first.dgrad.first == first.wgrad.first == recipe.wgrad.first  # d pre
    assert second.forward.first == second.wgrad.second == recipe.wgrad.second  # the activation
    assert first.dgrad.first.delayed
    assert second.forward.first.delayed
    assert (first.forward.first, second.dgrad.first) == (recipe.forward.first, recipe.dgrad.first)
    assert not first.wgrad.second.delayed  # x and dy: sorted beforehand, so their own
    assert not second.wgrad.first.delayed
    blockwise = build_recipe("fp8_blockwise")
    assert blockwise is not None
    assert blockwise.of_experts() == (blockwise, blockwise)
