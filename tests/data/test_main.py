"""The command that shows a data set."""

from __future__ import annotations

import pytest

from fsdmoe.data.__main__ import main


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["python -m fsdmoe.data", *arguments])
    main()


def test_it_shows_the_sources_a_row_and_a_rate(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("|".join(f"text number {i}" for i in range(50)))
    (tmp_path / "run.toml").write_text(
        f'[data]\nseq_len = 32\ncache_dir = "{tmp_path}/cache"\n'
        f'[[data.sources]]\nkind = "text"\npath = "{tmp_path}/a.txt"\nseparator = "|"\nname = "numbers"\n'
    )
    run(monkeypatch, "--config", str(tmp_path / "run.toml"), "--steps", "3")
    output = capsys.readouterr().out
    assert "numbers: 50 documents, 740 tokens" in output
    assert "text number" in output
    assert "M tokens/s" in output


@pytest.mark.parametrize("text", ["[data]\nseq_len = 1", "[data]\nunknown = 1", "not toml ="])
def test_a_wrong_file_ends_with_a_plain_line_and_code_2(tmp_path, monkeypatch, capsys, text):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "--config", str(tmp_path / "run.toml"))
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("data")
