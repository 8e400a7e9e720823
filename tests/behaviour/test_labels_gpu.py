"""A label outside of the vocabulary ends train.py's step on all ranks of a GPU."""

import json

import pytest

from fsdmoe.testing import requires_nccl
from tests.behaviour.test_labels import LAYOUTS, check
from tests.support.label_case import VOCABULARY
from tests.support.one_gpu import run_ranks_on_one_gpu


@requires_nccl
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("label", [VOCABULARY, -1])
def test_on_a_gpu_a_label_outside_of_the_vocabulary_ends_the_step_on_all_ranks(
    layout: str, label: int
) -> None:
    bf16 = {
        "precision__param_dtype": "bfloat16", "data__seq_len": 128, "model__hidden_size": 128,
        "model__head_dim": 32, "model__moe_intermediate_size": 64,
    }  # fmt: skip
    overrides = json.dumps(LAYOUTS[layout] | bf16)
    printed = run_ranks_on_one_gpu(2, "-m", "tests.support.label_case", str(label), overrides)
    lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 2, printed
    check([json.loads(line.removeprefix("RESULT ")) for line in lines], label, 0 if layout == "tp" else 1)
