"""A label outside of the vocabulary ends train.py's step on all ranks, before the optimizer."""

from pathlib import Path
from unittest import mock

import pytest
import torch

import fsdmoe
from fsdmoe.core import labels
from fsdmoe.core.errors import LabelError
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import tiny_hf
from tests.support.label_case import ROW, TOKEN, VOCABULARY, step_with_a_label

LAYOUTS = {"dp": {}, "tp": {"mesh__tp": 2}, "ep": {"mesh__ep": 2}}


def check(found: list[dict], label: int, rank: int) -> None:
    for each in found:
        assert f"got {label} on rank {rank}, in row {ROW} of a micro-batch, token {TOKEN}" in each["outcome"]
        assert each["unchanged"], "the optimizer ran"


def step_as_on_a_device(output_dir: str, label: int, overrides: dict) -> dict:
    with mock.patch.object(labels, "_is_on_host", return_value=False):
        return step_with_a_label(output_dir, label, overrides)


@pytest.mark.parametrize("layout", ["dp", "tp"])
def test_all_ranks_raise_together_before_the_optimizer(tmp_path: Path, layout: str) -> None:
    found = run_ranks(step_as_on_a_device, 2, str(tmp_path), VOCABULARY + 5, LAYOUTS[layout])
    check(found, VOCABULARY + 5, 0 if layout == "tp" else 1)
    assert found[0]["outcome"] == found[1]["outcome"], (
        "train.py tells an error once if all ranks say the same"
    )


def own_loop(optimizer: str) -> list[str]:
    """What became of: a bad label, the optimizer's step, the next forward, the one after."""
    model = fsdmoe.parallelize(tiny_hf("llama"), build_meshes())
    tokens = torch.arange(16).view(2, 8)
    kinds = {"AdamW": lambda: AdamW(model), "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.1)}
    optim, found = kinds[optimizer](), []
    bad = tokens.clone()
    bad[1, 4] = 64  # the label of the token before
    with mock.patch.object(labels, "_is_on_host", return_value=False):
        for tried in (bad, None, tokens, tokens):
            try:
                if tried is None:
                    optim.step()
                    found.append("stepped")
                else:
                    loss = model(tokens, labels=tried).loss
                    loss.backward()
                    found.append(f"loss {loss.item()}")
            except LabelError as error:
                found.append(str(error))
    return found


@requires_transformers
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_in_a_loop_of_ones_own_the_optimizer_or_the_next_forward_raises(optimizer: str) -> None:
    first, stepped, then, last = run_ranks(own_loop, 1, optimizer)[0]
    assert first == "loss nan"
    raised, quiet = (stepped, then) if optimizer == "AdamW" else (then, stepped)
    assert "got 64 on rank 0, in row 1 of a micro-batch, token 3" in raised
    assert "labels" not in quiet
    assert last.startswith("loss ")
    assert last != "loss nan"
