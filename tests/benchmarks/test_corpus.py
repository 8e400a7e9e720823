"""The corpus of packages: from a folder of two archives that serves as an index, with nothing downloaded."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks import corpus

SOURCE = "".join(f"def function_number_{i}(argument):\n    return argument + {i % 7}\n" for i in range(60))
OTHER = "".join(f"class Thing{i}(Base):\n    '''The documentation of thing {i}.'''\n" for i in range(60))
COPY = SOURCE.replace("argument + 3", "argument + three")  # most of its lines are SOURCE's


def tar_of(files: dict[str, str]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return written.getvalue()


def zip_of(files: dict[str, str]) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as opened:
        for name, text in files.items():
            opened.writestr(name, text)
    return written.getvalue()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of two projects; "one" is held out."""
    monkeypatch.setattr(corpus.Archive, "is_held_out", property(lambda self: self.project == "one"))
    monkeypatch.setattr(corpus, "VOCAB_SIZE", 300)
    table = "\n".join(str(number) for number in range(500))
    archives = {
        "one": ("one-1.0.tar.gz", tar_of({"one/a.py": SOURCE, "one/data.txt": table})),
        "two": (
            "two-2.10.zip",
            zip_of(
                {"two/b.py": OTHER, "two/c.py": COPY, "two/d.md": SOURCE, "two/_vendor/e.py": OTHER[:900]}
            ),
        ),
    }
    for project, (name, content) in archives.items():
        folder = tmp_path / "index" / project
        folder.mkdir(parents=True)
        (folder / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        before = {"one": "one-0.9.tar.gz", "two": "two-2.9.zip"}[project]
        old = f'<a href="{before}#sha256={"0" * 64}">{before}</a>'
        (folder / "page").write_text(f'{old}<a href="{name}#sha256={sha256}">{name}</a>')
    opened = corpus.urllib.request.urlopen

    def open_page(address: str, timeout: float) -> object:
        return opened(f"{address}page" if address.endswith("/") else address, timeout=timeout)

    monkeypatch.setattr(corpus.urllib.request, "urlopen", open_page)
    return (tmp_path / "index").as_uri()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["corpus.py", *map(str, arguments)])
    return corpus.main()


def test_pinned_archives_become_tokens_without_copies_and_held_out_by_project(
    tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned = tmp_path / "archives.txt"
    assert run(monkeypatch, "--index", index, "--pin", "one", "two") == 0
    pinned.write_text(capsys.readouterr().out)
    assert "two==2.10 " in pinned.read_text(), "versions are compared by number"
    folder, packed = tmp_path / "corpus", tmp_path / "corpus.tar.xz"
    given = ("--index", index, "--archives", pinned, "--cache", tmp_path / "cache", "--pack", packed)
    assert run(monkeypatch, folder, *given) == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [
        (row["project"], row["held_out"], row["files"], row["copies"]) for row in manifest["archives"]
    ] == [
        ("one", True, 1, 0),  # without the table of numbers
        ("two", False, 1, 2),  # the exact copy of a held-out file, and nearly one
    ]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name, text in (("train", OTHER), ("held_out", SOURCE)):
        ids, offsets = np.fromfile(folder / f"{name}.bin", "<u2"), np.load(folder / f"{name}.offsets.npy")
        assert offsets.tolist() == [0, len(ids)]
        assert ids[-1] == tokenizer.token_to_id(corpus.END)
        assert tokenizer.decode(ids[:-1].tolist()) == text
        assert manifest["files"][f"{name}.bin"] == hashlib.sha256(ids.tobytes()).hexdigest()
    with tarfile.open(packed) as tar:
        assert "corpus/train.bin" in tar.getnames()


def test_an_archive_of_another_hash_is_refused(tmp_path: Path, index: str) -> None:
    one = next(corpus.pin(["one"], index))
    archive = corpus.Archive.read(one)
    path = corpus.fetch(archive, tmp_path, index)
    path.write_bytes(b"something else")
    with pytest.raises(SystemExit, match=r"one==1\.0: expected [0-9a-f]{64}, got"):
        corpus.fetch(archive, tmp_path, index)
    assert not path.exists(), "it is downloaded again the next time"
