"""One call for any model: the example of the README, unknown MoE blocks, adapters, frozen bases, memory."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError
from fsdmoe.config import Config
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.fsdp import is_fully_sharded
from fsdmoe.huggingface.adapters import ExpertsSpec, register_moe_adapter, unregister_moe_adapter
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import VOCABULARY, batch, tiny_hf, train
from tests.support.loading_memory import measure as measure_loading

ROOT = Path(__file__).parent.parent.parent


def example_of(page: str) -> str:
    found = re.search(r"```python\n(import fsdmoe.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None, f"{page} shows no example"
    return found[1]


def run_text(text: str, folder: str) -> tuple[float, str, list[str]]:
    with contextlib.chdir(folder):
        names: dict[str, Any] = {}
        torch.manual_seed(dist.get_rank())
        exec(compile(text, "README.md", "exec"), names)
    return names["loss"].item(), type(names["model"]).__name__, sorted(os.listdir(Path(folder, "ckpt")))


@requires_transformers
def test_the_example_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    text = example_of("README.md")
    assert text == example_of("docs/huggingface.md")
    model = tiny_hf("qwen3_moe", max_position_embeddings=512)
    model.save_pretrained(tmp_path / "tutorial/model")  # type: ignore[operator]
    got = run_ranks(run_text, 2, text, str(tmp_path))
    for rank, (loss, kind, files) in enumerate(got):
        torch.manual_seed(rank)
        tokens = torch.randint(VOCABULARY, (1, 512))
        assert loss == pytest.approx(model(tokens, labels=tokens).loss.item(), rel=1e-4)
        assert kind == "Qwen3MoeForCausalLM"
        assert files


def test_importing_the_package_imports_nothing() -> None:
    code = "import sys, fsdmoe; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# MoE blocks that nobody knows


class Chosen(nn.Module):
    """Experts with names and an order of arguments of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(4, 2 * 6, 8) * 0.3)
        self.w2 = nn.Parameter(torch.randn(4, 8, 6) * 0.3)

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(4):
            row, k = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[row], self.w13[expert]).chunk(2, -1)
            out = F.linear(F.silu(gate) * up, self.w2[expert]) * scores[row, k, None]
            y = y.index_add(0, row, out)
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = Chosen()

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, scores)


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def strange_input(step: int, rank: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def describe(module: nn.Module) -> ExpertsSpec | None:
    if not isinstance(module, Chosen):
        return None
    return ExpertsSpec(
        num_experts=4, hidden_size=8, intermediate_size=6, gate_up="w13", down="w2",
        arguments=("x", "chosen", "scores"),
    )  # fmt: skip


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train_strange(known: bool) -> tuple[list[float], list[str], int]:
    heard, logger = Heard(), logging.getLogger("fsdmoe")
    logger.addHandler(heard)
    if known:
        register_moe_adapter(describe)
    try:
        model = parallelize(Strange(), build_meshes(ep=4))
    finally:
        logger.removeHandler(heard)
        if known:
            unregister_moe_adapter(describe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(5):
        loss = model(strange_input(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, heard.texts, sum(parallel_forward_of(m) is not None for m in model.modules())


@pytest.mark.parametrize("known", [False, True])
def test_an_unknown_block_trains_with_fsdp_alone_and_an_adapter_splits_it(known: bool) -> None:
    got = run_ranks(train_strange, 4, known)
    alone = Strange()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for step in range(5):
        losses = [alone(strange_input(step, rank)) for rank in range(4)]
        (sum(losses) / 4).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        assert [found[0][step] for found in got] == pytest.approx([loss.item() for loss in losses], rel=1e-5)
    assert [found[2] for found in got] == [2 if known else 0] * 4
    assert [len(found[1]) for found in got] == [0 if known else 1, 0, 0, 0]
    if not known:
        assert "Chosen" in got[0][1][0]
        assert "register_moe_adapter" in got[0][1][0]


# What users do wrong


def mistakes(folder: str) -> dict[str, str]:
    meshes = build_meshes(ep=2)
    model = parallelize(tiny_hf("mixtral"), meshes)
    attempts: dict[str, Any] = {
        "twice": lambda: parallelize(model, meshes),
        "no_path": lambda: parallelize(tiny_hf("mixtral"), meshes, load=f"{folder}/nowhere"),
        "indivisible": lambda: parallelize(tiny_hf("mixtral", num_local_experts=5), meshes),
        "parameters": lambda: AdamW(tiny_hf("mixtral").parameters()),
        "save_pretrained": lambda: model.save_pretrained(f"{folder}/hf"),  # type: ignore[operator]
        "copied": lambda: copy.deepcopy(model),
        "converted": lambda: (model.half(), model(batch(0, 0))),
    }
    told = {}
    for name, attempt in attempts.items():
        with pytest.raises((ConfigError, CheckpointError, AssertionError, TypeError, RuntimeError)) as caught:
            attempt()
        told[name] = str(caught.value)
    return told


@requires_transformers
def test_mistakes_are_refused_with_the_fix(tmp_path: Path) -> None:
    fixes = {
        "twice": "parallelize: this MixtralForCausalLM is parallel already; call parallelize",
        "no_path": "name the folder of a checkpoint or of a run",
        "indivisible": "mesh.ep: expected a divisor of the 5 experts, got 2",
        "parameters": "take model.parameters() after fsdmoe.parallelize",
        "save_pretrained": "fsdmoe.checkpoint.to_hf",
        "copied": "build the model a second time",
        "converted": "convert or freeze parameters before",
    }
    for told in run_ranks(mistakes, 2, str(tmp_path)):
        assert {name: fix for name, fix in fixes.items() if fix not in told[name]} == {}, told


def move() -> tuple[float, float]:
    model = parallelize(tiny_hf("qwen3_moe"), build_meshes(ep=2))
    optimizer = AdamW(model, lr=1e-2)
    losses = train(model, optimizer, range(1))
    model.to("cpu").float()  # where and what it is already
    return losses[0], train(model, optimizer, range(1))[0]


@requires_transformers
def test_moving_a_model_to_where_it_is_changes_nothing() -> None:
    before, after = run_ranks(move, 2)[0]
    assert after < before


def save_gathered(folder: str) -> Tensor:
    model = parallelize(tiny_hf("qwen3_moe"), build_meshes(ep=2)).eval()
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)  # type: ignore[operator]
    with torch.no_grad():
        return model(batch(0, 0)).logits


@requires_transformers
def test_whole_weights_that_were_gathered_are_saved_as_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    logits = run_ranks(save_gathered, 2, str(tmp_path))[0]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(batch(0, 0)).logits, logits, rtol=1e-5, atol=1e-5)


# Frozen base, trainable adapters


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted() -> nn.Module:
    model = tiny_hf("qwen3_moe").requires_grad_(False)
    torch.manual_seed(7)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    return model


def adapter_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    if is_fully_sharded(model):
        return AdamW(model, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))


def train_adapters(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    model = parallelize(adapted(), build_meshes(ep=2))
    frozen = {n: p.full_tensor() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = adapter_optimizer(model)
    losses = train(model, optimizer, range(2))
    checkpoint.save(f"{folder}/ckpt", model, optimizer)
    again = parallelize(adapted(), build_meshes(ep=1))
    optimizer = adapter_optimizer(again)
    checkpoint.load(f"{folder}/ckpt", again, optimizer)
    losses += train(again, optimizer, range(2, 4))
    for name, parameter in again.named_parameters():
        if name in frozen:
            assert torch.equal(parameter.full_tensor(), frozen[name]), name
    return losses, {n: p.full_tensor().detach() for n, p in again.named_parameters() if p.requires_grad}


@requires_transformers
def test_adapters_on_a_frozen_base_train_and_resume_under_another_ep(tmp_path: Path) -> None:
    got = run_ranks(train_adapters, 2, str(tmp_path))
    alone = adapted()
    optimizer = adapter_optimizer(alone)
    for step in range(4):
        losses = [alone(batch(step, rank), labels=batch(step, rank)).loss for rank in range(2)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        assert [found[0][step] for found in got] == pytest.approx([loss.item() for loss in losses], rel=1e-4)
    assert set(got[0][1]) == {n for n, p in alone.named_parameters() if p.requires_grad}


# Memory of loading

BIG = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 64}
REST = 1 << 16  # the rotary table, norms while they are read


@requires_transformers
def test_loading_holds_the_shards_and_one_unit_only(tmp_path: Path) -> None:
    model = tiny_hf("mixtral", **BIG)
    model.save_pretrained(tmp_path / "big")  # type: ignore[operator]
    tiny_hf("mixtral").save_pretrained(tmp_path / "small")  # type: ignore[operator]
    whole = sum(p.numel() * 4 for p in model.parameters())
    unit = sum(p.numel() * 4 for p in model.model.layers[0].parameters())  # type: ignore[union-attr]
    for found in run_ranks(measure_loading, 4, str(tmp_path)):
        # A quarter of the weights, as much again for gradients, and the slots (here of attention only: every
        # expert has one owner), which are memory of a unit, not of the model.
        assert whole / 2 <= found["held"] <= whole / 2 + unit, (found, whole)
        assert found["peak"] <= found["held"] + 1.5 * unit, (found, unit)
        assert found["end"] <= found["held"] + REST, (found, unit)
        assert found["objects"] < 2 * unit, "the file, or much of it, was read into Python's own memory"


@pytest.mark.parametrize(
    ("key", "tape"), [("record", r"RoutingTape\(\)"), ("replay", r"RoutingTape\.load\(path\)")]
)
def test_a_policy_is_given_no_folder_of_routing_which_it_would_not_open(key: str, tape: str) -> None:
    experts = ExpertsConfig(**{key: "runs/routing"})
    with pytest.raises(ConfigError, match=rf"^experts\.{key}: expected none .* got runs/routing; .*{tape}"):
        ParallelPolicy(experts=experts)
    of_run = ParallelPolicy.from_config(Config(experts=experts))  # whose feed opens it
    assert of_run.experts == ExpertsConfig()


def test_a_policy_says_that_weights_are_replayed() -> None:
    experts = ExpertsConfig(replay="runs/routing", replay_weights=True)
    assert ParallelPolicy(experts=experts).experts.routing_keys == ("experts.replay_weights",)
    assert ParallelPolicy.from_config(Config(experts=experts)).experts == experts
