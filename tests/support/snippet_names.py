"""What the Python blocks of the guides take for granted: a model, an optimizer, rows. Each function gives the
names for the blocks that say so in their ``needs`` comment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdmoe
from fsdmoe.data import Batch, DataConfig, build_data
from fsdmoe.mesh import Axis
from fsdmoe.models import build_model
from tests.support.hf_tiny import tiny_hf
from tests.support.tiny_run import tiny_config


def rows(num_rows: int = 2, length: int = 32) -> Batch:
    """Whole rows of one document each."""
    tokens = torch.arange(num_rows * length).view(num_rows, length) % 64
    positions = torch.arange(length).expand_as(tokens)
    has_next = positions < length - 1
    return Batch(tokens, tokens.roll(-1, 1).where(has_next, 0), positions, torch.zeros_like(tokens), has_next)


def hf_batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(32).view(2, 16)
    return {"input_ids": tokens, "labels": tokens}


def hf_model() -> dict[str, Any]:
    model = tiny_hf("qwen3_moe", num_attention_heads=4, moe_intermediate_size=16)
    return {"model": model, "batches": [rows()], "micro_batches": [hf_batch(), hf_batch()]}


def wrapped() -> dict[str, Any]:
    model = fsdmoe.parallelize(tiny_hf("qwen3_moe"), fsdmoe.build_meshes())
    optimizer = fsdmoe.AdamW(model, lr=1e-3)
    data = DataConfig(seq_len=32, max_bytes=100_000)
    stream = build_data(data, dp_rank=0, dp_size=1, micro_batch_size=2, global_batch_size=2, seed=0)
    return {"model": model, "optimizer": optimizer, "batches": [hf_batch()], "stream": stream}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def wrapped_decoder() -> dict[str, Any]:
    config = tiny_config("runs/none", dist.get_world_size(), mesh__cp=2)
    meshes = fsdmoe.build_meshes(cp=2)
    precision = fsdmoe.PrecisionConfig(param_dtype="float32")
    policy = fsdmoe.ParallelPolicy(grad_divisor=1.0, precision=precision)
    model = fsdmoe.parallelize(build_model(config.model, config.experts), meshes, policy)
    return {"model": model, "meshes": meshes, "batches": [rows(), rows()]}


def attention() -> dict[str, Any]:
    meshes = fsdmoe.build_meshes(cp=2)
    q, k, v = (torch.randn(2, 16, heads, 8) for heads in (4, 2, 2))
    return {
        "batch": rows(), "cp": 2, "cp_rank": meshes.rank(Axis.CP), "cp_group": meshes.group(Axis.CP),
        "device": "cpu", "scale": 0.3, "q_BLHD": q, "k_BLGD": k, "v_BLGE": v,
    }  # fmt: skip


def documents() -> dict[str, Any]:
    groups = {1: None, 2: dist.group.WORLD}
    return {"lengths": [9, 5, 12, 3], "world": 2, "rank": dist.get_rank(), "groups": groups, "device": "cpu"}


NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "": dict,
    "a Hugging Face model": hf_model,
    "a Hugging Face model and rows": hf_model,
    "a Hugging Face model and micro-batches": hf_model,
    "a folder of a model that transformers splits": dict,
    "MyExperts, your class": lambda: {"MyExperts": Layer},
    "a wrapped model, its optimizer and batches": wrapped,
    "a wrapped model, its optimizer and a stream": wrapped,
    "a model whose layers have up and down": lambda: {"model": Layers()},
    "a wrapped decoder, its meshes and rows": wrapped_decoder,
    "a batch, queries, keys and values": attention,
    "lengths of documents, groups of ranks": documents,
}
