"""What is said of folders that transformers cannot read."""

from pathlib import Path

import pytest

from fsdmoe.core.errors import ConfigError

transformers_api = pytest.importorskip("fsdmoe.huggingface.transformers_api")


def test_a_misspelt_folder_is_answered_with_the_one_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"did you mean {tmp_path / 'model'}?"):
        transformers_api.read_hf_config(tmp_path / "modle")
