"""The pool of host memory: sizes that vary find blocks that are there."""

from unittest import mock

import pytest
import torch

from fsdmoe.memory.pinned import PinnedPool, pinned_zeros, round_up


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, 100_000, 2**20, 2**20 + 1, 123_456_789])
def test_a_size_grows_by_an_eighth_at_most_and_to_whole_pages(nbytes: int) -> None:
    size = round_up(nbytes)
    assert size % 4096 == 0
    assert nbytes <= size <= max(nbytes * 9 / 8, nbytes + 4096)


def test_sizes_that_vary_from_step_to_step_use_the_same_blocks() -> None:
    pool = PinnedPool()
    for step in range(5):
        blocks = [pool.take(1_000_000 + 9_000 * ((step + n) % 5), pinned=False) for n in range(3)]
        for block in blocks:
            assert block is not None
            pool.give_back(block)
    assert pool.num_blocks <= 4


def test_a_block_that_is_in_use_is_not_given_twice() -> None:
    pool = PinnedPool()
    first, second = pool.take(5000, pinned=False), pool.take(5000, pinned=False)
    assert first is not None
    assert second is not None
    assert first.bytes.data_ptr() != second.bytes.data_ptr()


def test_beyond_the_limit_there_is_nothing_to_take() -> None:
    pool = PinnedPool(limit=8192)
    assert pool.take(8000, pinned=False) is not None
    assert pool.take(1, pinned=False) is None


def test_memory_stays_registered_as_long_as_anything_views_it() -> None:
    runtime = mock.Mock(**{"cudaHostRegister.return_value": 0})
    with mock.patch.multiple(torch.cuda, cudart=lambda: runtime, synchronize=mock.DEFAULT):
        whole = pinned_zeros(3 << 20, torch.bfloat16, torch.device("cpu"))
        address = whole.data_ptr()
        assert address % (2 << 20) == 0, "where a large page begins"
        runtime.cudaHostRegister.assert_called_once_with(address, 6 << 20, 0)
        part = whole[5:7]
        del whole
        part += 1
        runtime.cudaHostUnregister.assert_not_called()
        del part
        runtime.cudaHostUnregister.assert_called_once_with(address)


def test_memory_that_cannot_be_locked_is_an_error() -> None:
    runtime = mock.Mock(**{"cudaHostRegister.return_value": 1})
    with (
        mock.patch.object(torch.cuda, "cudart", return_value=runtime),
        pytest.raises(RuntimeError, match=r"cannot be page-locked .*ulimit -l"),
    ):
        pinned_zeros(64, torch.float32, torch.device("cpu"))
