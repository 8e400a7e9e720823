"""Parameters of a model by FSDP unit, and by what splits and shards them.

The engine's own planner (:mod:`fsdmoe.fsdp.plan`) lays out every tensor of a built model; a search needs the
same sums for thousands of meshes, so here a unit is three numbers:

    split    tp cuts them, the rest is sharded over dp_shard x cp       attention, dense MLPs, vocabulary
    whole    sharded over dp_shard x cp x tp                            norms, router, shared experts
    experts  ep and etp cut them, the rest is sharded over edp

Padding is left out: granules are 64 elements, so it is next to nothing. A test holds these sums against the
engine's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from fsdmoe.fsdp import FSDPPolicy
from fsdmoe.fsdp.units import select_units
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.models.config import ModelConfig


@dataclass(frozen=True)
class UnitShape:
    """Elements of one unit's parameters, of the whole model."""

    name: str
    split: int
    whole: int
    experts: int = 0
    is_repeated: bool = True
    covered: int = 0
    """Of the dense ones (split or whole), those of layers that a recipe covers."""
    largest: int = 0
    """Elements of the largest dense tensor: its gradient is handed over in one piece."""

    @property
    def total(self) -> int:
        return self.split + self.whole + self.experts


def unit_shapes(model: ModelConfig) -> tuple[UnitShape, ...]:
    """Of a native decoder, in the order of the engine: embedding, layers, depths, head, root."""
    hidden, vocabulary = model.hidden_size, model.vocab_size * model.hidden_size
    layers = [_layer(model, is_dense=index < model.first_k_dense_replace)
              for index in range(model.num_hidden_layers)]  # fmt: skip
    join = 2 * hidden * hidden + 3 * hidden  # eh_proj, enorm, hnorm, norm
    depths = [_layer(model, is_dense=False, extra=join)] * model.num_nextn_predict_layers
    embedding = UnitShape("embedding", vocabulary, 0, is_repeated=False, largest=vocabulary)
    if model.tie_word_embeddings:  # one weight, which the root owns
        return (
            *layers,
            *depths,
            UnitShape("root", vocabulary, hidden, is_repeated=False, largest=vocabulary),
        )
    head = UnitShape("head", vocabulary, 0, is_repeated=False, largest=vocabulary)
    return (
        embedding,
        *layers,
        *depths,
        head,
        UnitShape("root", 0, hidden, is_repeated=False, largest=hidden),
    )


def _layer(model: ModelConfig, *, is_dense: bool, extra: int = 0) -> UnitShape:
    hidden = model.hidden_size
    split, whole, largest = _attention(model)
    whole += 2 * hidden + extra
    if is_dense:
        width = hidden * model.intermediate_size
        return UnitShape("dense layer", split + 3 * width, whole, largest=max(largest, width),
                         covered=split + 3 * width)  # fmt: skip
    latent = model.moe_latent_size or hidden
    experts = model.num_experts * 3 * latent * model.moe_intermediate_size
    shared = 3 * hidden * model.n_shared_experts * model.moe_intermediate_size
    router = model.num_experts * hidden
    between = 2 * hidden * latent if model.moe_latent_size else 0
    gate = hidden if model.shared_expert_gate else 0
    largest = max(largest, shared // 3, router, extra and 2 * hidden * hidden)
    return UnitShape("MoE layer" if not extra else "prediction depth", split,
                     whole + shared + router + between + gate, experts,
                     covered=split + shared, largest=largest)  # fmt: skip


def _attention(model: ModelConfig) -> tuple[int, int, int]:
    """Elements that tp splits, that it leaves whole, and of the largest tensor."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if not model.is_mla:
        query, key = heads * model.head_dim, model.num_key_value_heads * model.head_dim
        biases = query + 2 * key if model.attention_bias else 0
        norms = 2 * model.head_dim if model.has_qk_norm else 0
        if model.attention_bias and model.architecture != "glm4_moe":
            norms += hidden  # o_proj's bias
        return 2 * hidden * (query + key) + biases, norms, hidden * query
    width = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    rank, both = model.kv_lora_rank, heads * (model.qk_nope_head_dim + model.v_head_dim)
    out = heads * model.v_head_dim * hidden
    query_rank = model.q_lora_rank
    split = rank * both + out + (hidden if query_rank is None else query_rank) * width
    whole = hidden * (rank + model.qk_rope_head_dim) + rank
    if query_rank is not None:
        whole += hidden * query_rank + query_rank
    if model.attention_bias:
        whole += hidden + rank + model.qk_rope_head_dim + (query_rank or 0)
    return split, whole, max(out, rank * both, (query_rank or hidden) * width)


_EXPERT = re.compile(r"\.experts\.")
_MATRIX = re.compile(r"\.(self_attn|attention|attn|mlp|feed_forward)\.\w+\.weight$|embed|lm_head")
_NEVER_SPLIT = re.compile(r"shared_expert|norm|\.gate\.|\.router\.")


@lru_cache(maxsize=16)
def folder_units(folder: str) -> tuple[UnitShape, ...]:
    """Of the model of a Hugging Face folder, built without memory."""
    return wrapped_unit_shapes(build_folder_model(folder))


def wrapped_unit_shapes(model: nn.Module) -> tuple[UnitShape, ...]:
    """Of any model, by the names of its parameters: fused experts, matrices that tp would split, the rest."""
    found = []
    for unit in select_units(model, FSDPPolicy()):
        sizes = [(owned.name, owned.parameter.numel(), owned.parameter.dim()) for owned in unit.owned]
        experts = _sum(sizes, lambda name, _: bool(_EXPERT.search(name)))
        split = _sum(sizes, _is_split)
        dense = [numel for name, numel, _ in sizes if not _EXPERT.search(name)]
        found.append(UnitShape(
            unit.name or "root", split, sum(dense) - split, experts,
            is_repeated=unit.repeated, covered=0, largest=max(dense, default=0),
        ))  # fmt: skip
    return tuple(unit for unit in found if unit.total)


def _is_split(name: str, dim: int) -> bool:
    is_matrix = dim == 2 and _MATRIX.search(name) and not _EXPERT.search(name)
    return bool(is_matrix and not _NEVER_SPLIT.search(name))


def _sum(sizes: Iterable[tuple[str, int, int]], wanted: Callable[[str, int], bool]) -> int:
    return sum(numel for name, numel, dim in sizes if wanted(name, dim))
