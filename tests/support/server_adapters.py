"""How vLLM and SGLang read the adapters of experts, as a table and as two small readers.

Written down from their published loading code: ``vllm/lora`` (``lora_model.py``, ``model_manager.py``,
``lora_weights.py``, ``peft_helper.py``; each model's ``get_expert_mapping`` and ``is_3d_moe_weight``) and
``sglang/srt/lora`` (``lora.py``, ``utils.py``, ``mem_pool.py``, ``layers.py``), both of 2026.

A reader takes the two files of an adapter, refuses what the server refuses, and returns what the server adds
to each weight of the model: gate and up one after the other, as its kernels have them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class Served:
    """A family in both servers."""

    block: str
    """The module with the experts, in a layer of vLLM."""
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The names of one expert's projections that vLLM looks for."""
    is_3d: bool = False
    """vLLM reads the stacked factors of peft, and nothing else."""
    is_interleaved: bool = False
    """Gates and ups take turns."""
    linears: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Further projections that both servers have."""


_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
SERVED = {
    "qwen3_moe": Served("mlp"),
    "mixtral": Served("block_sparse_moe", ("w1", "w3", "w2")),
    "deepseek_v3": Served("mlp", linears=_LATENT),
    "glm4_moe": Served("mlp"),
    "gpt_oss": Served("mlp", is_3d=True, is_interleaved=True),
}


class NotServedError(Exception):
    """The server refuses the adapter, or fails at it."""


def vllm_updates(served: Served, tensors: Tensors, config: Config, num_experts: int) -> Tensors:
    """By module, experts as ``experts.gate_up`` and ``experts.down`` of their block."""
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_(A|B)\.weight", name)
        if match is None:
            raise NotServedError(f"{name} is unsupported LoRA weight")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    wanted = {f"experts.{e}.{part}" for e in range(num_experts) for part in served.parts}
    wanted = {"experts", "experts.base_layer"} if served.is_3d else wanted
    for module in pairs:
        inside = module[module.find(".experts") + 1 :] if ".experts" in module else None
        if (inside not in wanted) if inside else (module.rpartition(".")[2] not in (*served.linears, "gate")):
            raise NotServedError(f"expected target modules in {sorted(wanted)}, got {module}")
    found: Tensors = {}
    for layer in {match[0] for module in pairs if (match := re.match(r"model\.layers\.\d+", module))}:
        experts = f"{layer}.{served.block}.experts"
        if served.is_3d and experts in pairs:
            stacked = {"gate_up": pairs[f"{experts}.base_layer"], "down": pairs[experts]}
            for name, pair in stacked.items():
                a_ERN = pair["A"].unflatten(0, (num_experts, -1))
                b_EMR = pair["B"].unflatten(1, (-1, num_experts)).permute(2, 0, 1)
                found[f"{experts}.{name}"] = scaling * (b_EMR @ a_ERN)
        elif any(module.startswith(experts) for module in pairs):
            try:  # all three of all experts, or it fails at an assertion
                parts = [
                    [pairs[f"{experts}.{expert}.{part}"] for expert in range(num_experts)]
                    for part in served.parts
                ]
            except KeyError as error:
                raise NotServedError(f"an expert without {error}") from error
            gate, up, down = (
                torch.stack([pair["B"] for pair in each]) @ torch.stack([pair["A"] for pair in each])
                for each in parts
            )
            found |= {
                f"{experts}.gate_up": scaling * torch.cat((gate, up), 1),
                f"{experts}.down": scaling * down,
            }
    known = rf"model\.layers\.\d+\.(self_attn\.({'|'.join(served.linears)})|{served.block}\.gate)"
    for module, pair in pairs.items():
        if re.fullmatch(known, module):  # others are passed over in silence
            found[module] = scaling * (pair["B"] @ pair["A"])
    return found


_SGLANG_TARGETS = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj", "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
}  # fmt: skip
_SGLANG_KNOWN = {"o_proj", "down_proj", "q_b_proj", "kv_b_proj", *_SGLANG_TARGETS.values()}
_SGLANG_EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def sglang_updates(served: Served, tensors: Tensors, config: Config, num_experts: int) -> Tensors:
    """Of experts alone: ``layers.N.gate_up`` and ``layers.N.down``. SGLang tells layers and experts by number
    and projections by name, whatever the block is called, and counts ``lora_alpha / r``."""
    targets = {_SGLANG_TARGETS.get(name, name) for name in config["target_modules"]}
    if unknown := targets - _SGLANG_KNOWN:
        raise NotServedError(f"get_hidden_dim not implemented for {sorted(unknown)}")
    scaling = config["lora_alpha"] / config["r"]
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, factor = re.sub(r"\.weight$", "", name).rsplit(".lora_", 1)
        if not any(name in module for name in (*config["target_modules"], *_SGLANG_EXPERTS)):
            raise NotServedError(f"Cannot find target module name for {name}")
        match = re.search(r"layers\.(\d+)\..*experts\.(\d+)\.(\w+)$", module)
        if match is not None:
            part = _SGLANG_EXPERTS.get(match[3], match[3])
            pairs.setdefault(f"layers.{match[1]}.{part}.{match[2]}", {})[factor] = tensor
    found: Tensors = {}
    for layer in sorted({key.rsplit(".", 2)[0] for key in pairs}):
        gate, up, down = (
            torch.stack(
                [
                    pairs[f"{layer}.{part}.{expert}"]["B"] @ pairs[f"{layer}.{part}.{expert}"]["A"]
                    for expert in range(num_experts)
                ]
            )
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        # gpt-oss: its layer puts gates and ups in turns again
        joined = (
            torch.stack((gate, up), 2).flatten(1, 2) if served.is_interleaved else torch.cat((gate, up), 1)
        )
        found |= {f"{layer}.gate_up": scaling * joined, f"{layer}.down": scaling * down}
    return found
