"""Activations on the host: what leaves, what comes back, and what of it stays in memory."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.memory import offload as offload_module
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.memory.layer_call import name_activation, saving_as
from fsdmoe.memory.layers import keep_less
from fsdmoe.memory.offload import Offload, build_offload

ROWS, WIDTH, NUM_LAYERS = 32, 16, 4
NBYTES = ROWS * WIDTH * 4


class Layer(nn.Module):
    """Saves its input, named ``layer_input``, and a ``qkv`` of the same size, beside its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.proj(x)
        name_activation("qkv", query)
        return x + saving_as("attention_output", torch.sin, query)


def build(**memory: Any) -> tuple[nn.ModuleList, Offload]:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
    config = MemoryConfig(**memory)
    offload = build_offload(config, NUM_LAYERS, torch.device("cpu"))
    assert offload is not None
    keep_less(layers, config, offload)
    return layers, offload


def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().sum()


def gradients(layers: nn.ModuleList, *, times: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    losses = [run(layers, x * (1 + n)) for n in range(times)]
    return list(torch.autograd.grad(sum(losses), [x, *layers.parameters()]))  # type: ignore[arg-type]


def plain(*, times: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return gradients(nn.ModuleList(Layer() for _ in range(NUM_LAYERS)), times=times)


@pytest.mark.parametrize("times", [1, 3])
def test_gradients_are_the_same_also_of_several_forwards_before_a_backward(times: int) -> None:
    layers, offload = build(offload=("layer_input", "qkv"))
    for wanted, found in zip(plain(times=times), gradients(layers, times=times), strict=True):
        assert torch.equal(wanted, found)
    moved = times * 2 * (NUM_LAYERS - 1)
    assert (offload.figures.num_moved, offload.figures.bytes_moved) == (moved, moved * NBYTES)


def test_backward_finds_every_layer_fetched_ahead() -> None:
    layers, offload = build(offload=("layer_input", "qkv"))
    gradients(layers)
    assert offload.figures.num_fetched_late == 0


def test_the_pool_grows_in_the_first_step_alone_and_gets_all_of_it_back() -> None:
    layers, offload = build(offload=("layer_input", "qkv"))
    found = []
    for _ in range(4):
        gradients(layers)
        found.append((offload.pool.nbytes, offload.pool.num_blocks, len(offload.pool._free)))
    assert len(set(found)) == 1
    assert found[0][1] == found[0][2] == 2 * (NUM_LAYERS - 1)


def test_what_left_has_no_memory_on_the_device_between_forward_and_backward() -> None:
    layers, _ = build(offload=("qkv",), offload_keep_last=0)
    alive: list[Any] = []
    real = offload_module._bytes_of

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        found = real(tensor)
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))
        return found

    offload_module._bytes_of = watched
    try:
        loss = run(layers, torch.randn(ROWS, WIDTH))
    finally:
        offload_module._bytes_of = real
    assert len(alive) == NUM_LAYERS
    assert all(reference.expired() for reference in alive)
    loss.backward()


def test_weights_stay_where_they_are() -> None:
    layers, _ = build(offload=("qkv", "layer_input", "attention_output"), offload_keep_last=0)
    pointers = {parameter.data_ptr() for parameter in layers.parameters()}
    taken: list[int] = []
    real = offload_module.MovedLayer.take

    def take(self: Any, names: Any, tensor: torch.Tensor) -> Any:
        taken.append(tensor.untyped_storage().data_ptr())
        return real(self, names, tensor)

    offload_module.MovedLayer.take = take  # type: ignore[method-assign]
    try:
        gradients(layers)
    finally:
        offload_module.MovedLayer.take = real  # type: ignore[method-assign]
    assert taken
    assert not pointers & set(taken)


def test_a_limit_leaves_the_rest_on_the_device() -> None:
    layers, offload = build(offload=("layer_input",), offload_limit_gib=2 * 4096 / 2**30)
    for wanted, found in zip(plain(), gradients(layers), strict=True):
        assert torch.equal(wanted, found)
    assert (offload.figures.num_moved, offload.figures.num_refused) == (2, 1)
    assert offload.pool.nbytes <= 2 * 4096


def test_a_forward_that_nobody_follows_gives_its_host_memory_back() -> None:
    layers, offload = build(offload=("layer_input",))
    loss = run(layers, torch.randn(ROWS, WIDTH, requires_grad=True))
    del loss
    gc.collect()
    assert len(offload.pool._free) == offload.pool.num_blocks > 0


def test_nothing_leaves_in_evaluation() -> None:
    layers, offload = build(offload=("layer_input", "qkv"))
    with torch.no_grad():
        run(layers, torch.randn(ROWS, WIDTH))
    assert offload.figures.num_moved == 0


def test_a_kept_graph_runs_backward_twice() -> None:
    layers, _ = build(offload=("layer_input", "qkv"))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    loss = run(layers, x)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, x)[0])


def test_a_captured_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="outside of CUDA graphs"):
        offload_module.refuse_capture(torch.device("cuda"))
