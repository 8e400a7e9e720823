"""What a decoder looks like: the ``model`` section, with Hugging Face's field names, and the presets.

A run names a preset and changes single fields of it; every field that is not written comes from the preset.
The architecture decides which fields matter: ``deepseek_v3`` reads the MLA and shared-expert fields,
``glm4_moe`` the shared-expert fields and ``use_qk_norm``, ``gpt_oss`` the windows, the others none of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.rules import divisor_problems, nearest
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.kernels.router_policy import ScoreName
from fsdmoe.models.rope_config import PLAIN_ROPE, RopeConfig

if TYPE_CHECKING:
    from fsdmoe.models.rope_scaling import RotaryPositions

Architecture = Literal["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss"]
LayerType = Literal["sliding_attention", "full_attention"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The decoder: a preset and what differs from it."""

    preset: str = "quickstart"
    """Named architecture that supplies every field not written: see fsdmoe.models.PRESETS."""
    hf: str | None = None
    """Folder of a Hugging Face model (config.json and safetensors) to train instead; its config.json decides
    every other key of this section."""
    random_weights: bool = False
    """With hf: start from new weights, drawn as the model itself draws them, so that a config.json is enough;
    for trying a configuration and for timing it."""
    architecture: Architecture = "qwen3_moe"
    """Family: decides attention (GQA with or without QK-norm or sinks, or MLA), routing and the experts'
    activation. With hf, the nearest of these, for plans."""
    vocab_size: int = 264
    """Rows of the embedding and of the head."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_hidden_layers: int = 4
    """Decoder layers."""
    num_attention_heads: int = 4
    """Query heads."""
    num_key_value_heads: int = 2
    """Key and value heads (grouped-query attention)."""
    head_dim: int = 64
    """Width of one attention head."""
    attention_bias: bool = False
    """Biases on the q, k, v and o projections (glm4_moe: not on o)."""
    use_qk_norm: bool = True
    """glm4_moe: a norm on each query and key head, which qwen3_moe always has and the others never."""
    sliding_window: int | None = None
    """gpt_oss: tokens that a query sees in sliding layers, its own included; none sees all everywhere."""
    layer_types: tuple[LayerType, ...] | None = None
    """gpt_oss: sliding_attention or full_attention of each layer; none takes turns, sliding first."""
    intermediate_size: int = 1024
    """Width of the dense MLP, in layers that have no experts."""
    first_k_dense_replace: int = 0
    """The first so many layers have a dense MLP instead of experts."""
    moe_intermediate_size: int = 384
    """Width of one expert."""
    num_experts: int = 8
    """Experts in each MoE layer."""
    num_experts_per_tok: int = 2
    """Experts that each token visits (top-k)."""
    norm_topk_prob: bool = True
    """Renormalise the chosen experts' weights to sum to one."""
    n_shared_experts: int = 0
    """Experts that every token visits, as one MLP of n_shared_experts * moe_intermediate_size."""
    shared_expert_gate: bool = False
    """Scale the shared experts' output by a learned sigmoid of each token (Qwen2-MoE)."""
    moe_latent_size: int | None = None
    """Width at which tokens are sent to experts and computed there, between two projections (Nemotron's
    latent MoE); none is hidden_size, without projections."""
    n_group: int = 1
    """Expert groups of group-limited routing."""
    topk_group: int = 1
    """Groups that a token may choose from."""
    routed_scaling_factor: float = 1.0
    """Factor on the routed experts' weights."""
    q_lora_rank: int | None = None
    """MLA: rank of the query down-projection; none projects directly."""
    kv_lora_rank: int = 512
    """MLA: rank of the joint key-value down-projection."""
    qk_nope_head_dim: int = 128
    """MLA: head width without rotary positions."""
    qk_rope_head_dim: int = 64
    """MLA: head width with rotary positions."""
    v_head_dim: int = 128
    """MLA: width of a value head."""
    num_nextn_predict_layers: int = 0
    """Multi-token prediction depths (DeepSeek-V3), each one more decoder layer with its own loss."""
    mtp_loss_coef: float = 0.3
    """Weight of the mean multi-token prediction loss."""
    rms_norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    partial_rotary_factor: float = 1.0
    """glm4_moe: the part of each head that is rotated."""
    max_position_embeddings: int = 32_768
    """Longest text that the model is meant for: goes into an exported config.json, limits nothing, and is
    what rope.type = dynamic scales beyond."""
    rope: RopeConfig = PLAIN_ROPE
    """Scaling of the rotary frequencies for longer texts."""
    tie_word_embeddings: bool = False
    """Use the embedding as the head's weight."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        problems = [
            f"model.{name}: expected a positive number below 2**31, got {size}; "
            f"{'write at least 1' if size < 1 else 'lower it'}"
            for name in (
                "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
                "intermediate_size", "moe_intermediate_size", "num_experts", "q_lora_rank", "kv_lora_rank",
                "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings",
                "moe_latent_size", "sliding_window",
            )
            if (size := getattr(self, name)) is not None and not 1 <= size < 1 << 31
        ]  # fmt: skip
        problems += [
            f"model.{name}: expected 0 or more, got {getattr(self, name)}; write 0 for none"
            for name in ("n_shared_experts", "num_nextn_predict_layers", "mtp_loss_coef", "initializer_range")
            if not getattr(self, name) >= 0
        ]
        problems += [
            f"model.{name}: expected a number above 0, got {getattr(self, name)}; drop it for the preset's"
            for name in ("rms_norm_eps", "rope_theta")
            if not getattr(self, name) > 0
        ]
        if self.random_weights and self.hf is None:
            problems.append(
                "model.random_weights: expected model.hf, got none, and a native decoder always starts so; "
                "drop it"
            )
        if not problems:
            problems = list(self._shape_problems())
        refuse(problems)

    def _shape_problems(self) -> list[str]:
        heads = {"query heads (num_attention_heads)": self.num_attention_heads}
        problems = divisor_problems("model.num_key_value_heads", self.num_key_value_heads, heads)
        problems += self._rotary_problems()
        problems += self._window_problems()
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            problems.append(
                f"model.first_k_dense_replace: expected 0 to num_hidden_layers = {self.num_hidden_layers}, "
                f"got {self.first_k_dense_replace}; lower it"
            )
        if self.shared_expert_gate and not self.n_shared_experts:
            problems.append(
                "model.shared_expert_gate: expected shared experts to gate, got n_shared_experts = 0; raise "
                "that"
            )
        try:
            self.router_spec()
        except ConfigError as error:
            problems += error.problems
        return problems

    def _rotary_problems(self) -> list[str]:
        width = "qk_rope_head_dim" if self.is_mla else "head_dim"
        whole, dim, partial = getattr(self, width), self.rotary_dim, self.partial_rotary_factor
        if not 0 < partial <= 1 or (partial != 1 and self.architecture != "glm4_moe"):
            allowed = (
                "above 0 and up to 1" if self.architecture == "glm4_moe" else "1: only glm4_moe has other"
            )
            return [f"model.partial_rotary_factor: expected {allowed}, got {partial}; write 1"]
        if dim % 2 or not dim:
            part = "" if partial == 1 else f" times partial_rotary_factor = {partial}"
            return [
                f"model.{width}: expected an even number for rotary positions, got {whole}{part}; add one"
            ]
        problems = []
        if self.rope.type == "dynamic" and dim < 4:
            problems.append(
                f"model.rope.type: dynamic needs at least 4 rotary dimensions, got model.{width} = {whole}; "
                "choose another type"
            )
        for key in ("short_factor", "long_factor"):
            factors = getattr(self.rope, key)
            if factors is not None and len(factors) != dim // 2:
                problems.append(
                    f"model.rope.{key}: expected {dim // 2} numbers, one a rotary pair, got {len(factors)}; "
                    "correct the list"
                )
        return problems

    def _window_problems(self) -> list[str]:
        stated = [key for key in ("sliding_window", "layer_types") if getattr(self, key) is not None]
        if self.architecture != "gpt_oss":
            return [
                f"model.{key}: expected none, for only gpt_oss has windows, got {getattr(self, key)}; drop it"
                for key in stated
            ]
        if self.layer_types is None or len(self.layer_types) == self.num_hidden_layers:
            return []
        return [
            f"model.layer_types: expected one of each of num_hidden_layers = {self.num_hidden_layers}, got "
            f"{len(self.layer_types)}; correct the list, or drop it for layers that take turns"
        ]

    def router_spec(self) -> RouterSpec:
        """How the architecture routes."""
        is_gpt_oss = self.architecture == "gpt_oss"
        plain: ScoreName = "topk_softmax" if is_gpt_oss else "softmax_topk"
        return RouterSpec(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            score="sigmoid" if self._has_sigmoid_router else plain,
            norm_topk=self.norm_topk_prob,
            scaling=self.routed_scaling_factor,
            num_groups=self.n_group,
            topk_groups=self.topk_group,
            correction_bias=self._has_sigmoid_router,
            router_bias=is_gpt_oss,
        )

    @property
    def _has_sigmoid_router(self) -> bool:
        return self.architecture in ("deepseek_v3", "glm4_moe")

    @property
    def is_mla(self) -> bool:
        return self.architecture == "deepseek_v3"

    @property
    def has_qk_norm(self) -> bool:
        """Whether each query and key head is normed."""
        return self.architecture == "qwen3_moe" or (self.architecture == "glm4_moe" and self.use_qk_norm)

    @cached_property
    def has_sinks(self) -> bool:
        """Whether every head has a learned score, in addition to its keys', for attending to nothing."""
        return self.architecture == "gpt_oss"

    def window_of(self, layer: int) -> int | None:
        """How many tokens a query of this layer sees, its own included; None for all."""
        if self.sliding_window is None:
            return None
        kinds = self.layer_types or gpt_oss_turns(self.num_hidden_layers)
        return self.sliding_window if kinds[layer] == "sliding_attention" else None

    @property
    def num_window_layers(self) -> int:
        return sum(self.window_of(layer) is not None for layer in range(self.num_hidden_layers))

    @property
    def rotary_dim(self) -> int:
        """Width of a head that is rotated."""
        return self.qk_rope_head_dim if self.is_mla else int(self.head_dim * self.partial_rotary_factor)

    @cached_property
    def rotary(self) -> RotaryPositions:
        """What positions do to queries and keys. One object, which keeps its tables on the device."""
        from fsdmoe.models.rope_scaling import RotaryPositions  # not above: it loads torch

        return RotaryPositions(self.rotary_dim, self.rope_theta, self.rope, self.max_position_embeddings)

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace


_QWEN3 = {
    "architecture": "qwen3_moe", "vocab_size": 151_936, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8, "num_key_value_heads": 4, "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
}  # fmt: skip
_MIXTRAL = {
    "architecture": "mixtral", "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "num_key_value_heads": 8, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
_DEEPSEEK = {
    "architecture": "deepseek_v3", "norm_topk_prob": True, "rope_theta": 10_000.0,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 4096,
}  # fmt: skip
_GLM = {
    "architecture": "glm4_moe", "vocab_size": 151_552, "head_dim": 128, "num_attention_heads": 96,
    "num_key_value_heads": 8, "attention_bias": True, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
    "partial_rotary_factor": 0.5, "max_position_embeddings": 131_072,
}  # fmt: skip


def _gpt_oss_rope(*, factor: float, trained_on: int) -> RopeConfig:
    return RopeConfig(
        type="yarn", factor=factor, original_max_position_embeddings=trained_on, beta_fast=32.0,
        beta_slow=1.0, truncate=False,
    )  # fmt: skip


_GPT_OSS = {
    "architecture": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "sliding_window": 128,
    "moe_intermediate_size": 2880, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
    "max_position_embeddings": 131_072,
    "rope": _gpt_oss_rope(factor=32.0, trained_on=4096),
}  # fmt: skip
_TINY = {
    "architecture": "qwen3_moe", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16,
    "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "quickstart": {},
    "qwen3-30b-a3b": _QWEN3 | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "qwen3-235b-a22b": _QWEN3 | {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
    },
    "mixtral-8x7b": _MIXTRAL | {
        "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "moe_intermediate_size": 14_336,
    },
    "mixtral-8x22b": _MIXTRAL | {
        "vocab_size": 32_768, "hidden_size": 6144, "num_hidden_layers": 56, "num_attention_heads": 48,
        "moe_intermediate_size": 16_384, "max_position_embeddings": 65_536,
    },
    "deepseek-v3": _DEEPSEEK | {
        "vocab_size": 129_280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "head_dim": 64, "intermediate_size": 18_432, "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048, "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "kv_lora_rank": 512,
    },
    "glm-4.5": _GLM | {
        "hidden_size": 5120, "num_hidden_layers": 92, "intermediate_size": 12_288, "first_k_dense_replace": 3,
        "moe_intermediate_size": 1536, "num_experts": 160, "routed_scaling_factor": 2.5,
    },
    "glm-4.5-air": _GLM | {
        "hidden_size": 4096, "num_hidden_layers": 46, "intermediate_size": 10_944, "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408, "num_experts": 128, "use_qk_norm": False,
    },
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_experts": 128},
    "tiny-qwen3": _TINY,
    "tiny-mixtral": _TINY | {"architecture": "mixtral", "rms_norm_eps": 1e-5},
    "tiny-deepseek-v3": _DEEPSEEK | _TINY | {
        "architecture": "deepseek_v3", "num_hidden_layers": 3, "num_key_value_heads": 4,
        "intermediate_size": 48, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    },
    "tiny-glm-4.5": _GLM | _TINY | {
        "architecture": "glm4_moe", "num_hidden_layers": 3, "head_dim": 16, "intermediate_size": 48,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "rope_theta": 10_000.0,
    },
    "tiny-gpt-oss": _GPT_OSS | _TINY | {
        "architecture": "gpt_oss", "sliding_window": 8, "max_position_embeddings": 64,
        "rope": _gpt_oss_rope(factor=4.0, trained_on=16),
    },
}  # fmt: skip
"""Fields by preset; a run's own keys come on top. Experts of Mixtral and gpt-oss have Hugging Face's
``intermediate_size`` width."""


def gpt_oss_turns(num_layers: int) -> list[str]:
    """The layer types of gpt-oss where they are not written."""
    return [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)]


def preset_fields(preset: str) -> dict[str, Any]:
    """What the preset decides; the rest are defaults."""
    if preset not in PRESETS:
        family = [name for name in PRESETS if name.startswith(preset.lower()) and preset]
        fix = f"choose one of {', '.join(family)}" if len(family) > 1 else nearest(preset, family or PRESETS)
        raise ConfigError(f"model.preset: unknown preset {preset!r}; {fix}")
    return PRESETS[preset]


def preset_config(preset: str, **changes: Any) -> ModelConfig:
    """The preset's configuration with some fields changed."""
    return ModelConfig(preset=preset, **(preset_fields(preset) | changes))
