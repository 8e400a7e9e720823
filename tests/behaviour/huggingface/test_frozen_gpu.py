"""Frozen weights as codes on a GPU: codes, values and gradients are those of weights rounded beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe.fsdp import engine_of
from fsdmoe.kernels.backend import has_fp8_kernels
from fsdmoe.kernels.frozen_weights import frozen_values
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.four_bit import FourBit, encode
from fsdmoe.precision.quantized_weight import WeightScales, decoded
from fsdmoe.testing import requires_gpu, requires_peft
from tests.parallel.test_frozen_layers import kept_values, round_base
from tests.support.hf_tiny import VOCABULARY, tiny_hf
from tests.support.lora_case import EXPERTS, move

pytestmark = [requires_gpu, requires_peft]
SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 256, "moe_intermediate_size": 128, "output_router_logits": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def meshes() -> Iterator[Meshes]:
    yield build_meshes()
    dist.destroy_process_group()


def precision_of(dtype: Any) -> PrecisionConfig:
    return PrecisionConfig(frozen_dtype=dtype)


def model_on(meshes: Meshes, policy: ParallelPolicy, dtype: str, *, is_rounded: bool) -> Any:
    import peft

    model = tiny_hf("qwen3_moe", **SIZES).bfloat16()
    config = peft.LoraConfig(
        r=8, lora_alpha=8, target_modules=["q_proj", "o_proj"], target_parameters=list(EXPERTS),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(0)
    shell = peft.get_peft_model(model, config)
    move(shell, 3)
    if is_rounded:
        round_base(shell, precision_of(dtype))
    return parallelize(shell, meshes, policy)


def assert_alike(meshes: Meshes, plain: ParallelPolicy, coded: ParallelPolicy, dtype: str) -> None:
    """Loss and gradients by ``coded``, and by ``plain`` of a base that was rounded beforehand."""
    tokens = torch.randint(0, VOCABULARY, (2, 96), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    for policy, is_rounded in ((plain, True), (coded, False)):
        model = model_on(meshes, policy, dtype, is_rounded=is_rounded)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found.append((loss.item(), {n: p.grad.full_tensor() for n, p in trained.items()}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    for name, wanted in found[0][1].items():
        error = (found[1][1][name] - wanted).norm() / wanted.norm().clamp(min=1e-8)
        assert error < 2e-2, f"{name}: {error}"


@pytest.mark.parametrize("dtype", ["float8", "nf4", "int4"])
@pytest.mark.parametrize("recompute", [(), ("layer",)])
def test_gradients_are_those_of_a_base_that_was_rounded(
    meshes: Meshes, recompute: tuple[str, ...], dtype: str
) -> None:
    memory = MemoryConfig(recompute=recompute)  # type: ignore[arg-type]
    plain = ParallelPolicy(memory=memory)
    coded = ParallelPolicy(memory=memory, precision=precision_of(dtype))
    assert_alike(meshes, plain, coded, dtype)


@pytest.mark.skipif(not has_fp8_kernels(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("recompute", [(), ("layer",)])
def test_products_in_fp8_take_codes_as_a_base_that_was_rounded(
    meshes: Meshes, recompute: tuple[str, ...]
) -> None:
    memory = MemoryConfig(recompute=recompute)  # type: ignore[arg-type]
    plain = ParallelPolicy(memory=memory, precision=PrecisionConfig(recipe="fp8_blockwise"))
    precision = PrecisionConfig(recipe="fp8_blockwise", frozen_dtype="float8")
    coded = ParallelPolicy(memory=memory, precision=precision)
    assert_alike(meshes, plain, coded, "float8")


@pytest.mark.parametrize("dtype", ["float8", "nf4", "int4"])
def test_codes_are_kept_alone_and_stand_for_rounded_weights(meshes: Meshes, dtype: str) -> None:
    model = model_on(meshes, ParallelPolicy(precision=precision_of(dtype)), dtype, is_rounded=False)
    inner = model.base_model.model
    wanted = tiny_hf("qwen3_moe", **SIZES).bfloat16()
    round_base(wanted, precision_of(dtype))
    expected = {name: p.detach() for name, p in wanted.named_parameters()}
    for name, value in kept_values(inner).items():
        assert torch.equal(value.cpu(), expected[name]), name
    for group in (g for unit in engine_of(inner).units for g in unit.groups if g.plan.keeps_codes):
        assert group.weights.main.untyped_storage().nbytes() == 0


def test_the_kernel_decodes_as_plain_torch_does() -> None:
    for form in (FourBit("nf4", 64), FourBit("int4", 128)):
        values = torch.randn(3, 200, 1280, device="cuda").bfloat16()
        codes = torch.empty(3, 200, 640, dtype=torch.uint8, device="cuda")
        factors = values.new_empty(form.factor_numel(values.numel()))
        encode(values.flatten(), form, codes.view(-1), factors)
        scales = WeightScales(factors, (1, form.block), four_bit=form, table=form.table_on(codes.device))
        for dtype in (torch.bfloat16, torch.float32):
            assert torch.equal(frozen_values(codes, scales, dtype), decoded(codes, scales, dtype))
