"""The ranks that share attention and dense layers, and the two transfers between them.

Outside of a split layer each rank holds its own range of every row's tokens, so norms, routers and experts
do no work twice; inside, each rank holds all of the tokens and its share of the heads or columns::

    tokens/tp  --gather-->  all tokens  --my heads-->  partial sums of all tokens  --scatter-->  tokens/tp
    gradient   <-scatter--             <------------                              <-gather----

The two are each other's backward. So the gradient of a whole parameter is partial on every rank, whether it
worked on the rank's own tokens or in front of its own heads: the sum over the ranks is the gradient.

A ``replicated`` group is for generation, whose steps of one token cannot be shared: every rank holds all of
the tokens throughout, a gather is nothing and a scatter is a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.core.compat import all_gather, reduce_scatter
from fsdmoe.mesh import Axis, Meshes


@dataclass(frozen=True)
class TensorGroup:
    """The ranks of ``tp``. Alone, every transfer is the identity."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    replicated: bool = False
    """Every rank holds all tokens between the layers too; no gradients."""

    @property
    def shares_tokens(self) -> bool:
        """Whether a rank holds its own range of tokens between the layers."""
        return self.size > 1 and not self.replicated

    @classmethod
    def of(cls, meshes: Meshes) -> TensorGroup:
        size = meshes.size(Axis.TP)
        return cls(meshes.group(Axis.TP), size, meshes.rank(Axis.TP)) if size > 1 else cls()

    def gather(self, x_BsD: Tensor) -> Tensor:
        """All tokens ``[B, S, ...]`` of the rows whose ranges ``[B, S/tp, ...]`` the ranks hold."""
        return _Transfer.apply(x_BsD, self, True) if self.shares_tokens else x_BsD

    def scatter(self, x_BSD: Tensor) -> Tensor:
        """This rank's range ``[B, S/tp, ...]`` of the sum of all ranks' ``[B, S, ...]``."""
        if self.replicated:
            return self.all_reduce(x_BSD.detach().clone(memory_format=torch.contiguous_format))
        return x_BSD if self.size == 1 else _Transfer.apply(x_BSD, self, False)

    def own(self, x_BS: Tensor) -> Tensor:
        """This rank's range of rows that every rank holds alike; no gradient flows through."""
        return x_BS.detach().chunk(self.size, 1)[self.rank] if self.shares_tokens else x_BS

    def join_columns(self, x_BSN: Tensor) -> Tensor:
        """The columns of all ranks side by side, ``[B, S, tp * N]``; no gradient flows between ranks."""
        if self.size == 1:
            return x_BSN
        pieces_RBSN = x_BSN.new_empty((self.size, *x_BSN.shape))
        all_gather(pieces_RBSN.flatten(), x_BSN.detach().contiguous().flatten(), self.group)
        return pieces_RBSN.movedim(0, -2).flatten(-2)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduced in place; no gradient flows through."""
        if self.size > 1:
            dist.all_reduce(x, op, group=self.group)
        return x


class _Transfer(torch.autograd.Function):
    """A gather, whose backward is a scatter, or a scatter, whose backward is a gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup, gathers: bool) -> Tensor:
        ctx.tensor = tensor
        ctx.gathers = gathers
        return _all_gather(x, tensor) if gathers else _reduce_scatter(x, tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        back = _reduce_scatter if ctx.gathers else _all_gather
        return back(grad, ctx.tensor), None, None


def _all_gather(x_BsD: Tensor, tensor: TensorGroup) -> Tensor:
    pieces_RBsD = x_BsD.new_empty((tensor.size, *x_BsD.shape))
    all_gather(pieces_RBsD.flatten(), x_BsD.contiguous().flatten(), tensor.group)
    # The ranks' ranges one after the other in every row: a copy only where there are several rows.
    return pieces_RBsD.transpose(0, 1).flatten(1, 2)


def _reduce_scatter(x_BSD: Tensor, tensor: TensorGroup) -> Tensor:
    pieces_RBsD = x_BSD.unflatten(1, (tensor.size, -1)).transpose(0, 1).contiguous()
    out_BsD = torch.empty_like(pieces_RBsD[0])
    reduce_scatter(out_BsD.flatten(), pieces_RBsD.flatten(), tensor.group)
    return out_BsD
