"""What a native model may have and its family in transformers has not: said before a run, refused at export.

A folder with such a model would be read without an error and compute something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdmoe.checkpoint.tree import Tree

CLASSES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
_WITH_BIAS = ("deepseek_v3", "glm4_moe")
_NOWHERE: Tree = {"moe_latent_size": None, "shared_expert_gate": False}
_PLAIN_ROUTER: Tree = {
    "n_shared_experts": 0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_ONLY: dict[str, Tree] = {
    "qwen3_moe": _NOWHERE | _PLAIN_ROUTER,
    "mixtral": _NOWHERE
    | _PLAIN_ROUTER
    | {"first_k_dense_replace": 0, "norm_topk_prob": True, "attention_bias": False},
    "deepseek_v3": _NOWHERE,
    "glm4_moe": _NOWHERE,
    "gpt_oss": _NOWHERE | _PLAIN_ROUTER | {"first_k_dense_replace": 0},
}
"""The only value of each field that the code of a family in transformers computes with, or a function of all
fields that returns it."""


def not_held(fields: Tree, *, has_bias: bool, selection: str = "top_k") -> list[str]:
    """What cannot be exported, a line a key, each with what to do.

    Args:
        fields: Of a ``ModelConfig``.
        has_bias: Routers have a selection bias, whether of their architecture or of ``bias_rate``.
        selection: Who chooses: ``experts.selection``.
    """
    kind = str(fields.get("architecture"))
    if kind not in CLASSES:
        return [f"model.architecture: expected one of {', '.join(CLASSES)}, got {kind!r}"]
    lines = routing_not_held(CLASSES[kind], has_bias=has_bias and kind not in _WITH_BIAS, selection=selection)
    for key, rule in _ONLY[kind].items():
        if key not in fields:
            continue
        only = rule(fields) if callable(rule) else rule
        value = fields[key]
        if value != only:
            lines.append(f"model.{key}: {CLASSES[kind]} has {_only(only)} there, got {value!r}; {_fix(only)}")
    return lines


def routing_not_held(name: str, *, has_bias: bool, selection: str) -> list[str]:
    """The same of routing in a model whose class is ``name``, native or wrapped. ``has_bias``: its routers
    have a selection bias, which those of that class have not."""
    lines = []
    if has_bias:
        lines.append(
            f"experts.balance.bias_rate: the routers of {name} have no selection bias; choose an "
            f"architecture that has one ({' or '.join(_WITH_BIAS)}), or balance by "
            "experts.balance.global_batch or sequence"
        )
    if selection == "expert_choice":
        lines.append(
            f"experts.selection: in {name} each token chooses its experts, got expert_choice; set it to top_k"
        )
    return lines


def _only(value: Any) -> str:
    return "nothing" if value is None else f"only {value!r}"


def _fix(value: Any) -> str:
    return "drop it" if value is None else f"write {str(value).lower()}, or choose another architecture"
