"""Which engine a GPU gets by its compute capability; the GPU is made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fsdmoe.config.compatibility import own_where_needed, refuse_sections
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.kernels import architecture, backend, te_products, torchao_products
from fsdmoe.kernels.libraries import LIBRARIES
from fsdmoe.kernels.recipe_support import check_recipe, chosen_backend
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import MeshConfig, resolve_degrees
from fsdmoe.parallel.build import ParallelPolicy
from fsdmoe.precision import PrecisionConfig
from fsdmoe.precision.config import Backend
from fsdmoe.run.facts import _devices_text

HOPPER, BLACKWELL, BLACKWELL_ULTRA, GEFORCE = (9, 0), (10, 0), (10, 3), (12, 0)
FP8_RECIPES = ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A GPU of this compute capability, with CUDA 13."""
    with (
        mock.patch.object(architecture, "capability", return_value=request.param),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_name", return_value="a made-up GPU"),
        mock.patch.object(torch.version, "cuda", "13.0"),
    ):
        yield


def test_no_other_file_compares_a_capability_with_hoppers() -> None:
    package = Path(backend.__file__).parents[1]
    found = [path.name for path in package.rglob("*.py") if "(9, 0)" in path.read_text()]
    assert found == ["architecture.py"]


def outcome(precision: PrecisionConfig) -> str:
    """Whose products a run would take, or why it is refused."""
    try:
        check_recipe(precision)
    except ConfigError as error:
        return str(error)
    return chosen_backend(precision)


@pytest.mark.parametrize(
    ("gpu", "name"),
    [(HOPPER, "hopper"), (BLACKWELL, "blackwell"), (BLACKWELL_ULTRA, "blackwell"), (GEFORCE, "other")],
    indirect=["gpu"],
)
@pytest.mark.usefixtures("gpu")
def test_a_capability_is_read_in_one_place(name: str) -> None:
    assert architecture.current_architecture() == name
    assert backend.has_fp8_kernels() == backend.has_fp8_products() == (name == "hopper")


@pytest.mark.parametrize("gpu", [BLACKWELL], indirect=True)
@pytest.mark.usefixtures("gpu")
def test_blackwell_takes_torchao_where_it_covers_all_and_refuses_the_rest_by_name() -> None:
    linear = ("attention", "dense", "shared")
    assert outcome(PrecisionConfig(recipe="mxfp8")) == "torchao"
    assert outcome(PrecisionConfig(recipe="fp8_rowwise")) == "torchao"
    assert outcome(PrecisionConfig(recipe="fp8_blockwise", covers=linear)) == "torchao"
    for refused in (
        PrecisionConfig(recipe="fp8_blockwise"),
        PrecisionConfig(recipe="nvfp4"),
        PrecisionConfig(recipe="fp8_blockwise", backend="own"),
    ):
        assert f"no kernels of {refused.recipe} for a made-up GPU" in outcome(refused)
    hint = outcome(PrecisionConfig(recipe="mxfp8", backend="own"))
    assert 'or precision.backend = "torchao", which has some' in hint


MXFP8 = PrecisionConfig(recipe="mxfp8")
LINEAR_IN_FP8 = PrecisionConfig(recipe="fp8_blockwise", covers=("attention", "dense", "shared"))


@pytest.mark.parametrize("gpu", [BLACKWELL], indirect=True)
@pytest.mark.parametrize(
    ("precision", "others"),
    [
        (MXFP8, {"experts": ExpertsConfig(clones=1)}),
        (LINEAR_IN_FP8, {"memory": MemoryConfig(keep="codes")}),
        (replace(LINEAR_IN_FP8, head="fp8"), {}),
        (MXFP8, {"train": SimpleNamespace(deterministic=True, graphs="none")}),
    ],
    ids=["clones", "codes", "head", "deterministic"],
)
@pytest.mark.usefixtures("gpu")
def test_blackwell_does_not_take_torchao_by_itself_where_the_table_refuses_it(
    precision: PrecisionConfig, others: dict[str, Any]
) -> None:
    asked = {**others, "precision": replace(precision, backend="torchao")}
    with pytest.raises(ConfigError, match=r'precision\.backend = "torchao"'):
        refuse_sections(asked)
    assert outcome(precision) == "torchao"
    own = own_where_needed({**others, "precision": precision})
    assert "there are no kernels" in outcome(own)
    assert outcome(replace(own, emulate=True)) == "own"


@pytest.mark.parametrize("gpu", [BLACKWELL], indirect=True)
@pytest.mark.usefixtures("gpu")
def test_what_a_policy_is_built_of_decides_too() -> None:
    assert ParallelPolicy(precision=MXFP8).precision.backend == "auto"
    with pytest.raises(ConfigError, match="there are no kernels"):
        ParallelPolicy(precision=MXFP8, experts=ExpertsConfig(clones=1))


@pytest.mark.parametrize(("gpu", "is_said"), [(HOPPER, False), (BLACKWELL, True)], indirect=["gpu"])
@pytest.mark.usefixtures("gpu")
def test_the_start_card_says_where_nothing_ever_ran(is_said: bool) -> None:
    meshes: Any = SimpleNamespace(
        device=torch.device("cuda"), size=lambda axis: 8, degrees=resolve_degrees(MeshConfig(ep=8), 8)
    )
    text = _devices_text(meshes)
    assert text.startswith("8 x a made-up GPU, ")
    assert text.endswith("; fsdmoe never ran on such a card") == is_said


@pytest.mark.parametrize("gpu", [HOPPER], indirect=True)
@pytest.mark.usefixtures("gpu")
def test_hopper_keeps_our_kernels_unless_torchao_is_asked_for() -> None:
    assert outcome(PrecisionConfig(recipe="fp8_blockwise")) == "own"
    assert outcome(PrecisionConfig(recipe="fp8_rowwise", backend="torchao")) == "torchao"
    assert "torchao has no kernels of mxfp8" in outcome(PrecisionConfig(recipe="mxfp8", backend="torchao"))
    assert outcome(PrecisionConfig(recipe="mxfp8", backend="torchao", emulate=True)) == "torchao"


@pytest.mark.parametrize("gpu", [GEFORCE], indirect=True)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.usefixtures("gpu")
def test_other_gpus_get_no_recipe_silently(recipe: str) -> None:
    assert f"no kernels of {recipe}" in outcome(PrecisionConfig(recipe=recipe))  # type: ignore[arg-type]


@pytest.mark.parametrize("gpu", [BLACKWELL], indirect=True)
@pytest.mark.usefixtures("gpu")
def test_blackwell_without_torchao_names_the_extra() -> None:
    with mock.patch.object(torchao_products.importlib.util, "find_spec", return_value=None):
        assert "pip install 'fsdmoe[torchao]'" in outcome(PrecisionConfig(recipe="mxfp8"))


@pytest.fixture
def te_is_there() -> Iterator[None]:
    with mock.patch.dict(LIBRARIES, te=LIBRARIES["te"]._replace(require=lambda: None)):
        yield


@pytest.mark.parametrize("gpu", [HOPPER], indirect=True)
@pytest.mark.usefixtures("gpu", "te_is_there")
def test_transformer_engine_on_hopper_takes_its_recipes_and_refuses_the_rest_by_name() -> None:
    for recipe in ("fp8_blockwise", "fp8_tensorwise"):
        assert outcome(PrecisionConfig(recipe=recipe, backend="te")) == "te"
    for recipe in ("fp8_rowwise", "mxfp8", "nvfp4"):
        message = outcome(PrecisionConfig(recipe=recipe, backend="te"))
        assert f"Transformer Engine has no kernels of {recipe} for a made-up GPU" in message
        assert 'set precision.backend = "own" with precision.emulate = true' in message
    # Experts by one scale each have no kernels of ours.
    hint = outcome(PrecisionConfig(recipe="fp8_tensorwise"))
    assert 'or precision.backend = "te", which has some (pip install --no-build-isolation' in hint


@pytest.mark.parametrize("gpu", [BLACKWELL], indirect=True)
@pytest.mark.usefixtures("gpu", "te_is_there")
def test_transformer_engine_on_blackwell_takes_the_formats_of_that_card() -> None:
    for recipe in ("mxfp8", "nvfp4", "fp8_tensorwise"):
        assert outcome(PrecisionConfig(recipe=recipe, backend="te")) == "te"
    message = outcome(PrecisionConfig(recipe="fp8_blockwise", backend="te"))
    assert "Transformer Engine has no kernels of fp8_blockwise" in message


@pytest.mark.parametrize("gpu", [HOPPER], indirect=True)
@pytest.mark.usefixtures("gpu")
def test_transformer_engine_that_is_not_there_names_the_extra() -> None:
    with mock.patch.object(te_products.importlib.util, "find_spec", return_value=None):
        message = outcome(PrecisionConfig(recipe="fp8_blockwise", backend="te"))
    assert "pip install --no-build-isolation 'fsdmoe[te]'" in message


@pytest.mark.parametrize("library", ["torchao", "te"])
def test_keys_that_other_libraries_do_not_know_are_refused(library: Backend) -> None:
    with pytest.raises(ConfigError, match=r"precision\.statistics: expected none with precision\.backend"):
        PrecisionConfig(recipe="fp8_tensorwise", backend=library, statistics=5)
    with pytest.raises(ConfigError, match=r"precision\.param_dtype: expected bfloat16"):
        PrecisionConfig(recipe="fp8_tensorwise", backend=library, param_dtype="float32")


def test_transformer_engine_emulates_nothing() -> None:
    with pytest.raises(ConfigError, match=r"precision\.emulate: expected false with precision\.backend"):
        PrecisionConfig(recipe="fp8_blockwise", backend="te", emulate=True)
