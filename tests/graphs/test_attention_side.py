"""One layer's attention as graphs, by recorders that compute: gradients, and when it runs as it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.graphs.attention_side import AttentionSide, Shared
from fsdmoe.models import preset_config
from fsdmoe.models.attention import AttentionContext
from fsdmoe.models.decoder import DecoderLayer

CONFIG = preset_config("tiny-qwen3")


class Echo:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work

    def reset(self) -> None:
        pass


class Echoes:
    pool_bytes = 0

    def record(self, work: Callable[[], None]) -> Echo:
        work()
        return Echo(work)

    def random_state(self) -> bytes:
        return torch.get_rng_state().numpy().tobytes()


def layer_of(trained: bool = True) -> DecoderLayer:
    torch.manual_seed(0)
    layer = DecoderLayer(CONFIG, nn.Identity())
    layer.self_attn.q_proj.requires_grad_(trained)
    return layer


def context(seed: int = 0) -> AttentionContext:
    positions = torch.arange(8).repeat(2, 1) + seed
    return AttentionContext.build(positions, None, CONFIG)


def tokens(seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(2, 8, CONFIG.hidden_size, generator=random).requires_grad_()


def gradients(layer: DecoderLayer, attend: Any, *seeds: int) -> list[Tensor]:
    """Of the input and of all weights, after as many forwards as there are seeds and one backward."""
    layer.zero_grad()
    given, loss = [tokens(seed) for seed in seeds], torch.zeros(())
    for x, seed in zip(given, seeds, strict=True):
        out, normed = attend(x, context(seed))
        loss = loss + (out * normed.cos()).sum()
    loss.backward()
    found = [x.grad for x in given] + [parameter.grad for parameter in layer.parameters()]
    return [grad.clone() for grad in found if grad is not None]


@pytest.mark.parametrize("trained", [True, False])
def test_gradients_are_those_without_graphs_for_other_tokens_and_positions_too(trained: bool) -> None:
    layer, shared = layer_of(trained), Shared()
    side = AttentionSide(layer, 0, Echoes())
    for seed in (1, 2, 3):
        side.use("a shape", shared)
        found = gradients(layer, side, seed)
        shared.end()
        torch.testing.assert_close(found, gradients(layer, layer.attend, seed), rtol=0, atol=0)
    assert side.num_replays == 3
    assert side.num_graphs == 2


def test_a_second_forward_before_backward_runs_as_it_is() -> None:
    layer = layer_of()
    side = AttentionSide(layer, 0, Echoes())
    side.use("a shape", Shared())
    found = gradients(layer, side, 1, 2)
    assert side.num_replays == 1
    torch.testing.assert_close(found, gradients(layer, layer.attend, 1, 2))


def test_attention_that_draws_random_numbers_is_refused() -> None:
    layer = layer_of()
    layer.self_attn.register_forward_hook(lambda _, __, out: torch.dropout(out, 0.1, True))
    with pytest.raises(ConfigError, match=r"train\.graphs: expected attention that draws no random numbers"):
        AttentionSide(layer, 0, Echoes())(tokens(1), context())
