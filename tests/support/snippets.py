"""The code blocks of README.md and of the guides, and the commands in them.

A block is ``python``, ``toml``, ``text`` (a picture, or what a command prints) or, named or not, ``bash``.
What a block needs beyond the page stands in a comment just above it: ``<!-- needs: 8 GPUs -->``.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from fsdmoe.launch.ranks import split_options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = ("bash", "python", "toml", "text")
_BLOCK = re.compile(
    r"^(?:<!-- needs: (?P<needs>[^\n]*?) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S
)
_COMMENT = re.compile(r"(^|\s)#.*$", re.M)
_HEREDOC = re.compile(r"<<'(\w+)'.*?^\1$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    needs: str
    text: str

    @property
    def name(self) -> str:
        """Where it stands, as ``page:line``."""
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One program that a block starts."""

    block: Block
    words: tuple[str, ...]

    @property
    def program(self) -> tuple[str, ...]:
        """Its words from ``train.py``, another script or a module on, whatever started it."""
        words = list(self.words)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            del words[0]
        if words[:2] in (["fsdmoe", "train"], ["fsdmoe", "check"]):
            return ("train.py", *split_options(words[2:])[1])
        if words and words[0] in ("torchrun", "python", "python3"):
            launcher = words.pop(0)
            while words and words[0].startswith("--") and launcher == "torchrun":
                del words[: 1 if words[0] in ("--standalone", "--") else 2]
        return tuple(words)

    @property
    def world_size(self) -> int:
        """Ranks that it starts, over all nodes."""
        found = 1
        for option in ("--nnodes", "--nproc-per-node", "--nodes", "--gpus-per-node"):
            if option in self.words:
                found *= int(self.words[self.words.index(option) + 1].rpartition(":")[2])
        return found


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found["language"] or "bash",
            found["needs"] or "",
            found["text"],
        )
        for found in _BLOCK.finditer(text)
    ]


def commands(block: Block) -> list[Command]:
    """The commands of a bash block, without comments, redirections and the text handed to them."""
    text = _COMMENT.sub("", _HEREDOC.sub("", block.text)).replace("\\\n", " ")
    found = []
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set(";&|\n"):
            if words:
                found.append(Command(block, tuple(words)))
            words = []
        else:
            words.append(word)
    return found


def pasted(page: str, *headings: str) -> str:
    """The bash of a page (of these sections of it), of all blocks that need nothing else. Left out are tests,
    and what goes on until it is stopped."""
    lines = (ROOT / page).read_text().splitlines()
    found = ""
    for block in blocks(ROOT / page):
        above = [line[3:] for line in lines[: block.line] if line.startswith("## ")]
        if block.language == "bash" and not block.needs and (not headings or {*above[-1:]} & {*headings}):
            found += block.text
    left_out = r"(make test|make check|pytest|tensorboard)\b|.*--serve"
    return "".join(line for line in found.splitlines(keepends=True) if not re.match(left_out, line))
