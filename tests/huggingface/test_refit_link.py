"""Weights reach another process whole and bit for bit, a bucket at a time."""

from __future__ import annotations

import multiprocessing
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.refit_link import (
    Bucket,
    GroupLink,
    Link,
    MemoryLink,
    connect,
    receive_in_place,
    receive_over,
    send_weights,
)
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import parallelize
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import tiny_hf

pytestmark = requires_transformers
LIMIT = 8192


class Receiver(threading.Thread):
    """The other side."""

    def __init__(self, buckets: Iterator[Bucket]) -> None:
        super().__init__(daemon=True)
        self._buckets = buckets
        self.whole: Bucket = {}
        self.largest = 0
        self.start()

    def run(self) -> None:
        for bucket in self._buckets:
            size = sum(value.nbytes for value in bucket.values())
            self.largest = max(self.largest, size if len(bucket) > 1 else 0)
            self.whole |= {name: value.clone() for name, value in bucket.items()}


def open_ends(kind: str, address: str) -> tuple[Link, Receiver]:
    if kind == "memory":
        ours, theirs = multiprocessing.Pipe()
        return MemoryLink(ours), Receiver(receive_in_place(theirs))

    def received() -> Iterator[Bucket]:
        yield from receive_over(connect(address, rank=1, size=2, timeout=60))

    receiver = Receiver(received())
    return GroupLink(connect(address, rank=0, size=2, timeout=60)), receiver


def send(kind: str, address: str) -> dict[str, Any]:
    model = parallelize(tiny_hf("qwen3_moe"), build_meshes(ep=2))
    link, receiver = open_ends(kind, address) if dist.get_rank() == 0 else (None, None)
    found: dict[str, Any] = {}
    found["sent"] = send_weights(model, link, dtype=torch.bfloat16, bucket_bytes=LIMIT)
    if receiver is not None:
        receiver.join(60)
        found |= {"whole": receiver.whole, "largest": receiver.largest}
    return found


@pytest.mark.parametrize("kind", ["group", "memory"])
def test_another_process_gets_every_weight_bit_for_bit(kind: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    first, second = run_ranks(send, 2, kind, address)
    assert 0 < first["largest"] <= LIMIT
    assert first["sent"] == second["sent"] == sum(value.nbytes for value in first["whole"].values())
    plain = tiny_hf("qwen3_moe").state_dict()
    for name, value in first["whole"].items():
        if ".experts." not in name:
            assert torch.equal(value, plain[name].bfloat16()), name
    fused = plain["model.layers.1.mlp.experts.gate_up_proj"].bfloat16()
    for expert in range(8):
        for half, part in enumerate(("gate", "up")):
            got = first["whole"][f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"]
            assert torch.equal(got, fused[expert, 12 * half : 12 * (half + 1)])


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="address: expected host:port, got 'here'"):
        connect("here", rank=0, size=2)
