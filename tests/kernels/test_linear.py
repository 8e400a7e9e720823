"""Linear layers and embeddings with a gradient sink, against torch's own."""

import copy

import pytest
import torch
from torch import nn

from fsdmoe.kernels.linear import Embedding, Linear, add_product_


class Sink:
    """Counts uses; what was there before must not matter."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self.buffer = torch.full_like(weight, float("nan"), dtype=dtype)
        self.uses = 0

    def claim(self) -> tuple[torch.Tensor, bool]:
        self.uses += 1
        return self.buffer, self.uses > 1


def with_sink(module: nn.Module, dtype: torch.dtype) -> Sink:
    sink = Sink(module.weight.detach(), dtype)
    module.weight.grad_sink = sink
    return sink


@pytest.mark.parametrize(("dtype", "buffer"), [("float64", "float64"), ("bfloat16", "float32")])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_used_twice_writes_and_then_adds(dtype: str, buffer: str, bias: bool) -> None:
    torch.manual_seed(0)
    ours = Linear(12, 8, bias=bias).to(getattr(torch, dtype))
    plain = nn.Linear(12, 8, bias=bias).double()
    plain.load_state_dict(ours.state_dict())
    sink = with_sink(ours, getattr(torch, buffer))
    x = torch.randn(2, 3, 12).to(getattr(torch, dtype))
    own, other = x.clone().requires_grad_(), x.double().requires_grad_()
    for scale in (1.0, 3.0):
        ((ours(own) * scale) ** 2).sum().backward()
        ((plain(other) * scale) ** 2).sum().backward()
    tolerance = 1e-12 if dtype == "float64" else 2e-2
    assert sink.uses == 2
    assert ours.weight.grad is None
    pairs = [(sink.buffer, plain.weight.grad), (own.grad, other.grad)]
    for found, wanted in pairs + ([(ours.bias.grad, plain.bias.grad)] if bias else []):
        assert ((found - wanted).norm() / wanted.norm()).item() < tolerance


def test_a_host_gives_a_wide_buffer_sums_that_are_not_rounded() -> None:
    torch.manual_seed(0)
    grad_y, x = torch.randn(8, 40).bfloat16(), torch.randn(40, 12).bfloat16()
    out = torch.randn(8, 12)
    wanted = out.double() + grad_y.double() @ x.double()
    add_product_(out, grad_y, x, accumulate=True)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("padding", [None, 7])
def test_an_embedding_adds_up_the_rows_of_repeated_tokens(padding: int | None) -> None:
    torch.manual_seed(0)
    ours = Embedding(10, 4, padding_idx=padding).double()
    weight = ours.weight.detach().clone()
    plain = nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=padding)
    sink = with_sink(ours, torch.float64)
    tokens = torch.tensor([[1, 1, 7], [7, 1, 0]])
    scale = torch.randn(2, 3, 4, dtype=torch.float64)
    for _ in range(2):
        (ours(tokens) * scale).sum().backward()
        (plain(tokens) * scale).sum().backward()
    torch.testing.assert_close(sink.buffer, plain.weight.grad, rtol=1e-12, atol=0)
    assert ours.weight.grad is None


def test_a_single_vector_and_a_single_token_are_taken() -> None:
    for ours, plain, one in (
        (Linear(5, 3, bias=False), nn.Linear(5, 3, bias=False), torch.randn(5)),
        (Embedding(5, 3), nn.Embedding(5, 3), torch.tensor(4)),
    ):
        plain.load_state_dict(ours.state_dict())
        sink = with_sink(ours, torch.float32)
        ours(one).square().sum().backward()
        plain(one).square().sum().backward()
        torch.testing.assert_close(sink.buffer, plain.weight.grad)


@pytest.mark.parametrize("option", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}])
def test_an_embedding_with_options_keeps_them(option: dict[str, float]) -> None:
    ours, plain = Embedding(5, 3, **option), nn.Embedding(5, 3, **option)
    plain.load_state_dict(ours.state_dict())
    with_sink(ours, torch.float32)
    tokens = torch.tensor([1, 2, 2])
    for module in (ours, plain):
        module(tokens).square().sum().backward()
    assert torch.equal(ours.weight, plain.weight)
    assert torch.equal(ours.weight.grad, plain.weight.grad)


def test_without_a_sink_both_are_torchs_own() -> None:
    torch.manual_seed(0)
    for ours, inputs in ((Linear(5, 3), torch.randn(2, 5)), (Embedding(5, 3), torch.tensor([0, 4]))):
        plain = (nn.Linear(5, 3) if inputs.is_floating_point() else nn.Embedding(5, 3)).requires_grad_()
        plain.load_state_dict(copy.deepcopy(ours.state_dict()))
        out = ours(inputs)
        assert torch.equal(out, plain(inputs))
        out.sum().backward()
        plain(inputs).sum().backward()
        assert torch.equal(ours.weight.grad, plain.weight.grad)


def test_evaluation_asks_no_sink() -> None:
    layer = Linear(4, 4)
    sink = with_sink(layer, torch.float32)
    with torch.no_grad():
        layer(torch.randn(2, 4))
    assert sink.uses == 0
