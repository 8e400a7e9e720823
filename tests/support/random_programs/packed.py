"""Random programs of documents: packed into rows anyhow and split over ranks anyhow, they train the same
model and are evaluated to the same number as one by one in one process.

::

    documents     one by one, whole, on the plain decoder               sums of losses, gradients
    the same      packed into rows of any length, in any order, with    equal
                  padding behind them, over dp, cp, tp and ep, in
                  micro-batches, with parts recomputed

Rows without any token that has a loss are among them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.data import Batch
from fsdmoe.feed import Feed
from fsdmoe.fsdp import engine_of
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.models import Decoder, Initializer, ModelConfig, StepCounts, build_model, materialize
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from tests.support.coordinates import At
from tests.support.random_programs.layout import Layout, Verdict

SEED, SPREAD, VOCAB = 7, 0.2, 32
SHORTEST = 8
"""Of rows: as many tokens as 2 ranks of cp and of tp divide."""
LOSSES, GRADIENTS, HELD_OUT = 1e-5, 2e-4, 1e-6
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 4,
    "num_key_value_heads": 2, "intermediate_size": 16, "moe_intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "initializer_range": SPREAD,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": ModelConfig(architecture="qwen3_moe", **_SMALL),
    "mixtral": ModelConfig(architecture="mixtral", tie_word_embeddings=True, **_SMALL),
    "gpt_oss": ModelConfig(architecture="gpt_oss", attention_bias=True, sliding_window=5, **_SMALL),
    "deepseek_v3": ModelConfig(
        architecture="deepseek_v3", first_k_dense_replace=1, n_shared_experts=1, n_group=2, topk_group=1,
        q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4,
        num_nextn_predict_layers=1, **(_SMALL | {"num_hidden_layers": 2}),
    ),
}  # fmt: skip
LAYOUTS = (
    (3, Layout(1)), (3, Layout(2)), (2, Layout(2, cp=2)), (1, Layout(2, tp=2)), (2, Layout(2, ep=2)),
    (2, Layout(3)), (2, Layout(4)), (1, Layout(4, cp=2, ep=2)), (1, Layout(4, tp=2, cp=2)),
    (1, Layout(4, dp_outer=2, ep=2)),
)  # fmt: skip


@dataclass(frozen=True)
class PackedProgram:
    """One step and one evaluation."""

    layout: Layout
    family: str = "qwen3_moe"
    documents: tuple[int, ...] = (5, 3)
    """Their lengths."""
    silent: tuple[int, ...] = ()
    """Documents that have no loss anywhere, by number."""
    row: int = SHORTEST
    """Tokens of a row."""
    rows: int = 1
    """Of a micro-batch."""
    order: int = 0
    """Seed of the order in which documents are packed."""
    mode: str = "ring"
    recompute: tuple[str, ...] = ()

    def features(self) -> list[str]:
        found = [f"{axis}={size}" for axis, size in vars(self.layout).items()]
        found += [f"family={self.family}", f"rows of {self.row}", f"{self.rows} rows"]
        return found + [f"recomputes {part}" for part in self.recompute]


def draw_packed(rng: random.Random, worlds: tuple[int, ...]) -> PackedProgram:
    choices = [(weight, layout) for weight, layout in LAYOUTS if layout.world in worlds]
    layout = rng.choices([c[1] for c in choices], [c[0] for c in choices])[0]
    family = rng.choice(sorted(FAMILIES))
    if layout.cp > 1 and family == "gpt_oss":
        family = "qwen3_moe"  # sinks and windows are refused there
    row = rng.choice([8, 12, 16])
    documents = tuple(rng.choice([1, 1, 2, 3, 5, 8, rng.randint(1, row)]) for _ in range(rng.randint(2, 8)))
    parts = ["norms", "activation", "attention_projections", "router", "experts"]
    parts += [] if layout.cp > 1 else ["attention"]
    return PackedProgram(
        layout, family, tuple(min(length, row) for length in documents),
        silent=tuple(i for i, _ in enumerate(documents) if rng.random() < 0.2),
        row=row, rows=rng.choice([1, 1, 2]), order=rng.randrange(100),
        mode=rng.choice(["ring", "all_gather"]),
        recompute=tuple(sorted(rng.sample(parts, rng.choice([0, 0, 1, 2])))),
    )  # fmt: skip


@dataclass(frozen=True)
class Document:
    tokens: Tensor
    mask: Tensor
    """Which tokens have a loss: never the last, whose successor is another document's."""

    @property
    def labels(self) -> Tensor:
        return self.tokens.roll(-1).masked_fill(~self.mask, 0)


def documents_of(program: PackedProgram) -> list[Document]:
    found = []
    for number, length in enumerate(program.documents):
        generator = torch.Generator().manual_seed(97 * number + length)
        mask = torch.rand(length, generator=generator) < 0.8
        mask[-1] = False
        mask &= number not in program.silent
        found.append(Document(torch.randint(0, VOCAB, (length,), generator=generator), mask))
    return found


def pack(documents: list[Document], row: int, num_rows: int) -> Batch:
    """Whole documents, each in the first row that has space; what is left of a row is a document of padding,
    and so are the rows behind the last."""
    rows: list[list[Document]] = [[] for _ in range(num_rows)]
    for document in documents:
        fits = [r for r in rows if sum(len(d.tokens) for d in r) + len(document.tokens) <= row]
        fits[0].append(document)
    return Batch(*(torch.stack(column) for column in zip(*(_columns(r, row) for r in rows), strict=True)))


def _columns(row: list[Document], length: int) -> tuple[Tensor, ...]:
    left = length - sum(len(document.tokens) for document in row)
    padding = Document(torch.zeros(left, dtype=torch.int64), torch.zeros(left, dtype=torch.bool))
    row = [*row, padding] if left else row
    return (
        torch.cat([d.tokens for d in row]), torch.cat([d.labels for d in row]),
        torch.cat([torch.arange(len(d.tokens)) for d in row]),
        torch.cat([torch.full((len(d.tokens),), i) for i, d in enumerate(row)]),
        torch.cat([d.mask for d in row]),
    )  # fmt: skip


class Alone:
    """Every document by itself, on the plain decoder."""

    def __init__(self, program: PackedProgram) -> None:
        config, documents = FAMILIES[program.family], documents_of(program)
        model = build_model(config)
        materialize(model, torch.device("cpu"), Initializer(SEED, SPREAD, At()))
        rows = [pack([document], len(document.tokens), 1) for document in documents]
        vectors = [model.count_tokens(r.labels_BS, r.loss_mask_BS, r.document_ids_BS) for r in rows]
        counts = StepCounts.from_vector(torch.stack(vectors).sum(0))
        self.loss = 0.0
        for row in rows:
            out = model(
                row.tokens_BS, positions_BS=row.positions_BS, labels_BS=row.labels_BS,
                loss_mask_BS=row.loss_mask_BS, counts=counts,
            )  # fmt: skip
            out.loss.backward()
            self.loss += out.cross_entropy.item()
        self.gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def own_batches(program: PackedProgram, meshes: Meshes, axis: Axis) -> list[Batch]:
    """This rank's rows in micro-batches, as many on every rank."""
    documents = documents_of(program)
    random.Random(program.order).shuffle(documents)
    share = meshes.size(axis) * program.rows
    num_rows = -(-len(documents) // share) * share
    whole = pack(documents, program.row, num_rows)
    first = meshes.rank(axis) * (num_rows // meshes.size(axis))
    return [
        whole.rows(slice(start, start + program.rows))
        for start in range(first, first + num_rows // meshes.size(axis), program.rows)
    ]


def build(program: PackedProgram, meshes: Meshes) -> Decoder:
    policy = ParallelPolicy(
        precision=PrecisionConfig(param_dtype="float32", reduce_dtype="float32"),
        memory=MemoryConfig(recompute=program.recompute),  # type: ignore[arg-type]
        seed=SEED, initializer_range=SPREAD, grad_divisor=1.0,
    )  # fmt: skip
    return parallelize(build_model(FAMILIES[program.family]), meshes, policy)


def judge_packed(program: PackedProgram, meshes: Meshes, folder: str) -> Verdict:
    """Run it on this rank; what rank 0 returns is the verdict."""
    model = build(program, meshes)
    feed = Feed(meshes, ContextParallelConfig(mode=program.mode))  # type: ignore[arg-type]
    batches = own_batches(program, meshes, feed.data_axis)
    inputs = feed.inputs(feed.prepare(batches))
    counts = feed.count(model, inputs)
    loss = torch.zeros((), device=meshes.device)
    for index, each in enumerate(inputs):
        with engine_of(model).micro_batch(last=index == len(inputs) - 1):
            out = model(**each, counts=counts, routing=feed.routing())
            out.loss.backward()
        loss += out.cross_entropy
    dist.all_reduce(loss, group=meshes.group(Axis.LOSS))
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    has_loss = any(document.mask.any() for document in documents_of(program))
    held_out = feed.held_out_loss(model, batches) if has_loss else loss.item()  # refused without any
    if dist.get_rank():
        return Verdict()
    return Verdict(
        compare(Alone(program), loss.item(), gradients, held_out), ["packed step", "held-out loss"]
    )


def compare(alone: Alone, loss: float, gradients: dict[str, Tensor], held_out: float) -> str:
    if not abs(loss - alone.loss) <= LOSSES * (1 + abs(alone.loss)):
        return f"packed, the loss is {loss}, document by document {alone.loss}"
    if not abs(held_out - alone.loss) <= HELD_OUT * max(1.0, abs(alone.loss)):
        return f"the held-out loss is {held_out}, document by document {alone.loss}"
    if gradients.keys() != alone.gradients.keys():
        return f"some have a gradient here only: {sorted(gradients.keys() ^ alone.gradients.keys())}"
    peak = max(float(g.abs().max()) for g in alone.gradients.values())
    for name, expected in alone.gradients.items():
        off = float((gradients[name].cpu() - expected).abs().max()) / (
            float(expected.abs().max()) + 1e-2 * peak + 1e-9
        )
        if not off <= GRADIENTS:
            return f"packed, the gradient of {name} is off by {off:.1e}"
    return ""
