"""The forward of a wrapped model's attention, with rotary positions and attention as our decoders have them.

transformers' attention modules call two things by names of the file that they stand in: a function that turns
queries and keys (:mod:`fsdmoe.huggingface.rotary_forms`), and the table of attention functions. Everything
around these, from projections to caches, is the module's own. So its forward is taken as it is, the same
code, with other values behind these two names. Nothing of transformers is changed: other models of the
process do not see it, and the model's attention implementation keeps its name, which masks are made by.

Attention is replaced where the model asks for ``sdpa`` and gets transformers' own function: causal or masked
attention of whole rows takes cuDNN's kernel, where that can, without repeating keys and values for masked
rows. Anything else goes to transformers' function.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdmoe.huggingface.rotary_forms import fused_rotation, rotary_form, takes_rotary_arguments
from fsdmoe.models.attention import attend

_HOME, _OWN, _TABLE = "transformers.integrations.sdpa_attention", "sdpa_attention_forward", "get_interface"
_TAKEN = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"}
_NOT_TAKEN = {"softcap", "output_attentions", "s_aux", "position_bias", "cache"}


class AttentionForward(NamedTuple):
    """A forward for all attention modules of one class."""

    forward: Callable[..., Any]
    turns: bool
    """Its rotary positions are fused."""
    attends: bool
    """Its attention is ours where it can be."""


@functools.cache
def attention_forward(own: Callable[..., Any]) -> AttentionForward | None:
    """``own``, the forward of a class, with our functions behind the names that it calls; None where it calls
    neither."""
    if not isinstance(own, types.FunctionType) or hasattr(own, "__wrapped__"):
        return None
    named = {name: own.__globals__[name] for name in own.__code__.co_names if name in own.__globals__}
    rotations = {name: found for name, found in named.items() if takes_rotary_arguments(found)}
    forms = {name: form for name, found in rotations.items() if (form := rotary_form(found)) is not None}
    values = {name: fused_rotation(rotations[name], form) for name, form in forms.items()}
    tables = {name: _Attentions(found) for name, found in named.items() if hasattr(found, _TABLE)}
    turns = bool(forms) and len(forms) == len(rotations)
    if not turns and not tables:
        return None
    renamed = _with_names(own, {**values, **tables})

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A compiler takes a name's value for that of the file's own name; and it fuses by itself.
        return (own if torch.compiler.is_compiling() else renamed)(self, *args, **kwargs)

    return AttentionForward(forward, turns, bool(tables))


def has_unknown_rotation(own: Callable[..., Any]) -> bool:
    """Whether a forward turns queries and keys in a way that is not known, by the names of what it calls."""
    if not isinstance(own, types.FunctionType):
        return False
    named = {name: own.__globals__.get(name) for name in own.__code__.co_names if "rotary" in name}
    return any(callable(f) and not (takes_rotary_arguments(f) and rotary_form(f)) for f in named.values())


def attends_by(module: nn.Module) -> str:
    """The implementation that the module's configuration names; ours takes the place of ``sdpa`` alone."""
    return str(getattr(getattr(module, "config", None), "_attn_implementation", "sdpa"))


def _with_names(function: types.FunctionType, values: dict[str, Any]) -> types.FunctionType:
    """The same code with other values behind some of its global names."""
    made = types.FunctionType(
        function.__code__,
        {**function.__globals__, **values},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__, made.__doc__ = function.__kwdefaults__, function.__doc__
    made.__qualname__, made.__annotations__ = function.__qualname__, function.__annotations__
    return made


class _Attentions:
    """transformers' table of attention functions, with ours in the place of its own for ``sdpa``."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __getitem__(self, name: str) -> Any:
        return _in_place_of(self._own[name])

    def get_interface(self, *args: Any, **kwargs: Any) -> Any:
        return _in_place_of(self._own.get_interface(*args, **kwargs))


def _in_place_of(function: Any) -> Any:
    own = getattr(sys.modules.get(_HOME), _OWN, None)
    return _attention(function) if function is own and own is not None else function


@functools.cache
def _attention(own: Callable[..., Any]) -> Callable[..., tuple[Tensor, None]]:
    # What another version of it might take, and ours does not know, is left to it.
    for_own = _NOT_TAKEN | (set(inspect.signature(own).parameters) - _TAKEN)

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if (
            dropout
            or any(_is_given(keywords[name]) for name in for_own & keywords.keys())
            or not (attention_mask is not None or causal)
            or not takes_cudnn(query, key, value, attention_mask)
        ):
            return own(
                module, query, key, value, attention_mask,
                dropout=dropout, scaling=scaling, is_causal=is_causal, **keywords,
            )  # fmt: skip
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows = [x.transpose(1, 2) for x in (query, key, value)]
        return attend(rows[0], rows[1], rows[2], attention_mask, scale).contiguous(), None

    return attention


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def takes_cudnn(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Tensor | None) -> bool:
    """Whether cuDNN's kernel takes whole rows like these; a grouped, masked call that it refuses would end in
    the slowest of all."""
    if torch.compiler.is_compiling() or not q_BHSD.is_cuda or q_BHSD.shape[2] != k_BGSD.shape[2]:
        return False
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4):
        return False
    grouped = q_BHSD.shape[1] != k_BGSD.shape[1]
    params = torch.backends.cuda.SDPAParams(q_BHSD, k_BGSD, v_BGSE, mask, 0.0, mask is None, grouped)
    return torch.backends.cuda.can_use_cudnn_attention(params)
