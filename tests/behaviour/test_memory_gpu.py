"""Recompute and offload on a GPU: streams, events and fused kernels change no bit."""

from typing import Any, get_args

import pytest
import torch
from torch import nn

from fsdmoe.experts.shared import SideStream
from fsdmoe.memory.config import Activation, MemoryConfig, Part
from fsdmoe.memory.layer_call import name_activation, saving_as
from fsdmoe.memory.layers import keep_less
from fsdmoe.memory.offload import Offload, build_offload
from fsdmoe.memory.recompute import part
from fsdmoe.models import Decoder, preset_config
from fsdmoe.models.memory_parts import prepare_parts
from fsdmoe.testing import requires_gpu

pytestmark = requires_gpu


def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().sum()


class WideLayer(nn.Module):
    """Enough work for copies to be late, on streams of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(2048, 2048, bias=False)
        self.side = SideStream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(part("norms", nn.functional.layer_norm, x, (2048,)))
        name_activation("qkv", y)
        beside = self.side.run(torch.tanh, y)
        return x + saving_as("attention_output", torch.sin, y) * self.side.join(beside)


def gpu_gradients(memory: MemoryConfig, offload: Offload | None, layers: nn.ModuleList) -> list[torch.Tensor]:
    for layer in layers:
        layer.__dict__.pop("forward", None)
    keep_less(layers, memory, offload)
    torch.manual_seed(1)
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    return list(torch.autograd.grad(run(layers, x), [x, *layers.parameters()]))


@pytest.mark.parametrize("parts", [(), ("norms",)])
def test_on_a_gpu_streams_find_the_same_gradients_step_after_step(parts: tuple[Any, ...]) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    layers = nn.ModuleList(WideLayer() for _ in range(8)).to(device, torch.bfloat16)
    wanted = gpu_gradients(MemoryConfig(), None, layers)
    memory = MemoryConfig(recompute=parts, offload=("layer_input", "qkv", "attention_output"))
    offload = build_offload(memory, len(layers), device)
    assert offload is not None
    sizes = []
    for _ in range(4):
        found = gpu_gradients(memory, offload, layers)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        sizes.append(offload.pool.nbytes)
    assert offload.figures.num_moved > 0
    assert len(set(sizes)) == 1


def test_on_a_gpu_activations_that_left_take_no_memory() -> None:
    device = torch.device("cuda")
    layers = nn.ModuleList(WideLayer() for _ in range(8)).to(device, torch.bfloat16)
    peaks, moved = [], 0
    for memory in (MemoryConfig(), MemoryConfig(offload=("layer_input", "qkv", "attention_output"))):
        offload = build_offload(memory, len(layers), device)
        gpu_gradients(memory, offload, layers)
        torch.cuda.reset_peak_memory_stats()
        gpu_gradients(memory, offload, layers)
        peaks.append(torch.cuda.max_memory_allocated())
        moved = 0 if offload is None else offload.figures.bytes_moved // 2  # of one of the two passes
    # Those of three layers are on the device at a time: on their way, in use, and at the end never sent.
    assert peaks[0] - peaks[1] > moved * (1 - 3 / len(layers))


def decoder_course(preset: str, memory: MemoryConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of three passes, and the gradients of the last."""
    torch.manual_seed(0)
    config = preset_config(preset, hidden_size=256, moe_intermediate_size=128)
    model = Decoder(config)
    for name, parameter in model.named_parameters():
        nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=0.05)
    model.to("cuda", torch.bfloat16)
    layers = [*model.model.layers, *model.model.mtp_layers]
    prepare_parts(layers, memory)
    keep_less(layers, memory, build_offload(memory, len(layers), torch.device("cuda")))
    tokens = torch.randint(0, 50, (2, 512), device="cuda")
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = model(tokens, labels_BS=tokens).loss
        loss.backward()
        losses.append(loss.item())
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def choices(preset: str) -> list[MemoryConfig]:
    absent = set() if "deepseek" in preset else {"mla_up", "shared_experts"}
    names: list[Part] = [name for name in get_args(Part) if name not in absent]
    together = tuple(name for name in names if name != "layer")
    moved = [MemoryConfig(offload=(name,)) for name in get_args(Activation)]
    return [
        *(MemoryConfig(recompute=(name,)) for name in names),
        *moved,
        MemoryConfig(recompute=together, offload=get_args(Activation)),
        MemoryConfig(recompute=("layer",), offload=("layer_input",)),
    ]


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-deepseek-v3"])
def test_on_a_gpu_no_name_changes_the_loss_of_a_decoder(preset: str) -> None:
    wanted, gradients = decoder_course(preset, MemoryConfig())
    for memory in choices(preset):
        losses, found = decoder_course(preset, memory)
        assert losses == wanted, memory
        for name, gradient in gradients.items():  # attention adds its gradients in any order
            torch.testing.assert_close(
                found[name], gradient, rtol=0.05, atol=0.02 * gradient.abs().max().item()
            )
