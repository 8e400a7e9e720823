"""Layouts that are drawn: the planner's bytes of buffers and states are those that real ranks allocate."""

import random
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe.config import Config, build_config
from fsdmoe.config.compatibility import check_compatibility
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import Engine, engine_of
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW, build_optimizer
from fsdmoe.parallel.auto_model import as_causal_lm, build_any_model
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.plan import Job, Setting
from fsdmoe.plan.memory import MemoryEstimate, state_bytes
from fsdmoe.testing import run_ranks

MESHES: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{}, {"ep": 2}, {"tp": 2}, {"dp_outer": 2}, {"cp": 2, "ep": 2}, {"etp": 2}],
    4: [{"ep": 2}, {"ep": 4, "tp": 2}, {"tp": 2, "etp": 2}, {"dp_outer": 2, "ep": 2}, {"ep": 2, "etp": 2}],
}
CHOICES: dict[str, list[dict[str, Any]]] = {
    "fsdp": [
        {}, {"lean": True}, {"shard": "grads"}, {"shard": "optimizer"}, {"reduce": "last"},
        {"granule": "rows"}, {"reshard_after_forward": False},
    ],
    "precision": [
        {}, {"param_dtype": "float32"}, {"grad_dtype": "bfloat16"}, {"reduce_dtype": "bfloat16"},
        {"main_dtype": "bfloat16", "main_rounding": "stochastic"},
        {"recipe": "fp8_blockwise", "emulate": True, "quantized_weights": True},
    ],
    "optim": [{}, {"name": "sgd"}, {"moment_dtype": "bfloat16"}, {"moment_dtype": "float8"},
              {"state_offload": 0.5}],
    "model": [
        {"preset": "tiny-qwen3"}, {"preset": "tiny-qwen3", "tie_word_embeddings": True},
        {"preset": "tiny-mixtral"}, {"preset": "tiny-deepseek-v3"}, {"preset": "tiny-glm-4.5"},
    ],
}  # fmt: skip


def drawn(world: int, seed: int) -> Config:
    """A layout that a run would take."""
    draw = random.Random(f"{world} {seed}")
    while True:
        tables = {name: draw.choice(choices) for name, choices in CHOICES.items()}
        tables["mesh"] = draw.choice(MESHES[world])
        tables |= {"data": {"seq_len": 16}, "train": {"global_batch_size": 4, "micro_batch_size": 1}}
        config = build_config(tables, {}, world, [], needs_data=False)
        if config is not None and not check_compatibility(config):
            return config


def nbytes(tensors: list[torch.Tensor | None]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def allocated(engine: Engine, optimizer: torch.optim.Optimizer) -> MemoryEstimate:
    """Of the tensors that are there."""
    weights, units = [group.weights for group in engine.groups], engine.units
    slots = {id(unit.slot): unit.slot for unit in units if unit.slot is not None}
    grad_slots = {id(unit.grads.slot): unit.grads.slot for unit in units if unit.grads.slot is not None}
    shards = [weight.shard for weight in weights if weight.shard is not weight.main]
    if isinstance(optimizer, AdamW):
        held = optimizer.moment_bytes
        moments = held.device + held.staging
        host = held.host
    else:
        states = [value for state in optimizer.state.values() for value in state.values()]
        moments = nbytes([value for value in states if isinstance(value, torch.Tensor)])
        host = 0
    return MemoryEstimate(
        weights=nbytes([*shards, *(weight.transposed for weight in weights)]),
        main_weights=nbytes([weight.main for weight in weights]),
        gradients=nbytes([group.grad.main for group in engine.groups]),
        moments=moments,
        gather_slots=nbytes([buffer for slot in slots.values() for buffer in slot.buffers.values()]),
        grad_slots=nbytes([buffer for slot in grad_slots.values() for buffer in slot.buffers.values()]),
        host=host,
    )


def planned_and_allocated(seeds: list[int]) -> list[tuple[str, MemoryEstimate, MemoryEstimate]]:
    """Of each layout, after a step. What the plan refuses, a run refuses too."""
    found = []
    for seed in seeds:
        config = drawn(dist.get_world_size(), seed)
        meshes = build_meshes(config.mesh)
        policy = ParallelPolicy.from_config(config)
        model = parallelize(build_any_model(config.model, config.experts)[0], meshes, policy)
        try:
            plan = state_bytes(Job.of(config), Setting.of(config, dist.get_world_size()))
        except ConfigError as refusal:
            with pytest.raises(ConfigError, match=re.escape(str(refusal))):
                build_optimizer(model, config.optim)
            continue
        optimizer, engine = build_optimizer(model, config.optim), engine_of(model)
        tokens_BS = torch.zeros((1, config.data.seq_len), dtype=torch.int64)
        with engine.micro_batch(last=True):
            as_causal_lm(model)(tokens_BS, labels_BS=tokens_BS, loss_mask_BS=tokens_BS == 0).loss.backward()
        optimizer.step()
        chosen = f"{config.model} {config.mesh} {config.fsdp} {config.precision} {config.optim}"
        sizes = [plan.weights, plan.main_weights, plan.gradients, plan.gather_slots, plan.grad_slots]
        assert list(engine.held_bytes().values()) == sizes, chosen
        found.append((chosen, plan, allocated(engine, optimizer)))
    return found


@pytest.mark.parametrize(
    ("world", "seeds"),
    [
        (2, range(3)),
        (4, range(2)),
        pytest.param(1, range(12), marks=pytest.mark.full),
        pytest.param(2, range(3, 43), marks=pytest.mark.full),
        pytest.param(4, range(2, 42), marks=pytest.mark.full),
    ],
)
def test_planned_buffers_and_states_are_those_that_ranks_allocate(world: int, seeds: range) -> None:
    results = run_ranks(planned_and_allocated, world, list(seeds))
    for chosen, plan, found in results[0]:  # a plan is of the first rank
        assert plan == found, chosen
