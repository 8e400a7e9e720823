"""Models whose ranks have filled them otherwise: all take the first rank's values, whatever their dtypes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import fully_shard
from fsdmoe.fsdp.materialize import agree_on_values
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import parallelize
from fsdmoe.testing import requires_peft, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)


class Mixed(nn.Module):
    """A parameter and buffers of many dtypes, of sizes that are no whole words; ``last`` fills them."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(35.0).reshape(5, 7).t())
        for index, dtype in enumerate(DTYPES):
            self.register_buffer(f"buffer{index}", torch.tensor([0, 1, 1, 0, 1, 0, last]).to(dtype))
        self.register_buffer("order", torch.tensor([0, 1, 2]) if last else torch.tensor([2, 1, 0]))
        self.register_buffer("none", torch.zeros(0))
        self.every_second = nn.Parameter(torch.arange(12.0).reshape(2, 6)[:, ::2])


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def _agreed(differs: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    lines, logger = _Lines(), logging.getLogger("fsdmoe.fsdp.materialize")
    logger.addHandler(lines)
    rank = dist.get_rank()
    model = Mixed(rank if differs else 1)
    agree_on_values(model, torch.device("cpu"))
    logger.removeHandler(lines)
    return {name: value.clone() for name, value in model.state_dict().items()}, lines.found


def test_ranks_take_the_values_of_the_first_one_and_are_told_which() -> None:
    (first, said), (second, nothing) = run_ranks(_agreed, 2, True)
    wanted = Mixed(0).state_dict()
    for name, value in wanted.items():
        assert torch.equal(first[name].double(), value.double()), name
        assert torch.equal(second[name].double(), value.double()), name
    assert nothing == []
    (line,) = said
    assert "6 of 8 parameters and buffers had other values on other ranks (buffer0, buffer1," in line
    assert "Seed all ranks alike" in line


def test_ranks_that_are_alike_are_told_nothing() -> None:
    assert [lines for _, lines in run_ranks(_agreed, 2, False)] == [[], []]


def _half_on_meta() -> None:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(
        ConfigError, match=r"weight: .* 'with values' on rank 0, 'on the meta device' on rank 1"
    ):
        fully_shard(model, build_meshes())


def test_values_on_one_rank_alone_are_refused() -> None:
    run_ranks(_half_on_meta, 2)


def _unseeded_adapters(mesh: dict[str, int]) -> dict[str, Any]:
    import peft

    from tests.support.hf_tiny import batch, tiny_hf

    model = tiny_hf("qwen3_moe")
    torch.manual_seed(100 + dist.get_rank())
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = parallelize(peft.get_peft_model(model, config), build_meshes(**mesh))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = batch(0, dist.get_rank())
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


@requires_peft
@pytest.mark.parametrize("mesh", [{"dp_outer": 2}, {"ep": 2}])
def test_adapters_without_a_seed_are_the_same_on_all_ranks(mesh: dict[str, int]) -> None:
    first, second = run_ranks(_unseeded_adapters, 2, mesh)
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    assert differing == []
