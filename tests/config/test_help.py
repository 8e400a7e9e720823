"""Help is short, finds keys by section and by word, and shows values as the command line takes them."""

import pytest

from fsdmoe.config import Config, load_config
from fsdmoe.config.help import help_text, shown
from fsdmoe.config.keys import all_keys
from fsdmoe.config.schema import SECTIONS, by_dotted_key
from tests.support.config_building import build


def test_help_is_one_screen_and_names_every_section() -> None:
    text = help_text(None)
    assert len(text.splitlines()) <= 40
    assert all(f"\n  {name} " in text for name in SECTIONS)


def test_help_all_documents_every_field() -> None:
    text = help_text("all")
    for name, cls in SECTIONS.items():
        for key in by_dotted_key(vars(cls()), f"{name}."):
            assert f"--{key}" in text
    assert not [key.name for key in all_keys() if not key.text], "a key without its text"


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("model", "--model.hidden_size N  (256)"),
        ("lr", "--optim.lr X  (0.0003)"),
        ("learning_rate", "--optim.lr X  (0.0003)"),
        ("top-k", "--model.num_experts_per_tok N  (2)"),
        ("context parallelism", "--mesh.cp N  (1)"),
        ("covers", "--precision.covers A,B,... of experts|attention|dense|shared  (experts,attention,"),
        ("profile_ranks", "--observe.profile_ranks N,N,...  (0)"),
        ("nonsense", "no key has the word 'nonsense' in it; see --help for the sections"),
        ("wandb_project", "--observe.project TEXT  (fsdmoe)"),
    ],
)
def test_help_finds_keys_by_section_and_by_word(word: str, key: str) -> None:
    assert key in help_text(word)


@pytest.mark.parametrize("others", [["--check-only"], ["--config", "a.toml"]])
def test_flags_after_help_are_no_words_to_look_for(
    others: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`fsdmoe check -h` comes to the first."""
    with pytest.raises(SystemExit) as end:
        load_config(["-h", *others])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_defaults_are_shown_as_the_command_line_takes_them() -> None:
    for key in all_keys():
        text = shown(key.default)
        if text[:1] == '"' or key.name.startswith("experts.capacity."):
            continue  # empty, or of several lines: quoted for the reader; or of a table that is off
        config, problems = build({}, **{key.name.replace(".", "__"): text})
        assert (problems, config) == ([], Config()), key.name


def test_lists_are_taken_with_commas_and_one_item_without() -> None:
    config, problems = build({}, observe__profile_ranks="0, 3", memory__recompute="norms,experts")
    assert not problems
    assert (config.observe.profile_ranks, config.memory.recompute) == ((0, 3), ("norms", "experts"))
    assert build({}, observe__profile_ranks="5")[0].observe.profile_ranks == (5,)
