"""The words of a rule: the key first, what was expected and found, and the fix."""

from pathlib import Path

import pytest

from fsdmoe.core.rules import (
    at_least,
    counted,
    divisor_problems,
    divisors,
    near_file,
    nearest_divisors,
    one_of,
    size_text,
    unreachable,
)


def test_bounds_and_choices_name_the_key_and_the_fix() -> None:
    assert at_least("train", {"steps": 0, "seed": 3}, {"steps": 1, "seed": 0}) == [
        "train.steps: expected 1 or more, got 0; raise it"
    ]
    assert at_least("train", {"steps": float("nan")}, {"steps": 1})
    assert one_of("a", {"kind": "rings", "mode": "x"}, {"kind": ("ring", "none"), "mode": ("x",)}) == [
        "a.kind: expected one of ring, none, got 'rings'; did you mean ring?"
    ]


def test_one_is_counted_without_an_s() -> None:
    assert [counted(number, "layer") for number in (0, 1, 1200)] == ["0 layers", "1 layer", "1,200 layers"]


def test_choices_may_be_called_as_elsewhere() -> None:
    (line,) = one_of("fsdp", {"shard": "zero3"}, {"shard": ("params", "grads")})
    assert line.endswith("got 'zero3'; did you mean params?")


def test_a_file_that_is_not_there_is_told_one_that_is(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").touch()
    (tmp_path / "other/runs").mkdir(parents=True)
    assert near_file(f"{tmp_path}/corpsu.txt") == f"did you mean {tmp_path}/corpus.txt?"
    assert near_file(f"{tmp_path}/other/corpus") is None, "runs is not like it"
    assert near_file(f"{tmp_path}/no/corpus.txt") is None


def test_a_path_that_nobody_wrote_is_no_key_s() -> None:
    error = PermissionError(13, "Permission denied", "runs/a")
    assert unreachable(error, {"--dry-run": "", "train": {"output_dir": "runs"}}).startswith(
        "train.output_dir: "
    )
    with pytest.raises(PermissionError):
        unreachable(error, {"--dry-run": "", "train": {"output_dir": "elsewhere"}})


def test_sizes_are_in_a_unit_in_which_a_difference_shows() -> None:
    sizes = (999, 2048, 38.62 * 2**20, 2.5 * 2**30)
    assert [size_text(size) for size in sizes] == ["999 bytes", "2.00 KiB", "38.62 MiB", "2.50 GiB"]


def test_divisors_are_common_and_rising() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(36, 24) == [1, 2, 3, 4, 6, 12]
    assert (nearest_divisors(5, 12), nearest_divisors(16, 8), nearest_divisors(3, 4, 2)) == (
        "4 or 6",
        "8",
        "2",
    )


def test_a_number_that_does_not_divide_is_told_what_would() -> None:
    assert divisor_problems("mesh.ep", 3, {"experts": 8, "others": 9}) == [
        "mesh.ep: expected a divisor of the 8 experts, got 3; choose one of 1, 2, 4, 8"
    ]
    assert divisor_problems("mesh.ep", 0, {"experts": 8})
    (line,) = divisor_problems("mesh.etp", 11, {"columns": 14_336})
    assert line.endswith("…")
