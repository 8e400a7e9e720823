"""A native model is exported only if transformers computes the same from the folder; else it is refused, and
a run says so before its first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, to_hf
from fsdmoe.config import load_config
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import BalanceConfig, ExpertsConfig
from fsdmoe.models import Decoder
from fsdmoe.testing import requires_transformers
from tests.support.hf_pairs import randomize, tiny

ARCHITECTURES = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss")
CHANGES: list[dict[str, Any]] = [
    {"attention_bias": True}, {"attention_bias": False}, {"use_qk_norm": False}, {"first_k_dense_replace": 1},
    {"first_k_dense_replace": 0}, {"norm_topk_prob": False}, {"n_shared_experts": 0}, {"n_shared_experts": 1},
    {"n_shared_experts": 2}, {"n_shared_experts": 1, "shared_expert_gate": True}, {"moe_latent_size": 8},
    {"n_group": 2}, {"n_group": 4, "topk_group": 2}, {"routed_scaling_factor": 2.0},
    {"num_nextn_predict_layers": 1}, {"rms_norm_eps": 1e-2}, {"rope_theta": 500.0},
    {"partial_rotary_factor": 0.25}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1},
    {"num_key_value_heads": 4}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 3}, {"q_lora_rank": None},
    {"q_lora_rank": 8}, {"v_head_dim": 12}, {"qk_nope_head_dim": 12}, {"qk_rope_head_dim": 4},
    {"head_dim": 16}, {"sliding_window": 3}, {"sliding_window": None},
    {"layer_types": ("full_attention", "sliding_attention")},
    {"num_hidden_layers": 3}, {"max_position_embeddings": 16}, {"intermediate_size": 20},
    {"kv_lora_rank": 12}, {"bias_rate": 1e-3},
]  # fmt: skip
QUICK: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"bias_rate": 1e-3}),
    ("qwen3_moe", {"routed_scaling_factor": 2.0}),
    ("mixtral", {"norm_topk_prob": False}),
    ("deepseek_v3", {"num_key_value_heads": 1}),
]


def built(architecture: str, changes: dict[str, Any]) -> Decoder | None:
    """None for what is no configuration."""
    fields = dict(changes)
    experts = ExpertsConfig(balance=BalanceConfig(bias_rate=fields.pop("bias_rate", 0.0)))
    try:
        model = Decoder(tiny(architecture, **fields), experts)
    except ConfigError:
        return None
    randomize(model, 0.3)
    return model.eval()


def difference(model: Decoder, folder: Path) -> float:
    """Of the logits that transformers computes from a folder."""
    import transformers

    tokens = torch.randint(0, 96, (2, 10), generator=torch.Generator().manual_seed(0))
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return float((read(tokens).logits - model(tokens).logits_BSV).abs().max())


def assert_equal_or_refused(architecture: str, changes: dict[str, Any], folder: Path) -> None:
    model = built(architecture, changes)
    if model is None:
        return
    checkpoint.save(folder / "checkpoint", model)
    refusal = export(folder)
    off = 0.0 if refusal else difference(model, folder / "out")
    assert off < 1e-4, f"transformers computes something else from the folder: logits are off by {off:.1e}"
    assert not refusal or "which computes something else" in refusal, "refused, and a run does not say so"


def export(folder: Path) -> str:
    """The refusal; empty where there is none."""
    try:
        to_hf(folder / "checkpoint", folder / "out")
    except CheckpointError as error:
        return str(error)
    return ""


@requires_transformers
@pytest.mark.parametrize(("architecture", "changes"), QUICK, ids=str)
def test_a_field_is_exported_only_where_transformers_computes_with_it(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    assert_equal_or_refused(architecture, changes, tmp_path)


@pytest.mark.full
@requires_transformers
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_of_every_architecture_is_computed_alike_or_refused(
    tmp_path: Path, architecture: str
) -> None:
    for number, changes in enumerate(CHANGES):
        assert_equal_or_refused(architecture, changes, tmp_path / str(number))


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("--experts.balance.bias_rate 0.001", "experts.balance.bias_rate"),
        ("--model.n_shared_experts 1", "model.n_shared_experts"),
        ("--model.preset tiny-deepseek-v3 --model.vocab_size 264 --experts.balance.bias_rate 0.001", None),
    ],
)
def test_a_run_that_cannot_be_exported_says_so_before_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, key: str | None
) -> None:
    run = ["--train.output_dir", str(tmp_path / "run"), "--precision.param_dtype", "float32"]
    load_config([*run, *arguments.split()])
    said = [line for line in capsys.readouterr().err.splitlines() if "cannot be exported" in line]
    expected = [] if key is None else [f"fsdmoe: warning: {key}: this run cannot be exported to transformers"]
    assert [": ".join(line.split(": ")[:4]) for line in said] == expected
