"""Weights of a Hugging Face folder (``model.hf``) that are not whole: pointers of git-lfs, shards that were
not downloaded, files that end too early. Found from the index and from headers, without torch and without
reading the weights."""

from __future__ import annotations

import json
from pathlib import Path

from fsdmoe.data.files import is_lfs_pointer

_INDEX = "model.safetensors.index.json"
_AGAIN = "download it again"


def weight_problems(folder: Path) -> list[str]:
    """A line for the first file of each kind of damage."""
    listed = _listed(folder)
    missing = [name for name in listed if not (folder / name).is_file()]
    problems = []
    if missing:
        more = f" and {len(missing) - 1} more" * (len(missing) > 1)
        problems.append(
            f"model.hf: {folder / missing[0]}{more}, which {_INDEX} names, is not there; download the folder "
            "again (hf download goes on where it stopped)"
        )
    files = [folder / name for name in listed if name not in missing] or sorted(folder.glob("*.safetensors"))
    pointers = [file for file in files if is_lfs_pointer(file)]
    if pointers:
        problems.append(
            f"model.hf: {pointers[0]} is a pointer of git-lfs, not the weights; run `git lfs pull` in "
            f"{folder}, or {_AGAIN}"
        )
    damaged = [(file, why) for file in files if file not in pointers and (why := _why_not_whole(file))]
    problems += [f"model.hf: {file} {why}; {_AGAIN}" for file, why in damaged[:1]]
    return problems


def _listed(folder: Path) -> list[str]:
    """The files that the index names; none without an index, or with one that is refused later."""
    try:
        table = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(name) for name in table.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _why_not_whole(file: Path) -> str:
    """Why a file cannot be safetensors with all of its bytes; empty where it can."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > size - 8:
                return f"is cut off, or no safetensors file ({size:,} bytes)"
            header = json.loads(opened.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "is no safetensors file"
    wanted = 8 + length + max(ends, default=0)
    return f"is cut off: it has {size:,} bytes of {wanted:,}" if size < wanted else ""
