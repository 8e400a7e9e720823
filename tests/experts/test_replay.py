"""Record and replay: the recorded run's losses bit for bit, and clear refusals of another shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.origin import Origin
from fsdmoe.experts.config import BalanceConfig, CapacityConfig, ExpertsConfig
from fsdmoe.experts.replay import Decision, DecisionPlace, Enforce, RoutingTape
from fsdmoe.experts.router import Router, RouterSpec, RoutingContext
from fsdmoe.experts.routing_file import save_routed_experts

D, E, K, VOCAB = 16, 8, 2, 40
CONFIGS = {
    "dropless": ExpertsConfig(balance=BalanceConfig(sequence=0.01)),
    "capacity": ExpertsConfig(capacity=CapacityConfig(factor=0.75)),
    "padded": ExpertsConfig(capacity=CapacityConfig(factor=1.0, pad_to_max=True)),
    "expert choice": ExpertsConfig(selection="expert_choice"),
}


class TinyMoE(nn.Module):
    """Embedding, two MoE layers of small linear experts, head."""

    def __init__(self, config: ExpertsConfig) -> None:
        super().__init__()
        spec = RouterSpec(num_experts=E, top_k=K, norm_topk=True)
        self.embedding = nn.Embedding(VOCAB, D)
        self.routers = nn.ModuleList(Router(spec, D, config) for _ in range(2))
        self.experts = nn.ParameterList(torch.randn(E, D, D) / D**0.5 for _ in range(2))
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens_T: Tensor, context: RoutingContext, recompute: bool = False) -> Tensor:
        x_TD = self.embedding(tokens_T)
        loss = x_TD.new_zeros(())
        for layer in range(2):
            if recompute:
                x_TD, aux = checkpoint(self._layer, x_TD, layer, context, use_reentrant=False)
            else:
                x_TD, aux = self._layer(x_TD, layer, context)
            loss = loss + aux
        return loss + nn.functional.cross_entropy(self.head(x_TD), tokens_T.roll(-1))

    def _layer(self, x_TD: Tensor, layer: int, context: RoutingContext) -> tuple[Tensor, Tensor]:
        routing = self.routers[layer](x_TD, context=context.at_layer(layer))
        spread_TE = torch.zeros(len(x_TD), E).scatter_add(
            1, routing.ids_TK.clamp_min(0), routing.weights_TK * (routing.ids_TK >= 0)
        )
        y_TED = torch.einsum("td,efd->tef", x_TD, self.experts[layer]).relu()
        return x_TD + torch.einsum("te,ted->td", spread_TE, y_TED), routing.loss


def _run(
    config: ExpertsConfig,
    tape: RoutingTape | None,
    *,
    steps: int = 6,
    recompute: bool = False,
    noise: float = 0.0,
) -> list[float]:
    """Losses of a few SGD steps of two micro-batches; ``noise`` disturbs the routers before each."""
    torch.manual_seed(5)
    model = TinyMoE(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    disturbance = torch.Generator().manual_seed(11)
    losses = []
    for step in range(steps):
        for half in range(2):
            context = replace(RoutingContext.for_rows(2, 16), replay=tape, micro_batch=2 * step + half)
            for router in model.routers:
                shift = noise * torch.randn(router.weight.shape, generator=disturbance)
                router.weight.data += shift
            loss = model(torch.randint(VOCAB, (32,)), context, recompute)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("enforce", ["ids", "ids_and_weights"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_replay_gives_the_recorded_losses_bit_for_bit(name: str, enforce: Enforce, tmp_path: Path) -> None:
    tape = RoutingTape(E)
    recorded = _run(CONFIGS[name], tape)
    tape.save(tmp_path / "tape.safetensors")
    replay = RoutingTape.load(tmp_path / "tape.safetensors", enforce)
    assert _run(CONFIGS[name], replay) == recorded
    assert len(set(recorded)) == len(recorded)


@pytest.mark.parametrize("name", ["capacity", "padded", "expert choice"])
def test_enforced_decisions_outweigh_a_disturbed_router(name: str) -> None:
    """With ids and weights enforced and no balance term, what the router thinks cannot change a loss."""
    tape = RoutingTape(E)
    recorded = _run(CONFIGS[name], tape, steps=1)
    assert _run(CONFIGS[name], tape.replaying("ids_and_weights"), steps=1, noise=0.5) == recorded
    assert _run(CONFIGS[name], tape.replaying("ids"), steps=1, noise=0.5) != recorded
    assert _run(CONFIGS[name], None, steps=1, noise=0.5) != recorded


def test_enforced_ids_leave_the_weights_to_the_router() -> None:
    router, x_TD = Router(RouterSpec(num_experts=E, top_k=K, norm_topk=True), D), torch.randn(10, D)
    tape = RoutingTape(E)
    ids_TK = router(x_TD, context=RoutingContext(replay=tape)).ids_TK
    with torch.no_grad():
        router.weight.normal_()
    routing = router(x_TD, context=RoutingContext(replay=tape.replaying("ids")))
    assert torch.equal(routing.ids_TK, ids_TK)
    assert not torch.equal(router(x_TD).ids_TK, ids_TK)
    scores_TE = (x_TD @ router.weight.t()).softmax(-1).gather(1, ids_TK)
    torch.testing.assert_close(routing.weights_TK, scores_TE / scores_TE.sum(-1, keepdim=True))
    routing.weights_TK.square().sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().max() > 0


def test_recording_under_recompute_gives_the_same_tape(tmp_path: Path) -> None:
    tapes = [RoutingTape(E), RoutingTape(E)]
    losses = [_run(CONFIGS["capacity"], tape, steps=2, recompute=tape is tapes[1]) for tape in tapes]
    assert losses[0] == losses[1]
    for index, tape in enumerate(tapes):
        tape.save(tmp_path / f"{index}.safetensors")
    contents = [(tmp_path / f"{index}.safetensors").read_bytes() for index in (0, 1)]
    assert contents[0] == contents[1]


def _tape() -> RoutingTape:
    tape = RoutingTape(E)
    ids_TK = torch.arange(10 * K).view(10, K) % E
    tape.record(DecisionPlace(0, 0, None), Decision(ids_TK, torch.ones(10, K), None), E)
    return tape.replaying("ids")


@pytest.mark.parametrize(
    ("tokens", "spec", "context", "message"),
    [
        (12, {}, {}, r"nothing was recorded for document 'micro-batch 0', position 10 in the tape"),
        (10, {"top_k": 3}, {}, r"1 MoE layers with 2 choices of 8 experts, got layer 0 with 3 choices"),
        (10, {"num_experts": 16}, {}, r"2 choices of 8 experts, got layer 0 with 2 choices of 16 experts"),
        (10, {}, {"layer": 4}, r"1 MoE layers .* got layer 4"),
        (10, {}, {"micro_batch": 1}, r"nothing was recorded for document 'micro-batch 1', position 0"),
    ],
)
def test_a_replay_of_another_shape_is_refused(
    tokens: int, spec: dict[str, int], context: dict[str, int], message: str
) -> None:
    router = Router(RouterSpec(**({"num_experts": E, "top_k": K} | spec)), D)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        router(torch.randn(tokens, D), context=RoutingContext(**({"replay": _tape()} | context)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("origin", "tokens", "message"),
    [
        (None, 4, "a micro_batch of its own for each call, got 0 for two"),
        (None, 3, "a micro_batch of its own for each call, got 0 for two"),
        (Origin(("b",), torch.zeros(4, dtype=torch.int64), torch.arange(4)), 4, "got 0 for two"),
        (Origin(("a",), torch.zeros(4, dtype=torch.int64), torch.arange(4)), 1, "expected 1 tokens .* got 4"),
    ],
)
def test_a_second_call_under_the_number_of_the_first_is_not_recorded(
    origin: Origin | None, tokens: int, message: str
) -> None:
    """Its choices would have stood there for the tokens of the first."""
    router, tape = Router(RouterSpec(num_experts=E, top_k=K), D), RoutingTape()
    first = None if origin is None else Origin(("a",), origin.document, origin.offset)
    router(torch.randn(4, D), context=RoutingContext(replay=tape, origin=first))
    with pytest.raises(ConfigError, match=message):
        router(torch.randn(tokens, D), context=RoutingContext(replay=tape, origin=origin))
    router(torch.randn(4, D), context=RoutingContext(replay=tape, origin=origin, micro_batch=1))


def test_padding_keeps_its_own_choice() -> None:
    router, x_TD = Router(RouterSpec(num_experts=E, top_k=K), D), torch.randn(4, D)
    origin = Origin(("a",), torch.tensor([0, 0, -1, -1]), torch.tensor([5, 6, 0, 0]))
    tape = RoutingTape()
    tape.record(DecisionPlace(0, 0, origin), Decision(torch.tensor([[0, 1]] * 4), torch.ones(4, K), None), E)
    replay = tape.replaying("ids")
    routing = router(x_TD, context=RoutingContext(replay=replay, origin=origin))
    assert routing.ids_TK[:2].tolist() == [[0, 1], [0, 1]]
    assert torch.equal(routing.ids_TK[2:], router(x_TD).ids_TK[2:])


def test_weights_that_were_not_recorded_cannot_be_enforced(tmp_path: Path) -> None:
    save_routed_experts(tmp_path / "r.safetensors", {"a": torch.tensor([[[0, 1]]])}, num_experts=E)
    tape = RoutingTape.load(tmp_path / "r.safetensors", "ids_and_weights")
    origin = Origin(("a",), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    router = Router(RouterSpec(num_experts=E, top_k=K), D)
    with pytest.raises(ConfigError, match="expected recorded weights and ids, got ids alone"):
        router(torch.randn(1, D), context=RoutingContext(replay=tape, origin=origin))
