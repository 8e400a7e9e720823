"""What becomes of a transfer when the work beside it fails."""

import torch
from torch import Tensor

from fsdmoe.mesh import build_meshes
from fsdmoe.tensor_parallel.group import TensorGroup
from fsdmoe.tensor_parallel.ring import gather_while, scatter_while
from fsdmoe.testing import run_ranks


def fail_and_go_on(kind: str) -> tuple[bool, bool]:
    tensor = TensorGroup.of(build_meshes(tp=2))
    mine_BsD = torch.full((1, 2, 3), float(tensor.rank))

    def boom(*_: object) -> Tensor:
        raise ValueError("boom")

    failed = False
    try:
        if kind == "gather":
            gather_while(mine_BsD, tensor, boom)
        else:
            scatter_while(lambda rank: mine_BsD.clone() if rank != tensor.rank else boom(), tensor)
    except ValueError:
        failed = True
    gathered = gather_while(mine_BsD, tensor, lambda *_: None)
    total = scatter_while(lambda rank: mine_BsD + rank, tensor)
    right = torch.equal(gathered[0, :, 0], torch.tensor([0.0, 0, 1, 1]))
    return failed, right and bool((total == 1 + 2 * tensor.rank).all())


def test_ranks_that_failed_alike_can_exchange_again() -> None:
    for kind in ("gather", "scatter"):
        assert run_ranks(fail_and_go_on, 2, kind) == [(True, True)] * 2, kind
