"""A plan for routing that is not even: by a number, or as it was recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fsdmoe.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.routing_file import Recording, save_routed_experts
from fsdmoe.mesh import Degrees
from fsdmoe.models.config import preset_config
from fsdmoe.plan.hardware import gpu_named
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.loads import Loads, Skew, read_loads, skew_of
from fsdmoe.plan.memory import estimate_memory
from fsdmoe.plan.step_time import estimate_time


def test_time_is_of_each_layers_busiest_rank_and_memory_of_one_rank() -> None:
    loads_SLE = torch.tensor([[[4, 2, 1, 1], [1, 2, 3, 2]]])
    assert skew_of(loads_SLE, 2) == pytest.approx((1.375, 1.125))
    assert skew_of(loads_SLE, 4) == pytest.approx(((2 + 1.5) / 2, 1.25))
    assert skew_of(torch.cat((loads_SLE, torch.ones_like(loads_SLE))), 2) == pytest.approx((1.1875, 1.125))


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
    (tmp_path / "file").write_text("none")
    for given, words in (
        ((None, str(tmp_path / "run"), 4), r"^--loads: expected files \*.safetensors in .*, got none"),
        ((None, str(tmp_path / "file"), 4), "^--loads: .* is not readable as a recording"),
        ((0.5, None, 4), "--skew: expected 1"),
        ((2.0, folder, 4), "--skew: expected a number or --loads, got both"),
        ((None, str(tmp_path / "none"), 4), "--loads: expected what experts.record wrote"),
        ((None, folder, 8), "--loads: expected a recording of 8 experts, as the model has, got one of 4"),
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
