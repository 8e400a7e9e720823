"""Runs whose micro-batches are CUDA graphs have the losses, norms and evaluations of runs without, bit for
bit."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdmoe.config import Config
from fsdmoe.core.capturing import is_capturing
from fsdmoe.core.errors import LabelError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.fsdp import engine_of
from fsdmoe.graphs import GraphedMicroBatches, LayeredMicroBatches, MicroBatches
from fsdmoe.graphs.static_inputs import GivenBatch, StaticInputs, shape_key
from fsdmoe.kernels.backend import has_fp8_kernels
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.models.causal_lm import LossOutput, StepCounts
from fsdmoe.testing import requires_gpu, requires_nccl, requires_peft, requires_transformers
from fsdmoe.train import Run
from tests.behaviour.test_hf_run import config_for, folder_of
from tests.support.one_gpu import run_ranks_on_one_gpu
from tests.support.tiny_run import tiny_config

pytestmark = requires_gpu
BF16: dict[str, Any] = {
    "precision__param_dtype": "bfloat16", "train__steps": 9, "data__seq_len": 128, "model__hidden_size": 128,
    "model__moe_intermediate_size": 64, "model__num_hidden_layers": 2, "train__global_batch_size": 6,
    "train__micro_batch_size": 2, "train__eval_interval": 6, "train__eval_batches": 1,
}  # fmt: skip
FP8: dict[str, Any] = {"precision__quantized_weights": True, "model__moe_intermediate_size": 128}
Row = tuple[float, float]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Flash attention's backward is deterministic, if asked for without ``warn_only``; cuDNN's is not, and is
    not taken."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def meshes() -> Meshes:
    return build_meshes()


def advance(run: Run, stop: int) -> list[Row]:
    """(loss, gradient norm) of every step up to ``stop``, and (evaluation, 0) where there is one."""
    rows: list[Row] = []
    while run.progress["step"] < stop:
        record = run.train_step()
        rows.append((record.loss, record.grad_norm))
        if run.config.train.evaluates_at(record.step):
            rows.append((run.evaluate(), 0.0))
        run.checkpoints.maybe_save(record.step, run.state)
    return rows


def finish(config: Config, meshes: Meshes) -> tuple[list[Row], int]:
    """The rows of a whole run, and how many micro-batches were replayed."""
    run = Run(config, meshes)
    rows = advance(run, config.train.steps)
    runner = run.micro_batches
    replays = runner.num_replays if isinstance(runner, GraphedMicroBatches | LayeredMicroBatches) else 0
    run.close("finished")
    run.checkpoints.close()
    return rows, replays


PROGRAMS: dict[str, dict[str, Any]] = {
    "packed rows": {},
    "one micro-batch": {"train__global_batch_size": 2},
    "Muon": {"optim__name": "muon"},
    "masked rows": {"context_parallel__varlen": "never"},
    "recomputed parts": {"memory__recompute": '["norms", "experts", "router"]'},
    "recomputed layers": {"memory__recompute": "layer"},
    "global balance, biases": {"experts__balance__global_batch": 0.01, "experts__balance__bias_rate": 0.01},
    "shared experts, MLA, MTP": {"model__preset": "tiny-deepseek-v3", "model__num_nextn_predict_layers": 1},
    "sinks and windows": {"model__preset": "tiny-gpt-oss"},
    "fp8 in blocks": FP8 | {"precision__recipe": "fp8_blockwise", "precision__covers": '["experts"]'},
    "fp8 in blocks, attention too": FP8 | {
        "precision__recipe": "fp8_blockwise", "model__num_key_value_heads": 4, "model__head_dim": 32,
    },
    "fp8 in blocks, weights quantised in use": FP8 | {
        "precision__recipe": "fp8_blockwise", "model__num_key_value_heads": 4, "model__head_dim": 32,
        "precision__quantized_weights": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_with_graphs_is_the_run_without(tmp_path: Path, meshes: Meshes, name: str) -> None:
    changes = BF16 | PROGRAMS[name]
    plain, none = finish(tiny_config(str(tmp_path / "plain"), 1, **changes), meshes)
    graphs, replays = finish(
        tiny_config(str(tmp_path / "graphs"), 1, **changes, train__graphs="step"), meshes
    )
    assert none == 0
    assert replays > 0
    assert graphs == plain


LAYERED: dict[str, dict[str, Any]] = {
    name: PROGRAMS[name]
    for name in ("packed rows", "masked rows", "Muon", "shared experts, MLA, MTP", "sinks and windows")
} | {
    "recomputed experts": {"memory__recompute": '["experts", "router"]'},
    "biases, plain kernels": {"model__attention_bias": "true", "train__kernels": "torch"},
}


@pytest.mark.parametrize("name", LAYERED)
def test_a_run_with_attention_in_graphs_is_the_run_without(tmp_path: Path, meshes: Meshes, name: str) -> None:
    changes = BF16 | LAYERED[name]
    plain, _ = finish(tiny_config(str(tmp_path / "plain"), 1, **changes), meshes)
    layers, replays = finish(
        tiny_config(str(tmp_path / "layers"), 1, **changes, train__graphs="layer"), meshes
    )
    assert replays > 0
    assert layers == plain


@pytest.mark.parametrize("steps", [24, pytest.param(500, marks=pytest.mark.full)])
def test_a_run_that_is_stopped_and_resumed_under_graphs_is_the_run_without(
    tmp_path: Path, meshes: Meshes, steps: int
) -> None:
    changes = BF16 | {
        "train__steps": steps,
        "train__eval_interval": steps // 4,
        "train__global_batch_size": 4,
        "model__num_hidden_layers": 2 if steps < 100 else 1,
    }
    plain, _ = finish(tiny_config(str(tmp_path / "plain"), 1, **changes), meshes)
    saving = {"checkpoint__interval": steps // 4, "checkpoint__load": "latest", "train__graphs": "step"}
    config = tiny_config(str(tmp_path / "graphs"), 1, **changes, **saving)
    first = Run(config, meshes)
    rows = advance(first, steps // 2)
    first.close("stopped")
    first.checkpoints.close()
    rest, replays = finish(config, meshes)
    assert rows + rest == plain
    assert replays > 0.6 * steps  # of two a step in the second half; some of another shape may be among them


def test_shapes_beyond_the_bound_run_without_a_graph_and_say_so_once(
    tmp_path: Path, meshes: Meshes, caplog: pytest.LogCaptureFixture
) -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(4, 260, 20000)
    tokens[np.cumsum(random.integers(20, 250, 70))] = 1  # where documents end: in some rows, not in others
    np.save(tmp_path / "tokens.npy", tokens.astype(np.uint16))
    changes = BF16 | {
        "data__kind": "tokens", "data__path": str(tmp_path / "tokens.npy"), "data__document_end": 1,
        "data__max_bytes": "none", "train__steps": 16,
    }  # fmt: skip
    plain, again = (
        finish(tiny_config(str(tmp_path / name), 1, **changes), meshes)[0] for name in ("plain", "again")
    )
    assert again == plain, "else the next comparison would mean nothing"
    bound = {"train__graphs": "step", "train__graph_shapes": 1}
    with caplog.at_level(logging.INFO, logger="fsdmoe.graphs"):
        graphs, replays = finish(tiny_config(str(tmp_path / "graphs"), 1, **changes, **bound), meshes)
    assert graphs == plain
    lines = [r.getMessage() for r in caplog.records if "run without a graph" in r.getMessage()]
    assert len(lines) == len(set(lines))
    assert len(lines) >= 1
    assert 0 < replays < 16 * 3


def padded(batch: GivenBatch) -> GivenBatch:
    """With as many borders of documents as a graph has."""
    key = shape_key(batch)
    assert key is not None
    return StaticInputs(batch, key.num_borders).given(first=batch.routing.prior_load_LE is None)


class PaddedMicroBatches(MicroBatches):
    """As they come, but for the borders."""

    def run(
        self, inputs: dict[str, Any], counts: StepCounts, routing: RoutingContext, *, last: bool
    ) -> LossOutput:
        return super().run(*padded(GivenBatch(inputs, counts, routing)), last=last)


def test_packed_rows_of_several_tiles_are_those_of_a_run_with_as_many_borders(
    tmp_path: Path, meshes: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which attention's backward adds gradients up depends on their number."""
    changes = BF16 | {"data__seq_len": 1024, "train__steps": 16}
    run = Run(tiny_config(str(tmp_path / "plain"), 1, **changes), meshes)
    run.micro_batches = PaddedMicroBatches(run.decoder, engine_of(run.model), run.scaler)
    plain = advance(run, 16)
    run.close("finished")

    def eager(self: GraphedMicroBatches, batch: GivenBatch, last: bool) -> LossOutput:
        """The first steps, too; what is captured has them already."""
        return MicroBatches.run(self, *(batch if is_capturing() else padded(batch)), last=last)

    monkeypatch.setattr(GraphedMicroBatches, "_eager", eager)
    graphs, replays = finish(
        tiny_config(str(tmp_path / "graphs"), 1, **changes, train__graphs="step"), meshes
    )
    assert replays > 0
    assert graphs == plain


def test_a_model_that_draws_random_numbers_is_refused(tmp_path: Path, meshes: Meshes) -> None:
    run = Run(tiny_config(str(tmp_path / "run"), 1, **BF16, train__graphs="step"), meshes)
    layer = run.model.model.layers[0]  # type: ignore[union-attr, index]
    layer.mlp.register_forward_hook(lambda _, __, out: (torch.dropout(out[0], 0.1, True), out[1]))
    with pytest.raises(ValueError, match=r"train\.graphs: expected a model that draws no random numbers"):
        advance(run, 1)
    run.close("refused")


@pytest.mark.parametrize("way", ["step", "layer"])
def test_memory_that_was_released_and_restored_is_captured_anew(
    tmp_path: Path, meshes: Meshes, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    changes = BF16 | {"train__steps": 12, "fsdp__register_buffers": "false"}
    plain, _ = finish(tiny_config(str(tmp_path / "plain"), 1, **changes), meshes)
    run = Run(tiny_config(str(tmp_path / "graphs"), 1, **changes, train__graphs=way), meshes)
    rows = advance(run, 6)
    engine = engine_of(run.model)
    engine.release(run.optimizer)
    held = [torch.empty(1 << 20, device="cuda") for _ in range(8)]  # where buffers were
    engine.restore()
    del held
    with caplog.at_level(logging.INFO, logger="fsdmoe.graphs"):
        rows += advance(run, 12)
    run.close("finished")
    assert rows == plain
    said = "captured again" if way == "step" else "of the attention of"
    assert any(said in record.getMessage() for record in caplog.records)


def test_a_label_outside_of_the_vocabulary_is_found_in_a_replay(
    tmp_path: Path, meshes: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tiny_config(str(tmp_path / "run"), 1, **BF16, train__graphs="step"), meshes)
    advance(run, 6)
    inputs = run.feed.inputs

    def spoiled(prepared: Any) -> Any:
        found = inputs(prepared)
        found[1]["labels_BS"][1, 5], found[1]["loss_mask_BS"][1, 5] = 1_000_000, True
        return found

    monkeypatch.setattr(run.feed, "inputs", spoiled)
    with pytest.raises(LabelError, match="got 1000000 on rank 0, in row 1 of a micro-batch, token 5"):
        advance(run, 7)
    run.close("refused")


def wrapped_runs(
    tmp_path: Path, meshes: Meshes, family: str, *, moe_intermediate_size: int = 64, **further: Any
) -> dict[str, Any]:
    """What a run on a folder of transformers gives, without graphs and with them."""
    shape = {
        "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
        "intermediate_size": 64, "max_position_embeddings": 256,
    }  # fmt: skip
    if family == "qwen3_moe":
        shape["moe_intermediate_size"] = moe_intermediate_size
    hf = str(folder_of(tmp_path, family, **shape))
    kept = ("precision__param_dtype", "data__seq_len", "train__micro_batch_size", "train__global_batch_size")
    changes = {key: BF16[key] for key in kept} | {"train__steps": 8, "checkpoint__interval": -1} | further
    found = {}
    for graphs in ("none", "step"):
        folder = str(tmp_path / graphs)
        config = config_for(hf, 1, **changes, train__output_dir=folder, train__graphs=graphs)
        found[graphs] = finish(config, meshes)
    return found


@requires_transformers
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_wrapped_models_are_captured_too(tmp_path: Path, meshes: Meshes, family: str) -> None:
    found = wrapped_runs(tmp_path, meshes, family)
    assert found["step"][1] > 0
    assert found["step"][0] == found["none"][0]


@requires_peft
@pytest.mark.parametrize("recompute", ["[]", "layer"])
@pytest.mark.parametrize(
    "adapter",
    [
        {"adapter__rank": 8},
        {"adapter__rank": 4, "adapter__alpha": 8},  # factors are padded for the products
        {"adapter__rank": 8, "adapter__target_parameters": "[]"},
    ],
    ids=["attention and experts", "rank 4", "attention alone"],
)
def test_steps_of_adapters_are_captured_too(
    tmp_path: Path, meshes: Meshes, adapter: dict[str, Any], recompute: str
) -> None:
    settings = adapter | {"memory__recompute": recompute, "optim__lr": 0.02}
    found = wrapped_runs(tmp_path, meshes, "qwen3_moe", **settings)
    losses = [loss for loss, _ in found["none"][0]]
    assert losses[0] != losses[-1], "the adapters are trained, so the comparison means something"
    assert found["step"][1] > 0
    assert found["step"][0] == found["none"][0]


@requires_peft
@pytest.mark.parametrize("recompute", ["[]", "layer"])
@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(
            {"frozen_dtype": "float8", "recipe": "fp8_blockwise"},
            marks=pytest.mark.skipif(not has_fp8_kernels(), reason="needs a Hopper GPU"),
        ),
        {"frozen_dtype": "float8"},
        {"frozen_dtype": "nf4"},
    ],
    ids=["products in fp8", "decoded", "nf4"],
)
def test_steps_of_adapters_on_a_base_in_codes_are_captured_too(
    tmp_path: Path, meshes: Meshes, precision: dict[str, str], recompute: str
) -> None:
    settings = {"adapter__rank": 8, "memory__recompute": recompute, "optim__lr": 0.02}
    settings |= {f"precision__{key}": value for key, value in precision.items()}
    found = wrapped_runs(tmp_path, meshes, "qwen3_moe", moe_intermediate_size=128, **settings)
    losses = [loss for loss, _ in found["none"][0]]
    assert losses[0] != losses[-1], "the adapters are trained, so the comparison means something"
    assert found["step"][1] > 0
    assert found["step"][0] == found["none"][0]


@requires_nccl
@pytest.mark.parametrize(
    "names",
    [
        ["sharded", "tp"],
        ["flex", "layers"],
        ["clones", "crowded, clones", "cloned layers"],
        pytest.param(["replicas", "tight", "padded"], marks=pytest.mark.full),
    ],
    ids=str,
)
def test_four_ranks_with_graphs_give_the_losses_of_four_without(names: list[str], tmp_path: Path) -> None:
    print(run_ranks_on_one_gpu(4, "-m", "tests.support.graph_ranks", str(tmp_path), *names))
