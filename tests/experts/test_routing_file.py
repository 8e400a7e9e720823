"""Files of routing: what they hold comes back under any packing, and bad ones are refused by file, document
and position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.origin import Origin
from fsdmoe.experts.routing_file import Recording, RoutingTable, save_routed_experts

E, L, K = 8, 3, 2
FORMAT = "fsdmoe-routing-2"


def origin_of(names: list[str], document: list[int], offset: list[int]) -> Origin:
    return Origin(tuple(names), torch.tensor(document), torch.tensor(offset))


def ids_of(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, L, E, generator=generator).topk(K).indices


def test_tokens_are_found_in_any_order_and_in_any_file(tmp_path: Path) -> None:
    ids = ids_of(7)
    first = origin_of(["a", "b"], [1, 0, 1, -1], [4, 0, 3, 0])
    second = origin_of(["b", "a"], [1, 0, 1], [2, 9, 1])
    RoutingTable.build(E, first, {"ids": ids[:4]}).write(tmp_path / "one.safetensors")
    RoutingTable.build(E, second, {"ids": ids[4:]}).write(tmp_path / "two.safetensors")
    asked = origin_of(["b", "a"], [1, 1, 0, -1, 0, 0, 1], [2, 0, 9, 0, 3, 4, 1])
    found = Recording.open(tmp_path).columns(asked)["ids"]
    wanted = torch.stack((ids[4], ids[1], ids[5], torch.full((L, K), -1), ids[2], ids[0], ids[6]))
    assert torch.equal(found, wanted)


def test_what_an_inference_engine_returned_becomes_a_recording(tmp_path: Path) -> None:
    """Arrays of all layers, of which those with experts are kept."""
    routed = {"request-1": ids_of(5, 1).numpy().astype(np.uint8), "request-2": ids_of(3, 2)}
    save_routed_experts(tmp_path / "r.safetensors", routed, num_experts=E, layers=[0, 2])
    asked = Origin.of_rows(["request-2", "request-1"], [3, 2], 4).map(lambda column: column.flatten())
    found = Recording.open(tmp_path / "r.safetensors").columns(asked)["ids"]
    assert torch.equal(found[:3], ids_of(3, 2)[:, [0, 2]])
    assert torch.equal(found[4:6], ids_of(5, 1)[:2, [0, 2]])
    assert (found[[3, 6, 7]] == -1).all()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 2)), r"request 'r': expected \[tokens, layers, k\], got shape \[4, 2\]"),
        (np.full((4, 1, 2), [[[0, 8]]]), r"document 'r', position 0: expected experts 0 to 7, got"),
        (np.array([[[0, 1]], [[3, 3]]]), r"document 'r', position 1: expected different experts, got"),
    ],
)
def test_arrays_that_are_no_routing_are_refused(tmp_path: Path, array: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        save_routed_experts(tmp_path / "r.safetensors", {"r": array}, num_experts=E)


def write(path: Path, segments: list[list[Any]], ids: torch.Tensor, num_experts: int = E) -> None:
    header = json.dumps({"num_experts": num_experts, "segments": segments})
    save_file({"ids": ids}, path, {FORMAT: header})


def test_a_token_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    write(tmp_path / "r.safetensors", [["a", 3, 4]], ids_of(4))
    recording = Recording.open(tmp_path)
    for name, offset in (("a", 2), ("a", 7), ("b", 3)):
        message = f"nothing was recorded for document '{name}', position {offset} in .*r.safetensors"
        with pytest.raises(ConfigError, match=message):
            recording.columns(origin_of([name], [0], [offset]))


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    asked = origin_of(["a"], [0], [0])
    for seed in (1, 2):
        ids = ids_of(1, seed)
        save_routed_experts(tmp_path / "r.safetensors", {"a": ids}, num_experts=E)
        assert torch.equal(Recording.open(tmp_path).columns(asked)["ids"], ids)


def test_a_token_in_two_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", [["a", 0, 4]], ids_of(4))
    write(tmp_path / "two.safetensors", [["a", 3, 2]], ids_of(2))
    with pytest.raises(ConfigError, match=r"'a', position 3 twice in .*one.safetensors and .*two"):
        Recording.open(tmp_path)


def test_files_of_two_recordings_in_one_folder_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", [["a", 0, 4]], ids_of(4))
    columns = {"ids": ids_of(2), "kept": ids_of(2) >= 0}
    RoutingTable.build(E, origin_of(["b"], [0, 0], [0, 1]), columns).write(tmp_path / "two.safetensors")
    with pytest.raises(ConfigError, match=r"got 8 experts and ids; 8 experts and ids, kept in .*one.safe"):
        Recording.open(tmp_path)


def test_damaged_ids_are_named_when_they_are_asked_for(tmp_path: Path) -> None:
    ids = ids_of(4)
    ids[2, 1, 0] = 8
    write(tmp_path / "r.safetensors", [["a", 10, 4]], ids)
    recording = Recording.open(tmp_path)
    recording.columns(origin_of(["a"], [0], [11]))
    with pytest.raises(
        ConfigError, match=r"r.safetensors: document 'a', position 12: expected experts 0 to 7"
    ):
        recording.columns(origin_of(["a"], [0], [12]))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([["a", 0, 5]], r"expected ids of 5 tokens"),
        ([["a", 0, 2], ["a", -1, 2]], r"document 'a', position -1: expected a range"),
        ([["a", 0]], r"has a header that is none"),
    ],
)
def test_headers_that_do_not_fit_are_refused(tmp_path: Path, segments: list[list[Any]], message: str) -> None:
    write(tmp_path / "r.safetensors", segments, ids_of(4))
    with pytest.raises(ConfigError, match=message):
        Recording.open(tmp_path)


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    other, broken = tmp_path / "other.safetensors", tmp_path / "broken.safetensors"
    save_file({"x": torch.zeros(2)}, other)
    broken.write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=f"replay: expected a file of format {FORMAT}, got metadata"):
        Recording.open(other)
    for path in (broken, tmp_path / "absent.safetensors"):
        with pytest.raises(ConfigError, match=r"replay: .* is not readable as a recording"):
            Recording.open(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"expected files \*.safetensors in .*empty"):
        Recording.open(tmp_path / "empty")
