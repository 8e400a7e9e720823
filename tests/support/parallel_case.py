"""A tiny decoder of each family under any layout, step by step beside the same model in one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.config import ContextParallelConfig, Mode
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import split_rows
from fsdmoe.data import Batch
from fsdmoe.experts.config import BalanceConfig, ExpertsConfig, FlexConfig
from fsdmoe.feed import Feed
from fsdmoe.fsdp import FSDPConfig, engine_of
from fsdmoe.memory.config import Activation, MemoryConfig, Part
from fsdmoe.mesh import Axis, MeshConfig, Meshes, build_meshes
from fsdmoe.models import (
    Decoder,
    Initializer,
    ModelConfig,
    StepCounts,
    build_model,
    materialize,
)
from fsdmoe.models.attention import SplitRows
from fsdmoe.models.rope_config import RopeConfig
from fsdmoe.optim import AdamW
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from tests.support.coordinates import At

ROWS, LENGTH, SEED = 8, 16, 7
FEW = 3  # steps
LEARNING_RATES = {"sgd": 0.3, "adamw": 3e-3}

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 16, "head_dim": 4,
    "num_key_value_heads": 8, "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 8,
    "num_experts_per_tok": 2, "initializer_range": 0.2,
}  # fmt: skip
MODELS: dict[str, ModelConfig] = {
    "qwen3_moe": ModelConfig(architecture="qwen3_moe", attention_bias=True, **_SMALL),
    "mixtral": ModelConfig(architecture="mixtral", tie_word_embeddings=True, **_SMALL),
    "deepseek_v3": ModelConfig(
        architecture="deepseek_v3", first_k_dense_replace=1, n_shared_experts=1, n_group=4, topk_group=2,
        q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=6,
        num_nextn_predict_layers=1, routed_scaling_factor=1.5, **_SMALL,
    ),
}  # fmt: skip
_WIDER = _SMALL | {"head_dim": 8}
SCALED: dict[str, ModelConfig] = {
    "glm4_moe": ModelConfig(
        architecture="glm4_moe", first_k_dense_replace=1, n_shared_experts=1, attention_bias=True,
        num_nextn_predict_layers=1, routed_scaling_factor=1.5, partial_rotary_factor=0.5,
        max_position_embeddings=4, rope=RopeConfig(type="dynamic", factor=4.0), **_WIDER,
    ),
    "gpt_oss": ModelConfig(
        architecture="gpt_oss", attention_bias=True, sliding_window=5, **_WIDER,
        rope=RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=4, truncate=False),
    ),
    "qwen3 longrope": ModelConfig(
        architecture="qwen3_moe", max_position_embeddings=16, **_WIDER,
        rope=RopeConfig(
            type="longrope", original_max_position_embeddings=4, short_factor=(1.0, 1.1, 1.2, 1.3),
            long_factor=(1.5, 2.0, 3.0, 4.0),
        ),
    ),
    "deepseek_v3 yarn": replace(
        MODELS["deepseek_v3"], qk_rope_head_dim=8,
        rope=RopeConfig(
            type="yarn", factor=4.0, original_max_position_embeddings=4, mscale=0.7, mscale_all_dim=1.0,
        ),
    ),
}  # fmt: skip
"""Models for texts longer than they were trained on: documents of 5 to 16 tokens are scaled."""
CASES = MODELS | SCALED
EXPERTS = ExpertsConfig(balance=BalanceConfig(sequence=0.02, z_loss=1e-3))


@dataclass(frozen=True)
class Layout:
    """Degrees of every axis, and how split sequences attend."""

    mesh: MeshConfig
    mode: Mode = "ring"
    micro_batches: int = 1
    recompute: tuple[Part, ...] = ()
    offload: tuple[Activation, ...] = ()
    shard: str = "params"
    dynamic: bool = False
    max_tokens: int = LENGTH
    varlen: bool = False
    num_layers: int = 2
    chunks: int = 1
    sub_batches: int = 1
    dispatcher: str = "auto"
    clones: int = 0

    @property
    def memory(self) -> MemoryConfig:
        return MemoryConfig(recompute=self.recompute, offload=self.offload)

    @property
    def context(self) -> ContextParallelConfig:
        return ContextParallelConfig(
            mode=self.mode,
            dynamic=self.dynamic,
            max_tokens=self.max_tokens,
            varlen="always" if self.varlen else "never",
        )

    def __str__(self) -> str:
        sizes = [f"{axis}{size}" for axis, size in vars(self.mesh).items() if size > 1]
        extra = [f"x{self.micro_batches}"] * (self.micro_batches > 1)
        extra += [*self.recompute, *self.offload]
        extra += ["dynamic"] * self.dynamic + ["varlen"] * self.varlen
        extra += [f"chunks{self.chunks}"] * (self.chunks > 1)
        extra += [f"sub-batches{self.sub_batches}"] * (self.sub_batches > 1)
        extra += [f"clones{self.clones}"] * (self.clones > 0)
        shard = [self.shard] * (self.shard != "params")
        return "-".join([*sizes, *([self.mode] if self.mesh.cp > 1 else []), *extra, *shard]) or "alone"


def rows_of(step: int) -> Batch:
    """Packed rows: documents of many lengths, some tokens without loss."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 64, (ROWS, LENGTH), generator=generator)
    ends = torch.rand((ROWS, LENGTH), generator=generator) < 0.12
    ends[0] = False  # one document fills the whole row
    ends[:, -1] = True
    ids = torch.cat((torch.zeros(ROWS, 1, dtype=torch.int64), ends[:, :-1].cumsum(1)), 1)
    starts = torch.cat((torch.ones(ROWS, 1, dtype=torch.bool), ends[:, :-1]), 1)
    places = torch.arange(LENGTH).expand(ROWS, LENGTH)
    positions = places - torch.where(starts, places, 0).cummax(1).values
    labels = torch.roll(tokens, -1, 1).masked_fill(ends, 0)
    mask = ~ends & (torch.rand((ROWS, LENGTH), generator=generator) < 0.9)
    return Batch(tokens, labels, positions, ids, mask)


@dataclass(frozen=True)
class Course:
    """How training went: the loss of every step, and every gradient of the first."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]


def model_of(family: str, num_layers: int) -> Decoder:
    return build_model(replace(CASES[family], num_hidden_layers=num_layers), EXPERTS)


@functools.cache
def one_process(family: str, optimizer: str, by_document: bool = False, num_layers: int = 2) -> Course:
    """The reference: plain torch, all rows at once. Balance speaks of rows, or of documents."""
    model = model_of(family, num_layers)
    materialize(model, torch.device("cpu"), Initializer(SEED, CASES[family].initializer_range, At()))
    optim: Any = torch.optim.SGD(model.parameters(), lr=LEARNING_RATES["sgd"])
    if optimizer == "adamw":
        optim = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATES["adamw"], weight_decay=0.0)
    losses, gradients = [], {}
    for step in range(FEW):
        batch = rows_of(step)
        vector = model.count_tokens(batch.labels_BS, batch.loss_mask_BS, batch.document_ids_BS)
        out = model(
            batch.tokens_BS, positions_BS=batch.positions_BS, document_ids_BS=batch.document_ids_BS,
            labels_BS=batch.labels_BS, loss_mask_BS=batch.loss_mask_BS, counts=StepCounts.from_vector(vector),
            split=_whole_documents(batch) if by_document else None,
        )  # fmt: skip
        out.loss.backward()
        losses.append(out.cross_entropy.item())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optim.step()
        optim.zero_grad()
    return Course(losses, gradients)


def _whole_documents(batch: Batch) -> SplitRows:
    plan = AttentionPlan(split_rows(batch.document_ids_BS, 1))
    return SplitRows(plan, ContextAttention(), by_document=True)


def build_parallel(family: str, layout: Layout) -> tuple[Decoder, Meshes]:
    meshes = build_meshes(layout.mesh)
    policy = ParallelPolicy(
        experts=replace(
            EXPERTS,
            dispatcher=layout.dispatcher,  # type: ignore[arg-type]
            chunks=layout.chunks,
            sub_batches=layout.sub_batches,
            clones=layout.clones,
            clone_rows=0,
            flex=FlexConfig(rows=8.0) if layout.dispatcher == "flex" else FlexConfig(),
        ),
        fsdp=FSDPConfig(shard=layout.shard),  # type: ignore[arg-type]
        precision=PrecisionConfig(param_dtype="float32", reduce_dtype="float32"),
        memory=layout.memory,
        seed=SEED,
        initializer_range=CASES[family].initializer_range,
        grad_divisor=1.0,
    )
    return parallelize(model_of(family, layout.num_layers), meshes, policy), meshes


def train_parallel(
    family: str, layout: Layout, steps: int, optimizers: tuple[str, ...] = tuple(LEARNING_RATES)
) -> dict[str, Course]:
    """On every rank of a layout, with each optimizer from the same start."""
    model, meshes = build_parallel(family, layout)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    courses = {}
    for optimizer in optimizers:
        lr = LEARNING_RATES[optimizer]
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        optim: Any = torch.optim.SGD(model.parameters(), lr=lr)
        if optimizer == "adamw":
            optim = AdamW(model, lr=lr, weight_decay=0.0)
        courses[optimizer] = train_steps(model, optim, meshes, layout, steps)
    return courses


def train_steps(model: Decoder, optim: Any, meshes: Meshes, layout: Layout, steps: int) -> Course:
    """The gradients are whole ones, on rank 0 only."""
    feed = Feed(meshes, layout.context)
    losses, gradients = [], {}
    for step in range(steps):
        inputs = feed.inputs(feed.prepare(own_rows(step, meshes, feed.data_axis, layout)))
        planned = layout.varlen or layout.dynamic or layout.mesh.cp > 1
        assert all(("split" in each) == planned for each in inputs), "plans where asked for, masks elsewhere"
        counts = feed.count(model, inputs)
        loss, loads = torch.zeros(()), None
        for index, each in enumerate(inputs):
            with engine_of(model).micro_batch(last=index == len(inputs) - 1):
                out = model(**each, counts=counts, routing=feed.routing(prior_load_LE=loads))
                out.loss.backward()
            loss += out.cross_entropy
            loads = out.loads_LE if loads is None else loads + out.loads_LE
        dist.all_reduce(loss, group=meshes.group(Axis.LOSS))
        losses.append(loss.item())
        if step == 0:
            gradients = {
                n: p.grad.full_tensor()
                for n, p in model.named_parameters()
                if p.grad is not None  # type: ignore[attr-defined]
            }
        optim.step()
        optim.zero_grad()
    return Course(losses, gradients if dist.get_rank() == 0 else {})


def own_rows(step: int, meshes: Meshes, axis: Axis, layout: Layout) -> list[Batch]:
    """This rank's rows, in micro-batches."""
    columns = rows_of(step).columns
    share = ROWS // meshes.size(axis)
    first = meshes.rank(axis) * share
    size = share // layout.micro_batches
    return [
        Batch(**{name: column[start : start + size] for name, column in columns.items()})
        for start in range(first, first + share, size)
    ]


def compare(found: Course, wanted: Course, name: str, bound: float = 1e-5) -> None:
    """Every loss and, where there are gradients (on rank 0), every gradient, within ``bound`` relative."""
    assert found.losses, name
    for step, (loss, expected) in enumerate(zip(found.losses, wanted.losses, strict=False)):
        assert abs(loss - expected) <= bound * abs(expected), (
            f"{name}: loss {loss} at step {step}, not {expected}"
        )
    if found.gradients:
        assert found.gradients.keys() == wanted.gradients.keys(), name
    for key, gradient in found.gradients.items():
        expected_gradient = wanted.gradients[key]
        worst = (gradient - expected_gradient).abs().max() / expected_gradient.abs().max()
        assert worst <= bound, f"{name}: gradient of {key} differs by {worst:.1e}"


def evaluate_parallel(family: str, layout: Layout) -> float:
    """The held-out loss of the initial weights on the rows of two steps."""
    model, meshes = build_parallel(family, layout)
    feed = Feed(meshes, layout.context)
    batches = [b for step in range(2) for b in own_rows(step, meshes, feed.data_axis, layout)]
    return feed.held_out_loss(model, batches)


def balance_without_routing(family: str, layout: Layout) -> tuple[float, float]:
    """The balance loss of a caller that says nothing of the ranks, and of one that does; summed over tp."""
    model, meshes = build_parallel(family, layout)
    feed = Feed(meshes)
    inputs = feed.inputs(feed.prepare([rows_of(0)]))[0]
    found = [model(**inputs, **each).balance_loss for each in ({}, {"routing": feed.routing()})]
    for loss in found:
        dist.all_reduce(loss)
    return found[0].item(), found[1].item()
