"""The words of a rule: the key first, what was expected and found, and the fix."""

from fsdmoe.rules import at_least, divisor_problems, divisors, nearest_divisors, one_of


def test_bounds_and_choices_name_the_key_and_the_fix() -> None:
    assert at_least("train", {"steps": 0, "seed": 3}, {"steps": 1, "seed": 0}) == [
        "train.steps: expected 1 or more, got 0; raise it"
    ]
    assert at_least("train", {"steps": float("nan")}, {"steps": 1})
    assert one_of("a", {"kind": "rings", "mode": "x"}, {"kind": ("ring", "none"), "mode": ("x",)}) == [
        "a.kind: expected one of ring, none, got 'rings'; did you mean ring?"
    ]


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
