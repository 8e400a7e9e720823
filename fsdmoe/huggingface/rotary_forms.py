"""How a wrapped model turns queries and keys by their positions, recognised by trying its function.

Functions like transformers' ``apply_rotary_pos_emb(q, k, cos, sin)`` differ in which members of a head form a
pair, and in what their tables hold. One whose form is found is replaced by a function of the same arguments
that computes it in one pass (:func:`fused_rotation`), where the kernel can run; elsewhere, and for whatever
the form does not cover, it calls the one that it replaces.

Sizes: B rows, H heads, S tokens, D width of a head, R of its part that is turned, P = R/2 pairs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fsdmoe.kernels.backend import triton_for

Rotation = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RotaryForm:
    """What a function computes."""

    interleaved: bool
    """Pairs are neighbours ``(2i, 2i + 1)``, half-split afterwards; else ``(i, i + P)``."""
    entries: Literal["both", "first", "pair"]
    """Tables ``[.., R]`` with one entry for each member of a pair, the same of which the first P are read, or
    tables ``[.., P]``."""
    partial: bool = False
    """R may be less than D: the rest of the head stays as it is."""

    def num_turned(self, cos: Tensor) -> int:
        """R, by the width of a table."""
        return cos.shape[-1] * (2 if self.entries == "pair" else 1)

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """What is read of them: ``[.., P]``, or ``[.., R]`` for entries of both."""
        if self.entries != "first":
            return cos, sin
        pairs = cos.shape[-1] // 2
        return cos[..., :pairs], sin[..., :pairs]


def takes_rotary_arguments(function: Any) -> bool:
    """Whether it is called as transformers' functions are."""
    try:
        return list(inspect.signature(function).parameters)[:4] == ["q", "k", "cos", "sin"]
    except (TypeError, ValueError):  # not a function, or one without a signature
        return False


@functools.cache
def rotary_form(function: Rotation) -> RotaryForm | None:
    """The form that ``function`` has, found by trying; None for another."""
    for interleaved, entries in itertools.product((False, True), ("both", "first", "pair")):
        form = RotaryForm(interleaved, entries)  # type: ignore[arg-type]
        if _computes(function, form, width=8, turned=8):
            partial = RotaryForm(interleaved, form.entries, partial=True)
            return partial if _computes(function, partial, width=12, turned=8) else form
    return None


@torch.no_grad()
def _computes(function: Rotation, form: RotaryForm, *, width: int, turned: int) -> bool:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 5, width, generator=random)
    k = torch.randn(2, 1, 5, width, generator=random)
    cos, sin = torch.randn(2, 2, 5, turned // 2 if form.entries == "pair" else turned, generator=random)
    try:
        theirs = function(q.clone(), k.clone(), cos, sin)
    except Exception:  # an unknown function, given inputs it may not expect: any failure means "not known"
        return False
    if not (isinstance(theirs, tuple) and len(theirs) == 2):
        return False
    ours = (_turn(x, cos, sin, form, _rotate_reference) for x in (q, k))
    return all(
        a.shape == b.shape and torch.allclose(a, b, 1e-5, 1e-5) for a, b in zip(theirs, ours, strict=True)
    )


def _rotate_reference(x_BSHR: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    first, second = (x_BSHR[..., 0::2], x_BSHR[..., 1::2]) if interleaved else x_BSHR.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    (cos_1, cos_2), (sin_1, sin_2) = (
        (t, t) if t.shape[-1] == first.shape[-1] else t.chunk(2, dim=-1) for t in (cos, sin)
    )
    return torch.cat((first * cos_1 - second * sin_1, second * cos_2 + first * sin_2), dim=-1)


def _turn(
    x_BHSD: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm, rotate: Callable[..., Tensor]
) -> Tensor:
    x_BSHD, num_turned = x_BHSD.transpose(1, 2), form.num_turned(cos)
    turned = rotate(x_BSHD[..., :num_turned], *form.tables(cos, sin), interleaved=form.interleaved)
    if num_turned < x_BSHD.shape[-1]:
        turned = torch.cat((turned, x_BSHD[..., num_turned:]), dim=-1)
    return turned.transpose(1, 2)


@functools.cache
def fused_rotation(own: Rotation, form: RotaryForm) -> Rotation:
    """``own`` in one pass over queries and one over keys."""

    @functools.wraps(own)
    def rotate(
        q: Any, k: Any = None, cos: Any = None, sin: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        # Some functions take queries alone (Qwen4-Exp's): what is missing does not fit, and goes to them.
        fused = triton_for(q) if not (args or kwargs) and _fits(q, k, cos, sin, form) else None
        if fused is None:
            return own(q, k, cos, sin, *args, **kwargs)
        return tuple(_turn(x, cos, sin, form, fused.rope_triton) for x in (q, k))  # type: ignore[return-value]

    return rotate


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: RotaryForm) -> bool:
    """Whether these are what the form was tried with: plain tensors of one dtype (tables of another would
    change that of the result), and angles that are constants."""
    tensors = (q, k, cos, sin)
    if any(type(t) is not Tensor or t.dtype != q.dtype for t in tensors) or cos.requires_grad:
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    num_turned, widths = form.num_turned(cos), (q.shape[-1], k.shape[-1])
    fits_head = all(num_turned == width or (form.partial and num_turned < width) for width in widths)
    return fits_head and all(cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == x.shape[2] for x in (q, k))
