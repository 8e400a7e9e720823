"""When a micro-batch is captured, and that the engine goes on from a replay as from the micro-batch itself.

Here a "replay" computes, and the host's notes of it are taken back; the CUDA side is tests/behaviour's."""

import logging
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.dispatch.flex_state import FlexPolicy, FlexState
from fsdmoe.fsdp import FSDPPolicy, engine_of, fully_shard
from fsdmoe.graphs import GraphedMicroBatches
from fsdmoe.mesh import build_meshes
from fsdmoe.models.causal_lm import LossOutput, StepCounts
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.precision.loss_scale import LossScaler
from fsdmoe.testing import requires_peft, run_ranks
from tests.behaviour.test_hf_run import config_for, folder_of
from tests.support.echo_graphs import EchoRecorder, run_with_echoes, train_with_echoes

SHORT: dict[str, Any] = {
    "train__steps": 6, "train__global_batch_size": 6, "train__eval_interval": 5, "train__eval_batches": 1,
    "model__num_hidden_layers": 2,
}  # fmt: skip


def losses(
    folder: Path, world_size: int, most_shapes: int, **overrides: Any
) -> tuple[list[Any], dict[str, int]]:
    folder.mkdir()
    found = run_ranks(train_with_echoes, world_size, str(folder), most_shapes, SHORT | overrides)
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row.get("loss"), row.get("grad_norm"), row.get("eval_loss")) for row in rows], found[0]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "sharded": (2, {}),
    "one rank": (1, {"train__global_batch_size": 3}),
    "reduced last": (2, {"fsdp__reduce": "last"}),
    "kept whole": (2, {"fsdp__reshard_after_forward": "false"}),
    "replicas": (2, {"mesh__dp_outer": 2, "fsdp__shard": "optimizer"}),
    "bf16 exchange": (2, {"fsdp__grad_exchange": "bf16_all_to_all"}),
}


@pytest.mark.parametrize(
    "name", ["sharded", *(pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS if n != "sharded")]
)
def test_replayed_micro_batches_train_as_plain_ones_do(tmp_path: Path, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    plain, _ = losses(tmp_path / "plain", world_size, 0, **overrides)
    replayed, found = losses(tmp_path / "replayed", world_size, 4, **overrides)
    assert len(plain) == 8  # with two evaluations
    assert replayed == plain
    assert found["graphs"] >= 3  # the first of a step, the next, the last
    assert found["replays"] > 0


CODES: dict[str, tuple[int, dict[str, Any]]] = {
    "decoded": (1, {"frozen_dtype": "float8"}),
    "products in fp8": (1, {"frozen_dtype": "float8", "recipe": "fp8_blockwise", "emulate": True}),
    "decoded, gathered": (2, {"frozen_dtype": "float8"}),
    "nf4, gathered": (2, {"frozen_dtype": "nf4", "frozen_block": 32}),
}


def _on_codes(hf: str, folder: str, most_shapes: int, precision: dict[str, Any]) -> dict[str, int]:
    keys = {f"precision__{key}": value for key, value in precision.items()}
    steps = {"train__steps": 4, "train__eval_interval": -1, "checkpoint__interval": -1}
    adapter = {"adapter__rank": 2, "memory__recompute": "layer", "optim__lr": 0.02}
    place = {"train__output_dir": folder}
    return run_with_echoes(
        config_for(hf, dist.get_world_size(), **keys, **steps, **adapter, **place), most_shapes
    )


@pytest.mark.full
@requires_peft
@pytest.mark.parametrize(
    "name",
    CODES,
)
def test_replayed_adapters_on_a_base_in_codes_train_as_plain_ones_do(tmp_path: Path, name: str) -> None:
    world_size, precision = CODES[name]
    hf = str(folder_of(tmp_path, hidden_size=64, moe_intermediate_size=32))
    rows, found = {}, {}
    for most_shapes in (0, 4):
        folder = tmp_path / str(most_shapes)
        folder.mkdir()
        found = run_ranks(_on_codes, world_size, hf, str(folder), most_shapes, precision)[0]
        metrics = read_metrics(folder / "metrics.jsonl")
        rows[most_shapes] = [(row["loss"], row["grad_norm"]) for row in metrics if "loss" in row]
    assert len({loss for loss, _ in rows[0]}) == 4, "adapters are trained"
    assert rows[4] == rows[0]
    assert found["replays"] > 0


SPLIT: dict[str, Any] = {
    "mesh__ep": 2, "train__steps": 8, "train__global_batch_size": 4, "train__eval_interval": -1,
    "model__num_hidden_layers": 1,
}  # fmt: skip


def long_documents(folder: Path) -> dict[str, Any]:
    """Rows of few steps without a border between documents, which would be of another shape; the standard
    library's files have theirs elsewhere in every version of Python."""
    folder.mkdir()
    for number in range(4):
        letters = random.Random(number).choices(string.ascii_lowercase, k=50_000)
        (folder / f"{number}.txt").write_text("".join(letters))
    return {"data__kind": "text", "data__path": folder}


@pytest.mark.parametrize("rows", [1.3, pytest.param(8.0, marks=pytest.mark.full)])
def test_rows_that_do_not_fit_a_replayed_exchange_are_sent_by_a_step_without_graphs(
    tmp_path: Path, rows: float
) -> None:
    keys = SPLIT | long_documents(tmp_path / "data")
    plain, _ = losses(tmp_path / "plain", 2, 0, **keys, experts__dispatcher="all_to_all")
    flex = {"experts__dispatcher": "flex", "experts__flex__domain": 1, "experts__flex__rows": rows}
    replayed, found = losses(tmp_path / "flex", 2, 4, **keys, **flex)
    assert len(plain) == 8
    assert replayed == plain
    assert found["replays"] >= (1 if rows < 2 else 10)  # two a step, from the fourth on
    assert (found["repeated"] > 0) == (found["repeated replays"] > 0) == (rows < 2)


def _repeated() -> list[int]:
    flex = FlexState(FlexPolicy())
    steps, found = Steps(TinyLM(), flex=flex), []
    for step in range(9):
        if step == 5:
            flex.num_repeated, flex.is_repeating = 1, True
        elif step == 6:
            flex.is_repeating = False
        before = steps.runner.num_replays
        steps.run()
        found.append(steps.runner.num_replays - before)
    return found[4:]


def test_neither_a_repeated_step_nor_the_one_behind_it_in_which_buffers_grow_is_replayed() -> None:
    assert run_ranks(_repeated, 1) == [[1, 0, 0, 1, 1]]


class TinyLM(nn.Module):
    """Just enough of a language model; ``noise`` draws random numbers."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.noise = noise
        self.read_from: list[int] = []
        """Where the tokens of each computed micro-batch were."""

    def forward(self, tokens_BS: torch.Tensor, *, counts: StepCounts, routing: RoutingContext) -> LossOutput:
        self.read_from.append(tokens_BS.data_ptr())
        loss = self.embed(tokens_BS).square().sum() / counts.tokens
        if self.noise:
            loss = loss + torch.rand(())
        zero = torch.zeros(())
        return LossOutput(loss, loss.detach(), zero, torch.ones(1, 2))


class Steps:
    """Steps of one micro-batch each, without an optimizer."""

    def __init__(self, model: TinyLM, most_shapes: int = 1, flex: FlexState | None = None) -> None:
        policy = FSDPPolicy(precision=PrecisionConfig(param_dtype="float32"), grad_divisor=1.0)
        self.model = fully_shard(model, build_meshes(), policy)
        self.engine = engine_of(self.model)
        self.recorder = EchoRecorder(self.engine)
        self.runner = GraphedMicroBatches(
            self.model, self.engine, LossScaler(enabled=False),  # type: ignore[arg-type]
            most_shapes=most_shapes, recorder=self.recorder, flex=flex,
        )  # fmt: skip

    def run(self, length: int = 3, token: int = 1) -> LossOutput:
        self.engine.zero_grad()
        inputs = {"tokens_BS": torch.full((1, length), token)}
        counts = StepCounts(torch.tensor(float(length)), torch.tensor(float(length)))
        return self.runner.run(inputs, counts, RoutingContext(), last=True)


def _captured_in() -> list[int]:
    steps = Steps(TinyLM())
    found = []
    for _ in range(6):
        steps.run()
        found.append(steps.runner.num_replays)
    return found


def test_a_micro_batch_is_captured_once_a_whole_step_brought_nothing_new() -> None:
    (replays,) = run_ranks(_captured_in, 1)
    first = replays.index(1)
    assert first in (2, 3)
    assert replays[first:] == list(range(1, 7 - first))


def _places() -> list[int]:
    steps = Steps(TinyLM())
    for _ in range(6):
        steps.run()
    assert steps.runner.num_graphs == 1
    return steps.model.read_from


def test_a_shape_first_runs_from_what_its_graph_reads() -> None:
    """Kernels build plans by shapes, padding of documents included, which they cannot do in a capture."""
    ((first, *others),) = run_ranks(_places, 1)
    assert first == others[-1]


def _said() -> list[str]:
    """What graphs say from now on."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("fsdmoe.graphs.micro_batches")
    logger.addHandler(Keep())
    logger.setLevel(logging.INFO)
    return lines


def _beyond_the_bound() -> tuple[list[str], int, list[bool]]:
    lines = _said()
    steps, equal = Steps(TinyLM()), []
    for _ in range(5):
        steps.run(length=3)
    for length in (5, 5, 3, 5, 3):
        found = steps.run(length=length, token=length)
        rows_BSD = steps.model.embed.weight.full_tensor()[torch.full((1, length), length)]
        equal.append(found.loss.item() == (rows_BSD.square().sum() / length).item())
    return lines, steps.runner.num_graphs, equal


def test_shapes_beyond_the_bound_run_as_they_are_and_say_so_once() -> None:
    ((lines, num_graphs, equal),) = run_ranks(_beyond_the_bound, 1)
    assert num_graphs == 1
    assert [line for line in lines if "run without a graph" in line] == [
        "graphs: micro-batches of 1 x 5 tokens run without a graph: 1 other shapes are captured already "
        "(train.graph_shapes)"
    ]
    assert all(equal)


def _out_of_memory(
    most_shapes: int, free_bytes: int, others: Sequence[int]
) -> tuple[list[int], list[bool], list[str]]:
    """Graphs after each step, of which the ``others`` have another shape; whether its loss is right; what was
    said of dropped graphs."""
    steps, found, equal, lines = Steps(TinyLM(), most_shapes), [], [], _said()
    for step in range(max(others) + 7):
        length = 5 if step in others else 3
        loss = steps.run(length=length, token=length).loss.item()
        rows_BSD = steps.model.embed.weight.full_tensor()[torch.full((1, length), length)]
        equal.append(loss == (rows_BSD.square().sum() / length).item())
        found.append(steps.runner.num_graphs)
        if step == 4:
            steps.recorder.pool_bytes, steps.recorder.free = 30, free_bytes
        elif found[-1]:
            steps.recorder.pool_bytes = 30  # as captured again
    return found, equal, [line for line in lines if "dropped" in line]


@pytest.mark.parametrize(
    ("most_shapes", "free_bytes", "wanted"),
    [(2, 49, [0, 0, 1]), (1, 49, [0, 1, 1]), (2, 50, [1, 1, 1]), (1, 50, [1, 1, 1])],
    ids=[
        "dropped for a new shape",
        "dropped for one without a graph",
        "fits a second shape",
        "fits without a graph",
    ],
)
def test_graphs_give_way_to_a_micro_batch_that_does_not_fit_next_to_them(
    most_shapes: int, free_bytes: int, wanted: list[int]
) -> None:
    ((found, equal, lines),) = run_ranks(_out_of_memory, 1, most_shapes, free_bytes, [5])
    assert found[4] == 1
    assert [found[5], found[6], found[11]] == wanted
    assert all(equal)
    assert len(lines) == (free_bytes == 49)


@pytest.mark.parametrize(("most_shapes", "is_given_up"), [(1, True), (2, False)])
def test_graphs_are_given_up_for_the_fourth_micro_batch_that_gets_none(
    most_shapes: int, is_given_up: bool
) -> None:
    others = [5, 10, 15, 20]
    ((found, equal, lines),) = run_ranks(_out_of_memory, 1, most_shapes, 49, others)
    assert [found[step - 1] > 0 for step in others] == [True] * 4
    assert bool(found[-1]) is not is_given_up
    assert ("for good: for the 4th time 5 tokens" in lines[-1]) is is_given_up
    assert all(equal)


def _draws() -> str:
    with pytest.raises(ConfigError) as refused:
        Steps(TinyLM(noise=True)).run()
    return str(refused.value)


def test_a_model_that_draws_random_numbers_is_refused() -> None:
    assert "train.graphs: expected a model that draws no random numbers" in run_ranks(_draws, 1)[0]


def _fails() -> str:
    steps = Steps(TinyLM())

    def fail(work: Callable[[], None]) -> Any:
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("the capture is broken")  # as torch does when it leaves one

    steps.recorder.record = fail  # type: ignore[method-assign]
    try:
        for _ in range(6):
            steps.run()
    except RuntimeError as failed:
        return str(failed)
    raise AssertionError("expected a capture")


def test_a_capture_that_fails_names_the_cause_and_the_way_out() -> None:
    (message,) = run_ranks(_fails, 1)
    assert "could not be captured (operation not permitted when stream is capturing)" in message
    assert 'set train.graphs = "none"' in message


def _kept_gradient() -> bool:
    steps = Steps(TinyLM())
    for _ in range(5):
        steps.run()
    kept = steps.model.embed.weight.grad
    assert kept is not None
    before = kept.full_tensor().clone()

    class Overwriting:
        """What a device does, past the engine."""

        def replay(self) -> None:
            for group in steps.engine.groups:
                assert group.grad is not None
                assert group.grad.main is not None
                group.grad.main.fill_(7.0)

    (captured,) = steps.runner._graphs.values()
    captured.graph = Overwriting()  # type: ignore[assignment]
    steps.run()
    shown = steps.model.embed.weight.grad
    assert shown is not None
    assert bool((shown.full_tensor() == 7.0).all())
    return torch.equal(kept.full_tensor(), before)


def test_a_gradient_that_a_user_kept_past_zero_grad_keeps_its_value() -> None:
    assert run_ranks(_kept_gradient, 1) == [True]
