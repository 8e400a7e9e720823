"""The search: every mesh is legal, the cheapest way to fit is taken, and losers know why."""

import re
from dataclasses import replace
from typing import Any

import pytest

from fsdmoe.config import build_config
from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import MeshConfig, resolve_degrees
from fsdmoe.models.config import PRESETS
from fsdmoe.plan import GPUS, Job
from fsdmoe.plan.answer import answer
from fsdmoe.plan.estimate import estimate, fits
from fsdmoe.plan.hardware import GIB
from fsdmoe.plan.search import Ranking, legal_degrees, search, summary_of_losers, why_it_loses
from fsdmoe.plan.source import Fixed, Request, read_request
from fsdmoe.precision.config import PrecisionConfig


def ranked(model: str, num_gpus: int, gpu: str, tokens: int | None = None) -> Ranking:
    wanted = read_request(Request(model, num_gpus, gpu, 4096, tokens))
    return search(wanted.config, Job.of(wanted.config), GPUS[gpu], num_gpus)


def test_every_mesh_is_one_that_the_engine_takes_and_none_comes_twice() -> None:
    wanted = read_request(Request("mixtral-8x7b", 16, "h100", 4096))
    found = list(legal_degrees(wanted.config, Job.of(wanted.config), 16, GPUS["h100"]))
    assert len(set(found)) == len(found) > 50
    for degrees in found:
        given = {axis: size for axis, size in vars(degrees).items() if axis != "edp"}
        assert resolve_degrees(MeshConfig(**given), 16) == degrees
    assert {(d.tp, d.cp, d.ep, d.etp) for d in found} >= {(1, 1, 1, 1), (8, 1, 8, 1), (1, 4, 2, 2)}


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return ranked("qwen3-30b-a3b", 8, "h100")


def test_the_ranking_fits_and_is_sorted_and_every_other_mesh_has_a_reason(ranking: Ranking) -> None:
    assert all(fits(each.found.memory, ranking.gpu) for each in ranking.candidates)
    seconds = [float(f"{each.found.time.total:.3g}") for each in ranking.candidates]
    assert seconds == sorted(seconds)
    assert all(why_it_loses(other, ranking.best) for other in ranking.candidates[1:])
    meshes = len(ranking.candidates) - 1 + len(ranking.losses)
    assert summary_of_losers(ranking).total() == meshes


def test_with_memory_to_spare_nothing_is_recomputed() -> None:
    best = ranked("qwen3-30b-a3b", 8, "gb300", 2**17).best
    assert not best.setting.recompute
    assert not best.setting.fsdp.lean
    assert best.setting.optim.moment_dtype == "float32"


def test_less_recompute_than_the_winners_would_not_fit(ranking: Ranking) -> None:
    best = next(each for each in ranking.candidates if each.setting.recompute)
    kept = replace(best.setting, memory=MemoryConfig())
    assert not estimate(ranking.job, kept, ranking.gpu).fits


def refused(
    model: str, num_gpus: int, gpu: str = "h100", fixed: Fixed | None = None, **precision: Any
) -> str:
    wanted = read_request(Request(model, num_gpus, gpu, 4096))
    config = replace(wanted.config, precision=PrecisionConfig(**precision))
    with pytest.raises(ConfigError) as error:
        _ = search(config, Job.of(config), GPUS[gpu], num_gpus, fixed).best
    return str(error.value)


NEEDS_HOST = r"leanest way \(.*\) needs ([\d.]+) GiB of host memory for each GPU, which has ([\d.]+)"
NEEDS_GPU = r"leanest way \(.*\) needs ([\d.]+) GiB of the GPU, of which a plan fills ([\d.]+)"


def test_what_fits_nowhere_says_which_memory_is_too_small() -> None:
    """With states on the host 10.3 GiB of the GPU are enough: the host's memory is not."""
    text = refused("mixtral-8x22b", 4)
    found = re.search(NEEDS_HOST, text)
    assert found is not None, text
    assert float(found[1]) > float(found[2]) == 220
    assert text.endswith("or more host memory (--host-memory)")


@pytest.mark.full
def test_quantised_weights_that_fit_nowhere_are_not_tried_on_the_host() -> None:
    codes = {"recipe": "fp8_blockwise", "emulate": True, "quantized_weights": True}
    text = refused("mixtral-8x22b", 4, **codes)
    found = re.search(NEEDS_GPU, text)
    assert found is not None, text
    assert float(found[1]) > float(found[2]) == pytest.approx(0.94 * 79.1, abs=0.1)


def test_host_memory_is_a_limit_that_the_request_sets() -> None:
    fixed = Fixed(tp=1, cp=1, ep=1, dp_outer=1)

    def host_of_best(gib: int | None) -> float:
        return (
            answer(Request("qwen3-30b-a3b", 8, "h100", 8192, None, None, fixed, gib))[
                1
            ].best.found.memory.host
            / GIB
        )

    assert host_of_best(None) > 40, "there is enough: activations are offloaded"
    assert 0 < host_of_best(40) <= 40
    assert host_of_best(1) == 0


def test_a_mesh_that_does_not_fit_keeps_its_leanest_way(ranking: Ranking) -> None:
    lost = [loss.leanest for loss in ranking.losses]
    assert lost
    for each in lost:
        assert each is not None
        assert each.found.memory == estimate(ranking.job, each.setting, ranking.gpu).memory
        assert not each.found.fits


def test_a_micro_batch_that_divides_nothing_is_not_said_to_need_memory() -> None:
    text = refused("tiny-qwen3", 4, fixed=Fixed(micro_batch=1000))
    assert text.startswith("--micro-batch, --recompute: what is fixed leaves nothing to try"), text


def test_a_batch_that_no_mesh_divides_is_refused() -> None:
    with pytest.raises(ConfigError, match="no mesh of so many ranks"):
        _ = ranked("qwen3-30b-a3b", 7, "h100", 3 * 4096).best


def test_a_fixed_degree_that_no_mesh_has_is_refused_by_its_option() -> None:
    text = refused("tiny-qwen3", 4, fixed=Fixed(ep=3))
    assert text == "--ep: no mesh of 4 ranks for this model and batch has 3; choose one of 1, 2, 4"
    text = refused("tiny-qwen3", 4, fixed=Fixed(tp=2, dp_outer=4))
    assert text == "--tp 2, --dp-outer 4: no mesh of 4 ranks has all of them; fix less"


def test_meshes_that_the_optimizer_refuses_are_not_proposed() -> None:
    """Stochastic rounding wants blocks of 64 elements, which ``tp`` would cut in a model as narrow."""
    wanted = read_request(Request("tiny-qwen3", 2, "h100", 4096))
    precision = PrecisionConfig(main_dtype="bfloat16", main_rounding="stochastic")
    config = replace(wanted.config, precision=precision)
    found = search(config, Job.of(config), GPUS["h100"], 2)
    assert found.candidates
    assert {each.setting.degrees.tp for each in found.candidates} == {1}
    with pytest.raises(ConfigError, match=r"main_rounding: stochastic.* mesh\.tp = 2 leaves"):
        search(config, Job.of(config), GPUS["h100"], 2, Fixed(tp=2))


def test_rows_that_are_dealt_to_ranks_are_not_planned_as_rows_of_one_length() -> None:
    config = read_request(Request("qwen3-30b-a3b", 8, "h100", 4096)).config
    config = replace(config, context_parallel=ContextParallelConfig(dynamic=True, max_tokens=16384))
    with pytest.raises(ConfigError, match=r"context_parallel\.dynamic: expected false for a search"):
        search(config, Job.of(config), GPUS["h100"], 8)


def test_with_graphs_only_settings_that_they_take_are_offered() -> None:
    wanted = read_request(Request("qwen3-30b-a3b", 8, "gb300", 4096, 2**17))
    config = replace(wanted.config, train=replace(wanted.config.train, graphs="step"))
    found = search(config, Job.of(config), GPUS["gb300"], 8)
    degrees = {each.setting.degrees for each in found.candidates}
    assert degrees
    assert all(d.ep == d.etp == d.cp == 1 for d in degrees)
    assert any(d.tp > 1 for d in degrees)
    assert not any(each.setting.offload or each.setting.fsdp.lean for each in found.candidates)
    with pytest.raises(ConfigError, match=r"train\.graphs: .*, got mesh\.ep = 4; set mesh\.ep = 1"):
        search(config, Job.of(config), GPUS["gb300"], 8, Fixed(ep=4))


def between_nodes(**sections: dict[str, object]) -> ExpertsConfig:
    """What is chosen for some layers of DeepSeek-V3, a micro-batch of two rows and experts over 8 nodes."""
    given: dict[str, dict[str, object]] = {
        "model": {"preset": "deepseek-v3", "num_hidden_layers": 8, "num_nextn_predict_layers": 0},
        "data": {"seq_len": 4096},
        "train": {"global_batch_size": 128},
    }
    merged = {name: given.get(name, {}) | sections.get(name, {}) for name in {*given, *sections}}
    problems: list[str] = []
    config = build_config(merged, {}, 1, problems, needs_data=False)
    assert config is not None, problems
    fixed = Fixed(tp=1, cp=1, ep=64, dp_outer=1, micro_batch=2, recompute="none")
    return search(config, Job.of(config), GPUS["h200"], 64, fixed).best.setting.experts


def test_rows_between_nodes_travel_in_sub_batches_where_the_configuration_takes_them() -> None:
    assert (between_nodes().sub_batches, between_nodes().chunks) == (2, 1)
    others: tuple[dict[str, dict[str, object]], ...] = (
        {"experts": {"balance": {"global_batch": 0.001}}},
        {"experts": {"dispatcher": "flex"}},
    )
    assert [between_nodes(**each).sub_batches for each in others] == [1, 1]
    assert between_nodes(experts={"chunks": 2}).sub_batches == 1, "somebody said so"


def test_inside_of_a_node_no_sub_batches_are_proposed(ranking: Ranking) -> None:
    assert all(each.setting.experts.sub_batches == 1 for each in ranking.candidates)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_read_with_the_balance_that_is_written(preset: str) -> None:
    reading = read_request(Request(preset, 8))
    written = reading.tables.get("experts", {}).get("balance", {})
    assert all(getattr(reading.config.experts.balance, key) == value for key, value in written.items())
