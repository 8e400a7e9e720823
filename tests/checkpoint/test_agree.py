"""What ranks tell each other of errors."""

import pytest
import torch.distributed as dist

from fsdmoe.checkpoint.agree import together
from fsdmoe.checkpoint.errors import DamagedCheckpointError
from fsdmoe.testing import run_ranks


def _find_damage() -> str:
    def look() -> None:
        if dist.get_rank() == 1:
            raise DamagedCheckpointError("model.bin", "block 3 differs")

    with pytest.raises(DamagedCheckpointError) as caught:
        together(look)
    return str(caught.value)


def test_damage_that_one_rank_finds_is_named_once_by_all() -> None:
    found = "damaged checkpoint: model.bin: block 3 differs"
    told = "damaged checkpoint: model.bin: found by rank 1: block 3 differs"
    assert run_ranks(_find_damage, 2) == [told, found]
