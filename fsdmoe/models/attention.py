"""Causal self-attention: grouped-query (Qwen3, Mixtral, GLM-4.5, gpt-oss) and multi-head latent (DeepSeek).

Under tensor parallelism a rank starts from its range of the tokens, works on all of them with its own
heads, and keeps its range of the sum; under context parallelism "all of them" are this rank's piece of the
rows, and :class:`AttentionContext` attends to the other pieces.

Shape suffixes: B batch, s tokens of a row on this rank, S tokens of a row over its tensor-parallel ranks (= s
without), H heads of this rank, D width of a head (or of the residual stream where no H stands before it), P
rotary pairs.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdmoe.context_parallel import flash4_attention as flash4
from fsdmoe.context_parallel.attention import ContextAttention, attend_here
from fsdmoe.context_parallel.blocks import Block, whole_rows
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import split_rows
from fsdmoe.kernels.linear import Linear, project_side_by_side
from fsdmoe.kernels.rms_norm import RMSNorm
from fsdmoe.memory.calls import plain_calls
from fsdmoe.models.config import ModelConfig
from fsdmoe.models.projections import scatter_projection
from fsdmoe.models.rope import apply_rope, apply_rope_interleaved, norm_and_rotate
from fsdmoe.tensor_parallel.group import TensorGroup
from fsdmoe.tensor_parallel.split import TensorPlan

# Without FlashAttention-4. cuDNN's kernel is about twice as fast as the flash backend on Hopper; a call it
# cannot take falls to the next.
_CUDA_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_IN_FIXED_ORDER = _CUDA_BACKENDS[1:]
"""cuDNN's backward adds gradients up in any order."""


class SplitRows(NamedTuple):
    """Rows that several ranks share: which rank holds which tokens, and how queries get the keys of other
    ranks."""

    plan: AttentionPlan
    attention: ContextAttention
    sequence_group: dist.ProcessGroup | None = None
    """All ranks with pieces of these rows, those of ``tp`` included; none is this rank alone."""
    by_document: bool = False
    """For balance and capacity a sequence is a document, not a row."""


@dataclass(frozen=True)
class AttentionContext:
    """What every layer's attention shares in one forward."""

    cos_BSP: torch.Tensor
    sin_BSP: torch.Tensor
    mask_B1SS: torch.Tensor | None
    """True where a query may see a key; none means plainly causal."""
    split: SplitRows | None = None
    """Set where rows are split over ranks; the mask is none then."""
    block: Block | None = None
    """Set, in place of a mask, where rows are whole and the model has sinks, which the mask's attention does
    not know."""
    document_ids_BS: torch.Tensor | None = None
    """Of whole rows, for who looks at single queries and keys; none is one document a row."""

    @classmethod
    def build(
        cls,
        positions_BS: torch.Tensor,
        document_ids_BS: torch.Tensor | None,
        config: ModelConfig,
        split: SplitRows | None = None,
        lengths_BS: torch.Tensor | None = None,
    ) -> AttentionContext:
        """``positions`` and ``lengths`` of the tokens that this rank's attention sees."""
        rotary = config.rotary
        cos, sin = rotary.tables(positions_BS, lengths_BS)
        if config.has_sinks and split is None:
            block = _block_of(positions_BS, document_ids_BS)
            return cls(cos, sin, None, block=block, document_ids_BS=document_ids_BS)
        mask = None if document_ids_BS is None or split is not None else document_mask(document_ids_BS)
        return cls(cos, sin, mask, split, document_ids_BS=document_ids_BS)

    def attend(
        self,
        query_BSHD: torch.Tensor,
        key_BSHD: torch.Tensor,
        value_BSHD: torch.Tensor,
        scale: float,
        sinks_H: torch.Tensor | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention inside each document, ``[B, S, H, D]``, to its last ``window`` tokens where that
        is given."""
        heads = query_BSHD, key_BSHD, value_BSHD
        if self.split is not None:
            return self.split.attention.attend(*heads, self.split.plan, scale, sinks_H, window)
        if self.block is not None:
            return attend_here(*heads, self.block, scale, sinks_H, window)
        return attend(*heads, self.mask_B1SS, scale)


def _block_of(positions_BS: torch.Tensor, document_ids_BS: torch.Tensor | None) -> Block | None:
    """Of whole rows. Documents are looked up on the host, which waits for the device; where a run packs rows
    on a GPU, ``context_parallel.varlen`` has made a plan of them beforehand."""
    if document_ids_BS is None:
        return whole_rows(len(positions_BS), positions_BS.shape[1], positions_BS.device)
    return AttentionPlan(split_rows(document_ids_BS, 1), None, positions_BS.device).whole


def document_mask(document_ids_BS: torch.Tensor) -> torch.Tensor:
    """Causal attention inside each packed document: ``[B, 1, S, S]``, True = may see."""
    size = document_ids_BS.shape[1]
    same_BSS = document_ids_BS[:, :, None] == document_ids_BS[:, None, :]
    causal_SS = torch.ones(size, size, dtype=torch.bool, device=document_ids_BS.device).tril()
    return (same_BSS & causal_SS)[:, None]


def attend(
    query_BSHD: torch.Tensor,
    key_BSHD: torch.Tensor,
    value_BSHD: torch.Tensor,
    mask_B1SS: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Scaled dot-product attention ``[B, S, H, D]``, grouped heads included, on the fastest backend that
    takes it."""
    if query_BSHD.is_cuda and mask_B1SS is None and flash4.takes_rows(query_BSHD, value_BSHD):
        return flash4.flash4_rows(query_BSHD, key_BSHD, value_BSHD, scale)
    q, k, v = (x.transpose(1, 2) for x in (query_BSHD, key_BSHD, value_BSHD))
    grouped = q.shape[1] != k.shape[1]
    is_causal = mask_B1SS is None
    backends = _IN_FIXED_ORDER if torch.are_deterministic_algorithms_enabled() else _CUDA_BACKENDS
    with sdpa_kernel(backends, set_priority=True) if q.is_cuda else nullcontext():
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask_B1SS, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    return out.transpose(1, 2)


def _planned(
    module: nn.Module,
    *,
    by_heads: tuple[str, ...],
    of_heads: tuple[str, ...] = (),
    of_tokens: tuple[str, ...] = (),
) -> TensorPlan:
    """A plan from the names of the layers; those that the module does not have are left out."""
    plan: TensorPlan = {"o_proj.weight": 1, "o_proj.bias": "tokens", "sinks": 0}
    for names, value in ((by_heads, 0), (of_heads, "heads"), (of_tokens, "tokens")):
        plan |= {f"{name}.{kind}": value for name in names for kind in ("weight", "bias")}  # type: ignore[misc]
    return {name: plan[name] for name, _ in module.named_parameters() if name in plan}


class GroupedQueryAttention(nn.Module):
    """Qwen3 (with a norm on each query and key head), Mixtral (without), GLM-4.5 (either; half of each head
    is rotated), and gpt-oss (without; a sink a head, and a window in some layers)."""

    def __init__(self, config: ModelConfig, window: int | None = None) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, window
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(config.hidden_size, query, bias=bias)
        self.k_proj = Linear(config.hidden_size, key, bias=bias)
        self.v_proj = Linear(config.hidden_size, key, bias=bias)
        self.o_proj = Linear(query, config.hidden_size, bias=bias and config.architecture != "glm4_moe")
        has_norm = config.has_qk_norm
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if has_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if has_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.has_sinks else None
        self.tensor = TensorGroup()
        self.memory_calls = plain_calls("projections", "head_norm", "attend")

    def tensor_plan(self) -> TensorPlan:
        return _planned(self, by_heads=("q_proj", "k_proj", "v_proj"), of_heads=("q_norm", "k_norm"))

    def forward(self, x_BsD: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        x_BSD = x_BsD if self.tensor.size == 1 else self.tensor.gather(x_BsD)
        heads = self.memory_calls["projections"](self._project, x_BSD, context)
        attend = self.memory_calls["attend"]
        out_BSHD = attend(context.attend, *heads, self.head_dim**-0.5, self.sinks, self.window)
        if self.tensor.size == 1:
            return self.o_proj(out_BSHD.flatten(2))
        return scatter_projection(self.o_proj, out_BSHD.flatten(2), self.tensor)

    def _project(self, x_BSD: torch.Tensor, context: AttentionContext) -> tuple[torch.Tensor, ...]:
        projected = project_side_by_side(x_BSD, (self.q_proj, self.k_proj, self.v_proj))
        return self._heads(context, *projected)

    def _heads(self, context: AttentionContext, *projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries and keys, normed and rotated, and values."""
        query_BSHD, key_BSHD, value_BSHD = (each.unflatten(2, (-1, self.head_dim)) for each in projected)
        query_BSHD = self._rotated(query_BSHD, self.q_norm, context)
        return query_BSHD, self._rotated(key_BSHD, self.k_norm, context), value_BSHD

    def _rotated(self, x_BSHD: torch.Tensor, norm: nn.Module, context: AttentionContext) -> torch.Tensor:
        """A norm keeps x for its backward; without one, x would be kept only to rotate it again."""
        if isinstance(norm, RMSNorm):
            return self.memory_calls["head_norm"](_rotated, x_BSHD, norm, context)
        return _rotated(x_BSHD, norm, context)


def _rotated(x_BSHD: torch.Tensor, norm: nn.Module, context: AttentionContext) -> torch.Tensor:
    tables = context.cos_BSP, context.sin_BSP
    if isinstance(norm, RMSNorm):
        return norm_and_rotate(x_BSHD, norm.weight, norm.eps, *tables)
    return apply_rope(norm(x_BSHD), *tables)


class LatentAttention(nn.Module):
    """DeepSeek's MLA: queries and the joint keys and values pass through low-rank bottlenecks.

    One rotary key of width ``qk_rope_head_dim`` is shared by all heads; the rest of each key has no
    positions. Tensor-parallel ranks exchange the narrow latents, not the residual stream.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.nope_dim = config.qk_nope_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.rank = config.kv_lora_rank
        heads, hidden, bias = config.num_attention_heads, config.hidden_size, config.attention_bias
        query = heads * (self.nope_dim + self.rope_dim)
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden, query, bias=False)
        else:
            self.q_a_proj = Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=1e-6)
            self.q_b_proj = Linear(config.q_lora_rank, query, bias=False)
        self.has_query_rank = config.q_lora_rank is not None
        self.scale = (self.nope_dim + self.rope_dim) ** -0.5 * config.rotary.softmax_factor
        self.kv_a_proj_with_mqa = Linear(hidden, self.rank + self.rope_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.rank, eps=1e-6)
        self.kv_b_proj = Linear(self.rank, heads * (self.nope_dim + self.value_dim), bias=False)
        self.o_proj = Linear(heads * self.value_dim, hidden, bias=bias)
        self.tensor = TensorGroup()
        self.memory_calls = plain_calls("projections", "mla_up", "head_norm", "attend")

    def tensor_plan(self) -> TensorPlan:
        return _planned(
            self,
            by_heads=("q_proj", "q_b_proj", "kv_b_proj"),
            of_tokens=("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
        )

    def forward(self, x_BsD: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        query_latent, latent, key_rope = self.memory_calls["projections"](self._down, x_BsD)
        if self.tensor.size > 1:
            query_latent = self.tensor.gather(query_latent)
            joint = self.tensor.gather(torch.cat((latent, key_rope), dim=-1))  # one exchange, not two
            latent, key_rope = joint.split([self.rank, self.rope_dim], dim=-1)
        heads = self.memory_calls["mla_up"](self._up, context, query_latent, latent, key_rope)
        out_BSHD = self.memory_calls["attend"](context.attend, *heads, self.scale, None, None)
        if self.tensor.size == 1:
            return self.o_proj(out_BSHD.flatten(2))
        return scatter_projection(self.o_proj, out_BSHD.flatten(2), self.tensor)

    def _down(self, x_BsD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of this rank's tokens: what queries are projected from, what keys and values are, and the rotary
        key of all heads."""
        query_latent = x_BsD
        if self.has_query_rank:
            query_latent = self.memory_calls["head_norm"](self.q_a_layernorm, self.q_a_proj(x_BsD))
        latent, key_rope = self.kv_a_proj_with_mqa(x_BsD).split([self.rank, self.rope_dim], dim=-1)
        latent = self.memory_calls["head_norm"](self.kv_a_layernorm, latent)
        return query_latent, latent, key_rope

    def _up(
        self,
        context: AttentionContext,
        query_latent: torch.Tensor,
        latent: torch.Tensor,
        key_rope: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        query_proj = self.q_b_proj if self.has_query_rank else self.q_proj
        return self._heads(context, query_proj(query_latent), self.kv_b_proj(latent), key_rope)

    def _heads(
        self, context: AttentionContext, query: torch.Tensor, key_value: torch.Tensor, key_rope: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of this rank's heads; ``key_value`` holds keys without positions and
        values side by side."""
        batch, seq = query.shape[:2]
        query_BSHD = query.view(batch, seq, -1, self.nope_dim + self.rope_dim)
        query_nope, query_rope = query_BSHD.split([self.nope_dim, self.rope_dim], dim=-1)
        key_nope, value_BSHD = key_value.view(batch, seq, -1, self.nope_dim + self.value_dim).split(
            [self.nope_dim, self.value_dim], dim=-1
        )
        query_rope = apply_rope_interleaved(query_rope, context.cos_BSP, context.sin_BSP)
        key_rope = apply_rope_interleaved(key_rope[:, :, None], context.cos_BSP, context.sin_BSP)
        query_BSHD = torch.cat((query_nope, query_rope), dim=-1)
        key_BSHD = torch.cat((key_nope, key_rope.expand(-1, -1, key_nope.shape[2], -1)), dim=-1)
        return query_BSHD, key_BSHD, value_BSHD
