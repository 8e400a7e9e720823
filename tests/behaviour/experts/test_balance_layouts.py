"""Routing over several ranks against one process: equal under any layout, or equal to that scope emulated."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.experts.config import BalanceConfig, CapacityConfig, ExpertsConfig
from fsdmoe.mesh import MeshConfig
from fsdmoe.testing import run_ranks
from tests.support.routing_layouts import NUM_TOKENS, in_one_process, on_ranks, pieces

WHOLE = [torch.arange(NUM_TOKENS)]

INVARIANT = {
    "token and sequence terms": ExpertsConfig(
        balance=BalanceConfig(sequence=0.1, z_loss=0.01, device=0.1, device_scope="sequence")
    ),
    "capacity by probability over sequences": ExpertsConfig(
        balance=BalanceConfig(sequence=0.1), capacity=CapacityConfig(factor=0.8, scope="sequence")
    ),
    "capacity by position over sequences": ExpertsConfig(
        capacity=CapacityConfig(factor=0.8, scope="sequence", policy="position")
    ),
    "capacity of devices over sequences": ExpertsConfig(
        capacity=CapacityConfig(factor=0.8, scope="sequence", per="device")
    ),
    "global batch, one micro-batch": ExpertsConfig(balance=BalanceConfig(global_batch=0.1)),
}
LAYOUTS = {
    "cp 2": (2, MeshConfig(cp=2, ep=2), 1),
    "dp 2, 2 micro-batches": (2, MeshConfig(dp_shard=2, ep=2), 2),
    "cp 2, tp 2": (4, MeshConfig(cp=2, tp=2, ep=2), 1),
    "dp 2, cp 2, 2 micro-batches": (4, MeshConfig(dp_shard=2, cp=2, ep=2), 2),
    "replicas 2, dp 2": (4, MeshConfig(dp_outer=2, dp_shard=2, ep=2), 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", INVARIANT)
def test_one_process_equals_any_layout(policy: str, layout: str) -> None:
    world_size, mesh, num_micro_batches = LAYOUTS[layout]
    if policy == "global batch, one micro-batch":
        num_micro_batches = 1
    score = "sigmoid" if mesh.tp > 1 else "softmax_topk"
    expected = in_one_process(INVARIANT[policy], WHOLE, score=score, num_devices=2)
    found = run_ranks(on_ranks, world_size, INVARIANT[policy], mesh, num_micro_batches, score)
    for outcome in found:
        outcome.assert_close(expected)


def test_these_cases_drop_tokens() -> None:
    for name, config in INVARIANT.items():
        outcome = in_one_process(config, WHOLE, num_devices=2)
        dropped = outcome.load_E.sum() - (outcome.output_TE > 0).sum()
        assert (dropped > 5) == ("capacity" in name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_micro_batch_term_equals_its_scope_emulated(layout: str) -> None:
    """Scope: one micro-batch of one data-parallel rank, whatever cp and tp do to it."""
    world_size, mesh, num_micro_batches = LAYOUTS[layout]
    dp = mesh.dp_outer * max(1, mesh.dp_shard)
    config = ExpertsConfig(balance=BalanceConfig(micro_batch=0.1, device=0.2))
    pools = list(pieces(dp, 1, num_micro_batches).values())
    expected = in_one_process(config, pools, num_devices=2)
    for outcome in run_ranks(on_ranks, world_size, config, mesh, num_micro_batches):
        outcome.assert_close(expected)
    if len(pools) > 1:
        assert (in_one_process(config, WHOLE, num_devices=2).loss - expected.loss).abs() > 1e-4


@pytest.mark.parametrize("layout", ["dp 2, 2 micro-batches", "dp 2, cp 2, 2 micro-batches"])
def test_the_global_term_counts_all_ranks_and_the_micro_batches_so_far(layout: str) -> None:
    world_size, mesh, num_micro_batches = LAYOUTS[layout]
    config = ExpertsConfig(balance=BalanceConfig(global_batch=0.1))
    by_place = pieces(2, 1, num_micro_batches)
    pools = [
        torch.cat([by_place[d, 0, micro_batch] for d in range(2)]) for micro_batch in range(num_micro_batches)
    ]
    expected = in_one_process(config, pools)
    for outcome in run_ranks(on_ranks, world_size, config, mesh, num_micro_batches):
        outcome.assert_close(expected)


@pytest.mark.parametrize(
    "config",
    [
        ExpertsConfig(capacity=CapacityConfig(factor=0.8)),
        ExpertsConfig(capacity=CapacityConfig(factor=0.8, policy="position", per="device")),
        ExpertsConfig(capacity=CapacityConfig(factor=0.8, pad_to_max=True)),
        ExpertsConfig(selection="expert_choice", balance=BalanceConfig(z_loss=0.1)),
    ],
    ids=["probability", "position per device", "padded", "expert choice"],
)
@pytest.mark.parametrize("layout", ["cp 2, tp 2", "dp 2, 2 micro-batches"])
def test_sub_sequence_scopes_equal_a_process_that_routes_each_ranks_tokens_apart(
    config: ExpertsConfig, layout: str
) -> None:
    world_size, mesh, num_micro_batches = LAYOUTS[layout]
    dp = max(1, mesh.dp_shard)
    pools = list(pieces(dp, mesh.cp * mesh.tp, num_micro_batches).values())
    expected = in_one_process(config, pools, num_devices=2)
    for outcome in run_ranks(on_ranks, world_size, config, mesh, num_micro_batches):
        outcome.assert_close(expected)
