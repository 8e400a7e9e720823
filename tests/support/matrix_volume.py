"""What Muon sends in a step, counted from plans, next to two other ways; for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdmoe.core.placement import Coordinates
from fsdmoe.fsdp.plan import GroupPlan
from fsdmoe.mesh import Axis
from fsdmoe.optim.matrices import FlatMatrices
from fsdmoe.optim.matrix_exchange import MatrixBlock, _work
from fsdmoe.optim.muon import _is_planned


def planned_matrices(plans: Sequence[GroupPlan]) -> list[FlatMatrices]:
    """The matrices that Muon will update, in the order of a run."""
    return [
        FlatMatrices.of(plan, index)
        for plan in plans
        for index, param in enumerate(plan.params)
        if param.requires_grad and _is_planned(param, ())
    ]


@dataclass(frozen=True)
class ExchangeVolume:
    """Elements that all ranks together send in a step."""

    total: int
    """Of all matrices, in one replica."""
    sent: int
    """Parts of matrices that are cut, and their results."""
    gathered: int
    """If every rank gathered all matrices, and computed them all."""
    owned: int
    """If each matrix went to an owner, in turn, and came back."""
    busiest: float
    """The most work of a rank, over the mean."""


def count_volume(
    params: Sequence[FlatMatrices], blocks: Sequence[MatrixBlock], at: Coordinates
) -> ExchangeVolume:
    """What an exchange of ``blocks`` sends, next to two other ways."""
    replica, replicas = at.size(Axis.FSDP_TP), at.size(Axis.DP_OUTER)
    total = sent = owned = 0
    loads = [0.0] * (replica * replicas)
    for number, block in enumerate(blocks):
        numel = params[block.param].form.numel
        held = sum(piece.numel for piece in block.pieces if piece.rank == block.owner % replica)
        in_turn = sum(piece.numel for piece in block.pieces if piece.rank == number % replica)
        total += numel
        sent += (numel - held) + (replicas * numel - held)
        owned += 2 * replicas * (numel - in_turn)
        loads[block.owner] += _work(params[block.param])
    busiest = max(loads) * len(loads) / max(1.0, sum(loads))
    return ExchangeVolume(total, sent, replicas * (replica - 1) * total, owned, busiest)
