"""gpt-oss on a GPU: sinks and windows through flash and cuDNN, experts through the fused kernel, each against
plain torch in fp32. ``pytest tests/behaviour/models/test_gpt_oss_gpu.py -s`` also prints times."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdmoe.context_parallel.attention import attend_here
from fsdmoe.context_parallel.blocks import whole_rows
from fsdmoe.kernels.expert_mlp import experts_mlp
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.models import Decoder, preset_config
from fsdmoe.testing import requires_gpu
from tests.support.experts_by_products import experts_mlp_grouped
from tests.support.hf_pairs import randomize

pytestmark = requires_gpu


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def with_gradients(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = function(*leaves)
    generator = torch.Generator(y.device).manual_seed(1)
    dy = torch.randn(y.shape, device=y.device, dtype=torch.float32, generator=generator).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def milliseconds(function: Callable[[], object]) -> float:
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        function()
    torch.cuda.synchronize()
    return 100 * (time.perf_counter() - start)


@pytest.mark.parametrize(
    ("rows", "length"), [(3, 512), (1, 2304)], ids=["flash", "cudnn where there is no window"]
)
@pytest.mark.parametrize("window", [None, 128, 1], ids=str)
def test_sinks_and_windows_equal_plain_torch(rows: int, length: int, window: int | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(rows, length, heads, 64, device="cuda") for heads in (16, 4, 4))
    sinks = torch.randn(16, device="cuda")
    block = whole_rows(rows, length, torch.device("cuda"))

    def attention(*leaves: Tensor) -> Tensor:
        return attend_here(*leaves[:3], block, 0.125, leaves[3], window)

    exact = with_gradients(attention, [query, key, value, sinks])  # fp32 takes no fused kernel
    half = [x.bfloat16() for x in (query, key, value, sinks)]
    for name, ours, wanted in zip(
        ("out", "q", "k", "v", "sinks"), with_gradients(attention, half), exact, strict=True
    ):
        assert relative(ours, wanted) < (5e-2 if name == "sinks" else 2e-2), name
    print(f"{rows}x{length} window {window}: {milliseconds(lambda: with_gradients(attention, half)):.2f} ms")


@pytest.mark.parametrize(
    ("num_rows", "experts"), [(8192, 32), (96, 8)], ids=["a layer of gpt-oss-20b", "few rows"]
)
def test_fused_experts_equal_the_grouped_products(num_rows: int, experts: int) -> None:
    torch.manual_seed(0)
    hidden, width = 2880, 2880
    ids = torch.randint(-1, experts, (num_rows, 4), device="cuda")

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device="cuda") * scale

    leaves = [
        draw(num_rows, hidden, scale=3.0), torch.rand(num_rows, 4, device="cuda"),
        draw(experts, 2 * width, hidden, scale=hidden**-0.5), draw(experts, hidden, width, scale=width**-0.5),
        draw(experts, 2 * width), draw(experts, hidden),
    ]  # fmt: skip
    half = [leaf if index == 1 else leaf.bfloat16() for index, leaf in enumerate(leaves)]

    def layer(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
            return function(Rows(x, weights, ids), ExpertWeights(*parameters), ExpertPolicy("gpt_oss"))

        return run

    exact = with_gradients(layer(experts_mlp_grouped), [leaf.float() for leaf in half])
    names = ("y", "x", "weights", "gate_up", "down", "gate_up_bias", "down_bias")
    errors: dict[str, list[float]] = {name: [] for name in names}
    for function in (experts_mlp_grouped, experts_mlp):
        found = with_gradients(layer(function), half)
        for name, ours, wanted in zip(names, found, exact, strict=True):
            # Not less: what bf16 rounds over a clamp's edge has no gradient, or gets one.
            assert relative(ours, wanted) < 3e-2, (function.__name__, name)
            errors[name].append(float(relative(ours, wanted)))
        took = milliseconds(lambda: with_gradients(layer(function), half))  # noqa: B023
        print(f"{num_rows} rows, {function.__name__}: {took:.2f} ms")
    for name, (plain, fused) in errors.items():
        assert fused <= 1.5 * plain, name


def test_the_decoder_in_bf16_is_near_itself_in_fp32_on_the_host() -> None:
    config = preset_config(
        "tiny-gpt-oss",
        hidden_size=128,
        head_dim=64,
        moe_intermediate_size=128,
        sliding_window=32,
        vocab_size=256,
    )
    model = Decoder(config)
    randomize(model, 0.05)
    tokens = torch.randint(0, 256, (2, 193), generator=torch.Generator().manual_seed(3))
    documents = torch.tensor([0] * 70 + [1] * 122)[None].expand(2, -1)
    wanted = model(tokens[:, :-1], document_ids_BS=documents, labels_BS=tokens[:, 1:]).loss
    model = model.to("cuda", torch.bfloat16)
    inputs = {"document_ids_BS": documents.cuda(), "labels_BS": tokens[:, 1:].cuda()}
    found = model(tokens[:, :-1].cuda(), **inputs).loss
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-2)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
