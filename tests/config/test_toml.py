"""Configurations in files: what is printed reads back to the same, whatever version printed it."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fsdmoe.config import load_config, to_toml
from fsdmoe.config.removed import REMOVED
from fsdmoe.config.schema import SECTIONS
from fsdmoe.config.toml import read_toml
from fsdmoe.config.values import former_names
from tests.support.config_building import build

PRINTED = Path(__file__).parents[1] / "support" / "printed_config.toml"


def test_printed_toml_reads_back_to_the_same_configuration() -> None:
    config, _ = build(
        {
            "model": {"preset": "deepseek-v3"},
            "mesh": {"ep": 4},
            "data": {
                "sources": [
                    {"kind": "text", "path": 'a "b" \\c'},
                    {"kind": "jsonl", "path": "d", "weight": 2},
                ]
            },
            "train": {"global_batch_size": 64},
        },
        world=8,
    )
    again, problems = build(tomllib.loads(to_toml(config)), world=8)
    assert not problems
    assert again == config


@pytest.mark.parametrize(
    "mapping",
    [
        {"experts": {"capacity": {"factor": 2.0}}},
        {"model": {"preset": "deepseek-v3", "q_lora_rank": "none"}},
        {"data": {"kind": "text", "path": "a\x7f\u2028b", "separator": "\r\n\x00"}},
    ],
    ids=["optional table", "none over a preset", "control characters"],
)
def test_odd_values_survive_printing(mapping: dict[str, Any]) -> None:
    config, problems = build(mapping)
    assert not problems
    assert build(tomllib.loads(to_toml(config)))[0] == config


def test_broken_toml_names_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[train]\nsteps = = 4\n")
    with pytest.raises(SystemExit) as end:
        load_config(["--config", str(path)])
    assert end.value.code == 2
    assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "model:\n  name: x\n", "it is YAML; write TOML: [section]"),
        ("a.toml", "# mine\nmodel:\n  name: x\n", "it is YAML; write TOML: [section]"),
        ("a.toml", "---\nlr: 1\n", "it is YAML"),
        ("ds.json", '{"bf16": {}}', "it is JSON; write TOML"),
        ("a", '{\n"bf16": {}}', "it is JSON; write TOML"),
        ("a.toml", "[train]\nsteps = = 4\n", "correct 'steps = = 4'"),
    ],
)
def test_a_file_of_another_format_is_called_what_it_is(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    problems: list[str] = []
    assert read_toml(str(tmp_path / name), problems) == {}
    assert said in problems[0]


def test_a_file_of_an_editor_that_marks_utf_8_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nsteps = 3\n", encoding="utf-8-sig")
    problems: list[str] = []
    assert read_toml(str(tmp_path / "a.toml"), problems) == {"train": {"steps": 3}}
    assert not problems


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    problems: list[str] = []
    for name in ("x" * 300, "x" * 300 + ".toml"):  # as a file of somebody else; this fails for root too
        read_toml(str(tmp_path / name), problems)
    assert [line.startswith("--config: cannot read") for line in problems] == [True, True]


def test_what_an_earlier_version_printed_still_loads() -> None:
    written = tomllib.loads(PRINTED.read_text())
    config, problems = build(written, world=64)
    assert not problems
    assert (config.mesh.ep, config.experts.capacity.factor, config.optim.lr) == (64, 1.5, 2.2e-4)
    again = tomllib.loads(to_toml(config))
    for section, keys in written.items():
        renamed = former_names(SECTIONS[section]) if section in SECTIONS else {}
        for key, value in keys.items():
            if f"{section}.{key}" in REMOVED:
                continue
            assert is_part(value, again[section][renamed.get(key, key)]), f"{section}.{key}"


def is_part(written: Any, now: Any) -> bool:
    """Whether every key is still there with its value; later versions may have more."""
    if isinstance(written, dict):
        return all(key in now and is_part(value, now[key]) for key, value in written.items())
    return bool(written == now)


def test_a_packaged_configuration_goes_by_its_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()  # a folder is no configuration
    problems: list[str] = []
    assert read_toml("quickstart", problems)["model"] == {"preset": "quickstart"}
    assert Path(read_toml("qwen3-30b-a3b-lora", problems)["model"]["hf"], "config.json").is_file()
    assert read_toml("clusters/deepseek-v3-1024xh100-fp8", problems)["mesh"]
    assert not problems
    assert read_toml("mine.toml", problems) == {}
    assert "packaged one by its name: deepseek-v3, " in problems[0]
    assert ", clusters/qwen3-235b-a22b-256xh100-bf16" in problems[0]


def test_a_file_goes_before_a_packaged_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text("[train]\nsteps = 3\n")
    assert read_toml("quickstart", []) == {"train": {"steps": 3}}
    problems: list[str] = []
    assert read_toml("quickstart.toml", problems) == {}, "a file that is not here is not replaced"
    assert problems
