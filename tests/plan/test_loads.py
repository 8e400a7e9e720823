"""A plan for routing that is not even: by a number, or as it was recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig, FlexConfig
from fsdmoe.experts.routing_file import Recording, save_routed_experts
from fsdmoe.mesh import Degrees
from fsdmoe.models.config import preset_config
from fsdmoe.optim.config import OptimConfig
from fsdmoe.plan.hardware import GIB, gpu_named
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.loads import Cloning, Loads, Skew, read_loads, skew_of
from fsdmoe.plan.memory import estimate_memory
from fsdmoe.plan.step_time import estimate_time
from fsdmoe.precision.config import PrecisionConfig


def test_time_is_of_each_layers_busiest_rank_and_memory_of_one_rank() -> None:
    loads_SLE = torch.tensor([[[4, 2, 1, 1], [1, 2, 3, 2]]])
    assert skew_of(loads_SLE, 2) == pytest.approx((1.375, 1.125))
    assert skew_of(loads_SLE, 4) == pytest.approx(((2 + 1.5) / 2, 1.25))
    assert skew_of(torch.cat((loads_SLE, torch.ones_like(loads_SLE))), 2) == pytest.approx((1.1875, 1.125))


def test_clones_even_out_what_was_recorded() -> None:
    torch.manual_seed(0)
    loads_SLE = (torch.randn(3, 4, 64).mul(1.2).exp() * 100).int()
    loads_SLE[0, 0] = 0  # nothing was routed there
    loads = Loads(recorded={8: skew_of(loads_SLE, 8)}, choices_SLE=loads_SLE)
    assert loads.skew(8).time > 1.4
    evened = loads.skew(8, Cloning(64, 2, 0, 65536))
    assert 1 <= evened.time < 1.05
    assert evened.memory <= evened.time
    assert evened.time < loads.skew(8, Cloning(64, 1, 0, 65536)).time < loads.skew(8).time
    # Nothing is worth a clone.
    assert loads.skew(8, Cloning(64, 2, 65536, 65536)).time == pytest.approx(loads.skew(8).time, rel=1e-3)


@pytest.mark.parametrize(
    ("num_experts", "ep", "skew", "slots", "left"),
    # Two slots leave 1 to 2 % of any skew; with one, more is left the more ranks there are.
    [(128, 8, 1.5, 2, 1.02), (128, 8, 1.5, 1, 1.13), (256, 64, 3.0, 2, 1.02), (256, 64, 3.0, 1, 1.33)],
)
def test_a_given_skew_is_drawn_and_planned(
    num_experts: int, ep: int, skew: float, slots: int, left: float
) -> None:
    given = Loads(Skew(skew, skew))
    evened = given.skew(ep, Cloning(num_experts, slots, 1024, 131072))
    assert evened.time == pytest.approx(left, abs=0.03)
    assert given.skew(ep, Cloning(num_experts, slots, 1024, 1000)).time == pytest.approx(skew, rel=0.02)


def _recorded(folder: Path) -> str:
    ids = np.array([[[0, 1]], [[0, 2]], [[0, -1]], [[3, 0]]])
    save_routed_experts(folder / "step-0-rank-0.safetensors", {"a": ids}, num_experts=4)
    save_routed_experts(folder / "step-0-rank-1.safetensors", {"b": ids}, num_experts=4)
    save_routed_experts(folder / "step-1-rank-0.safetensors", {"c": ids[:1]}, num_experts=4)
    return str(folder)


def test_loads_are_counted_by_step_over_all_ranks(tmp_path: Path) -> None:
    folder = _recorded(tmp_path)
    assert Recording.open(folder).loads().tolist() == [[[8, 2, 2, 2]], [[1, 1, 0, 0]]]
    loads = read_loads(None, folder, 4)
    assert loads.skew(1) == Skew(1.0, 1.0)
    assert loads.skew(2) == pytest.approx(((20 / 14 + 2) / 2, 2.0))


def test_wrong_loads_are_refused(tmp_path: Path) -> None:
    folder = _recorded(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "nothing").mkdir()
    nothing = str(tmp_path / "nothing")
    ids = np.full((4, 1, 2), -1)
    save_routed_experts(tmp_path / "nothing/step-0-rank-0.safetensors", {"a": ids}, num_experts=4)
    (tmp_path / "file").write_text("none")
    for given, words in (
        ((None, str(tmp_path / "run"), 4), r"^--loads: expected files \*.safetensors in .*, got none"),
        ((None, str(tmp_path / "file"), 4), "^--loads: .* is not readable as a recording"),
        ((0.5, None, 4), "--skew: expected 1"),
        ((2.0, folder, 4), "--skew: expected a number or --loads, got both"),
        ((None, str(tmp_path / "none"), 4), "--loads: expected what experts.record wrote"),
        ((None, folder, 8), "--loads: expected a recording of 8 experts, as the model has, got one of 4"),
        ((None, nothing, 4), "--loads: expected recorded choices, got none in .*; record more steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_loads(*given)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "flex"])
def test_a_busy_rank_takes_longer_and_keeps_more(dispatcher: str) -> None:
    model = preset_config("qwen3-30b-a3b")
    experts = ExpertsConfig(dispatcher=dispatcher)  # type: ignore[arg-type]
    setting = Setting(degrees=Degrees(1, 8, 1, 1, 1, 8, 1), experts=experts)
    even, uneven = (Job(model, 4096, 64, experts, loads=Loads(skew)) for skew in (Skew(), Skew(2.0, 1.5)))
    gpu = gpu_named("h200")
    times = [estimate_time(job, setting, gpu) for job in (even, uneven)]
    assert times[1].experts == pytest.approx(2 * times[0].experts)
    assert times[1].compute > 1.1 * times[0].compute
    kept = [estimate_memory(job, setting).activations for job in (even, uneven)]
    # Buffers of flex have their own size.
    assert kept[1] == kept[0] if dispatcher == "flex" else kept[1] > 1.2 * kept[0]


MEASURED = {  # of an emulated node, in ms and GiB (docs/results/emulated_run.md, recorded loads)
    ("all_to_all", 1.0, 0): (797.5, 83.6),
    ("all_to_all", 2.04, 0): (1168.0, 106.2),
    ("all_to_all", 2.04, 2): (856.2, 85.4),
    ("flex", 1.0, 0): (806.6, 91.6),
}


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_uneven_loads_and_clones_are_planned_as_they_were_measured(case: tuple[str, float, int]) -> None:
    dispatcher, skew, clones = case
    flex = FlexConfig(rows=1.25) if dispatcher == "flex" else FlexConfig()
    experts = ExpertsConfig(dispatcher=dispatcher, clones=clones, chunks=2, flex=flex)  # type: ignore[arg-type]
    model = replace(preset_config("qwen3-30b-a3b"), num_hidden_layers=40)
    low = {"param_dtype": "bfloat16", "main_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    setting = Setting(
        degrees=Degrees(1, 8, 1, 1, 1, 8, 1), micro_batch_size=4, experts=experts,
        precision=PrecisionConfig(**low), optim=OptimConfig(moment_dtype="bfloat16"),  # type: ignore[arg-type]
        is_replayed=dispatcher == "flex",
    )  # fmt: skip
    job = Job(model, 4096, 32, experts, loads=Loads(Skew(skew, skew)))
    memory = estimate_memory(job, setting)
    planned_ms = 1e3 * estimate_time(job, setting, gpu_named("h200")).total
    planned_gib = (memory.total - memory.context - memory.slack) / GIB
    milliseconds, gib = MEASURED[case]
    print(
        f"{dispatcher}, skew {skew}, clones {clones}: planned {planned_ms:.0f} ms and {planned_gib:.1f} GiB, "
        f"measured {milliseconds:.0f} and {gib:.1f}"
    )
    assert planned_ms == pytest.approx(milliseconds, rel=0.05)
    assert planned_gib == pytest.approx(gib, rel=0.01)


def test_buffers_of_flex_hold_more_rows_with_clones_and_layers_keep_their_weights() -> None:
    model = preset_config("qwen3-30b-a3b")
    degrees = Degrees(1, 8, 1, 1, 1, 8, 1)
    found = []
    for clones, keep in ((0, True), (2, True), (2, False)):
        experts = ExpertsConfig(dispatcher="flex", clones=clones, clone_keep=keep)
        setting = Setting(degrees=degrees, experts=experts)
        found.append(estimate_memory(Job(model, 4096, 64, experts), setting))
    plain, kept, sent_again = found
    weights = 2 * 3 * model.hidden_size * model.moe_intermediate_size * 2  # of two experts in bf16
    assert kept.activations - sent_again.activations == model.num_hidden_layers * weights
    assert sent_again.activations > plain.activations
    assert kept.dispatch > plain.dispatch
