"""What the repository says about the package: its version, its license, its changes, its checks."""

import re
import subprocess
import tomllib
from pathlib import Path

import fsdmoe
from mkdocs_hooks import llms_text

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_has_one_source() -> None:
    version = getattr(fsdmoe, "__version__", None)
    assert version is not None, "expected fsdmoe.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fsdmoe.__version__"}


def test_files_that_name_the_version_name_this_one() -> None:
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == fsdmoe.__version__
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    wheels = {name for page in pages for name in re.findall(r"fsdmoe-([\d.]+)-py3", page.read_text())}
    assert wheels == {fsdmoe.__version__}


def test_a_wheel_has_the_configurations() -> None:
    link = ROOT / "fsdmoe" / "configs"
    assert link.resolve() == ROOT / "configs"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["fsdmoe"]
    packed = {file for pattern in patterns for file in (ROOT / "fsdmoe").glob(pattern)}
    assert {file for file in link.glob("**/*") if file.is_file()} <= packed


def test_the_workflow_runs_what_runs_here() -> None:
    steps = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "- run: .ci/run\n" in steps
    assert 'python: ["3.11", "3.12"]' in steps


def test_llms_txt_has_every_page_with_its_first_sentence() -> None:
    text = llms_text([{"Home": "index.md"}, {"Start": [{"Install": "install.md"}]}], ROOT / "docs")
    assert text.startswith(
        "# fsdmoe\n\n> fsdmoe trains Mixture-of-Experts language models on PyTorch alone.\n"
    )
    assert "\n## Start\n\n- [Install](install.html): You need Python 3.11 or 3.12 on Linux.\n" in text


def test_the_changelog_opens_with_unreleased_and_then_this_version() -> None:
    path = ROOT / "CHANGELOG.md"
    assert path.is_file(), "expected CHANGELOG.md"
    versions = re.findall(r"^## \[(.+?)\]", path.read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", fsdmoe.__version__]


def test_the_license_is_apache_2() -> None:
    assert PROJECT["project"].get("license") == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_types_are_checked_wherever_users_read_code() -> None:
    settings = PROJECT["tool"]["mypy"]
    assert {"fsdmoe", "train.py", "benchmarks", "examples"} <= set(settings.get("files", []))
    assert settings["warn_unused_ignores"]


def test_make_check_and_the_commit_hooks_run_the_same_checks() -> None:
    plan = subprocess.run(
        ["make", "-n", "check"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for tool in ("ruff format --check", "ruff check", "bin/mypy", "bin/mkdocs build"):
        assert tool in plan, tool
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"repo: (\S+)", hooks)) == {"local"}
    for tool in ("ruff format", "ruff check", "bin/mypy"):
        assert tool in hooks, tool


def test_the_documentation_tools_come_with_the_developers_extra() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert any("docs" in requirement for requirement in extras["dev"] if requirement.startswith("fsdmoe["))
    assert {"mkdocs-material", "mkdocstrings"} <= {re.split(r"[\[<>=]", name)[0] for name in extras["docs"]}
