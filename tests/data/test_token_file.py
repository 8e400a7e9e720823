"""Files of token ids, read at random by several threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fsdmoe.data import token_file
from fsdmoe.data.token_file import TokenFile, file_opener


def write(path, count, first=0):
    np.arange(first, first + count, dtype="<u2").tofile(path)
    return path


def test_slices_are_those_of_the_array(tmp_path):
    file = TokenFile(write(tmp_path / "a.bin", 100), "<u2", file_opener())
    array = np.arange(100)
    assert len(file) == 100
    for part in (slice(0, 0), slice(3, 9), slice(90, 200), slice(None), slice(7, 3)):
        assert file[part].tolist() == array[part].tolist()


def test_a_header_is_left_out(tmp_path):
    file = TokenFile(write(tmp_path / "a.bin", 100), "<u2", file_opener(), header_bytes=20)
    assert len(file) == 90
    assert file[0:2].tolist() == [10, 11]


def test_threads_read_right_while_files_are_opened_and_closed_around_them(tmp_path, monkeypatch):
    monkeypatch.setattr(token_file, "_MOST_OPEN_FILES", 2)
    opener = file_opener()
    files = [TokenFile(write(tmp_path / f"{i}.bin", 500, 1000 * i), "<u2", opener) for i in range(12)]
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    def read(number):
        which, start = number % 12, (number * 37) % 400
        return files[which][start : start + 5].tolist() == list(
            range(1000 * which + start, 1000 * which + start + 5)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(2000)))
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_file_cut_short_under_way_is_an_error_and_not_silence(tmp_path):
    file = TokenFile(write(tmp_path / "a.bin", 100), "<u2", file_opener())
    os.truncate(tmp_path / "a.bin", 50)
    with pytest.raises(OSError, match="shorter"):
        file[20:60]
