"""Rules across sections are the parts' own: whoever builds a part by hand meets the same words."""

from collections.abc import Callable
from typing import Any

import pytest

from fsdmoe.config.elastic import fit_mesh
from fsdmoe.context_parallel.config import heads_of_ranks
from fsdmoe.context_parallel.planner import check_fits
from fsdmoe.core.errors import ConfigError
from fsdmoe.data import check_batch, require_holdout
from fsdmoe.experts.dispatch import Links
from fsdmoe.experts.dispatch.base import Link
from fsdmoe.experts.dispatch.local import LocalDispatcher
from fsdmoe.experts.dispatch.traffic import DispatchTraffic
from fsdmoe.experts.divide import check_clones_stay, experts_per_rank
from fsdmoe.experts.split import check_split
from fsdmoe.fsdp.config import FSDPConfig, FSDPPolicy
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Axis, MeshConfig, resolve_degrees
from fsdmoe.optim.config import check_rounding
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.tensor_parallel.divide import check_tensor_parallel
from tests.support.config_building import build


def test_an_ep_for_no_number_of_ranks_is_told_the_numbers_of_experts_alone() -> None:
    (line,) = build({"mesh": {"ep": 3}}, 1)[1]
    assert line == (
        "mesh.ep: expected a divisor of the 8 experts, got 3; choose one of 1, 2, 4, 8, and start a multiple "
        "of as many ranks in all (on one host --nproc-per-node; in a dry run --world)"
    )
    (line,) = build({"mesh": {"ep": 2}}, 1)[1]
    assert line.endswith(
        "choose mesh.ep = 1, or start a multiple of 2 ranks in all: on one host --nproc-per-node 2 (in a dry "
        "run --world 2)"
    )


def test_rows_are_kept_where_experts_are_trained_alone() -> None:
    rows = {"memory": {"keep": "rows"}}
    (line,) = build(rows | {"model": {"num_hidden_layers": 2, "first_k_dense_replace": 2}}, 1)[1]
    assert line.startswith('memory.keep: expected a model with experts for "rows", got none; set memory.keep')
    adapters = {"rank": 4, "target_modules": ["q_proj"], "target_parameters": []}
    frozen = build(rows | {"adapter": adapters}, 1)[1]
    assert sum("frozen weights have no gradients that rows are kept for" in line for line in frozen) == 1
    trained = build(rows | {"adapter": adapters | {"freeze_base": False}}, 1)[1]
    assert not any("memory.keep" in line for line in trained)


class Split:
    """Coordinates of a mesh that nobody built."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes

    def size(self, axis: Axis) -> int:
        return self.sizes.get(axis.value, 1)

    def rank(self, axis: Axis) -> int:
        return 0


def links(ep: int) -> Links:
    traffic = DispatchTraffic()
    one, many = Link(None, 1, 0, traffic), Link(None, ep, 0, traffic)
    return Links(many, one, many, traffic)


EXPERTS = {"num_experts": 8, "width": 384, "bias_width": 0}
RULES: dict[str, tuple[Callable[[], object], dict[str, dict[str, Any]], int]] = {
    "degrees": (lambda: resolve_degrees(MeshConfig(tp=2), 3), {"mesh": {"tp": 2}}, 3),
    "experts over ranks": (lambda: experts_per_rank(8, 3, world_size=3), {"mesh": {"ep": 3}}, 3),
    "width of experts": (lambda: check_split(Split(etp=5), **EXPERTS), {"mesh": {"etp": 5}}, 5),
    "dispatcher": (
        lambda: LocalDispatcher(links(2), 8), {"mesh": {"ep": 2}, "experts": {"dispatcher": "local"}}, 2,
    ),
    "clones over domains": (
        lambda: check_clones_stay(4, 2, world_size=4),
        {"mesh": {"ep": 4}, "experts": {"dispatcher": "flex", "clones": 2, "flex": {"domain": 2}}},
        4,
    ),
    "batch": (
        lambda: check_batch(10, 4, dp_size=4),
        {"train": {"global_batch_size": 10, "micro_batch_size": 4}},
        4,
    ),
    "held-out rows": (lambda: require_holdout(0.0), {"data": {"holdout": 0.0}}, 1),
    "heads over tp": (
        lambda: check_tensor_parallel(3, heads=(4, 2), vocab_size=264, num_ranks=3), {"mesh": {"tp": 3}}, 3,
    ),
    "heads over cp": (
        lambda: heads_of_ranks(4, 2, 8),
        {"mesh": {"cp": 8}, "context_parallel": {"mode": "all_to_all"}},
        8,
    ),
    "document over ranks": (
        lambda: check_fits(1024, 2, 64),
        {"context_parallel": {"dynamic": True, "max_tokens": 64}, "data": {"seq_len": 1024}},
        2,
    ),
    "layer and more": (
        lambda: MemoryConfig(recompute=("layer", "norms")), {"memory": {"recompute": ["layer", "norms"]}}, 1,
    ),
    "exchange": (
        lambda: FSDPPolicy(
            fsdp=FSDPConfig(grad_exchange="bf16_all_to_all"),
            precision=PrecisionConfig(reduce_dtype="bfloat16"),
        ),
        {"fsdp": {"grad_exchange": "bf16_all_to_all"}, "precision": {"reduce_dtype": "bfloat16"}},
        1,
    ),
    "rounding by chance": (
        lambda: check_rounding("sgd", PrecisionConfig(main_dtype="bfloat16", main_rounding="stochastic")),
        {"precision": {"main_dtype": "bfloat16", "main_rounding": "stochastic"}, "optim": {"name": "sgd"}},
        1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_the_checks_say_what_the_part_says(name: str) -> None:
    rule, mapping, world = RULES[name]
    with pytest.raises(ConfigError) as refused:
        rule()
    _, problems = build(mapping, world)
    assert set(refused.value.problems) <= set(problems)


@pytest.mark.parametrize(
    ("ep", "domain", "world", "fits"),
    [
        (4, 8, 16, True),
        (8, 8, 16, True),
        (8, 4, 8, False),
        (2, 3, 4, False),
        (2, 3, 2, True),
        (8, 0, 16, True),
    ],
)
def test_clones_by_flex_are_refused_beyond_a_domain_that_is_told(
    ep: int, domain: int, world: int, fits: bool
) -> None:
    experts = {"dispatcher": "flex", "clones": 2, "flex": {"domain": domain}}
    train = {"global_batch_size": 16, "micro_batch_size": 1}
    _, problems = build({"mesh": {"ep": ep}, "experts": experts, "train": train}, world)
    refused = [] if fits else [
        'experts.clones: with experts.dispatcher = "flex", expected the ranks of an EP group in one NVLink '
        f"domain, got ep {ep} over several, of {domain} each (experts.flex.domain); set experts.dispatcher = "
        f'"all_to_all", or take an ep that divides {domain}'
    ]  # fmt: skip
    assert problems == refused
    for other in ({"dispatcher": "flex", "flex": {"domain": domain}}, {"clones": 2}):
        assert build({"mesh": {"ep": ep}, "experts": other, "train": train}, world)[1] == []


def test_an_elastic_mesh_keeps_clones_in_their_domain() -> None:
    experts = {"dispatcher": "flex", "clones": 2, "flex": {"domain": 2}}
    config, problems = build({"mesh": {"ep": 4, "elastic": True}, "experts": experts}, 4)
    assert (config and fit_mesh(config, 4).mesh.ep, problems) == (2, [])


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"record": "a", "replay": "b"}, "experts.record: expected record or replay, got both"),
        (
            {"replay_weights": True},
            "experts.replay_weights: expected a recording in experts.replay, got none",
        ),
        ({"record": "a", "selection": "forced_balance"}, "experts.selection: forced_balance does not follow"),
    ],
)
def test_tapes_that_cannot_be_are_refused(mapping: dict[str, Any], message: str) -> None:
    _, problems = build({"experts": mapping})
    assert any(problem.startswith(message) for problem in problems), problems
