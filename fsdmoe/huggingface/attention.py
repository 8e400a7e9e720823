"""Context-parallel attention for Hugging Face models, through their own attention interface::

    from transformers import AttentionInterface
    AttentionInterface.register("context_parallel", huggingface_attention("ring"))
    model.set_attn_implementation("context_parallel")
    model(tokens_BL, position_ids=positions_BL, attention_plan=plan)

The plan is passed with the call, as a keyword that the models pass on to every layer's attention, so nothing
is kept between calls. Positions, which the models' rotary embeddings need, are those of the tokens in their
documents. :class:`fsdmoe.huggingface.causal_lm.WrappedCausalLM` does all of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.config import Mode
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.core.errors import ConfigError
from fsdmoe.memory.layer_call import name_activation, saving_as
from fsdmoe.memory.recompute import drawing_part, hand_out, part


def huggingface_attention(mode: Mode = "ring") -> Callable[..., tuple[Tensor, None]]:
    """A function to register; it wants ``attention_plan`` among the keywords of the model's call."""
    attention = ContextAttention(mode)

    def attend(
        module: nn.Module,
        query_BHLD: Tensor,
        key_BGLD: Tensor,
        value_BGLE: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        attention_plan: AttentionPlan | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        attention_plan = require_plan(attention_plan)
        _refuse({"dropout": dropout, "attention_mask": attention_mask} | keywords, attention_plan)
        query, key, value = (x.transpose(1, 2) for x in (query_BHLD, key_BGLD, value_BGLE))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attended(attention.attend, query, key, value, attention_plan, scale), None

    return attend


def attended(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    draws: bool = False,
    **kwargs: Any,
) -> Tensor:
    """``attend`` of these: where the projections of a layer end and its attention begins, for whatever is
    recomputed or offloaded. ``draws``: with dropout; a second run must leave out what the first left out."""
    hand_out(query, key, value)
    for each in (query, key, value):
        name_activation("qkv", each)
    run = drawing_part if draws else part
    return saving_as("attention_output", run, "attention", attend, query, key, value, *args, **kwargs)


def require_plan(plan: AttentionPlan | None) -> AttentionPlan:
    """The plan of a model's call, or a ConfigError that says where to get one."""
    if plan is None:
        raise ConfigError(
            "attention_plan: expected an AttentionPlan among the keywords of the model's call, got none; "
            "call the model through fsdmoe.as_causal_lm with the inputs of a fsdmoe.Feed, or pass "
            "model(..., attention_plan=plan)"
        )
    return plan


_UNKNOWN = {
    "s_aux": "attention sinks",
    "softcap": "soft-capped scores",
    "position_bias": "scores with a bias of their own",
    "sliding_window": "a sliding window that is shorter than the rows",
    "dropout": "dropout on attention",
    "attention_mask": "a mask of the caller's or the model's own",
}


def _refuse(keywords: dict[str, Any], plan: AttentionPlan) -> None:
    """What a model needs of its attention beyond causal attention inside each document."""
    for name, what in _UNKNOWN.items():
        value = keywords.get(name)
        if value is None or (isinstance(value, float) and value == 0.0):
            continue
        if name == "sliding_window" and value >= plan.split.seq_len:
            continue  # every query sees all of its row
        raise ConfigError(
            f"{name}: expected none in context-parallel attention, got {what}; switch it off in the model's "
            "configuration, or set mesh.cp and mesh.tp to 1"
        )
