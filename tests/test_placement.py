"""Placements by properties: whatever the factoring, the splits and the cuts, boxes tile the tensor once."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdmoe.errors import ConfigError
from fsdmoe.mesh import Axis
from fsdmoe.placement import Placement, contiguous_strides, placement_of, range_boxes, set_placement

AXES = (Axis.EP, Axis.ETP, Axis.TP)


@dataclass
class At:
    """A rank's coordinates without any process group."""

    sizes: dict[Axis, int]
    ranks: dict[Axis, int]

    def size(self, axis: Axis) -> int:
        return self.sizes.get(axis, 1)

    def rank(self, axis: Axis) -> int:
        return self.ranks.get(axis, 0)


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, dict[Axis, int]]:
    """A random factored view, random even splits of distinct view dims, and the axes' sizes."""
    factored = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=0, max_size=3))
    view = [size for factors in factored for size in factors]
    dims = draw(st.permutations(range(len(view))))[: draw(st.integers(0, min(3, len(view))))]
    sizes, splits = {}, []
    for axis, dim in zip(AXES, dims):
        sizes[axis] = draw(st.sampled_from([n for n in range(1, view[dim] + 1) if view[dim] % n == 0]))
        splits.append((axis, dim))
    shape = tuple(math.prod(factors) for factors in factored)
    return Placement("expert", shape, tuple(view), tuple(splits)), sizes


def coordinates(sizes: dict[Axis, int]) -> list[At]:
    found = [At(sizes, {})]
    for axis, size in sizes.items():
        found = [At(sizes, {**at.ranks, axis: rank}) for at in found for rank in range(size)]
    return found


def local_reference(full: torch.Tensor, placement: Placement, at: At) -> torch.Tensor:
    """The local tensor by plain slicing of the view: what the placement promises."""
    local = full.reshape(placement.view_shape)
    for axis, dim in placement.splits:
        size = local.shape[dim] // at.size(axis)
        local = local.narrow(dim, at.rank(axis) * size, size)
    return local


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
        assert placement.local_view_shape(at) == tuple(local.shape)
        assert math.prod(placement.local_shape(at)) == local.numel()
        assert len(placement.local_shape(at)) == len(placement.global_shape)
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
    placement = Placement("expert", (2, 8, 3), (2, 2, 4, 3), ((Axis.EP, 0), (Axis.ETP, 2)))
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
        Placement("expert", (4, 2), (4, 2), ((Axis.EP, 0),)).local_shape(At({Axis.EP: 3}, {}))


@pytest.mark.parametrize("view", [(2, 3), (4, 4), (8,), (4, 2, 2), (2, 4)])
def test_a_view_that_does_not_factor_the_shape_is_refused(view: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="factoring"):
        Placement("dense", (4, 2), view)


def test_two_axes_cannot_split_one_dim() -> None:
    with pytest.raises(AssertionError, match="distinct dims"):
        Placement("expert", (4, 2), (4, 2), ((Axis.EP, 0), (Axis.ETP, 0)))


def test_a_parameter_without_placement_is_whole_and_dense() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    assert placement_of(parameter) == Placement.whole((2, 3))
    placement = Placement("expert", (4, 3), (4, 3), ((Axis.EP, 0),))
    set_placement(parameter, placement)
    assert placement_of(parameter) is placement
