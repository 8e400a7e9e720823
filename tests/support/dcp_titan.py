"""States as torchtitan saves them: its names and shapes, of three ages, from Hugging Face's."""

from __future__ import annotations

import re
from typing import Any, Literal

import torch

Age = Literal["2025", "0.5", "physical"]
"""``2025``: ``attention.wq``, ``moe.experts.w1``; ``0.5``: ``qkv_linear.wq``, ``inner_experts.w1_EFD``;
``physical``: fused ``wqkv`` and ``w13``, linear layers with a leading dim."""
Tensors = dict[str, torch.Tensor]

_ATTENTION = {
    "q_a_proj": "wq_a", "q_b_proj": "wq_b", "q_a_layernorm": "q_norm", "kv_a_layernorm": "kv_norm",
    "kv_a_proj_with_mqa": "wkv_a", "kv_b_proj": "wkv_b", "o_proj": "wo",
    "q_norm": "q_norm", "k_norm": "k_norm",
}  # fmt: skip
_PROJECTIONS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}


def titan_names(state: Tensors, age: Age, heads: tuple[int, int] = (0, 0)) -> Tensors:
    """The same tensors under torchtitan's names; ``heads`` of queries and of keys, for ``physical``."""
    out: Tensors = {}
    for name, value in state.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if layer is None:
            out[_top(name, age)] = _linear(value, age) if name == "lm_head.weight" else value
            continue
        for key, part in _layer(layer[2], value, age).items():
            out[f"layers.{layer[1]}.{key}"] = part
    if age == "physical":
        _fuse(out, heads)
    return out


def _top(name: str, age: Age) -> str:
    head = "output.weight" if age == "2025" else "lm_head.weight"
    return {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": head,
    }[name]


def _layer(name: str, value: torch.Tensor, age: Age) -> Tensors:
    module, leaf = name.split(".", 1)
    if module in _NORMS:
        return {f"{_NORMS[module]}.weight": value}
    if module == "self_attn":
        word, kind = leaf.split(".")
        if word in ("q_proj", "k_proj", "v_proj") and age != "2025":
            return {f"attention.qkv_linear.w{word[0]}.{kind}": value}
        renamed = f"attention.{_ATTENTION.get(word, f'w{word[0]}')}.{kind}"
        return {renamed: value if "norm" in word else _linear(value, age)}
    return _feed_forward(leaf, value, age, transposed=module == "feed_forward")


def _feed_forward(leaf: str, value: torch.Tensor, age: Age, transposed: bool) -> Tensors:
    found = re.fullmatch(r"(?:(shared_experts?)\.)?(gate|up|down)_proj\.weight", leaf)
    if found is not None:
        module = "moe.shared_experts" if found[1] else "feed_forward"
        return {f"{module}.{_PROJECTIONS[found[2] + '_proj']}.weight": _linear(value, age)}
    if leaf in ("gate.weight", "router.weight"):
        return {"moe.router.gate.weight": _linear(value, age)}
    if leaf == "gate.e_score_correction_bias":
        return {"moe.expert_bias" if age == "2025" else "moe.expert_bias_E": value}
    if transposed:
        value = value.transpose(-2, -1)
    module = "moe.experts" if age == "2025" else "moe.routed_experts.inner_experts"
    if age == "physical":
        if leaf == "experts.down_proj":
            return {"moe.routed_experts.w2.weight": value.contiguous()}
        return {"moe.routed_experts.w13.weight": torch.stack(value.chunk(2, 1), 1)}
    suffix = (
        {"w1": "_EFD", "w3": "_EFD", "w2": "_EDF"} if age == "0.5" else dict.fromkeys(("w1", "w2", "w3"), "")
    )
    if leaf == "experts.down_proj":
        return {f"{module}.w2{suffix['w2']}": value.contiguous()}
    gate, up = value.chunk(2, 1)
    return {f"{module}.w1{suffix['w1']}": gate.contiguous(), f"{module}.w3{suffix['w3']}": up.contiguous()}


def _linear(value: torch.Tensor, age: Age) -> torch.Tensor:
    return value.unsqueeze(0) if age == "physical" else value


def _fuse(out: Tensors, heads: tuple[int, int]) -> None:
    """``wq wk wv`` to one tensor, by groups of queries; ``w1 w3`` of dense layers stacked."""
    for name in [n for n in out if n.endswith("qkv_linear.wq.weight")]:
        prefix = name.removesuffix("wq.weight")
        q, k, v = (out.pop(f"{prefix}{word}.weight") for word in ("wq", "wk", "wv"))
        groups = [w.reshape(heads[1], count, -1, w.shape[1])
                  for w, count in ((q, heads[0] // heads[1]), (k, 1), (v, 1))]  # fmt: skip
        out[f"{prefix}wqkv.weight"] = torch.cat(groups, 1).reshape(-1, q.shape[1])
    for name in [n for n in out if n.endswith(".w1.weight")]:
        up = name.replace(".w1.", ".w3.")
        out[name.replace(".w1.", ".w13.")] = torch.stack((out.pop(name)[0], out.pop(up)[0]))


def titan_state(weights: Tensors, moments: dict[str, Tensors], step: int) -> dict[str, Any]:
    """What its checkpointer hands to ``dcp.save``: bare weights, a flattened optimizer, and the rest."""
    optimizer: dict[str, Any] = {}
    for kind, tensors in moments.items():
        optimizer |= {f"state.{name}.{kind}": value for name, value in tensors.items()}
    for name in moments["exp_avg"]:
        optimizer[f"state.{name}.step"] = torch.tensor(float(step))
        settings = {"lr": 2e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
        optimizer |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
    return {
        **weights,
        "optimizer": optimizer,
        "lr_scheduler": {"last_epoch": step, "_step_count": step + 1},
        "train_state": {
            "step": torch.tensor(step, dtype=torch.int32),
            "ntokens_seen": torch.tensor(4096 * step, dtype=torch.int64),
        },
        "dataloader": {"dp_rank_0": b"a pickle of its own", "world_size": 4},
    }
