"""Statistics of quantised operands over steps, and what earlier versions left in checkpoints."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdmoe.checkpoint import load, save
from fsdmoe.checkpoint.format import StoredTensor
from fsdmoe.checkpoint.hf_export import plan_tensors
from fsdmoe.checkpoint.hf_names import Names
from fsdmoe.kernels.linear import Linear
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import build_meshes
from fsdmoe.models import build_model
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.optim import AdamW
from fsdmoe.parallel.build import ParallelPolicy, end_step, parallelize
from fsdmoe.parallel.quantized_state import state_of
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.fsdp.test_block_scales import MODEL, build, step
from tests.parallel.test_quantized_layers import losses


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What is logged as a warning or worse."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdmoe").addHandler(handler)
    yield found
    logging.getLogger("fsdmoe").removeHandler(handler)


def _said(recipe: str) -> list[str]:
    with warnings() as lines:
        build(recipe, quantized=False)
    return [line for line in lines if line.startswith("precision.recipe")]


def test_a_model_whose_recipe_another_one_computes_says_so_once() -> None:
    (found,) = run_ranks(_said, 1, "fp8_fast")
    assert len(found) == 1
    assert found[0].startswith("precision.recipe: fp8_fast is computed by fp8_blockwise: ")
    assert run_ranks(_said, 1, "fp8_blockwise") == [[]]


def _resume(folder: str, is_first: bool) -> tuple[list[float], list[str]]:
    """Losses, and what a load says. The first run has buffers as earlier versions had."""
    model = build("fp8_blockwise", quantized=False)
    optimizer = AdamW(model, lr=5e-4)
    if is_first:
        for module in list(model.modules()):
            if isinstance(module, Linear):
                module.register_buffer("amax_history", torch.ones(2, 16))
    with warnings() as lines:
        if not is_first:
            load(folder, model, optimizer)
    found = []
    for number in range(0 if is_first else 1, 2):
        found.append(step(model, number))
        optimizer.step()
        optimizer.zero_grad()
        if is_first and number == 0:
            save(folder, model, optimizer)
    return found, [line for line in lines if "amax_history" in line]


def test_a_checkpoint_with_histories_of_magnitudes_loads_without_them(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    ((first, _),) = run_ranks(_resume, 1, folder, True)
    ((resumed, said),) = run_ranks(_resume, 1, folder, False)
    assert resumed == first[1:]
    assert len(said) == 1
    assert "tensors amax_history are passed over: they belong to delayed scales" in said[0]


def test_an_exported_folder_has_no_histories_of_magnitudes() -> None:
    tensors = {
        f"model/model.layers.0.self_attn.q_proj.{name}": StoredTensor(torch.float32, (4, 16), ())
        for name in ("weight", "amax_history")
    }
    index = SimpleNamespace(tensors=tensors)
    found = plan_tensors(index, Names(), {"model_type": "qwen3_moe", "num_experts": 4}, None)  # type: ignore[arg-type]
    assert [tensor.disk for tensor in found] == ["model.layers.0.self_attn.q_proj.weight"]


def test_a_run_logs_statistics_of_every_operand_in_the_steps_it_was_asked_for(tmp_path: Path) -> None:
    found = tmp_path / "run"
    keys = {"precision__recipe": "fp8_blockwise", "precision__emulate": True, "precision__statistics": 2}
    with pytest.raises(KeyError, match="loss"):  # rows of another kind stand between the steps
        losses(found, 1, precision__covers="attention", **keys)
    rows = [row for row in read_metrics(found / "metrics.jsonl") if "operands" in row]
    assert [row["step"] for row in rows] == [2]
    operands = rows[0]["operands"]
    assert len(operands) == 2 * 4
    figures = operands["model.layers.0.self_attn.q_proj"]
    assert set(figures) == {"input", "grad", "weight"}
    assert figures["weight"]["amax"] > 0
    assert sum(figures["weight"]["scales"].values()) >= 1
    assert 0 <= figures["grad"]["underflow"] < 0.2


def _untouched() -> bool:
    model = build("fp8_blockwise", quantized=False)
    is_bare = all(
        m.quantized is None or m.quantized.state is None for m in model.modules() if isinstance(m, Linear)
    )
    return is_bare and state_of(model) is None and end_step(model) is None


def test_nothing_is_counted_unless_asked_for() -> None:
    assert run_ranks(_untouched, 1) == [True]


def step_loss(model: Any) -> torch.Tensor:
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    return model(tokens, labels_BS=tokens).loss


def counting(interval: int, recompute: tuple[Any, ...] = (), **keys: Any) -> Any:
    precision = PrecisionConfig(
        recipe="fp8_blockwise", emulate=True, param_dtype="float32", statistics=interval, **keys
    )
    policy = ParallelPolicy(precision=precision, memory=MemoryConfig(recompute=recompute))
    return parallelize(build_model(MODEL), build_meshes(), policy)


def _counted(recompute: tuple[Any, ...], discards: bool) -> Any:
    model = counting(1, recompute)
    if discards:
        step_loss(model).backward()
        model.zero_grad()
        state_of(model).discard_step()
    step_loss(model).backward()
    return end_step(model)


@pytest.mark.parametrize(("recompute", "discards"), [(("layer",), False), ((), True)])
def test_operands_that_are_computed_again_are_counted_once(
    recompute: tuple[Any, ...], discards: bool
) -> None:
    plain, again = run_ranks(_counted, 1, (), False)[0], run_ranks(_counted, 1, recompute, discards)[0]
    for name, operands in plain.items():
        for role, figures in operands.items():
            assert again[name][role]["scales"] == figures["scales"], f"{role} of {name}"


def _steps(calls_end: bool) -> list[bool]:
    """Which of four steps were counted; the second leaves the weights as they are."""
    model = counting(2, covers=("attention",))
    optimizer = AdamW(model, lr=1e-3)
    found = []
    for number in range(4):
        step_loss(model).backward()
        step_loss(model).backward()  # a second micro-batch is no other step
        found.append(any(state.statistics is not None for state in state_of(model).states))
        if number != 1 or not calls_end:
            optimizer.step()
        optimizer.zero_grad()
        if calls_end:
            end_step(model)
    return found


@pytest.mark.parametrize("calls_end", [True, False])
def test_every_second_step_is_counted_whoever_ends_it(calls_end: bool) -> None:
    assert run_ranks(_steps, 1, calls_end) == [[False, True, False, True]]
