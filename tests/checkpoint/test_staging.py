"""Staged copies: exact, independent of the originals, few copies for many views, memory kept from save to
save."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdmoe.checkpoint.staging import Stager, _storage_ranges
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks
from tests.support.checkpoint_states import whole_state


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 5_000)), max_size=12))
def test_views_of_shared_buffers_are_copied_exactly(cuts: list[tuple[int, int]]) -> None:
    buffers = [torch.arange(300_000).to(dtype) for dtype in (torch.int16, torch.float32)]
    views = {f"{n}": buffers[n % 2][start : start + size] for n, (start, size) in enumerate(cuts)}
    views["transposed"] = buffers[1][:600].view(20, 30).t()
    views["scalar"] = torch.tensor(3.0)
    views["float8"] = torch.arange(7.0).to(torch.float8_e4m3fn)
    wanted = {key: view.clone() for key, view in views.items()}
    copies = Stager().stage(views)
    for buffer in buffers:
        buffer.zero_()
    for key, copy in copies.items():
        assert copy.dtype == wanted[key].dtype
        assert torch.equal(copy.float(), wanted[key].float()), key


def test_neighbouring_pieces_travel_in_one_copy() -> None:
    buffer = torch.zeros(1_000_000)
    views = {str(n): buffer[n * 1000 : n * 1000 + 990] for n in range(1000)}
    assert sum(map(len, _storage_ranges(views).values())) == 1
    far = {"a": buffer[:10], "b": buffer[900_000:900_010]}
    assert sum(map(len, _storage_ranges(far).values())) == 2


def test_host_memory_is_kept_and_bounded_by_what_is_staged() -> None:
    stager, tensors = Stager(), {str(n): torch.ones(1000) for n in range(10)}
    first = stager.stage(tensors)["3"].untyped_storage().data_ptr()
    assert stager.stage(tensors)["3"].untyped_storage().data_ptr() == first
    assert 40_000 <= stager.num_bytes <= 45_000


def stage_sharded() -> None:
    state = whole_state(build_meshes())["model"]
    copies = Stager().stage(state)
    for name, tensor in state.items():
        if isinstance(tensor, ShardedTensor):
            assert isinstance(copies[name], ShardedTensor)
            assert copies[name].same_layout(tensor)
            assert torch.equal(copies[name].piece, tensor.piece)
            assert not tensor.piece.numel() or copies[name].piece.data_ptr() != tensor.piece.data_ptr()


def test_sharded_tensors_keep_their_layout() -> None:
    run_ranks(stage_sharded, 3)
