"""The ``precision`` section: in which number formats weights, gradients and main weights are stored and
sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import at_least, one_of
from fsdmoe.precision.formats import ELEMENTS, DeployedFormat, Recipe
from fsdmoe.precision.loss_scale import LossScaleConfig, LossScaler
from fsdmoe.precision.recipes import RECIPES, RecipeName, build_recipe

if TYPE_CHECKING:
    import torch

Part = Literal["experts", "attention", "dense", "shared"]
"""Of a decoder layer: routed experts, projections of attention, MLPs without experts, shared experts."""
ComputeDtype = Literal["bfloat16", "float16", "float32"]
MainDtype = Literal["float32", "bfloat16"]
FrozenDtype = Literal["float8", "nf4", "int4"]
Backend = Literal["auto", "own", "torchao", "te"]
OWN_KEYS = ("gradient_format", "power_of_two_scales", "statistics", "quantized_weights", "frozen_dtype")
"""What only fsdmoe's own kernels and emulation know."""
FOUR_BIT_BLOCKS = {"nf4": 64, "int4": 128}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of a run."""

    param_dtype: ComputeDtype = "bfloat16"
    """What modules compute with, and what is sent when weights are gathered. float16 needs loss_scale."""
    reduce_dtype: ComputeDtype = "float32"
    """What gradients are collected and summed across ranks in. bfloat16 halves their buffers and their
    traffic, and sums in bfloat16; fsdp.grad_exchange = "bf16_all_to_all" halves the traffic only, and still
    sums in float32."""
    main_dtype: MainDtype = "float32"
    """What the optimizer updates: the main weights."""
    grad_dtype: MainDtype | None = None
    """What main gradients, which the optimizer reads, are kept in, and added up in over micro-batches; none
    takes main_dtype. bfloat16 next to float32 main weights halves their memory (docs/small_states.md)."""
    main_rounding: Literal["nearest", "stochastic"] = "nearest"
    """With main_dtype = "bfloat16" and AdamW: how an updated main weight is rounded. stochastic: up or down
    by chance, in proportion, so that updates too small to change a weight are right on average; the chance is
    drawn from the element's place in its parameter and the step, so that no mesh changes a number."""
    output_dtype: ComputeDtype | None = None
    """What floating-point outputs of the whole model are cast to; none leaves them as they come."""
    recipe: RecipeName = "bf16"
    """How matrix products of decoder layers are quantised (docs/low_precision.md). Routers, norms and the
    embedding never are, the head by precision.head."""
    backend: Backend = "auto"
    """With a recipe: whose kernels quantise and multiply. own: fsdmoe's, for Hopper. torchao: torchao's, for
    Hopper and Blackwell. te: Transformer Engine's, for the same. auto: fsdmoe's, and torchao's on Blackwell
    (docs/low_precision.md)."""
    head: Literal["bf16", "fp8"] = "bf16"
    """With recipe = "fp8_blockwise": how the loss multiplies with the head's weight. bf16: in param_dtype.
    fp8: logits and gradients of hidden states by products in fp8, with the recipe's scales; the weight's
    gradient stays in param_dtype, summed in float32 (docs/low_precision.md)."""
    covers: tuple[Part, ...] = get_args(Part)
    """With a recipe: the parts that it covers."""
    keep_first_layers: int = 0
    """With a recipe: so many layers at the start stay in param_dtype."""
    keep_last_layers: int = 0
    """With a recipe: so many layers at the end stay in param_dtype."""
    keep: tuple[str, ...] = ()
    """With a recipe: modules that stay in param_dtype, as patterns of their names ("*.o_proj")."""
    gradient_format: Literal["e4m3", "e5m2"] | None = None
    """With an fp8 recipe: the format of gradients in products; none takes the recipe's own."""
    power_of_two_scales: bool = False
    """With an fp8 recipe: round scales up to powers of two, which change no mantissa."""
    statistics: int = 0
    """With a recipe: in every so many steps, log of each operand of covered layers its largest magnitude, the
    shares that became zero and that were clipped, and how many scales there are of each power of two. 0
    never, and costs nothing."""
    quantized_weights: bool = False
    """With fp8_blockwise or fp8_tensorwise: weights of covered layers are quantised once per optimizer step,
    sharded and gathered as fp8: half the traffic and half the gathered buffers of bfloat16. Main weights stay
    what they are."""
    frozen_dtype: FrozenDtype | None = None
    """What frozen matrices of decoder layers are kept and sent in, and decoded from where they are used.
    float8: E4M3 with a scale for each block of 128 x 128, half of the memory of bfloat16; with recipe =
    "fp8_blockwise", products of covered layers take the codes as they are. nf4: torchao's
    NF4, 16 quantiles of a normal distribution with a scale for each 64 elements, 0.53 bytes an element.
    int4: torchao's int4, scale and zero for each 128 elements, 0.53 bytes. none is param_dtype. For adapters
    (docs/adapters.md)."""
    frozen_block: int | None = None
    """With frozen_dtype = "nf4" or "int4": how many elements share a scale, a power of two; none is 64 for
    nf4 and 128 for int4. Rows that are no multiple of it stay in param_dtype."""
    qat: DeployedFormat | None = None
    """Quantisation-aware training: forward and backward compute with weights rounded to the format that they
    are going to be served in, gradients go to the weights that were not rounded, and to-hf writes that format
    (docs/qat.md). int4: blocks of 32; mxfp4, nvfp4; fp8: E4M3 with a scale a row; none rounds nothing."""
    qat_modules: tuple[str, ...] = ("*.experts",)
    """With qat: the modules whose weights are rounded, as patterns of their names: experts, and projections
    of attention, of MLPs and of shared experts ("*.self_attn.*_proj"). Others never are."""
    emulate: bool = False
    """Round the operands of a recipe and multiply them in float32 or, on Hopper, in bfloat16, where nothing
    is lost by it: for studying its numerics where the device has no kernels for it. What is rounded is exact,
    but it is slower than bfloat16, and saves neither memory nor traffic."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """For param_dtype or reduce_dtype = "float16" only: what keeps gradients inside of its range."""

    def __post_init__(self) -> None:
        allowed = {
            "param_dtype": get_args(ComputeDtype), "reduce_dtype": get_args(ComputeDtype),
            "main_dtype": get_args(MainDtype), "grad_dtype": (*get_args(MainDtype), None),
            "main_rounding": ("nearest", "stochastic"),
            "output_dtype": (*get_args(ComputeDtype), None),
            "recipe": RECIPES, "backend": get_args(Backend), "gradient_format": ("e4m3", "e5m2", None),
            "head": ("bf16", "fp8"), "frozen_dtype": (*get_args(FrozenDtype), None),
            "frozen_block": (32, 64, 128, 256, 512, None),
            "qat": (*get_args(DeployedFormat), None),
        }  # fmt: skip
        problems = one_of("precision", vars(self), allowed)
        problems += at_least(
            "precision", vars(self), {"keep_first_layers": 0, "keep_last_layers": 0, "statistics": 0}
        )
        for part in self.covers:
            problems += one_of("precision", {"covers": part}, {"covers": get_args(Part)})
        if self.main_rounding == "stochastic" and self.main_dtype != "bfloat16":
            problems.append(
                "precision.main_rounding: stochastic is for precision.main_dtype = bfloat16, got "
                f"{self.main_dtype}; set main_dtype, or drop the line"
            )
        if self.frozen_block is not None and self.frozen_dtype not in FOUR_BIT_BLOCKS:
            problems.append(
                'precision.frozen_block: expected precision.frozen_dtype = "nf4" or "int4", got '
                f"{self.frozen_dtype or 'none'}; set that, or drop the line"
            )
        refuse(problems or self._qat_problems() + self._recipe_problems())

    def _qat_problems(self) -> list[str]:
        """Keys that say something else of the same weights than ``qat`` does, or nothing without it."""
        if self.qat is None:
            is_default = self.qat_modules == PrecisionConfig.__dataclass_fields__["qat_modules"].default
            return [] if is_default else [
                'precision.qat_modules: expected precision.qat with it, got "none"; choose a format, or drop '
                "the line"
            ]  # fmt: skip
        problems = []
        if self.recipe != "bf16":
            problems.append(
                f'precision.qat: expected precision.recipe = "bf16", got "{self.recipe}", which rounds the '
                "same weights a second time, otherwise; drop one of them"
            )
        if self.frozen_dtype is not None:
            problems.append(
                f'precision.qat: expected precision.frozen_dtype = "none", got "{self.frozen_dtype}", which '
                "is another format for the same weights; drop one of them"
            )
        if not self.qat_modules:
            problems.append(
                'precision.qat_modules: expected patterns of names, got none; write ["*.experts"], or '
                'precision.qat = "none"'
            )
        return problems

    def _recipe_problems(self) -> list[str]:
        """Keys that the recipe leaves without effect."""
        problems = []
        if self.backend not in ("auto", "own"):
            problems += [
                f'precision.{key}: expected none with precision.backend = "{self.backend}", which quantises '
                f'in its own way, got {getattr(self, key)}; drop the line, or set precision.backend = "own"'
                for key in OWN_KEYS
                if getattr(self, key)
            ]
            if self.param_dtype != "bfloat16":
                problems.append(
                    f'precision.param_dtype: expected bfloat16 with precision.backend = "{self.backend}", '
                    f"whose products take no other, got {self.param_dtype}; set it, or precision.backend = "
                    '"own"'
                )
        if self.backend == "te" and self.emulate:
            problems.append(
                'precision.emulate: expected false with precision.backend = "te", which emulates nothing; '
                'drop the line, or set precision.backend = "own"'
            )
        if self.frozen_dtype not in (None, "float8") and self.recipe != "bf16":
            problems.append(
                f'precision.frozen_dtype: expected "float8" with precision.recipe = {self.recipe}, got '
                f'{self.frozen_dtype}, whose codes no product takes; set "float8", or recipe = "bf16"'
            )
        if self.frozen_dtype == "float8" and self.recipe not in ("bf16", "fp8_blockwise", "fp8_fast"):
            problems.append(
                "precision.frozen_dtype: expected precision.recipe = fp8_blockwise, whose products take its "
                f"codes, or bf16, got {self.recipe}; set one of them, or drop frozen_dtype"
            )
        if self.head == "fp8" and self.recipe not in ("fp8_blockwise", "fp8_fast"):
            problems.append(
                'precision.head: expected precision.recipe = "fp8_blockwise", whose scales fp8 takes, got '
                f'"{self.recipe}"; choose that recipe, or set precision.head = "bf16"'
            )
        if self.recipe == "bf16":
            defaults = PrecisionConfig.__dataclass_fields__
            idle = (
                "backend",
                "covers",
                "keep_first_layers",
                "keep_last_layers",
                "keep",
                "statistics",
                "quantized_weights",
                "emulate",
            )
            problems += [
                f"precision.{key}: expected a recipe that it says something of, got precision.recipe = bf16; "
                "choose one, or drop the line"
                for key in idle
                if getattr(self, key) != defaults[key].default
            ]
        if not self.recipe.startswith("fp8_"):
            problems += [
                f"precision.{key}: expected an fp8 recipe, got precision.recipe = {self.recipe}, whose "
                "formats are fixed; drop the line"
                for key in ("gradient_format", "power_of_two_scales")
                if getattr(self, key)
            ]
        recipe = None if problems else self.build_recipe()
        if self.quantized_weights and recipe is not None and recipe.gather_scaling is None:
            problems.append(
                f"precision.quantized_weights: {self.recipe} quantises weights along the contraction of each "
                "product, so that two copies would travel; choose fp8_blockwise or fp8_tensorwise, or set it "
                "to false"
            )
        return problems

    @property
    def four_bit_block(self) -> int:
        """Elements that share a scale of frozen weights in four bits; 0 where there are none."""
        return self.frozen_block or FOUR_BIT_BLOCKS.get(self.frozen_dtype or "", 0)

    def build_recipe(self) -> Recipe | None:
        """How covered products are quantised; None where none are."""
        gradients = None if self.gradient_format is None else ELEMENTS[self.gradient_format]
        return build_recipe(self.recipe, gradients=gradients, power_of_two_scales=self.power_of_two_scales)

    def build_scaler(self, *, num_tokens: int | None = None) -> LossScaler:
        """Of the loss of a run, a mean over ``num_tokens``: one that scales where gradients pass through
        float16, and does nothing in other formats."""
        enabled = "float16" in (self.param_dtype, self.reduce_dtype)
        return LossScaler(self.loss_scale, num_tokens=num_tokens, enabled=enabled)


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` to ``torch.bfloat16``."""
    import torch  # not above: configurations are checked before it is loaded

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise AssertionError(f"expected the name of a torch dtype, got {name!r}")
    return dtype
