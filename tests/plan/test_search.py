"""The search: every mesh is legal, the cheapest way to fit is taken, and losers know why."""

from dataclasses import replace

import pytest

from fsdmoe.errors import ConfigError
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import MeshConfig, resolve_degrees
from fsdmoe.plan import GPUS, Job
from fsdmoe.plan.estimate import estimate, fits
from fsdmoe.plan.search import Ranking, legal_degrees, search, summary_of_losers, why_it_loses
from fsdmoe.plan.source import Fixed, Request, read_request


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
    scores = [each.score for each in ranking.candidates]
    assert scores == sorted(scores)
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


def test_what_fits_nowhere_says_how_much_it_would_take() -> None:
    with pytest.raises(
        ConfigError, match=r"--gpus: nothing fits 79 GiB: the leanest way .* takes \d+\.\d GiB"
    ):
        _ = ranked("mixtral-8x22b", 4, "h100").best


def test_a_batch_that_no_mesh_divides_is_refused() -> None:
    with pytest.raises(ConfigError, match="no mesh of so many ranks"):
        _ = ranked("qwen3-30b-a3b", 7, "h100", 3 * 4096).best


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
