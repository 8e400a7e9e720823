"""Modules through the fused kernels equal themselves through plain torch, in Triton's interpreter, in fp32.

Each case runs one module twice, with ``kernels("torch")`` and with ``kernels("triton")``, and compares the
output and every gradient. That the second run took the kernels is checked by counting launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe.experts.config import BalanceConfig, ExpertsConfig
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.router import Router
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.kernels import permute as plain_permute
from fsdmoe.kernels import triton as fused_kernels
from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.rms_norm import RMSNorm, gated_norm, rms_norm
from fsdmoe.kernels.triton import launch, swiglu_mlp
from fsdmoe.kernels.triton.tiles import LayerTiles, Tile
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.memory.layers import keep_less
from fsdmoe.mesh import build_meshes
from fsdmoe.models import Decoder, head, preset_config
from fsdmoe.models.attention import AttentionContext, GroupedQueryAttention, LatentAttention
from fsdmoe.models.head import LMHead
from fsdmoe.optim import AdamW
from fsdmoe.precision.config import PrecisionConfig
from tests.support.kernel_references import router_input_grad_reference

pytestmark = pytest.mark.usefixtures("poisoned")
TILE = Tile(m=16, n=32, k=16, num_warps=4, num_stages=2, group=2)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels launched so far."""
    names: list[str] = []
    original = launch.QuickLaunch.__getitem__

    def counted(self: Any, grid: Any) -> Any:
        names.append(self.function.__name__)
        return original(self, grid)

    monkeypatch.setattr(launch.QuickLaunch, "__getitem__", counted)
    return names


def both(compute: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Output and gradients by plain torch, then by the kernels."""
    for choice in ("torch", "triton"):
        with kernels(choice):  # type: ignore[arg-type]
            out = compute()
            dout = torch.linspace(-1, 1, out.numel()).view_as(out)
            grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
            yield [out.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


def assert_same(compute: Callable[[], torch.Tensor], leaves: list[torch.Tensor], limit: float = 5e-6) -> None:
    plain, fused = both(compute, leaves)
    for index, (expected, ours) in enumerate(zip(plain, fused, strict=True)):
        error = (ours.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
        assert error < limit, f"result {index} (0 is the output) is off by {error:.1e}"


@pytest.mark.parametrize("size", [8, 128, 5000])
def test_the_norm_equals_plain_torch(size: int, launches: list[str]) -> None:
    module = RMSNorm(size, eps=1e-6)
    nn.init.normal_(module.weight)
    wide = torch.randn(3, 5, size + 4, requires_grad=True)
    # Part of a wider row, as in MLA, and a gradient that is not dense.
    assert_same(lambda: module(wide[..., :size]).transpose(0, 1), [wide, module.weight])
    assert launches == ["_rms_norm_kernel", "_rms_norm_backward_kernel"]


def test_the_norm_with_an_offset_equals_plain_torch(launches: list[str]) -> None:
    x, weight = torch.randn(3, 5, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    assert_same(lambda: rms_norm(x, weight, 1e-6, 1.0), [x, weight])
    assert launches == ["_rms_norm_kernel", "_rms_norm_backward_kernel"]


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("size", [8, 130])
def test_the_gated_norm_equals_plain_torch(silu: bool, size: int, launches: list[str]) -> None:
    wide, weight = torch.randn(3, 70, 2 * size, requires_grad=True), torch.randn(size, requires_grad=True)
    x, gate = wide.unflatten(-1, (2, size)).unbind(-2)  # both are part of a wider row
    assert_same(lambda: gated_norm(x, gate, weight, 1e-6, silu=silu).transpose(0, 1), [wide, weight])
    assert launches == ["_rms_norm_kernel", "_rms_norm_backward_kernel"]


def test_the_norm_of_nothing_is_nothing() -> None:
    module = RMSNorm(8, eps=1e-6)
    with kernels("triton"):
        x = torch.zeros(0, 8, requires_grad=True)
        module(x).sum().backward()
    assert x.grad is not None
    assert not module.weight.grad.any()  # type: ignore[union-attr]


class Sink:
    def __init__(self, like: torch.Tensor, accumulate: bool) -> None:
        self.buffer, self.accumulate = torch.full_like(like, 3.0), accumulate

    def claim(self) -> tuple[torch.Tensor, bool]:
        return self.buffer, self.accumulate


@pytest.mark.parametrize("accumulate", [False, True])
def test_the_norm_puts_its_weight_gradient_into_the_sink(accumulate: bool) -> None:
    module, x = RMSNorm(8, eps=1e-6), torch.randn(40, 8)
    with kernels("triton"):
        (expected,) = torch.autograd.grad(module(x).square().sum(), [module.weight])
        module.weight.grad_sink = sink = Sink(module.weight, accumulate)  # type: ignore[assignment]
        module(x).square().sum().backward()
    assert module.weight.grad is None
    torch.testing.assert_close(sink.buffer, expected + (3.0 if accumulate else 0.0))


SPECS = {
    "qwen3": RouterSpec(num_experts=12, top_k=3, norm_topk=True),
    "plain": RouterSpec(num_experts=8, top_k=2),
    "deepseek": RouterSpec(
        num_experts=16, top_k=4, score="sigmoid", norm_topk=True, scaling=2.5, num_groups=4, topk_groups=2,
        correction_bias=True,
    ),
    "deepseek-v2": RouterSpec(num_experts=16, top_k=3, num_groups=4, topk_groups=2, group_score="max"),
    "gpt-oss": RouterSpec(num_experts=8, top_k=2, score="topk_softmax", router_bias=True),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_the_router_equals_plain_torch_with_all_its_terms(name: str, launches: list[str]) -> None:
    balance = BalanceConfig(sequence=0.5, micro_batch=0.25, z_loss=0.1, transformers=0.1)
    router = Router(SPECS[name], 16, ExpertsConfig(balance=balance))
    router.reset_parameters(std=0.5)
    if router.e_score_correction_bias is not None:
        router.e_score_correction_bias.normal_(std=0.2)
    x = torch.randn(24, 16, requires_grad=True)
    context = replace(RoutingContext.for_rows(3, 8), token_mask_T=torch.arange(24) % 5 != 0)
    decided = []

    def compute() -> torch.Tensor:
        routing = router(x, context=context)
        decided.append(torch.cat([routing.ids_TK.flatten().float(), routing.load_E]))
        return torch.cat([routing.weights_TK.flatten(), routing.loss[None], routing.prob_sum_E])

    assert_same(compute, [x, *router.parameters()])
    assert torch.equal(*decided)
    assert launches == ["_forward_kernel", "_balance_kernel", "_backward_kernel"]


def test_what_the_router_kernel_does_not_know_goes_the_plain_way(launches: list[str]) -> None:
    x = torch.randn(6, 16)
    by_sequence = ExpertsConfig(balance=BalanceConfig(sequence=0.5))
    uneven = RoutingContext(sequence_ids_T=torch.tensor([0, 0, 0, 0, 1, 1]), num_sequences=2)
    grouped = RouterSpec(num_experts=12, top_k=2, num_groups=3, topk_groups=2)
    with kernels("triton"):
        Router(SPECS["plain"], 16, by_sequence)(x, context=uneven)
        Router(SPECS["plain"], 16, ExpertsConfig(selection="expert_choice"))(x)
        Router(grouped, 16)(x)
    assert not launches


@pytest.mark.parametrize(("num_rows", "num_experts", "width"), [(70, 8, 272), (64, 64, 256), (3, 136, 40)])
@pytest.mark.parametrize("with_passed", [True, False])
def test_the_input_gradient_of_a_router_equals_plain_torch(
    num_rows: int, num_experts: int, width: int, with_passed: bool
) -> None:
    dlogits, weight = torch.randn(num_rows, num_experts), torch.randn(num_experts, width).half()
    odd = torch.randn(num_rows * width + 1).half()[1:].view(num_rows, width)  # no multiple of 16 bytes
    passed = odd if with_passed else None
    dx, halves = fused_kernels.router_input_grad(dlogits, weight, passed)
    expected = router_input_grad_reference(dlogits, weight, passed)
    torch.testing.assert_close(dx, expected[0], rtol=2e-3, atol=2e-3)
    assert torch.equal(halves, expected[1])
    high, low = halves.float().chunk(2, dim=1)
    assert ((high + low - dlogits).abs() <= 2.0**-21 * dlogits.abs() + 2.0**-24).all()


def test_the_head_equals_plain_torch(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    monkeypatch.setattr(head, "CHUNK_TOKENS", 4)
    module = LMHead(16, 50)
    nn.init.normal_(module.weight)
    hidden = torch.randn(2, 5, 16, requires_grad=True)
    labels, mask = torch.randint(50, (2, 5)), torch.rand(2, 5) < 0.7
    assert_same(lambda: module(hidden, labels, mask)[None], [hidden, module.weight])
    assert launches == ["_cross_entropy_kernel"] * 3 + ["_scale_kernel"] * 2


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-deepseek-v3"])
def test_attention_equals_plain_torch(preset: str, launches: list[str]) -> None:
    config = preset_config(preset)
    kind = LatentAttention if config.is_mla else GroupedQueryAttention
    module = kind(config)
    x = torch.randn(2, 6, config.hidden_size, requires_grad=True)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]])
    context = AttentionContext.build(positions, None, config)
    assert_same(lambda: module(x, context), [x, *module.parameters()])
    if config.has_qk_norm:  # queries and keys, forward and backward
        assert launches == ["_norm_rope_kernel"] * 2 + ["_norm_rope_backward_kernel"] * 2
    else:
        assert launches.count("_rope_kernel") == 4
        assert "_rms_norm_kernel" in launches


def test_the_whole_model_equals_plain_torch(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    check_whole_model("tiny-qwen3", monkeypatch, launches)


def check_whole_model(preset: str, monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    monkeypatch.setattr(fused_kernels, "supports", lambda *_: True)
    monkeypatch.setattr(swiglu_mlp, "tiles_for", lambda *_: LayerTiles(16, False, TILE, TILE))
    monkeypatch.setattr(swiglu_mlp, "grad_tile", lambda *_: replace(TILE, parts=2))
    config = preset_config(preset, num_hidden_layers=2 if preset == "tiny-deepseek-v3" else 1)
    model = Decoder(config, ExpertsConfig(balance=BalanceConfig(sequence=0.1, z_loss=0.01)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    keep_less(model.model.layers, MemoryConfig(recompute=("norms", "router", "shared_experts")))
    stream = torch.randint(config.vocab_size, (2, 5))

    def compute() -> torch.Tensor:
        return model(stream[:, :-1], labels_BS=stream[:, 1:], loss_mask_BS=stream[:, 1:] > 3).loss[None]

    assert_same(compute, list(model.parameters()), limit=2e-5)
    wanted = {"_rms_norm", "_forward", "_gate_up", "_weight_grad", "_combine", "_cross_entropy"}
    wanted |= {"_norm_rope" if config.has_qk_norm else "_rope"}
    assert {f"{name}_kernel" for name in wanted} <= set(launches)


def random_ids(num_rows: int, num_ids: int, num_groups: int) -> torch.Tensor:
    return torch.randint(-1, num_groups, (num_rows, num_ids))


@pytest.mark.parametrize("sizes", [(40, 3, 5), (300, 2, 40), (7, 1, 1), (0, 2, 3)])
def test_groups_equal_those_of_plain_torch(sizes: tuple[int, int, int]) -> None:
    ids = random_ids(*sizes)
    found = []
    for choice in ("torch", "triton"):
        with kernels(choice):  # type: ignore[arg-type]
            found.append(plain_permute.group_assignments(ids, sizes[2]))
    for ours, expected in zip(found[1], found[0], strict=True):
        assert torch.equal(ours, expected)
        assert ours.dtype == expected.dtype


@pytest.mark.parametrize("num_ids", [1, 3])
def test_rows_go_and_come_back_as_with_plain_torch(num_ids: int, launches: list[str]) -> None:
    permutation = plain_permute.group_assignments(random_ids(20, num_ids, 4), 4)
    num_assigned = int(permutation.ends_G[-1])
    permutation = permutation._replace(sources_M=permutation.sources_M[:num_assigned])
    y = torch.randn(num_assigned, 6, requires_grad=True)
    assert_same(lambda: plain_permute.unpermute(y, permutation), [y])
    assert launches == ["_combine_kernel", "_permute_kernel"]


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.layers:
            x = module(x).tanh()
        return x


def train_two_steps(choice: str, moment_dtype: torch.dtype, param_dtype: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    precision = PrecisionConfig(param_dtype=param_dtype)  # type: ignore[arg-type]
    model = fully_shard(
        TwoLayers(), build_meshes(), FSDPPolicy(fsdp=FSDPConfig(), precision=precision, grad_divisor=1.0)
    )
    optimizer = AdamW(model, lr=1e-2, betas=(0.9, 0.95), moment_dtype=moment_dtype)
    with kernels(choice):  # type: ignore[arg-type]
        for step in range(2):
            model(torch.full((3, 8), 0.5 + step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for group in engine_of(model).groups:
                if choice == "triton" and group.weights.cast is not None:
                    assert torch.equal(group.weights.cast, group.weights.main.to(group.weights.cast.dtype)), (
                        "the step casts"
                    )
        # A change by other hands, after the step, must reach the compute weights all the same.
        for group in engine_of(model).groups:
            group.weights.main.mul_(2)
        loss = model(torch.ones(3, 8)).float().square().mean()
    state = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    return state | {"loss": loss.detach()}


@pytest.mark.parametrize("param_dtype", ["float32", "float16"])
@pytest.mark.parametrize("moment_dtype", [torch.float32, torch.float16])
def test_the_optimizer_equals_plain_torch(
    param_dtype: str, moment_dtype: torch.dtype, launches: list[str]
) -> None:
    plain, fused = (train_two_steps(choice, moment_dtype, param_dtype) for choice in ("torch", "triton"))
    limit = 2e-6 if moment_dtype == torch.float32 else 2e-3
    for name, expected in plain.items():
        error = (fused[name].double() - expected.double()).norm() / expected.double().norm()
        assert error < limit, f"{name} is off by {error:.1e}"
    assert "_adamw_kernel" in launches
