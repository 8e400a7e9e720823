"""Rows of a micro-batch in sub-batches: one is computed while rows of another travel, forward and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.dispatch.transfer import Link, Pending
from fsdmoe.experts.replay import RoutingTape
from fsdmoe.kernels.late_grads import LateGrads
from fsdmoe.mesh import MeshConfig, build_meshes
from fsdmoe.models import Decoder, build_model
from fsdmoe.models.decoder import DecoderLayer
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.parallel_case import MODELS, Layout, build_parallel

TOKENS = torch.arange(32).view(2, 16)


def build(sub_batches: int) -> Decoder:
    experts = ExpertsConfig(dispatcher="all_to_all", sub_batches=sub_batches)
    policy = ParallelPolicy(experts=experts, precision=PrecisionConfig(param_dtype="float32"))
    model = build_model(MODELS["qwen3_moe"], experts)
    return parallelize(model, build_meshes(ep=2), policy)


class Events:
    """Exchanges of rows, attention, experts and weights' gradients, as they happen on this rank."""

    def __init__(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        for layer in model.model.layers:
            assert isinstance(layer, DecoderLayer)
            for module, name in ((layer.self_attn, "attention"), (layer.mlp.experts, "experts")):
                module.register_forward_hook(lambda _, __, y, name=name: self._note(name, y))
        self._watch(monkeypatch)

    def _note(self, name: str, y: Tensor) -> None:
        self.said.append(name)
        if y.requires_grad:
            y.register_hook(lambda _: self.said.append(f"{name}'"))

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        exchange, take = Link.exchange, LateGrads.take

        def start(link: Link, rows: Tensor, *args: object) -> Pending:
            pending = exchange(link, rows, *args)  # type: ignore[arg-type]
            if rows.shape[1:] != (32,):  # ids and weights: rows alone are watched
                return pending
            phase, _, backward = str(args[-1]).partition(".")
            which = phase + "'" * bool(backward)
            self.said.append(f"start {which}")

            def wait() -> Tensor:
                self.said.append(f"end {which}")
                return pending()

            return wait

        def taken(late: LateGrads) -> object:
            self.said.append("weights'")
            return take(late)

        monkeypatch.setattr(Link, "exchange", start)
        monkeypatch.setattr(LateGrads, "take", taken)


SEND = "attention, start dispatch"
COMPUTE = "end dispatch, experts, start combine"
FORWARD = [SEND, SEND, COMPUTE, COMPUTE]
BETWEEN = [f"end combine, {SEND}"] * 2 + [COMPUTE, COMPUTE]
COMPUTE_BACK = "end combine', experts', start dispatch', weights'"
SEND_BACK = "end dispatch', attention'"
BACKWARD = [COMPUTE_BACK, COMPUTE_BACK, f"{SEND_BACK}, start combine'", f"{SEND_BACK}, start combine'"]


def _events(sub_batches: int) -> list[str]:
    model = build(sub_batches)
    with pytest.MonkeyPatch.context() as monkeypatch:
        events = Events(model, monkeypatch)
        model(TOKENS, labels_BS=TOKENS).loss.backward()
    return events.said


def test_one_is_under_way_while_another_is_computed_over_the_end_of_a_layer() -> None:
    parts = [*FORWARD, *BETWEEN, "end combine", "end combine", "start combine'", "start combine'"]
    parts += [*BACKWARD, COMPUTE_BACK, COMPUTE_BACK, SEND_BACK, SEND_BACK]
    for events in run_ranks(_events, 2, 2):
        assert events == ", ".join(parts).split(", ")


def _loads_and_losses(sub_batches: int) -> tuple[list[float], list[list[float]], int]:
    model = build(sub_batches)
    found = model(TOKENS, labels_BS=TOKENS)
    with torch.no_grad():
        model(TOKENS, labels_BS=TOKENS)
    calls = sum(layer.mlp.dispatcher.traffic.calls["combine"] for layer in model.model.layers)
    return [found.cross_entropy.item(), found.balance_loss.item()], found.loads_LE.tolist(), calls


def test_losses_and_loads_are_sums_and_evaluation_is_in_one_piece() -> None:
    one, two, three = (run_ranks(_loads_and_losses, 2, n)[0] for n in (1, 2, 3))
    assert two[0] == pytest.approx(one[0], rel=1e-6)
    assert two[1] == one[1]
    assert (one[2], two[2]) == (4, 6), "two layers: in training once for each sub-batch, in evaluation once"
    assert three[2] == 6, "each holds at least a row"


def _refused() -> str:
    model = build(2)
    with pytest.raises(ConfigError) as error:
        model(TOKENS, labels_BS=TOKENS, routing=RoutingContext(replay=RoutingTape()))
    return str(error.value)


def test_a_tape_is_refused() -> None:
    assert "experts.sub_batches: expected no recorded routing" in run_ranks(_refused, 2)[0]


def _alone() -> int:
    model, _ = build_parallel("qwen3_moe", Layout(MeshConfig(), sub_batches=2))
    return max(layer.mlp.sub_batches for layer in model.model.layers)


def test_where_nothing_is_sent_rows_stay_together() -> None:
    assert run_ranks(_alone, 1) == [1]
