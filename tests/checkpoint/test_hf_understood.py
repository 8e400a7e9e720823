"""Hugging Face models that the native decoder does not compute are refused by key, on every way into it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointConfig, Checkpointer, CheckpointError
from fsdmoe.checkpoint.__main__ import main
from fsdmoe.checkpoint.hf_config import model_fields
from fsdmoe.checkpoint.hf_import import from_hf
from fsdmoe.checkpoint.upcycling import UpcyclePolicy, upcycle
from fsdmoe.core.errors import ConfigError
from fsdmoe.models import Decoder, preset_config
from fsdmoe.models.rope_config import RopeConfig
from fsdmoe.testing import requires_transformers
from tests.support.hf_dense import dense
from tests.support.hf_pairs import hf_model, tiny

YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
LINEAR: dict[str, Any] = {"type": "linear", "factor": 2.0}
# config.json as released, the widths aside
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02, "intermediate_size": 16384,
    "max_position_embeddings": 65536, "model_type": "mixtral", "num_attention_heads": 48,
    "num_experts_per_tok": 2, "num_hidden_layers": 56, "num_key_value_heads": 8, "num_local_experts": 8,
    "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.0.dev0",
    "use_cache": False, "vocab_size": 32768,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": YARN, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip
GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 3, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1536, "n_group": 1,
    "n_routed_experts": 160, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 92, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": True, "vocab_size": 151552,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": False, "pad_token_id": 199999, "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    }, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
    "vocab_size": 201088,
}  # fmt: skip
GPT_OSS_BY_DEFAULT = {
    "rope_scaling", "rope_theta", "sliding_window", "layer_types", "attention_bias", "head_dim",
    "rms_norm_eps", "num_experts_per_tok", "max_position_embeddings",
}  # fmt: skip
GLM_AIR = GLM | {
    "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_hidden_layers": 46,
    "routed_scaling_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("released", "preset"),
    [
        (QWEN3, "qwen3-30b-a3b"),
        (MIXTRAL, "mixtral-8x22b"),
        (DEEPSEEK | {"rope_scaling": None, "max_position_embeddings": 4096}, "deepseek-v3"),
        (GLM, "glm-4.5"),
        (GLM_AIR, "glm-4.5-air"),
        (GPT_OSS, "gpt-oss-20b"),
        ({k: v for k, v in GPT_OSS.items() if k not in GPT_OSS_BY_DEFAULT}, "gpt-oss-20b"),
    ],
    ids=["qwen3", "mixtral", "deepseek before yarn", "glm", "glm air", "gpt-oss", "gpt-oss in few words"],
)
def test_released_models_that_it_computes_are_understood_and_mean_their_presets(
    released: dict[str, Any], preset: str
) -> None:
    wanted = preset_config(preset)
    for key, value in model_fields(released).items():
        assert getattr(wanted, key) == value, key


def test_the_released_deepseek_v3_is_understood_with_its_yarn() -> None:
    fields = model_fields(DEEPSEEK)
    assert fields["max_position_embeddings"] == 163_840
    assert fields["rope"] == RopeConfig(
        type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
    )  # fmt: skip


def folder_of(architecture: str, folder: Path, **changes: Any) -> nn.Module:
    """A folder as transformers saves it, with some keys of its config.json changed by hand."""
    model = hf_model(tiny(architecture))
    model.save_pretrained(folder)  # type: ignore[operator]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return model


REFUSED = [
    ("deepseek_v3", {"rope_scaling": YARN | {"type": "proportional"}, "rope_theta": 1e4},
     r"rope_scaling\.type"),
    ("deepseek_v3", {"rope_scaling": YARN}, "rope_theta"),  # which transformers would pass over
    ("qwen3_moe", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4,
                                       "alpha": 1000.0}}, r"rope_parameters\.alpha"),
    ("qwen3_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}},
     r"rope_parameters\.mrope_section"),
    ("qwen3_moe", {"rope_scaling": {"type": "linear", "factor": 0.5}, "rope_theta": 1e4},
     r"rope_scaling\.factor"),
    ("qwen3_moe", {"rope_theta": 5e5}, "rope_theta"),
    ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen3_moe", {"sliding_window": 16, "use_sliding_window": True}, "sliding_window"),
    ("qwen3_moe", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen3_moe", {"attention_dropout": 0.1}, "attention_dropout"),
    ("qwen3_moe", {"attention_multiplier": 0.5}, "attention_multiplier"),
    ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts"),
    ("mixtral", {"sliding_window": 16}, "sliding_window"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("mixtral", {"attention_bias": True}, "attention_bias"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("glm4_moe", {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ("gpt_oss", {"swiglu_limit": 9.0}, "swiglu_limit"),
    ("gpt_oss", {"layer_types": ["chunked_attention", "full_attention"]}, "layer_types"),
]  # fmt: skip


@requires_transformers
@pytest.mark.parametrize(("architecture", "changes", "key"), REFUSED, ids=[f"{a} {k}" for a, _, k in REFUSED])
def test_what_the_decoder_does_not_compute_is_refused_by_key(
    tmp_path: Path, architecture: str, changes: dict[str, Any], key: str
) -> None:
    folder_of(architecture, tmp_path / "hf", **changes)
    start = CheckpointConfig(load=str(tmp_path / "hf"), load_only_model=True, asynchronous=False)
    for act in (
        lambda: from_hf(tmp_path / "hf", tmp_path / "ckpt"),
        lambda: checkpoint.load(tmp_path / "hf", Decoder(tiny(architecture))),
        lambda: Checkpointer(start, tmp_path / "run").load({"model": Decoder(tiny(architecture))}),
    ):
        with pytest.raises(CheckpointError, match=rf"(?m)^  {key}: "):
            act()
    assert not (tmp_path / "ckpt").exists()


@requires_transformers
def test_weights_converted_for_transformers_load_there_and_not_into_the_decoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = folder_of("deepseek_v3", tmp_path / "hf", rope_interleave=False)
    assert main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "ckpt")]) == 1
    assert "rope_interleave: expected True" in capsys.readouterr().err
    assert main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "ckpt"), "--for-transformers"]) == 0
    for start in ("hf", "ckpt"):
        with torch.no_grad():
            other = hf_model(tiny("deepseek_v3"), std=0.1)
        checkpoint.load(tmp_path / start, other)
        for name, value in hf.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name
        with pytest.raises(CheckpointError, match="rope_interleave: "):
            checkpoint.load(tmp_path / start, Decoder(tiny("deepseek_v3")))


@requires_transformers
def test_a_checkpoint_of_a_wrapped_model_is_held_to_the_same(tmp_path: Path) -> None:
    hf = hf_model(tiny("qwen3_moe"))
    checkpoint.save(tmp_path / "good", hf)
    checkpoint.load(tmp_path / "good", Decoder(tiny("qwen3_moe")))
    hf.config.attention_dropout = 0.1  # type: ignore[union-attr]
    checkpoint.save(tmp_path / "other", hf)
    with pytest.raises(CheckpointError, match=r"attention_dropout: expected 0, got 0\.1"):
        checkpoint.load(tmp_path / "other", Decoder(tiny("qwen3_moe")))


@requires_transformers
def test_another_base_of_the_rotary_positions_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_of("qwen3_moe", tmp_path / "hf")
    with caplog.at_level(logging.WARNING):
        checkpoint.load(tmp_path / "hf", Decoder(tiny("qwen3_moe")))
        assert "other settings" not in caplog.text
        checkpoint.load(tmp_path / "hf", Decoder(tiny("qwen3_moe", rope_theta=5e5, norm_topk_prob=False)))
    assert "rope_theta 10000.0 there, 500000.0 here; norm_topk_prob True there, False here" in caplog.text


@requires_transformers
def test_another_scaling_of_the_rotary_positions_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder_of("qwen3_moe", tmp_path / "hf", rope_scaling=LINEAR, rope_theta=1e4)
    with caplog.at_level(logging.WARNING):
        checkpoint.load(tmp_path / "hf", Decoder(tiny("qwen3_moe", rope=RopeConfig(**LINEAR))))
        assert "other settings" not in caplog.text
        checkpoint.load(tmp_path / "hf", Decoder(tiny("qwen3_moe")))
    assert "rope {'type': 'linear', 'factor': 2.0} there, {'type': 'default'} here" in caplog.text


@requires_transformers
def test_dense_first_layers_and_the_defaults_of_keys_left_out_are_read(tmp_path: Path) -> None:
    hf = hf_model(tiny("qwen3_moe", norm_topk_prob=False), mlp_only_layers=[0])
    hf.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    config = json.loads((tmp_path / "hf/config.json").read_text())
    del config["norm_topk_prob"]  # transformers takes false for Qwen3 then
    ours = Decoder(preset_config("tiny-qwen3", **model_fields(config)))
    checkpoint.load(tmp_path / "hf", ours)
    tokens = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        got, want = ours.eval()(tokens).logits_BSV, hf.eval()(tokens).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@requires_transformers
@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2], "rope_theta": 1e4}},
         r"rope_parameters\.mrope_section"),
        ("mistral", {"sliding_window": 16}, "sliding_window"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
         "sliding_window"),
        ("llama", {"hidden_act": "relu"}, "hidden_act"),
    ],
)  # fmt: skip
def test_dense_models_that_the_mixture_would_not_compute_are_not_upcycled(
    tmp_path: Path, kind: str, changes: dict[str, Any], key: str
) -> None:
    dense(kind, tmp_path / "dense", **changes)
    with pytest.raises(ConfigError, match=f"dense: {key}: "):
        upcycle(tmp_path / "dense", tmp_path / "ckpt", UpcyclePolicy(groups=2, top_k=1))
