"""The experts' compute as one differentiable function, over an interface of products.

::

    forward    gate_up × activation × routing weight                                 ``gate_up``
               the second projection, summed over a row's experts                    ``down``
    backward   dy through down and the activation -> the pre-activation's gradient   ``down_dgrad``
               gradients of both weights, at once or later                           ``wgrad``
               the pre-activation's gradient through gate_up -> dx                   ``gate_up_dgrad``

==============================================  ===========================================================
``GroupedProducts`` (``expert_mlp_grouped.py``)  grouped products of plain torch, any device and dtype
``LowRank`` (``low_rank.py``)                    one weight of those products with its update
``FusedProducts`` (``triton/swiglu_mlp.py``)     Triton in bf16: activations fused, gradients in place
``RoundedProducts`` (``triton/rounded_mlp.py``)  Triton, operands rounded as a recipe has them
``BlockwiseProducts`` (``gluon/fp8_mlp.py``)     Gluon in fp8, on Hopper
``LowRankBlockwise`` (``gluon/fp8_low_rank.py``) the same with updates of frozen weights
==============================================  ===========================================================

A gradient goes to its parameter's sink where there is one, else back to autograd (:class:`Gradient`).

Sizes: R rows, K assignments a row, E experts here, D hidden, N expert width.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fsdmoe.core.autograd import once_differentiable
from fsdmoe.kernels.expert_operands import NO_UPDATES, ExpertWeights, LowRankUpdates, Rows
from fsdmoe.kernels.grad_sink import GradSink, deliver, sink_of
from fsdmoe.kernels.late_grads import LateGrads

Each = TypeVar("Each")


class ExpertInputs(NamedTuple, Generic[Each]):
    """One thing for each input that experts are differentiable in: tensors, or gradients."""

    x_RD: Each
    weights_RK: Each
    gate_up_E2ND: Each
    down_EDN: Each
    gate_up_bias: Each | None = None
    down_bias: Each | None = None
    gate_up_a: Each | None = None
    gate_up_b: Each | None = None
    down_a: Each | None = None
    down_b: Each | None = None


class Gradient:
    """A gradient that is wanted, and where it goes."""

    def __init__(self, of: Tensor, sink: GradSink | None) -> None:
        self._of = of
        self._sink = sink
        self.for_autograd: Tensor | None = None
        """What is returned to autograd; None if a sink has it."""

    def put(self, gradient: Tensor) -> None:
        """Take a gradient that was computed in memory of its own."""
        self.for_autograd = deliver(gradient, self._sink, self._of.dtype)

    def place(self) -> tuple[Tensor, bool] | None:
        """The memory to compute it in, and whether to add to what is there. None where the sink refuses it:
        this backward is for other tensors (``torch.autograd.grad``), so it need not be computed."""
        if self._sink is None:
            self.for_autograd = torch.empty_like(self._of)
            return self.for_autograd, False
        claimed = self._sink.claim()
        if claimed is not None and (claimed[0].shape != self._of.shape or not claimed[0].is_contiguous()):
            raise AssertionError(
                f"expected a contiguous gradient buffer of shape {tuple(self._of.shape)}, "
                f"got shape {tuple(claimed[0].shape)}, strides {claimed[0].stride()}"
            )
        return claimed

    def places(self) -> list[tuple[int, Tensor, bool]]:
        """The same, as ranges of experts: the first of a range, and its place. Clones have places of their
        own (:mod:`fsdmoe.kernels.cloned_products`)."""
        place = self.place()
        return [] if place is None else [(0, *place)]


Given = ExpertInputs[Tensor]
Grads = ExpertInputs[Gradient | None]
"""None for what needs no gradient."""


class PreActivation(NamedTuple):
    """What most products keep."""

    values: Tensor | None
    """None where backward computes it again."""


class SortedRows(NamedTuple):
    """What products keep in addition, instead of making it again (``ExpertPolicy.keeps_rows``)."""

    x_MD: Tensor | None
    """Rows in the order of their experts."""
    act_MN: Tensor | None
    """What the second projection was given."""


class ExpertProducts(Protocol):
    """How one call of experts computes. What passes between its steps is the implementation's own."""

    def gate_up(self, given: Given, ids_RK: Tensor, *, keep: bool) -> tuple[list[Any], Sequence[Any]]:
        """What :meth:`down` goes on with, and if ``keep`` what backward needs beyond ``given``: named tuples
        of tensors or None."""
        ...

    def down(self, given: Given, activated: list[Any]) -> Tensor:
        """``y_RD``. It may clear ``activated`` once it has used it."""
        ...

    def down_dgrad(self, dy_RD: Tensor, given: Given, kept: list[Any], grads: Grads) -> tuple[Any, Any]:
        """The operands of :meth:`wgrad`, and those of :meth:`gate_up_dgrad`; gradients of the routing weights
        and of down's bias. It may clear ``kept`` once it has used it."""
        ...

    def wgrad(self, operands: Any, grads: Grads) -> None:
        """The gradients of both weights and of their updates."""
        ...

    def gate_up_dgrad(self, operands: Any, given: Given, grads: Grads) -> None:
        """The gradients of x and of gate_up's bias."""
        ...


def compute_experts(
    products: ExpertProducts,
    rows: Rows,
    weights: ExpertWeights,
    updates: LowRankUpdates = NO_UPDATES,
    late: LateGrads | None = None,
    *,
    keeps_x: bool = True,
) -> Tensor:
    """``y_RD`` by ``products``; with ``late``, backward leaves :meth:`~ExpertProducts.wgrad` there. Without
    ``keeps_x`` backward is given an empty x: the products keep what they need of it."""
    x_RD, weights_RK, ids_RK = rows
    given = ExpertInputs(x_RD, weights_RK, *weights, *updates)
    if not torch.is_grad_enabled():  # which the function itself is not told
        return products.down(given, products.gate_up(given, ids_RK, keep=False)[0])
    # Asked for here: what autograd hands to backward may be another tensor, without its sink.
    sinks = ExpertInputs(None, None, *[None if each is None else sink_of(each) for each in weights])
    if torch._C._current_graph_task_id() == -1:  # not ``is_in_backward``, without its call in every layer
        return _Experts.apply(_Call(products, sinks, late, keeps_x), ids_RK, *given)
    # Computed again: that stops at the last tensor which backward needs. Usually it is one of these, and an
    # output that is a node of its own is left out.
    down: list[Callable[[], Tensor]] = []
    return _Output.apply(_Experts.apply(_Call(products, sinks, late, keeps_x, down), ids_RK, *given), down)


class _Call(NamedTuple):
    """What the function needs in addition to tensors."""

    products: ExpertProducts
    sinks: ExpertInputs[GradSink | None]
    late: LateGrads | None
    keeps_x: bool
    down: list[Callable[[], Tensor]] | None = None
    """Takes the second projection, where :class:`_Output` computes it; a stand-in is returned then."""


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, ids_RK: Tensor, *tensors: Tensor) -> Tensor:
        given = ExpertInputs(*tensors)
        activated, kept = call.products.gate_up(given, ids_RK, keep=any(ctx.needs_input_grad))
        ctx.call = call
        ctx.kinds = ExpertInputs, *map(type, kept)
        saved = given if call.keeps_x else given._replace(x_RD=given.x_RD.new_empty(0))
        ctx.save_for_backward(*saved, *itertools.chain(*kept))
        del kept
        if call.down is None:
            return call.products.down(given, activated)
        call.down.append(functools.partial(call.products.down, given, activated))
        return given.x_RD.new_empty(()).expand(given.x_RD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor | None, ...]:
        products, sinks, late, *_ = ctx.call
        given, *kept = _restored(ctx.kinds, ctx.saved_tensors)
        inputs = zip(given, sinks, ctx.needs_input_grad[2:], strict=True)
        grads: Grads = ExpertInputs(*[Gradient(of, sink) if wanted else None for of, sink, wanted in inputs])
        operands, rest = products.down_dgrad(dy_RD, given, kept, grads)
        if late is None:
            products.wgrad(operands, grads)
        else:  # holds these two alone: autograd would copy any other gradient that has a second holder
            late_grads: Grads = ExpertInputs(None, None, grads.gate_up_E2ND, grads.down_EDN)
            late.leave(functools.partial(_late_wgrad, products, operands, late_grads))
        del operands
        products.gate_up_dgrad(rest, given, grads)
        return None, None, *[None if each is None else each.for_autograd for each in grads]


class _Output(torch.autograd.Function):
    """The second projection of a call, in the place of its stand-in. It saves nothing."""

    @staticmethod
    def forward(ctx: Any, stand_in_RD: Tensor, down: list[Callable[[], Tensor]]) -> Tensor:
        return down.pop()()

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None]:
        return dy_RD, None


def _restored(kinds: tuple[Any, ...], tensors: Iterable[Tensor | None]) -> list[Any]:
    """The named tuples that were saved one after the other."""
    saved = iter(tensors)
    return [kind._make(itertools.islice(saved, len(kind._fields))) for kind in kinds]


def _late_wgrad(products: ExpertProducts, operands: Any, grads: Grads) -> tuple[Tensor | None, Tensor | None]:
    products.wgrad(operands, grads)
    gate_up = grads.gate_up_E2ND
    down = grads.down_EDN
    assert gate_up is not None  # both are wanted: see ``ExpertPolicy.late``
    assert down is not None
    return gate_up.for_autograd, down.for_autograd
