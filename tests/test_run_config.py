"""What has changed between two starts of a run, and which changes make another model."""

from pathlib import Path

import pytest

from fsdmoe.errors import ConfigError
from fsdmoe.run_config import (
    differences,
    refuse_other_model,
    refuse_other_optimizer,
    warn_of_trained_documents,
)
from fsdmoe.testing import requires_peft
from tests.support.config_building import build
from tests.support.hf_tiny import tiny_hf
from tests.support.tiny_run import tiny_config

FOLDER = Path("runs/x")


def test_a_table_that_only_one_has_is_told_by_its_keys() -> None:
    before = tiny_config("run", 1)
    now = tiny_config("run", 1, experts__capacity__factor=2.0)
    assert differences(before, now)["experts.capacity.factor"] == "None -> 2.0"
    assert differences(before, before) == {}


def test_documents_that_were_trained_on_are_not_called_held_out_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fewer, more = (tiny_config("run", 1, data__holdout=share) for share in (0.01, 0.1))
    warn_of_trained_documents(more, fewer)
    warn_of_trained_documents(fewer, fewer)
    assert not caplog.messages
    warn_of_trained_documents(fewer, more)
    (told,) = caplog.messages
    assert told.startswith("data.holdout was 0.01: ")


def test_keys_that_leave_all_parameters_as_they_are_do_not_make_another_model() -> None:
    before = tiny_config("run", 1)
    now = tiny_config("run", 1, model__rope_theta=5e5, model__num_experts_per_tok=1, train__seed=4)
    refuse_other_model(before, now, FOLDER)


def test_another_preset_is_refused_by_its_name_first() -> None:
    before = tiny_config("run", 1)
    now = tiny_config("run", 1, model__preset="tiny-deepseek-v3")
    with pytest.raises(ConfigError, match=r"^model\.preset 'tiny-qwen3' -> 'tiny-deepseek-v3', .*: expected"):
        refuse_other_model(before, now, FOLDER)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"optim__name": "muon"}, r"optim\.name 'adamw' -> 'muon'"),
        ({"optim__moment_dtype": "float8"}, r"optim\.moment_dtype 'float32' -> 'float8'"),
    ],
)
def test_another_optimizer_is_refused_by_its_key(change: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{told}: expected .*checkpoint\.load_only_model = true$"):
        refuse_other_optimizer(tiny_config("run", 1), tiny_config("run", 1, **change), FOLDER)


def test_moments_in_another_number_format_are_converted() -> None:
    now = tiny_config("run", 1, optim__moment_dtype="bfloat16")
    refuse_other_optimizer(tiny_config("run", 1), now, FOLDER)


@requires_peft
def test_adapters_of_another_rank_are_refused_and_another_alpha_is_not(tmp_path: Path) -> None:
    model = tiny_hf("qwen3_moe", vocab_size=264)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    given = {"model": {"hf": str(tmp_path)}, "data": {"kind": "python-stdlib", "tokenizer": "bytes"}}
    before, wider, louder = (
        build(given | {"adapter": {"rank": rank, "alpha": alpha}})[0]
        for rank, alpha in ((2, 4.0), (4, 8.0), (2, 8.0))
    )
    assert None not in (before, wider, louder)
    refuse_other_model(before, louder, FOLDER)
    with pytest.raises(ConfigError, match=r"^adapter\.rank 2 -> 4: expected"):
        refuse_other_model(before, wider, FOLDER)
