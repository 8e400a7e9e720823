"""Writes ``llms.txt`` into the site: all pages by section, each with its first sentence, for language models.

The form is that of https://llmstxt.org. mkdocs calls ``on_post_build`` (``hooks`` in ``mkdocs.yml``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def on_post_build(config: Any) -> None:
    """After the site was built."""
    Path(config["site_dir"], "llms.txt").write_text(
        llms_text(config["nav"], Path(config["docs_dir"])), encoding="utf-8"
    )


def llms_text(nav: list[Any], docs: Path) -> str:
    """The pages of the navigation as Markdown links, each with its first sentence."""
    home, *sections = nav
    lines = ["# fsdmoe", "", f"> {_opening(docs / home['Home'])}"]
    for section in sections:
        [(title, entries)] = section.items()
        lines += ["", f"## {title}", ""]
        for entry in entries:
            [(name, page)] = entry.items() if isinstance(entry, dict) else [(title, entry)]
            lines.append(f"- [{name}]({Path(page).with_suffix('.html')}): {_opening(docs / page)}")
    return "\n".join([*lines, ""])


def _opening(page: Path) -> str:
    """The first sentence under the page's title, links as their words."""
    text = page.read_text(encoding="utf-8")
    paragraphs = re.split(r"\n\s*\n", text)
    prose = [part for part in paragraphs if part[0] not in "#`<|:-" and not part.startswith("!")]
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose[0].split())) if prose else page.stem
    return re.split(r"(?<=[.:?])\s", words, maxsplit=1)[0].rstrip(":")
