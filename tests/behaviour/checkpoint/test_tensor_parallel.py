"""Parameters that tensor parallelism splits, fully sharded: saved and loaded under any other degree."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointConfig, Checkpointer
from fsdmoe.checkpoint.parts import collect
from fsdmoe.checkpoint.tree import split_tree
from fsdmoe.core.placement import Placement, halves, placed_parameter
from fsdmoe.fsdp import FSDPPolicy, engine_of, fully_shard
from fsdmoe.fsdp.sharded_tensor import ShardedTensor
from fsdmoe.mesh import Axis, Meshes, build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.checkpoint_states import truth

WIDTH, INNER, VOCAB, EXPERTS = 12, 8, 40, 8
PLACEMENTS = {
    "embedding": Placement((VOCAB, WIDTH), ((Axis.TP, Shard(0)),)),
    "column": Placement((INNER, WIDTH), ((Axis.TP, Shard(0)),)),
    "column_bias": Placement((INNER,), ((Axis.TP, Shard(0)),)),
    "row": Placement((WIDTH, INNER), ((Axis.TP, Shard(1)),)),
    # gates and ups in one matrix: every rank has its share of both
    "fused": Placement((2 * INNER, WIDTH), ((Axis.TP, halves(0)),)),
    "norm": Placement.whole((WIDTH,)),
    "experts": Placement((EXPERTS, 2 * INNER, 3), ((Axis.EP, Shard(0)), (Axis.ETP, halves(1)))),
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "tp1": (1, {}),
    "fsdp3": (3, {}),
    "tp2": (2, {"tp": 2}),
    "hsdp2 tp2 ep2": (4, {"dp_outer": 2, "tp": 2, "ep": 2}),
    "tp4": (4, {"tp": 4}),
    "cp2 tp2 etp2": (8, {"cp": 2, "tp": 2, "etp": 2}),
    "hsdp2 tp4 ep4": (8, {"dp_outer": 2, "tp": 4, "ep": 4}),
    "fsdp2 tp4 ep8": (8, {"tp": 4, "ep": 8}),
}


class Block(nn.Module):
    """Parameters of every kind, as local tensors; the loss gives each element a gradient of its own."""

    def __init__(self, prefix: str, meshes: Meshes) -> None:
        super().__init__()
        for name, placement in PLACEMENTS.items():
            whole, local = (
                truth(prefix + name, placement.global_shape),
                torch.empty(placement.local_shape(meshes)),
            )
            for box in placement.boxes(meshes):
                box.view_of(local.view(-1)).copy_(box.slice_of(whole))
            self.register_parameter(name, placed_parameter(local, placement, meshes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            x = x + (parameter * parameter).sum()
        return x


class Net(nn.Module):
    def __init__(self, meshes: Meshes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(f"{layer}.", meshes) for layer in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build(meshes: Meshes) -> tuple[nn.Module, AdamW]:
    precision = PrecisionConfig(param_dtype="float32", reduce_dtype="float32")
    model = fully_shard(Net(meshes), meshes, FSDPPolicy(precision=precision, grad_divisor=1.0))
    return model, AdamW(model, lr=0.1)


def step(model: nn.Module, optimizer: AdamW) -> None:
    with engine_of(model).micro_batch(last=True):
        model(torch.zeros((), requires_grad=True)).backward()
    optimizer.step()
    optimizer.zero_grad()


def digests(model: nn.Module, optimizer: AdamW, meshes: Meshes) -> dict[str, str]:
    """Of every whole tensor, put together from all ranks."""
    tensors, _ = split_tree(collect({"model": model, "optimizer": optimizer}, meshes))
    found = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor.detach()
        found[name] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()
    return found


def begin(degrees: dict[str, int], folder: str, name: str) -> dict[str, str]:
    """Train a little, save, in the background as runs do."""
    meshes = build_meshes(**degrees)
    model, optimizer = build(meshes)
    before = digests(model, optimizer, meshes)
    for prefix in ("0", "1"):
        for key, placement in PLACEMENTS.items():
            whole = truth(f"{prefix}.{key}", placement.global_shape)
            assert (
                before[f"model/layers.{prefix}.{key}"] == hashlib.sha256(whole.numpy().tobytes()).hexdigest()
            )
    step(model, optimizer)
    step(model, optimizer)
    one = Checkpointer(
        CheckpointConfig(interval=1, asynchronous=True, folder=f"{folder}/{name}"), folder, meshes=meshes
    )
    one.save(1, {"model": model, "optimizer": optimizer})
    one.close()
    return digests(model, optimizer, meshes)


def hand_on(degrees: dict[str, int], folder: str, name: str, following: str) -> dict[str, str]:
    """Load under this layout and save again."""
    meshes = build_meshes(**degrees)
    model, optimizer = build(meshes)
    checkpoint.load(f"{folder}/{name}", model, optimizer)
    checkpoint.save(f"{folder}/{following}/step_1", model, optimizer, meshes=meshes)
    found = digests(model, optimizer, meshes)
    step(model, optimizer)  # and it can be trained on
    assert digests(model, optimizer, meshes) != found
    return found


def write(folder: Path, layout: str) -> dict[str, str]:
    world, degrees = LAYOUTS[layout]
    wanted, *others = run_ranks(begin, world, degrees, str(folder), "0")
    assert all(other == wanted for other in others)
    assert any(key.endswith("exp_avg_sq") for key in wanted)
    return wanted


def assert_taken(folder: Path, layout: str, number: int, following: int, wanted: dict[str, str]) -> None:
    world, degrees = LAYOUTS[layout]
    for found in run_ranks(hand_on, world, degrees, str(folder), str(number), str(following)):
        assert found.keys() == wanted.keys()
        assert [key for key in wanted if found[key] != wanted[key]] == [], layout


def test_split_parameters_and_their_moments_go_from_tp_2_to_1_to_4_beside_replicas(tmp_path: Path) -> None:
    wanted = write(tmp_path, "hsdp2 tp2 ep2")
    for number, layout in enumerate(["tp1", "tp4"]):
        assert_taken(tmp_path, layout, number, number + 1, wanted)


@pytest.mark.full
@pytest.mark.parametrize("written", LAYOUTS)
def test_every_degree_takes_over_from_every_other(tmp_path: Path, written: str) -> None:
    wanted = write(tmp_path, written)
    for number, layout in enumerate(LAYOUTS):
        assert_taken(tmp_path, layout, 0, number + 1, wanted)
