"""Headers of Hugging Face folders: what does not hold together is refused by file and tensor, on every way
in."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.hf_import import from_hf
from fsdmoe.checkpoint.local_storage import LocalStorage
from fsdmoe.checkpoint.session import open_verified
from fsdmoe.checkpoint.upcycling import UpcyclePolicy, upcycle

Header = dict[str, Any]


def good() -> Header:
    """Two matrices and a vector: 64 bytes."""
    return {
        "weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "bias": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
        "secret": {"dtype": "F32", "shape": [10], "data_offsets": [24, 64]},
    }


def write_folder(folder: Path, header: Header | bytes, data: bytes = bytes(range(64))) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama", "intermediate_size": 2, "hidden_size": 2}')
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("secret", torch.zeros(10))


def change(name: str, **fields: Any) -> Callable[[Header], Any]:
    return lambda header: header[name].update(fields)


CRAFTED: dict[str, tuple[Callable[[Header], Any], str]] = {
    "another's bytes": (change("weight", data_offsets=[24, 40]), "weight"),
    "the same bytes twice": (change("bias", data_offsets=[0, 8]), "bias"),
    "longer than its bytes": (change("weight", shape=[4, 4]), "weight"),
    "shorter than its bytes": (change("weight", shape=[1, 2]), "weight"),
    "wider dtype": (change("weight", dtype="F64"), "weight"),
    "narrower dtype": (change("weight", dtype="BF16"), "weight"),
    "past the end": (change("secret", data_offsets=[64, 104]), "secret"),
    "backwards": (change("weight", data_offsets=[16, 0]), "weight"),
    "a gap": (lambda header: header.pop("bias"), "secret"),
    "nothing at the end": (lambda header: header.pop("secret"), "24"),
    "negative": (change("weight", shape=[-2, -2]), "weight"),
    "negative offset": (change("weight", data_offsets=[-16, 0]), "weight"),
    "true is no number": (change("bias", shape=[True, 2]), "bias"),
    "true is no offset": (change("bias", data_offsets=[True, 24]), "bias"),
    "fractions": (change("bias", shape=[2.0]), "bias"),
    "text": (change("bias", shape=["2"]), "bias"),
    "huge": (change("bias", shape=[2**62, 2**62, 0], data_offsets=[16, 16]), "bias"),
    "three offsets": (change("bias", data_offsets=[16, 20, 24]), "bias"),
    "no shape": (lambda header: header["bias"].pop("shape"), "bias"),
    "unknown dtype": (change("bias", dtype="F7"), "bias"),
    "a list as dtype": (change("bias", dtype=["F32"]), "bias"),
    "not an object": (lambda header: header.update(bias=7), "bias"),
    "metadata of numbers": (lambda header: header.update(__metadata__={"a": 1}), "__metadata__"),
}


@pytest.mark.parametrize("kind", CRAFTED)
def test_a_header_that_does_not_hold_together_is_refused_by_file_and_tensor(
    tmp_path: Path, kind: str
) -> None:
    header = good()
    CRAFTED[kind][0](header)
    folder = write_folder(tmp_path / "hf", header)
    upcycled = UpcyclePolicy(groups=2, top_k=1)
    for act in (
        lambda: checkpoint.load(folder, Linear()),
        lambda: from_hf(folder, tmp_path / "out"),
        lambda: upcycle(folder, tmp_path / "out", upcycled),
    ):
        with pytest.raises(CheckpointError) as caught:
            act()
        assert "model.safetensors" in str(caught.value)
        assert CRAFTED[kind][1] in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_good_one_loads(tmp_path: Path) -> None:
    model = Linear()
    checkpoint.load(write_folder(tmp_path / "hf", good()), model)
    whole = torch.frombuffer(bytearray(range(64)), dtype=torch.float32)
    assert torch.equal(torch.cat([model.weight.flatten(), model.bias, model.secret]).detach(), whole)


@pytest.mark.parametrize(
    "text",
    [
        b"[]", b"", b"null", b" {}", b"\xff\xfe", b"{" * 100_000, b'{"weight": NaN}',
        b'{"bias": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}, '
        b'"bias": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}',
    ],
)  # fmt: skip
def test_what_is_no_header_at_all_is_refused_by_file(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors"):
        checkpoint.load(write_folder(tmp_path / "hf", text), Linear())


def is_opened(folder: Path) -> bool:
    try:
        open_verified(LocalStorage(folder.parent), folder.name, "fast")
    except CheckpointError:
        return False
    return True


def test_random_headers_are_taken_exactly_where_the_safetensors_library_takes_them(tmp_path: Path) -> None:
    """Headers with zero to three random changes; the library is the judge."""
    draw, taken = random.Random(0), 0
    numbers = [0, 1, 2, 3, 4, 8, 10, 16, 24, 40, 64, -1, 2**63]
    for _ in range(120):
        header = good()
        for _ in range(draw.choice([0, 1, 1, 2, 3])):
            entry = header[draw.choice(list(header))]
            key = draw.choice(["dtype", "shape", "data_offsets"])
            if key == "dtype":
                entry[key] = draw.choice(["F32", "BF16", "I32", "U8", "F64", "X"])
            else:
                entry[key][draw.randrange(len(entry[key]))] = draw.choice(numbers)
        folder = write_folder(tmp_path / "hf", header)
        try:
            with safetensors.safe_open(folder / "model.safetensors", "pt"):
                is_good = True
        except (safetensors.SafetensorError, OverflowError):
            is_good = False
        taken += is_good
        assert is_opened(folder) == is_good, header
    assert 15 < taken < 105


def index_folder(folder: Path, weight_map: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    one, other = {"weight": torch.ones(2, 2)}, {"bias": torch.ones(2), "secret": torch.ones(10)}
    save_file(one, folder / "a.safetensors")
    save_file(other, folder / "b.safetensors")
    save_file({**one, **other}, folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


LISTED = {"weight": "a.safetensors", "bias": "b.safetensors", "secret": "b.safetensors"}


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        (LISTED | {"bias": "a.safetensors"}, r"bias is not in a\.safetensors"),
        (LISTED | {"more": "b.safetensors"}, r"more is not in b\.safetensors"),
        (LISTED | {"bias": "../outside.safetensors"}, "bias: expected the name of"),
        (LISTED | {"bias": "..\\outside.safetensors"}, "bias: expected the name of"),
        (LISTED | {"bias": ""}, "bias: expected the name of"),
        (LISTED | {"bias": "b.safetensors\0"}, "bias: expected the name of"),
        (LISTED | {"bias": ".safetensors"}, "bias: expected the name of"),
        (LISTED | {"bias": 3}, "bias: expected the name of"),
        (LISTED | {"bias": "gone.safetensors"}, "missing"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, weight_map: Any, words: str) -> None:
    folder = index_folder(tmp_path / "hf", weight_map)
    with pytest.raises(DamagedCheckpointError, match=words):
        checkpoint.load(folder, Linear())


def test_a_tensor_in_two_files_is_that_of_the_file_which_the_index_names(tmp_path: Path) -> None:
    folder = index_folder(tmp_path / "hf", LISTED)
    save_file({"weight": torch.ones(2, 2), "secret": torch.zeros(10)}, folder / "a.safetensors")
    save_file({"bias": torch.ones(2), "secret": torch.ones(10), "weight": torch.zeros(2, 2)},
              folder / "b.safetensors")  # fmt: skip
    model = Linear()
    checkpoint.load(folder, model)
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert torch.equal(model.secret, torch.ones(10))
    listed = {name: file for name, file in LISTED.items() if name != "secret"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(DamagedCheckpointError, match=r"secret is in a\.safetensors too"):
        checkpoint.load(folder, model)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"x.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, r"x\.weight is FP8 .* no scales"),
        ({"x.weight_scale_inv": torch.ones(1, 1)}, r"its weight x\.weight is not"),
        ({"x.weight": torch.ones(4, 4), "x.weight_scale_inv": torch.ones(1, 1)}, "is not FP8 but F32"),
        (
            {"x.weight": torch.ones(4).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(1)},
            "expected a matrix and its scales",
        ),
    ],
)
def test_fp8_weights_and_their_scales_belong_together(
    tmp_path: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({**tensors, "y.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        from_hf(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
