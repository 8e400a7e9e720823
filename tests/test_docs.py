"""The documentation: every page can be reached, guides teach and hold no lab notes, every result has its
command, and the API reference says what a caller needs. `make docs` checks the links of the built site."""

import importlib
import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import fsdmoe

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = sorted(DOCS.glob("*.md"))
# Pages on which there is nothing to set: the list of pages, the limits, and those about the code.
OF_THE_CODE = {
    "index.md",
    "what_it_is_not.md",
    "families.md",
    "how_it_works.md",
    "add_a_model_family.md",
    "add_a_dispatcher.md",
    "add_an_optimizer.md",
    "add_a_kernel.md",
}
RESULTS = sorted(path for path in DOCS.glob("results/*.md") if path.stem != "index")
PROSE = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]
TEXTS = [
    *(ROOT / "configs").glob("*.toml"),
    *(p for d in ("fsdmoe", "tests", "benchmarks", "examples") for p in (ROOT / d).rglob("*.py")),
    ROOT / "train.py",
    *(path for path in PROSE if path.name != "CHANGELOG.md"),
]
# Words that had two meanings or none outside of this project, each with where it is refused. Quoted words
# are keys of files written before.
RETIRED = {
    r"(?<![A-Za-z])(?<!hugging_)([Mm]end(s|ed|ing)?|[Rr]ooms?|faces?)(?![a-z])": "",
    r"\b(forget|may_forget|forget_norms|readers_may_leave|deal_documents)\b": "",
    r"\b(Flight|depart|(?<!mbarrier\.)arrive|Lane|Ticket|Mark|Passage|Visits|announce)\b": "",
    r"\b(show_full|show_sharded|grads_open)\b": "",
    r"\b(Plan|Traffic|Segment|Permutation)\(": "",
    r"\b(tell|leave)\b": "fsdmoe/core/lifecycle.py",
    r"(?<![A-Za-z\"])([Ll]ane|[Uu]nit)s?(?![a-z\"])": "fsdmoe/data/",
    r"\b([Ll]ane|[Uu]nit)s?\b": "docs/data.md",
}
OF_A_MACHINE = re.compile(r"\b(A100|H100|H200|B200|GB/s|TB/s)\b|\b\d[\d.,]* (ms|GiB|TFLOP/s)(?!\w)")
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")
FUNCTIONS = [
    "fsdmoe.build_meshes",
    "fsdmoe.clip_grad_norm",
    "fsdmoe.engine_of",
    "fsdmoe.iterate_weights",
    "fsdmoe.parallelize",
    "fsdmoe.register_moe_adapter",
    "fsdmoe.fsdp.fully_shard",
    "fsdmoe.fsdp2.fully_shard",
    "fsdmoe.optim.AdamW.__init__",
    "fsdmoe.optim.build_optimizer",
    "fsdmoe.optim.grad_norm",
    "fsdmoe.optim.learning_rate",
    "fsdmoe.checkpoint.save",
    "fsdmoe.checkpoint.load",
    "fsdmoe.checkpoint.from_hf",
    "fsdmoe.checkpoint.to_hf",
    "fsdmoe.checkpoint.upcycle",
    "fsdmoe.checkpoint.Checkpointer.__init__",
]


def named(dotted: str) -> Callable[..., object]:
    parts = dotted.split(".")
    owners = [part for part in parts[:-1] if part.islower()]
    found = importlib.import_module(".".join(owners))
    for part in parts[len(owners) :]:
        found = getattr(found, part)
    if inspect.ismodule(found):  # a module and its function may share a name
        found = getattr(found, parts[-1])
    return found  # type: ignore[return-value]


def test_every_page_is_in_the_navigation_once() -> None:
    config = ROOT / "mkdocs.yml"
    assert config.is_file(), "expected mkdocs.yml, the site of docs/"
    nav = re.findall(r"\S+\.md$", config.read_text().partition("\nnav:")[2], re.MULTILINE)
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(nav) == sorted(pages)


def test_links_between_pages_resolve() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in PROSE
        for target, _ in LINK.findall(path.read_text())
        if not (path.parent / target).exists()
    ]
    assert not broken


def test_tests_that_a_document_names_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in PROSE
        for target in re.findall(r"\btests/[\w/.]+", path.read_text())
        if not (ROOT / target.rstrip(".")).exists()
    ]
    assert not missing


def test_files_that_the_pages_about_the_code_name_exist() -> None:
    missing = [
        f"{page}: {target}"
        for page in sorted(OF_THE_CODE)
        for target in re.findall(r"\bfsdmoe/[\w/.]+", (DOCS / page).read_text())
        if not (ROOT / target.rstrip(".")).exists()
    ]
    assert not missing


def uses(path: Path, pattern: str) -> list[str]:
    """The lines of a file in which the pattern occurs."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return [f"{path.relative_to(ROOT)}:{n}: {line.strip()}" for n, line in lines if re.search(pattern, line)]


@pytest.mark.parametrize("pattern", RETIRED)
def test_code_and_prose_use_the_words_of_the_field(pattern: str) -> None:
    scope = [p for p in TEXTS if p.relative_to(ROOT).as_posix().startswith(RETIRED[pattern])]
    assert scope, f"expected a file under {RETIRED[pattern]}"
    assert not [line for path in scope if path != Path(__file__) for line in uses(path, pattern)]


def test_guides_hold_no_figures_of_a_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in GUIDES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OF_A_MACHINE.search(line)
    ]
    assert not found


def test_guides_say_what_to_set_first() -> None:
    silent = [
        path.name
        for path in GUIDES
        if path.name not in OF_THE_CODE and "\n## What to set first\n" not in path.read_text()
    ]
    assert not silent


def test_every_result_has_a_title_and_the_command_that_printed_it() -> None:
    assert RESULTS, "expected pages in docs/results/"
    for page in RESULTS:
        sections = re.findall(r"^## (.*)\n\n(.*)$", page.read_text(), re.M)
        assert sections, page.name
        for title, line in sections:
            assert "`" not in title, f"{page.name}: {title}"
            command = re.match(r"`python (benchmarks/(\w+)\.py)", line)
            assert command is not None, f"{page.name}: {title}"
            assert command[2] == page.stem or page.stem == "removed", f"{page.name}: {title}"
            assert (ROOT / command[1]).is_file()


def test_every_extra_of_the_package_is_explained_where_it_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (DOCS / "install.md").read_text()
    assert not [name for name in project["optional-dependencies"] if f"\n| `{name}` | " not in page]


def test_every_public_name_is_in_the_api_reference() -> None:
    reference = "\n".join(path.read_text() for path in sorted(DOCS.glob("api/*.md")))
    assert not [name for name in fsdmoe.__all__ if not re.search(rf"\b{name}\b", reference)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_of_the_public_api_name_every_parameter(name: str) -> None:
    function = named(name)
    doc = inspect.getdoc(function) or ""
    kinds = inspect.Parameter
    for parameter in inspect.signature(function).parameters.values():
        stars = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.name != "self":
            assert f"\n    {stars}{parameter.name}: " in doc, (
                f"{name}: nothing is said about {parameter.name}"
            )
