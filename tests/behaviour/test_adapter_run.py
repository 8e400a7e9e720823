"""``train.py`` with adapters on a Hugging Face folder: any mesh, resumed under another, written for peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdmoe.checkpoint.__main__ import main
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import RankFailure, requires_peft, run_ranks
from fsdmoe.train import Run
from tests.behaviour.test_hf_run import STEPS, STOP, config_for, folder_of, go, losses
from tests.support.hf_tiny import batch

pytestmark = [requires_peft, pytest.mark.full]
LORA = {"adapter__rank": 4, "adapter__alpha": 16, "optim__lr": 0.02}
DORA = LORA | {"adapter__kind": "dora"}
COURSES = [
    ("qwen3_moe", LORA, (2, {"mesh__ep": 2}), (2, {"mesh__etp": 2})),
    ("gpt_oss", LORA, (2, {"mesh__ep": 2, "memory__recompute": "layer"}), (1, {})),
    ("deepseek_v3", LORA, (4, {"mesh__tp": 2, "mesh__ep": 4}), (2, {"mesh__cp": 2})),
    ("mixtral", DORA, (2, {"mesh__tp": 2}), (2, {"mesh__ep": 2})),
]


@torch.no_grad()
def final_logits(hf: str, folder: str, overrides: dict[str, Any]) -> torch.Tensor:
    """Of the model of the newest checkpoint."""
    config = config_for(hf, 1, train__output_dir=folder, **overrides)
    run = Run(config, build_meshes(config.mesh), trains=False)
    try:
        return run.model.eval()(batch(0, 0)).logits
    finally:
        run.data.close()


@pytest.mark.parametrize(("family", "adapter", "first", "then"), COURSES)
def test_adapters_train_alike_on_any_mesh_go_on_under_another_and_load_into_peft(
    tmp_path: Path,
    family: str,
    adapter: dict[str, Any],
    first: tuple[int, dict[str, Any]],
    then: tuple[int, dict[str, Any]],
) -> None:
    import peft
    import transformers

    hf = folder_of(tmp_path, family)
    run_ranks(go, 1, str(hf), str(tmp_path / "one"), STEPS, adapter)
    expected = losses(tmp_path / "one")
    assert expected[-1][0] < expected[0][0] - 0.02, "the adapters learn, so the comparison means something"
    run_ranks(go, first[0], str(hf), str(tmp_path / "split"), STOP, adapter | first[1])
    run_ranks(go, then[0], str(hf), str(tmp_path / "split"), STEPS, adapter | then[1])
    for step, (mine, theirs) in enumerate(zip(losses(tmp_path / "split"), expected, strict=True)):
        assert mine == pytest.approx(theirs, rel=5e-5), f"step {step}"

    assert main(["to-adapter", str(tmp_path / "split"), str(tmp_path / "adapter")]) == 0
    assert main(["to-hf", str(tmp_path / "split"), str(tmp_path / "whole")]) == 1
    base = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
    untrained = base(batch(0, 0)).logits
    trained = run_ranks(final_logits, 1, str(hf), str(tmp_path / "split"), adapter)[0]
    assert (trained - untrained).abs().max() > 1e-2
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(batch(0, 0)).logits, trained, rtol=1e-4, atol=1e-4)


def test_a_run_with_dropout_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    hf = folder_of(tmp_path, "qwen3_moe")
    dropout = LORA | {"adapter__dropout": 0.3, "adapter__target_parameters": "[]", "mesh__ep": 2}
    run_ranks(go, 2, str(hf), str(tmp_path / "whole"), STEPS, dropout)
    run_ranks(go, 2, str(hf), str(tmp_path / "parts"), STOP, dropout)
    run_ranks(go, 2, str(hf), str(tmp_path / "parts"), STEPS, dropout)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_adapters_need_the_model_of_a_folder() -> None:
    with pytest.raises(
        ConfigError, match=r"adapter\.rank: adapters are for .*, got model\.hf = \"none\"; name one"
    ):
        config_for("none", 1, adapter__rank=4)


def test_a_run_on_a_base_in_fp8_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    hf = folder_of(tmp_path, "qwen3_moe")
    fp8 = LORA | {"precision__frozen_dtype": "float8", "mesh__ep": 2, "memory__recompute": "layer"}
    run_ranks(go, 2, str(hf), str(tmp_path / "whole"), STEPS, fp8)
    run_ranks(go, 2, str(hf), str(tmp_path / "parts"), STOP, fp8)
    run_ranks(go, 2, str(hf), str(tmp_path / "parts"), STEPS, fp8)
    expected = losses(tmp_path / "whole")
    assert losses(tmp_path / "parts") == expected
    run_ranks(go, 2, str(hf), str(tmp_path / "plain"), STEPS, fp8 | {"precision__frozen_dtype": "none"})
    assert losses(tmp_path / "plain") != expected
    run_ranks(go, 1, str(hf), str(tmp_path / "moved"), STOP, fp8 | {"mesh__ep": 1})
    run_ranks(go, 2, str(hf), str(tmp_path / "moved"), STEPS, fp8)
    for mine, theirs in zip(losses(tmp_path / "moved"), expected, strict=True):
        assert mine == pytest.approx(theirs, rel=5e-5)


def test_a_config_json_is_enough_to_try_a_run_and_to_go_on_with_it(tmp_path: Path) -> None:
    hf = folder_of(tmp_path, "qwen3_moe")
    for weights in hf.glob("*.safetensors"):
        weights.unlink()
    overrides = LORA | {"model__random_weights": True, "precision__frozen_dtype": "float8"}
    with pytest.raises(RankFailure, match=r"model\.random_weights = true"):
        run_ranks(go, 1, str(hf), str(tmp_path / "refused"), STOP, LORA)
    run_ranks(go, 2, str(hf), str(tmp_path / "whole"), STEPS, overrides)
    run_ranks(go, 2, str(hf), str(tmp_path / "parts"), STOP, overrides)
    run_ranks(go, 2, str(hf), str(tmp_path / "parts"), STEPS, overrides)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
