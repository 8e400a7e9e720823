"""A seeded permutation of [0, size) that can be evaluated at any index, without an array.

A shuffled order of a billion documents as an array costs eight gigabytes a rank; this costs eight keys. It
is an alternating Feistel network over the smallest power of two that holds `size`, and indices that fall
outside are sent through the network again until they fall inside (cycle walking, fewer than two passes on
average).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_NUM_ROUNDS = 8


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A 64-bit finalizer: every input bit moves about half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_indices(first: int, last: int, salt: str) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each index in [first, last), for documents whose content is too large to be read."""
    key = np.frombuffer(hashlib.blake2b(salt.encode(), digest_size=8).digest(), dtype="<u8")
    return _mix(_mix(np.arange(first, last, dtype=np.uint64) + key) ^ key)


class SeededPermutation:
    """A bijection of [0, size), fixed by `key`."""

    def __init__(self, size: int, key: str) -> None:
        if size < 1:
            raise AssertionError(f"expected a size of at least 1, got {size}")
        self.size = size
        num_bits = (size - 1).bit_length()
        self._right_bits = np.uint64((num_bits + 1) // 2)
        self._right_mask = np.uint64((1 << int(self._right_bits)) - 1)
        self._left_mask = np.uint64((1 << (num_bits // 2)) - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each index goes."""
        values = self._network(indices.astype(np.uint64))
        outside = np.flatnonzero(values >= np.uint64(self.size))
        while outside.size:
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= np.uint64(self.size)]
        return values.astype(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._right_bits, values & self._right_mask
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                right = right ^ (_mix(left + key) & self._right_mask)
            else:
                left = left ^ (_mix(right + key) & self._left_mask)
        return (left << self._right_bits) | right
