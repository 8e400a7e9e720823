"""Hugging Face models whose sequences, heads and columns are split over ranks train as one process does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.data import Batch
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.feed import Feed
from fsdmoe.fsdp import engine_of
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.mesh import Axis, MeshConfig, build_meshes
from fsdmoe.models import StepCounts
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import tiny_hf
from tests.support.parallel_case import Course, Layout, compare, own_rows, rows_of

pytestmark = requires_transformers
STEPS, RATE = 2, 0.1  # the second loss shows what the first gradients did
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": HEADS | {"mlp_only_layers": [0]},
    "mixtral": HEADS | {"tie_word_embeddings": True},
    "deepseek_v3": {"v_head_dim": 6},
    "qwen2_moe": HEADS,
    "granite_shared": HEADS,
    "llama": HEADS,
    "llama dynamic": HEADS,
}


@functools.cache
def one_process(family: str, num_parts: int) -> Course:
    """Plain torch; the auxiliary loss is over each of ``num_parts`` equal parts of the rows."""
    model = tiny_hf(family, **CHANGES[family])
    decoder = WrappedCausalLM(model)
    optim = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, gradients = [], {}
    for step in range(STEPS):
        rows = rows_of(step)
        vector = decoder.count_tokens(rows.labels_BS, rows.loss_mask_BS, None)
        counts, loss = StepCounts.from_vector(vector), 0.0
        parts = zip(*(column.chunk(num_parts) for column in rows.columns.values()), strict=True)
        for part in parts:
            out = decoder(**Batch(*part).columns, counts=counts)
            out.loss.backward()  # type: ignore[union-attr]
            loss += out.cross_entropy.item()  # type: ignore[union-attr]
        losses.append(loss)
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optim.step()
        optim.zero_grad()
    return Course(losses, gradients)


def train_parallel(family: str, layout: Layout) -> tuple[Course, float]:
    """On every rank; then the held-out loss of another step's rows."""
    meshes = build_meshes(layout.mesh)
    policy = ParallelPolicy(
        experts=ExpertsConfig(
            chunks=layout.chunks,
            dispatcher=layout.dispatcher,  # type: ignore[arg-type]
            clones=layout.clones,
            clone_rows=0,
        ),
        precision=PrecisionConfig(param_dtype="float32", reduce_dtype="float32"),
        memory=layout.memory,
        grad_divisor=1.0,
    )
    model = parallelize(tiny_hf(family, **CHANGES[family]), meshes, policy)
    decoder, optim = as_causal_lm(model), torch.optim.SGD(model.parameters(), lr=RATE)
    feed = Feed(
        meshes,
        ContextParallelConfig(mode=layout.mode, dynamic=layout.dynamic, max_tokens=layout.max_tokens),
        own_attention=True,
    )
    losses, gradients = [], {}
    for step in range(STEPS):
        inputs = feed.inputs(feed.prepare(own_rows(step, meshes, feed.data_axis, layout)))
        counts, loss = feed.count(decoder, inputs), torch.zeros(())
        for index, each in enumerate(inputs):
            with engine_of(model).micro_batch(last=index == len(inputs) - 1):
                out = decoder(**each, counts=counts, routing=feed.routing())
                out.loss.backward()
            loss += out.cross_entropy
        dist.all_reduce(loss, group=meshes.group(Axis.LOSS))
        losses.append(loss.item())
        if step == 0:
            gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        optim.step()
        optim.zero_grad()
    held_out = feed.held_out_loss(decoder, own_rows(STEPS, meshes, feed.data_axis, layout))
    return Course(losses, gradients if dist.get_rank() == 0 else {}), held_out


LAYOUTS = [
    # The layout with experts below splits its rows alike.
    pytest.param("qwen3_moe", Layout(MeshConfig(cp=2), "ring"), marks=pytest.mark.full),
    pytest.param(
        "mixtral",
        Layout(MeshConfig(cp=2, ep=2), "all_to_all", recompute=("layer",), chunks=2),
        marks=pytest.mark.full,
    ),
    ("deepseek_v3", Layout(MeshConfig(cp=2, ep=2), "all_gather")),
    ("qwen3_moe", Layout(MeshConfig(cp=2, ep=2), "ring", micro_batches=2, chunks=3)),
    pytest.param(
        "qwen3_moe",
        Layout(MeshConfig(cp=2, dp_shard=2, ep=4), "ring", micro_batches=2, chunks=3),
        marks=pytest.mark.full,
    ),
    pytest.param(
        "qwen3_moe",
        Layout(MeshConfig(cp=2, dp_shard=2, ep=4), micro_batches=2, chunks=2, clones=2),
        marks=pytest.mark.full,
    ),
    pytest.param(
        "mixtral",
        Layout(MeshConfig(dp_shard=2, ep=2), recompute=("layer",), clones=1),
        marks=pytest.mark.full,
    ),
    pytest.param("qwen3_moe", Layout(MeshConfig(tp=2)), marks=pytest.mark.full),
    ("mixtral", Layout(MeshConfig(tp=2, cp=2, ep=2), "ring", recompute=("layer",))),
    ("deepseek_v3", Layout(MeshConfig(tp=2, ep=2), recompute=("dispatch",), clones=2)),
    # a gated shared expert in the block
    pytest.param("qwen2_moe", Layout(MeshConfig(tp=2, ep=2)), marks=pytest.mark.full),
    ("granite_shared", Layout(MeshConfig(tp=2, ep=2))),  # and one beside it
    ("llama", Layout(MeshConfig(cp=2), "all_to_all")),
    pytest.param("llama", Layout(MeshConfig(tp=2, cp=2), "all_to_all"), marks=pytest.mark.full),
    ("llama dynamic", Layout(MeshConfig(cp=2), "ring")),
    pytest.param("llama dynamic", Layout(MeshConfig(tp=2, dp_shard=2)), marks=pytest.mark.full),
    ("deepseek_v3", Layout(MeshConfig(dp_shard=2, ep=2), dynamic=True, max_tokens=20, chunks=2)),
    pytest.param(
        "deepseek_v3",
        Layout(MeshConfig(dp_shard=2, tp=2, ep=4), dynamic=True, max_tokens=10),
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_a_layout_trains_as_one_process(family: str, layout: Layout) -> None:
    mesh = layout.mesh
    num_parts = max(mesh.dp_shard, 1) * layout.micro_batches
    wanted = one_process(family, num_parts)
    courses = run_ranks(train_parallel, max(mesh.dp_shard, 1) * mesh.cp * mesh.tp, family, layout)
    for course, held_out in courses:
        compare(course, wanted, f"{layout}, {family}")
        assert held_out == courses[0][1]


def example(cp: int, tp: int) -> list[float]:
    from examples.split_rows import main

    return main(cp, tp)


def test_the_example_of_the_documentation_prints_the_same_losses_under_any_layout() -> None:
    alone = run_ranks(example, 1, 1, 1)[0]
    assert run_ranks(example, 2, 1, 2)[0] == pytest.approx(alone, rel=1e-5)
