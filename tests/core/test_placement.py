"""Placements by properties: whatever the cuts and the ranges, boxes tile the tensor once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdmoe.core.boxes import contiguous_strides, range_boxes
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import (
    Placement,
    computes_on_dtensor,
    halves,
    local_slice,
    local_tensor,
    make_dtensor,
    placement_of,
    recall_splits,
    register_split,
    split_parameter,
)
from fsdmoe.mesh import Axis, build_meshes
from fsdmoe.testing import run_ranks
from tests.support.coordinates import At

AXES = (Axis.EP, Axis.ETP, Axis.TP)


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, dict[Axis, int]]:
    """A random shape, random even cuts of distinct dims, some of them strided, and the axes' sizes."""
    shape = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=4))
    dims = draw(st.permutations(range(len(shape))))[: draw(st.integers(0, min(3, len(shape))))]
    sizes, cuts = {}, []
    for axis, dim in zip(AXES, dims):
        factor, size = shape[dim]
        sizes[axis] = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        cuts.append((axis, Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)))
    return Placement(tuple(factor * size for factor, size in shape), tuple(cuts)), sizes


def coordinates(sizes: dict[Axis, int]) -> list[At]:
    found = [At(sizes, {})]
    for axis, size in sizes.items():
        found = [At(sizes, {**at.ranks, axis: rank}) for at in found for rank in range(size)]
    return found


def local_reference(full: torch.Tensor, placement: Placement, at: At) -> torch.Tensor:
    """The local tensor as torch itself cuts it."""
    for axis, cut in placement.cuts:
        parts, _ = cut._split_tensor(full, at.size(axis), with_padding=False, contiguous=True)
        full = parts[at.rank(axis)]
    return full


@settings(max_examples=150, deadline=None)
@given(placements(), st.data())
def test_boxes_of_all_pieces_tile_the_global_tensor_once(
    case: tuple[Placement, dict], data: st.DataObject
) -> None:
    placement, sizes = case
    numel = math.prod(placement.global_shape)
    full = torch.arange(numel).reshape(placement.global_shape)
    rebuilt = torch.full(placement.global_shape, -1)
    for at in coordinates(sizes):
        local = local_reference(full, placement, at)
        assert placement.local_shape(at) == tuple(local.shape)
        assert math.prod(placement.local_view_shape(at)) == local.numel()
        assert torch.equal(local_slice(full, placement, at), local)
        flat = local.flatten()
        cuts = sorted(data.draw(st.lists(st.integers(0, flat.numel()), max_size=4)))
        for start, end in zip([0, *cuts], [*cuts, flat.numel()]):
            piece, seen = flat[start:end].clone(), 0
            for box in placement.boxes(at, start, end):
                assert box.numel > 0
                target = box.slice_of(rebuilt)
                assert tuple(target.shape) == box.sizes
                assert torch.equal(box.view_of(piece), box.slice_of(full))
                assert bool((target == -1).all()), "an element in two boxes"
                target.copy_(box.view_of(piece))
                seen += box.numel
            assert seen == end - start
    assert torch.equal(rebuilt, full)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_flat_range_is_at_most_two_ndim_minus_one_boxes_in_order(
    shape: list[int], data: st.DataObject
) -> None:
    numel = math.prod(shape)
    start, end = sorted((data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel))))
    boxes = list(range_boxes(shape, start, end))
    full = torch.arange(numel).reshape(shape)
    parts = [full[tuple(slice(o, o + n) for o, n in zip(*box))].flatten() for box in boxes]
    assert (torch.cat(parts).tolist() if parts else []) == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_an_unfactored_range_is_contiguous_in_its_piece() -> None:
    """What checkpoints rely on to write pieces without a copy."""
    for start, end in [(0, 60), (7, 41), (19, 22), (30, 31)]:
        for box in Placement.whole((3, 4, 5)).boxes(At({}, {}), start, end):
            wanted = contiguous_strides(box.sizes)
            assert all(n == 1 or a == b for n, a, b in zip(box.sizes, box.strides, wanted))


def test_gate_and_up_halves_both_reach_every_etp_rank() -> None:
    placement = Placement((2, 8, 3), ((Axis.EP, Shard(0)), (Axis.ETP, halves(1))))
    at = At({Axis.EP: 2, Axis.ETP: 2}, {Axis.EP: 1, Axis.ETP: 1})
    assert placement.local_shape(at) == (1, 4, 3)
    rows = sorted(
        row for box in placement.boxes(at) for row in range(box.offsets[1], box.offsets[1] + box.sizes[1])
    )
    assert rows == [2, 3, 6, 7]  # the second half of the gates (0-3) and of the ups (4-7)


def test_tensors_with_no_elements_have_no_boxes() -> None:
    for shape in [(0,), (0, 4), (4, 0), (2, 0, 3)]:
        placement = Placement.whole(shape)
        assert placement.boxes(At({}, {})) == []
        assert placement.local_shape(At({}, {})) == shape


def test_a_scalar_is_one_box() -> None:
    (box,) = Placement.whole(()).boxes(At({}, {}))
    assert box.view_of(torch.tensor([3.0])).item() == 3.0


def test_an_uneven_split_names_the_axis_and_the_divisors() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.ep: 3 ranks cannot split dim 0"):
        Placement((4, 2), ((Axis.EP, Shard(0)),)).local_shape(At({Axis.EP: 3}, {}))


def test_a_factor_that_does_not_divide_the_dim_is_refused() -> None:
    with pytest.raises(AssertionError, match="expected a factor of 3"):
        Placement((4, 3), ((Axis.TP, halves(1)),))


@pytest.mark.parametrize("dims", [(0, 0), (0, 2), (-1, 0)])
def test_two_axes_cannot_cut_one_dim_nor_one_that_is_not_there(dims: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="distinct dims"):
        Placement((4, 2), tuple(zip((Axis.EP, Axis.ETP), map(Shard, dims))))


def test_a_plain_parameter_is_whole_and_dense() -> None:
    assert placement_of(nn.Parameter(torch.zeros(2, 3)), At()) == Placement.whole((2, 3))


def test_a_split_parameter_is_a_dtensor_that_says_how_it_is_cut() -> None:
    at = At({Axis.EP: 2, Axis.ETP: 3}, {Axis.EP: 1, Axis.ETP: 2})
    whole = nn.Parameter(torch.randn(4, 12, 5), requires_grad=False)
    placement = Placement((4, 12, 5), ((Axis.EP, Shard(0)), (Axis.ETP, halves(1))))
    split = split_parameter(whole, placement, at)
    assert isinstance(split, DTensor)
    assert isinstance(split, nn.Parameter)
    assert split.shape == whole.shape
    assert split.placements == (Shard(0), _StridedShard(1, split_factor=2))
    assert split.device_mesh.mesh_dim_names == ("ep", "etp")
    assert not split.requires_grad
    assert placement_of(split, at) == placement
    assert torch.equal(local_tensor(split), whole[2:, [4, 5, 10, 11]])
    assert not computes_on_dtensor(split)


def convert_split_module() -> None:
    meshes, module = build_meshes(tp=2), nn.Linear(3, 4, bias=False)
    placement = Placement((4, 3), ((Axis.TP, Shard(0)),))
    register_split(module, "weight", split_parameter(module.weight, placement, meshes))
    module.to(torch.bfloat16)
    recall_splits(module)
    assert module.weight.dtype is torch.bfloat16
    assert isinstance(module.weight, DTensor)
    assert not computes_on_dtensor(module.weight)


def test_a_module_that_was_split_computes_locally_after_a_conversion_too() -> None:
    run_ranks(convert_split_module, 2)


def test_a_dtensor_of_others_says_how_it_is_cut_too() -> None:
    at = At({Axis.TP: 2}, {Axis.TP: 1})
    theirs = make_dtensor(torch.zeros(4, 3), at.submesh(Axis.TP), [Shard(1)], (4, 6))
    assert placement_of(theirs, at) == Placement((4, 6), ((Axis.TP, Shard(1)),))
    assert computes_on_dtensor(theirs)
    whole = make_dtensor(torch.zeros(4, 6), at.submesh(Axis.TP), [Replicate()], (4, 6))
    assert placement_of(whole, at) == Placement.whole((4, 6))
    partial = make_dtensor(torch.zeros(4, 6), at.submesh(Axis.TP), [Partial()], (4, 6))
    with pytest.raises(ConfigError, match=r"expected Shard or Replicate over tp, got Partial\(sum\)"):
        placement_of(partial, at)
