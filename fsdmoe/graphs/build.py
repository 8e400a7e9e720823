"""What runs the micro-batches of a training run."""

from __future__ import annotations

import os

from torch import nn

from fsdmoe.config.compatibility import refuse_sections
from fsdmoe.config.train import TrainConfig
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.fsdp import engine_of
from fsdmoe.graphs.device_graph import Recorder
from fsdmoe.graphs.expert_shapes import check_expert_shapes
from fsdmoe.graphs.layers import LayeredMicroBatches
from fsdmoe.graphs.micro_batches import GraphedMicroBatches
from fsdmoe.models.causal_lm import CausalLM, MicroBatches
from fsdmoe.parallel.build import ParallelPolicy, flex_state_of
from fsdmoe.precision.loss_scale import LossScaler


def build_micro_batches(
    model: nn.Module, causal_lm: CausalLM, scaler: LossScaler, config: TrainConfig, *, trains: bool = True
) -> MicroBatches:
    """As ``train.graphs`` says. ``causal_lm`` is how the sharded ``model`` is called.

    Raises:
        ConfigError: Graphs were asked for, and there is no GPU, or the model has what no graph takes.
    """
    engine = engine_of(model)
    if config.graphs == "none" or not trains:
        return MicroBatches(causal_lm, engine, scaler)
    device = engine.meshes.device
    config.require_device(device.type)
    refuse_model(model, config)
    recorder, most_shapes = Recorder(device), config.graph_shapes
    if config.graphs == "layer":
        return LayeredMicroBatches(
            model, causal_lm, engine, scaler, most_shapes=most_shapes, recorder=recorder
        )
    params = [param for group in engine.groups for param in group.plan.params]
    check_expert_shapes(params, engine.policy.param_dtype)
    # Else NCCL exchanges addresses with other ranks while it captures, which those may do at other times.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    return GraphedMicroBatches(
        causal_lm,
        engine,
        scaler,
        most_shapes=most_shapes,
        recorder=recorder,
        flex=flex_state_of(model),
    )


def refuse_model(model: nn.Module, config: TrainConfig) -> None:
    """Refuse a sharded model that has what the table of what goes with what refuses with graphs."""
    engine = engine_of(model)
    experts = ExpertsConfig() if flex_state_of(model) is None else ExpertsConfig(dispatcher="flex")
    policy = ParallelPolicy(experts=experts, fsdp=engine.policy.fsdp, precision=engine.policy.precision)
    known = policy.sections(model, engine.meshes)
    known["model"].num_moe_layers = 0  # check_expert_shapes looks at the dtype and the shape of each expert
    refuse_sections(known | {"train": config})
