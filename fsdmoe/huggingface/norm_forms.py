"""Root-mean-square norms of wrapped models, recognised by trying them, through our kernels.

A norm is a module with a ``weight [D]`` and an epsilon. Known are ``x / rms(x) * weight``, the same with
``1 + weight`` (Gemma, Qwen3-Next), and the norm with a gate, ``forward(x, gate)``: times ``silu(gate)``
(Qwen3-Next) or ``sigmoid(gate)`` (Kimi Linear).
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdmoe.kernels.rms_norm import gated_norm, gated_norm_reference, rms_norm, rms_norm_reference

_EPS = ("variance_epsilon", "eps")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRIED = ((torch.float32, 1e-5), (torch.bfloat16, 3e-2))


class NormForm(NamedTuple):
    """What a norm computes."""

    offset: float = 0.0
    """Added to the weight."""
    is_gated: bool = False
    silu: bool = False
    """Gated by ``silu`` and not by ``sigmoid``."""

    def of(self, given: Sequence[Tensor], weight_D: Tensor, eps: float) -> Tensor:
        """Of x, or of x and its gate."""
        if self.is_gated:
            return gated_norm(given[0], given[1], weight_D, eps, silu=self.silu)
        return rms_norm(given[0], weight_D, eps, self.offset)

    def reference(self, given: Sequence[Tensor], weight_D: Tensor, eps: float) -> Tensor:
        """The same in plain torch."""
        if self.is_gated:
            return gated_norm_reference(given[0], given[1], weight_D, eps, silu=self.silu)
        return rms_norm_reference(given[0], weight_D, eps, self.offset)


_PLAIN = (NormForm(), NormForm(offset=1.0))
_GATED = (NormForm(is_gated=True, silu=True), NormForm(is_gated=True))


def eps_name(module: nn.Module) -> str | None:
    """What a norm calls its epsilon; None for a module that is no norm."""
    own = list(module.parameters(recurse=False))
    if not own or any(p.dim() != 1 for p in own) or any(True for _ in module.children()):
        return None
    return next((name for name in _EPS if isinstance(getattr(module, name, None), float)), None)


@torch.no_grad()
def norm_form(module: nn.Module, eps: str) -> NormForm | None:
    """The form that the module's own forward has."""
    own = dict(module.named_parameters(recurse=False))
    if own.keys() != {"weight"} or any(True for _ in module.buffers()):
        return None
    size = own["weight"].shape[0]
    # One that may be called with a gate is not known by what it computes without.
    takes_gate = "gate" in inspect.signature(type(module).forward).parameters
    forms = _GATED if takes_gate else _GATED + _PLAIN
    return next((form for form in forms if _has_form(form, module, eps, size)), None)


def _has_form(form: NormForm, module: nn.Module, eps: str, size: int) -> bool:
    """It is tried with a large epsilon, so that one in another place of the formula shows, and with a row of
    large values, so that clamps show."""
    random = torch.Generator().manual_seed(0)
    weight_D, x, gate = (torch.randn(*n, size, generator=random) for n in ((), (2, 3), (2, 3)))
    x[1], gate[1] = 50 * x[1], 50 * gate[1]
    given = (x, gate) if form.is_gated else (x,)
    for trains, (dtype, tolerance) in itertools.product((False, True), _TRIED):
        twin = copy.copy(module)
        parameters = {"weight": nn.Parameter(weight_D.to(dtype))}
        twin.__dict__.update({"_parameters": parameters, "training": trains, eps: 0.5})
        try:
            theirs = type(module).forward(twin, *(each.to(dtype) for each in given))
        except Exception:  # an unknown forward, given inputs it may not expect: any failure means "not known"
            return False
        ours = form.reference(given, weight_D, 0.5)
        if not isinstance(theirs, Tensor) or theirs.dtype != dtype or theirs.shape != ours.shape:
            return False
        if not torch.allclose(theirs.float(), ours, tolerance, tolerance):
            return False
    return True


@functools.cache
def norm_forward(form: NormForm, eps: str) -> Callable[..., Any]:
    """A forward that computes this form, and leaves any other call to the module's own."""
    arguments = 2 if form.is_gated else 1

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        # Mixed dtypes and autocast give a result of another dtype; a compiler fuses the module's own forward.
        if kwargs or len(args) != arguments or not _are_taken(args, self.weight):
            return type(self).forward(self, *args, **kwargs)
        return form.of(args, self.weight, getattr(self, eps))

    return forward


def _are_taken(given: Sequence[Any], weight_D: Tensor) -> bool:
    if not all(_is_taken(x, weight_D.dtype) for x in given):
        return False
    # Others are broadcast, or refused, by the module's own forward.
    return all(x.shape == given[0].shape for x in given) and given[0].shape[-1:] == weight_D.shape


def _is_taken(x: Any, dtype: torch.dtype) -> bool:
    return (
        type(x) is Tensor
        and x.dtype == dtype
        and dtype in _DTYPES
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(x.device.type)
    )
