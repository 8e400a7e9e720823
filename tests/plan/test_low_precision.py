"""What is emulated has no price; what kernels compute has one."""

from dataclasses import replace

import pytest

from fsdmoe.plan import GPUS, Job
from fsdmoe.plan.loads import Loads, Skew
from fsdmoe.plan.low_precision import faster_parts, why_no_price
from fsdmoe.plan.search import search
from fsdmoe.plan.source import Fixed, Request, read_request
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.recipes import RecipeName


def test_parts_without_kernels_are_named_for_each_gpu() -> None:
    def emulated(recipe: str) -> PrecisionConfig:
        return PrecisionConfig(recipe=recipe, emulate=True)  # type: ignore[arg-type]

    assert why_no_price(PrecisionConfig(), GPUS["gb200"]) == ""
    assert why_no_price(emulated("fp8_blockwise"), GPUS["h100"]) == "", (
        "emulated only where nothing else does"
    )
    assert "fp8_rowwise of experts is emulated on h100" in why_no_price(emulated("fp8_rowwise"), GPUS["h100"])
    assert faster_parts(emulated("fp8_rowwise"), GPUS["h100"]) == {"attention", "dense", "shared"}
    for gpu in ("a100", "b200", "gb300"):
        assert f"is emulated on {gpu}" in why_no_price(emulated("fp8_blockwise"), GPUS[gpu])


def test_without_emulation_a_gpu_without_kernels_has_no_price() -> None:
    blockwise = PrecisionConfig(recipe="fp8_blockwise")
    assert why_no_price(blockwise, GPUS["h100"]) == ""
    assert "gb200 has no kernels of fp8_blockwise for experts" in why_no_price(blockwise, GPUS["gb200"])
    assert why_no_price(PrecisionConfig(recipe="mxfp8"), GPUS["gb200"]) == "", "torchao's"


@pytest.mark.parametrize(
    ("gpu", "recipe", "has_clones"), [("h200", "fp8_blockwise", True), ("b200", "mxfp8", False)]
)
def test_clones_are_proposed_where_they_go_with_the_products_of_the_gpu(
    gpu: str, recipe: RecipeName, has_clones: bool
) -> None:
    wanted = read_request(Request("qwen3-30b-a3b", 8, gpu, 4096, 2**18))
    config = replace(wanted.config, precision=PrecisionConfig(recipe=recipe))
    job = replace(Job.of(config), loads=Loads(Skew(2.0, 1.5)))
    fixed = Fixed(tp=1, cp=1, ep=8, dp_outer=1, micro_batch=1, recompute="none")
    best = search(config, job, GPUS[gpu], 8, fixed).best
    assert (best.setting.experts.clones > 0) is has_clones


def test_another_library_is_priced_by_what_it_computes() -> None:
    tensorwise = PrecisionConfig(recipe="fp8_tensorwise", backend="te")
    assert "experts" in faster_parts(tensorwise, GPUS["h100"])
    assert "experts" not in faster_parts(PrecisionConfig(recipe="fp8_tensorwise"), GPUS["h100"])
    rowwise = PrecisionConfig(recipe="fp8_rowwise", backend="te")
    assert "h100 has no kernels of fp8_rowwise for experts, attention" in why_no_price(rowwise, GPUS["h100"])
