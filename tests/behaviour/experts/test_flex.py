"""``flex`` where something does not fit, across NVLink domains, and in whole training runs, on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fsdmoe.experts.dispatch import FlexDispatcher, FlexPolicy
from fsdmoe.experts.dispatch.flex import share_state
from fsdmoe.experts.dispatch.flex_state import FlexState
from fsdmoe.experts.dispatch.flex_transport import Transport
from fsdmoe.experts.moe import MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from fsdmoe.train import Run
from tests.support.coordinates import use_local_tensors
from tests.support.moe_case import HIDDEN, Case, Layout, build_layer, check_layout, run
from tests.support.tiny_run import tiny_config
from tests.support.token_run import _SETTINGS, write_documents

TIGHT, APART = FlexPolicy(rows=0.5), FlexPolicy(rows=8.0, domain=2)


def _hard_cases(policy: FlexPolicy) -> list[Case]:
    return [
        Case("flex", "skewed", "even", flex=policy),
        Case("flex", "dropped", "one", flex=policy),
        Case("flex", "random", "uneven", extras="latent", flex=policy),
        Case("flex", policy="padded", flex=policy),
        Case("flex", "skewed", "uneven", chunks=3, flex=policy),
    ]


@pytest.mark.parametrize(
    ("policy", "layout"),
    [(TIGHT, Layout(2, 2)), (APART, Layout(4))],
    ids=["bounds too low", "two nodes of two"],
)
def test_the_layer_equals_one_process(policy: FlexPolicy, layout: Layout) -> None:
    run_ranks(check_layout, 4, layout, _hard_cases(policy))


@pytest.mark.full
@pytest.mark.parametrize("policy", [TIGHT, APART, FlexPolicy(rows=0.5, domain=1)], ids=str)
@pytest.mark.parametrize("layout", [Layout(4, tp=2, cp=2), Layout(2), Layout(1, 4), Layout(2, 2)], ids=str)
def test_every_case_equals_one_process(policy: FlexPolicy, layout: Layout) -> None:
    routings, tokens = ("random", "skewed", "dropped"), ("even", "uneven", "one")
    cases = [Case("flex", one, other, flex=policy) for one in routings for other in tokens]
    run_ranks(check_layout, 4, layout, [*cases, *_hard_cases(policy)])


def _split_layer(policy: FlexPolicy, chunks: int = 1) -> tuple[MoE, FlexState]:
    torch.manual_seed(0)
    layer = build_layer(Case("flex"))
    parallelize_experts(layer, build_meshes(ep=4), dispatcher="flex", flex=policy, chunks=chunks)
    use_local_tensors(layer)
    assert isinstance(layer.dispatcher, FlexDispatcher)
    return layer, layer.dispatcher.state


def _deferred(policy: FlexPolicy) -> dict[str, Any]:
    layer, state = _split_layer(policy)
    x = torch.randn(12, HIDDEN)
    wanted, _ = run(layer, x)
    checked = layer.dispatcher.traffic.host_syncs, state.num_rerouted
    state.defers = True
    layer.dispatcher.traffic.clear()
    y = layer(x)[0]
    syncs = layer.dispatcher.traffic.host_syncs
    repeats = state.must_repeat(bool(torch.isfinite(y).all()))
    again, _ = run(layer, x)
    return {
        "checked": checked,
        "syncs": syncs,
        "lost": y.isnan().all().item(),
        "repeats": repeats,
        "again": torch.equal(again, wanted),
        "after": state.must_repeat(True),
        "figures": state.figures(),
    }


def test_a_deferred_layer_never_reads_the_flag_itself_and_loses_nothing_in_silence() -> None:
    for found in run_ranks(_deferred, 4, TIGHT):
        assert found["checked"] == (2, 1), "the flag, then the counts of all_to_all"
        assert found["syncs"] == 0
        assert found["lost"]
        assert found["repeats"]
        assert found["again"]
        assert not found["after"]
        assert (found["figures"]["repeated"], found["figures"]["rerouted"]) == (1, 1)
        assert found["figures"]["fill"] > 1


def test_a_deferred_layer_that_fits_is_not_repeated() -> None:
    for found in run_ranks(_deferred, 4, APART):
        assert found["checked"] == (1, 0)
        assert (found["syncs"], found["lost"], found["repeats"]) == (0, False, False)
        assert 0 < found["figures"]["fill"] <= 1


def _growing(chunks: int) -> list[int]:
    layer, state = _split_layer(FlexPolicy(rows=8.0), chunks)
    seen = []
    for num_tokens in (4, 9, 9, 7):
        run(layer, torch.randn(num_tokens + dist.get_rank(), HIDDEN))
        seen.append(state.num_rerouted)
    return seen


def test_batches_larger_than_any_before_take_another_way_once() -> None:
    assert run_ranks(_growing, 4, 1) == [[0, 1, 1, 1]] * 4
    assert run_ranks(_growing, 4, 2) == [[0, 2, 2, 2]] * 4, "each chunk of one batch"


def _growing_recomputed() -> list[int]:
    """Two layers with the same buffers, both recomputed in backward."""
    (one, state), (two, _) = _split_layer(FlexPolicy(rows=8.0)), _split_layer(FlexPolicy(rows=8.0))
    share_state([one.dispatcher, two.dispatcher])
    seen = []
    for num_tokens in (4, 9, 9):
        x = torch.randn(num_tokens, HIDDEN, requires_grad=True)
        y = checkpoint(lambda x: one(x)[0], x, use_reentrant=False)
        checkpoint(lambda x: two(x)[0], y, use_reentrant=False).sum().backward()
        seen.append(state.num_rerouted)
    return seen


def test_a_recomputed_layer_finds_the_bounds_of_its_forward() -> None:
    assert run_ranks(_growing_recomputed, 4) == [[0, 2, 2]] * 4


def _course(
    folder: str, data: str, overrides: dict[str, Any], faults: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Two steps of ``train.py``, an evaluation in between; rank 1 claims too many tokens in these calls."""
    settings = _SETTINGS | {"data__path": data, "data__holdout": 0.25, "train__output_dir": folder}
    settings |= {"train__micro_batch_size": 1, "train__eval_batches": 2, "experts__balance__bias_rate": 0.05}
    config = tiny_config(folder, dist.get_world_size(), **(settings | overrides))
    run = Run(config, build_meshes(config.mesh))
    calls, gather = [0], Transport.gather_counts

    def claim(self: Transport, counts_C: torch.Tensor, *rest: Any) -> Any:
        if dist.get_rank() == 1 and calls[0] in faults:
            counts_C[-2] += 10**6
        calls[0] += 1
        return gather(self, counts_C, *rest)

    Transport.gather_counts = claim  # type: ignore[method-assign]
    try:
        records, evaluated = [run.train_step()], run.evaluate()
        records.append(run.train_step())
    finally:
        Transport.gather_counts = gather  # type: ignore[method-assign]
    run.close("finished")
    return {
        "losses": [record.loss for record in records],
        "norms": [record.grad_norm for record in records],
        "loads": [{name: load.tolist() for name, load in (record.loads or {}).items()} for record in records],
        "biases": [router.e_score_correction_bias.tolist() for router in run.decoder.routers()],
        "evaluated": evaluated,
        "exchange": records[-1].exchange,
    }


FLEX = {"mesh__ep": 2, "experts__dispatcher": "flex"}
COURSES: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "roomy": (FLEX | {"experts__flex__rows": 8.0}, (), 0),
    "tight": (FLEX | {"experts__flex__rows": 0.5}, (), 2),
    # Two MoE layers, so the third of four micro-batches makes the fifth and the sixth call.
    "one rank, third micro-batch": (FLEX | {"experts__flex__rows": 8.0}, (4,), 1),
    "two nodes": (FLEX | {"experts__flex__rows": 0.5, "experts__flex__domain": 1}, (), 2),
    # Repeated steps have no clones.
    "clones": (FLEX | {"experts__flex__rows": 0.5, "experts__clones": 2, "experts__clone_rows": 0}, (), 2),
    "recomputed": (FLEX | {"experts__flex__rows": 0.5, "memory__recompute": "layer"}, (), 2),
}


@pytest.mark.parametrize(
    "names",
    [
        ["one rank, third micro-batch"],
        # graphs/test_micro_batches.py has steps that are repeated since their rows do not fit.
        pytest.param(["tight", "roomy", "two nodes", "recomputed", "clones"], marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_run_equals_one_by_all_to_all_and_counts_what_did_not_fit(tmp_path: Path, names: list[str]) -> None:
    data = write_documents(tmp_path)
    plain = {"mesh__ep": 2, "experts__dispatcher": "all_to_all"}
    wanted = run_ranks(_course, 2, str(tmp_path / "plain"), data, plain)[0]
    assert wanted.pop("exchange") is None
    for name in names:
        overrides, faults, repeated = COURSES[name]
        found = run_ranks(_course, 2, str(tmp_path / name), data, overrides, faults)[0]
        exchange = found.pop("exchange")
        assert exchange["repeated"] == repeated, (name, exchange)
        # Two layers, eight batches; what is too little for a step is so for an evaluation.
        assert exchange["rerouted"] == (16 if repeated == 2 else 0), (name, exchange)
        assert found == wanted, name
