"""What a benchmark prints becomes a section of its page, under its command."""

from pathlib import Path

import pytest

from benchmarks.record import opening, record, section, with_section


def script(folder: Path, body: str) -> Path:
    path = folder / "speed.py"
    path.write_text(f'"""How fast is\nit?\n\nMore."""\nimport sys\n{body}\n')
    return path


def test_a_page_holds_the_command_the_machine_and_what_was_printed(tmp_path: Path) -> None:
    fast = script(tmp_path, "print('took', *sys.argv[1:])")
    page = record(fast, ["--rounds", "2"], tmp_path / "results")
    lines = page.read_text().splitlines()
    assert page.name == "speed.md"
    assert lines[:7] == [
        "# Speed", "", "How fast is it?", "",
        "## With --rounds 2", "", "`python benchmarks/speed.py --rounds 2`",
    ]  # fmt: skip
    assert "torch" in lines[8]
    assert lines[10:] == ["```text", "took --rounds 2", "```"]


def test_recording_a_command_again_replaces_its_section_and_no_other(tmp_path: Path) -> None:
    path = script(tmp_path, "")
    page = with_section(opening(path), section(path, ["--a"], "a CPU", "first"))
    page = with_section(page, section(path, [], "a CPU", "plain")).replace("With --a", "A title of its own")
    again = with_section(page, section(path, ["--a"], "a GPU", "second"))
    assert again == page.replace("first", "second").replace("a CPU", "a GPU", 1)
    assert again.index("--a") < again.index("plain")
    assert with_section(again, section(path, ["--a"], "a GPU", "second")) == again


def test_a_benchmark_that_fails_leaves_its_page_alone(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    page.write_text("# kept\n")
    with pytest.raises(SystemExit, match=r"speed\.py ended with code 3; nothing was recorded"):
        record(script(tmp_path, "print('half'); sys.exit(3)"), [], tmp_path)
    assert page.read_text() == "# kept\n"
