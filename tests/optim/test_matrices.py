"""Matrices of parameters, cut by axes and put together again, against slices of the whole tensor."""

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdmoe.core.placement import Placement, halves, local_slice
from fsdmoe.mesh import Axis
from fsdmoe.optim.matrices import form_of, has_matrices
from tests.support.coordinates import At

EP, ETP = (Axis.EP, Shard(0)), Axis.ETP
FORMS = {
    "rows over tp": ("up", Placement((8, 6), ((Axis.TP, Shard(0)),)), 0),
    "columns over tp": ("down", Placement((6, 8), ((Axis.TP, Shard(1)),)), 0),
    "heads over tp": ("q_proj", Placement((8, 6), ((Axis.TP, Shard(0)),)), 2),
    "gate and up": ("gate_up_proj", Placement((4, 8, 6), (EP, (ETP, halves(1)))), 0),
    "down": ("down_proj", Placement((4, 6, 8), (EP, (ETP, Shard(2)))), 0),
    "transposed down": ("down_proj", Placement((4, 8, 6), (EP, (ETP, Shard(1)))), 0),
    "transposed gate and up": ("gate_up_proj", Placement((4, 6, 8), (EP, (ETP, halves(2)))), 0),
    "alternating": ("gate_up_proj", Placement((4, 8, 6), (EP, (ETP, Shard(1)))), 0),
    "transposed and alternating": ("gate_up_proj", Placement((4, 6, 8), (EP, (ETP, Shard(2)))), 0),
}


def wanted(kind: str, whole: torch.Tensor, name: str, head_rows: int) -> list[torch.Tensor]:
    """The matrices, by hand."""
    if head_rows:
        return list(whole.split(head_rows))
    if whole.dim() == 2:
        return [whole]
    if name == "down_proj":
        return list(whole)
    dim = 1 if kind in ("transposed gate and up", "transposed and alternating") else 0
    if "alternating" in kind:
        return [each for expert in whole for each in (expert[0::2], expert[1::2])] if dim == 0 else [
            each for expert in whole for each in (expert[:, 0::2], expert[:, 1::2])
        ]  # fmt: skip
    return [each for expert in whole for each in expert.chunk(2, dim)]


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_all_ranks_are_the_matrices_and_come_back(kind: str, size: int) -> None:
    name, placement, head_rows = FORMS[kind]
    whole = torch.arange(float(torch.Size(placement.global_shape).numel())).view(placement.global_shape)
    form = form_of(name, placement, head_rows)
    sizes = {axis: size for axis, _ in placement.cuts}
    num_parts = form.num_parts(At(sizes))
    found = []
    for cell in range(size if form.count_axis is not None else 1):
        split = {} if form.count_axis is None else {form.count_axis: cell}
        parts = []
        for part in range(num_parts):
            own = split | ({} if form.block_cut is None else {form.block_cut[0]: part})
            local = local_slice(whole, placement, At(sizes, own))
            parts.append(local.view(-1, form.numel // num_parts))
        blocks = torch.cat(parts, dim=1)
        matrices = form.join(blocks.clone(), num_parts)
        assert torch.equal(form.part(matrices, num_parts), blocks)
        found += list(matrices)
    assert len(found) == len(wanted(kind, whole, name, head_rows))
    assert all(map(torch.equal, found, wanted(kind, whole, name, head_rows)))
    assert all(tuple(each.shape) == form.shape for each in found)
    is_transposed = kind.startswith("transposed")
    assert form.outputs_and_inputs == (form.shape[::-1] if is_transposed else form.shape)


def test_vectors_of_experts_and_biases_are_no_matrices() -> None:
    assert has_matrices("gate_up_proj", Placement((4, 8, 6), (EP,)))
    assert has_matrices("weight", Placement((8, 6)))
    assert not has_matrices("sinks", Placement((4, 8), (EP,)))
    of_adapters = Placement((8, 12), ((Axis.EP, _StridedShard(1, split_factor=3)), (ETP, Shard(0))))
    assert not has_matrices("lora_B.default.weight", of_adapters), "experts would be orthogonalised as one"
    assert not has_matrices("gate_up_proj_bias", Placement((4, 8)))
    assert not has_matrices("conv", Placement((4, 8, 3, 3)))
