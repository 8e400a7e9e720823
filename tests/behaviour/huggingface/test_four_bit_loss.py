"""What a trained model loses by a base in four bits, and what adapters regain of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_peft, run_ranks
from tests.support.hf_tiny import VOCABULARY, tiny_hf

pytestmark = requires_peft
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "moe_intermediate_size": 64, "num_hidden_layers": 1, "output_router_logits": False,
}  # fmt: skip


def rows(seed: int) -> torch.Tensor:
    """Text of a language in which a token, and whether the one before is even, say what may follow."""
    language = torch.Generator().manual_seed(0)
    chances = torch.rand(VOCABULARY, 2, VOCABULARY, generator=language).pow(12)
    random = torch.Generator().manual_seed(seed)
    stream = [torch.randint(VOCABULARY, (8,), generator=random) for _ in range(2)]
    for _ in range(24):
        given = chances[stream[-1], stream[-2] % 2]
        stream.append(torch.multinomial(given, 1, generator=random).flatten())
    return torch.stack(stream, 1)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = rows(seed)
    mask = torch.ones_like(tokens[:, 1:], dtype=torch.bool)
    return as_causal_lm(model)(tokens[:, :-1], labels_BS=tokens[:, 1:], loss_mask_BS=mask).loss


def held_out(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(loss_of(model, 10_000 + seed).item() for seed in range(6)) / 6


def step(model: nn.Module, steps: range, lr: float) -> None:
    optimizer = AdamW(model, lr=lr, weight_decay=0.0)
    for seed in steps:
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()


def losses(folder: str, dtypes: tuple[str, ...]) -> dict[str, list[float]]:
    meshes = build_meshes()
    base = parallelize(tiny_hf("qwen3_moe", randomized=False, **SIZES), meshes, policy(None))
    step(base, range(240), 1e-2)
    found = {"base": [held_out(base)]}
    checkpoint.save(f"{folder}/base", base)
    checkpoint.to_hf(f"{folder}/base", f"{folder}/hf")
    for dtype in dtypes:
        model = build_folder_model(f"{folder}/hf", AdapterConfig(rank=8))
        model = parallelize(model, meshes, policy(dtype), load=f"{folder}/hf")
        before = held_out(model)
        step(model, range(240, 260), 2e-3)
        found[dtype] = [before, held_out(model)]
    return found


def policy(frozen: Any) -> ParallelPolicy:
    block = 64 if frozen is not None else None
    precision = PrecisionConfig(param_dtype="float32", frozen_dtype=frozen, frozen_block=block)
    return ParallelPolicy(precision=precision)


@pytest.mark.full
def test_a_base_in_four_bits_loses_a_hundredth_and_adapters_regain_it(tmp_path: Path) -> None:
    found = run_ranks(losses, 1, str(tmp_path), ("nf4", "int4"), timeout=900.0)[0]
    (base,) = found.pop("base")
    assert base < 3.6, "it has learned: a guess has a loss of 4.2"
    for before, after in found.values():
        assert base != before < 1.01 * base
        assert after <= base
