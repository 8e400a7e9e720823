"""Messages between ranks: of any length, and refusals that name who has what."""

import pytest
import torch.distributed as dist

from fsdmoe.core.all_ranks import by_rank, from_all_ranks, require_alike
from fsdmoe.core.errors import ConfigError
from fsdmoe.testing import run_ranks


def _messages() -> list[list[str]]:
    rank = dist.get_rank()
    return [from_all_ranks("é" * (rank * scale)) for scale in (0, 1, 20, 100, 3000)]


def test_ranks_exchange_messages_of_any_length() -> None:
    wanted = [["é" * (rank * scale) for rank in range(3)] for scale in (0, 1, 20, 100, 3000)]
    assert run_ranks(_messages, 3) == [wanted] * 3


def _refusals() -> list[str]:
    rank, found = dist.get_rank(), []
    for facts in ({"same": 1, "key": rank // 2}, {"only": None} if rank else {}, {"same": [1, "x"]}):
        try:
            require_alike(facts, "fix it")
            found.append("alike")
        except ConfigError as error:
            found.append(str(error))
    return found


def test_what_differs_is_named_in_the_same_words_on_all_ranks() -> None:
    first, second, third = run_ranks(_refusals, 3)
    assert first == second == third
    assert first == [
        "key: expected the same on all ranks, got 0 on ranks 0-1, 1 on rank 2; fix it",
        "only: expected the same on all ranks, got absent on rank 0, None on ranks 1-2; fix it",
        "alike",
    ]


def test_a_process_alone_is_like_itself() -> None:
    require_alike({"any": "thing"}, "no fix")
    assert from_all_ranks([1]) == [[1]]


@pytest.mark.parametrize(
    ("values", "words"),
    [("aba", "'a' on ranks 0, 2, 'b' on rank 1"), (["x" * 199], f"'{'x' * 119}… on rank 0")],
)
def test_ranks_are_counted_in_ranges(values: list[str], words: str) -> None:
    assert by_rank(values) == words
