"""Run a benchmark and write what it prints to docs/results/, with its command and the facts of the machine.

    python benchmarks/record.py fsdp_padding
    python benchmarks/record.py fsdp_step --rounds 4                  what follows the name is the benchmark's
    python benchmarks/record.py --results /tmp/pages train_step --tiny

A page is a benchmark, a section is a command: recording a command again replaces its section and no other. A
new page and a new section are named after the benchmark and its options; give them a title that says more.
A benchmark that fails leaves the page as it was. A page of a new benchmark needs a line in mkdocs.yml.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "triton", "transformers", "torchtitan")
HEADING = "## "


def run(script: Path, arguments: list[str]) -> str:
    """What the benchmark prints, shown as it comes; its own error output goes to the terminal alone."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(script), *arguments]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if process.returncode:
        raise SystemExit(f"{script.name} ended with code {process.returncode}; nothing was recorded")
    return "\n".join(lines).strip("\n")


def facts() -> str:
    """The device and the versions of what takes part. No date and no name of the machine."""
    import torch  # after the benchmark: a second process on its GPU would disturb it

    device = f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{device}; {', '.join(versions)}"


def section(script: Path, arguments: list[str], machine: str, printed: str) -> str:
    command = shlex.join(["python", f"benchmarks/{script.name}", *arguments])
    title = f"With {shlex.join(arguments)}" if arguments else "With its defaults"
    return f"{HEADING}{title}\n\n`{command}`\n\n{machine}\n\n```text\n{printed}\n```\n"


def with_section(page: str, new: str) -> str:
    """``page`` with the section of the same command replaced by ``new`` under its own title, or with ``new``
    at its end."""
    head, *sections = page.split(f"\n{HEADING}")
    sections = [f"{HEADING}{text}".rstrip("\n") + "\n" for text in sections]
    commands = [text.splitlines()[2] for text in sections]
    _, command, *_ = new.split("\n\n")
    if command in commands:
        place = commands.index(command)
        title = sections[place].splitlines()[0]
        sections[place] = "\n".join([title, *new.splitlines()[1:], ""])
    else:
        sections.append(new)
    return "\n".join([head.rstrip("\n") + "\n", *sections])


def opening(script: Path) -> str:
    """A title, and the question the benchmark answers."""
    about = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    return f"# {script.stem.replace('_', ' ').capitalize()}\n\n{' '.join(about.split())}\n"


def record(script: Path, arguments: list[str], results: Path) -> Path:
    """Run ``script`` and put what it prints on its page."""
    printed = run(script, arguments)
    page = results / f"{script.stem}.md"
    text = page.read_text(encoding="utf-8") if page.exists() else opening(script)
    results.mkdir(parents=True, exist_ok=True)
    page.write_text(with_section(text, section(script, arguments, facts(), printed)), encoding="utf-8")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results", help="where the pages are")
    parser.add_argument("benchmark", help="a file of benchmarks/, without .py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark")
    args = parser.parse_args()
    script = ROOT / "benchmarks" / f"{args.benchmark}.py"
    if not script.is_file():
        parser.error(f"expected a file of benchmarks/, got {args.benchmark!r}")
    print(f"written to {record(script, args.arguments, args.results)}")


if __name__ == "__main__":
    main()
