"""What is emulated has no price; what kernels compute has one."""

from fsdmoe.plan import GPUS
from fsdmoe.plan.low_precision import faster_parts, why_no_price
from fsdmoe.precision.config import PrecisionConfig


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
