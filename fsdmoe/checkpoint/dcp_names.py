"""Names of parameters in a stock checkpoint, and the regions of our tensors that they are.

A name goes through the user's own rules, then it is one of Hugging Face's (as it stands, experts of their
own fused as in :mod:`fsdmoe.checkpoint.hf_names`), or one of torchtitan's. torchtitan's have changed; all of
these are known (E experts, F their width, D the model's)::

    tok_embeddings.weight                            model.embed_tokens.weight
    output.weight, lm_head.weight                    lm_head.weight
    layers.N.attention[.qkv_linear].wq.weight        model.layers.N.self_attn.q_proj.weight
    layers.N.attention.qkv_linear.wqkv.weight        q_proj, k_proj, v_proj: heads of each group of queries
    layers.N.attention.wkv_a.weight                  …self_attn.kv_a_proj_with_mqa.weight (DeepSeek-V3)
    layers.N.moe.experts.w1 [E, F, D]                …mlp.experts.gate_up_proj [E, 2F, D] from row 0
    layers.N.moe.routed_experts.inner_experts.w3_EFD …mlp.experts.gate_up_proj from row F
    layers.N.moe.routed_experts.w13.weight [E,2,F,D] …mlp.experts.gate_up_proj
    layers.N.moe[.router].expert_bias[_E]            …mlp.gate.e_score_correction_bias

Llama 4 says ``feed_forward`` for ``mlp`` and has its experts transposed. Rotary pairs lie in torchtitan's
Qwen3, DeepSeek-V3 and Llama 4 as Hugging Face has them; those of Llama 3 do not, and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import Shape
from fsdmoe.checkpoint.hf_names import Names
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.core.boxes import overlap
from fsdmoe.core.errors import ConfigError

Family = Literal["qwen3", "deepseek_v3", "llama4"]

Rules = Sequence[tuple[re.Pattern[str], str]]

_HF = re.compile(
    r"model\.embed_tokens\.weight|model\.norm\.(weight|bias)|lm_head\.(weight|bias)"
    r"|model\.(layers|mtp_layers)\.\d+\.(self_attn|mlp|feed_forward|block_sparse_moe|input_layernorm"
    r"|(pre|post)_(attention|feedforward)_layernorm|enorm|hnorm|eh_proj|shared_head|join|norm|embed_tokens)\..+"
)
_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_RENAMED = {
    r"attention\.(?:qkv_linear\.)?w([qkvo])\.(weight|bias)": r"self_attn.\1_proj.\2",
    r"attention\.wq_([ab])\.weight": r"self_attn.q_\1_proj.weight",
    r"attention\.wkv_a\.weight": r"self_attn.kv_a_proj_with_mqa.weight",
    r"attention\.wkv_b\.weight": r"self_attn.kv_b_proj.weight",
    r"attention\.kv_norm\.weight": r"self_attn.kv_a_layernorm.weight",
    r"attention\.([qk])_norm\.weight": r"self_attn.\1_norm.weight",
    r"attention_norm\.weight": r"input_layernorm.weight",
    r"ffn_norm\.weight": r"post_attention_layernorm.weight",
    r"feed_forward\.w(1|2|3)\.weight": r"mlp.w\1",
    r"moe\.shared_experts\.w(1|2|3)\.weight": r"mlp.shared_experts.w\1",
    r"moe\.router\.gate\.(weight|bias)": r"mlp.gate.\1",
    r"moe\.(?:router\.)?expert_bias(?:_E)?": r"mlp.gate.e_score_correction_bias",
}
_PROJECTIONS = {"w1": "gate_proj.weight", "w2": "down_proj.weight", "w3": "up_proj.weight"}
_STACKED = re.compile(r"(feed_forward|moe\.shared_experts)\.w13\.weight")
_QKV = re.compile(r"attention\.qkv_linear\.wqkv\.(weight|bias)")
_EXPERTS = re.compile(
    r"moe\.(?:experts|routed_experts|routed_experts\.inner_experts)\.(w1|w2|w3|w13)(?:_E\w+)?(?:\.weight)?"
)
_DROPPED = re.compile(
    r"(.*\.)?(freqs_cis|rope\.cache|rotary_emb\.inv_freq|(num_)?tokens_per_expert(_E)?|local_tokens_per_expert)"
)


@dataclass(frozen=True)
class Region:
    """A region of a tensor of the stock checkpoint, and where it lies in one of ours."""

    low: Shape
    sizes: Shape
    memory: str
    at: Shape
    """Where its first element lies in ours."""
    dropped: tuple[int, ...] = ()
    """Dims of size 1 that ours does not have."""
    transposed: bool = False
    """The last two dims are the other way round in ours."""

    @property
    def end(self) -> Shape:
        """Where the region ends in ours."""
        return tuple(a + n for a, n in zip(self.at, self.box_of(self.sizes), strict=True))

    def box_of(self, sizes: Shape) -> Shape:
        """Sizes of a part of the region, in ours."""
        kept = [size for dim, size in enumerate(sizes) if dim not in self.dropped]
        if self.transposed:
            kept[-2:] = reversed(kept[-2:])
        return (1,) * (len(self.at) - len(kept)) + tuple(kept)

    def place_of(self, low: Shape) -> Shape:
        """Where a point of the region lies in ours."""
        kept = [
            o - first
            for dim, (o, first) in enumerate(zip(low, self.low, strict=True))
            if dim not in self.dropped
        ]
        if self.transposed:
            kept[-2:] = reversed(kept[-2:])
        inside = (0,) * (len(self.at) - len(kept)) + tuple(kept)
        return tuple(a + b for a, b in zip(self.at, inside, strict=True))

    def common(self, offsets: Shape, sizes: Shape) -> tuple[Shape, Shape] | None:
        """The part of the region inside a chunk: where it begins, and its sizes."""
        return overlap(offsets, sizes, self.low, self.sizes)


@dataclass(frozen=True)
class NameRules:
    """How names are translated into ours."""

    rules: Rules = ()
    """The user's, tried first: the whole name must match; an empty replacement leaves the tensor out."""
    family: Family | None = None
    """Of torchtitan's names; None where there are none."""
    config: Tree | None = None
    """config.json of the model: the numbers of heads, and how its experts are called."""
    width: int | None = None
    """Of the model (D), which tells how torchtitan's experts lie."""

    def regions(self, name: str, shape: Shape) -> list[Region] | None:
        """The regions of ours that a tensor is; none where it is not kept, None where the name is unknown."""
        target = apply_rules(self.rules, name)
        if target is not None:
            return self._hugging_face(target, shape) if target else []
        if _DROPPED.fullmatch(name):
            return []
        # torchtitan's first: a head has the same name in both, and other dims
        found = self._torchtitan(name, shape) if self.family is not None else None
        return self._hugging_face(name, shape) if found is None and _HF.fullmatch(name) else found

    def _hugging_face(self, name: str, shape: Shape) -> list[Region]:
        piece = Names.of(self.config or {}).from_disk(name, shape)
        if piece is None:
            return []
        return [Region((0,) * len(shape), shape, piece.memory, piece.low)]

    def _torchtitan(self, name: str, shape: Shape) -> list[Region] | None:
        if name in _TOP:
            return [_whole(_TOP[name], shape, 2 if name != "norm.weight" else 1)]
        found = _LAYER.fullmatch(name)
        if found is None:
            return None
        layer, rest = f"model.layers.{found[1]}.", found[2]
        if _EXPERTS.fullmatch(rest):
            return self._experts(layer, rest, shape)
        if stacked := _STACKED.fullmatch(rest):
            module = self._module(stacked[1].replace("moe.", "mlp.").replace("feed_forward", "mlp"))
            return _unstacked([f"{layer}{module}.{_PROJECTIONS[w]}" for w in ("w1", "w3")], shape)
        if qkv := _QKV.fullmatch(rest):
            return self._qkv(f"{layer}self_attn.", qkv[1], shape)
        for pattern, replacement in _RENAMED.items():
            if renamed := re.fullmatch(pattern, rest):
                target = self._layer_name(renamed.expand(replacement))
                dims = 2 if target.endswith(".weight") and "norm" not in target else 1
                return [_whole(layer + target, shape, dims)]
        return None

    def _layer_name(self, name: str) -> str:
        module, _, leaf = name.rpartition(".")
        if self.family == "deepseek_v3" and name == "self_attn.q_norm.weight":
            return "self_attn.q_a_layernorm.weight"
        if self.family == "llama4" and module == "mlp.gate":
            return f"feed_forward.router.{leaf}"
        return f"{self._module(module)}.{_PROJECTIONS.get(leaf, leaf)}"

    def _module(self, name: str) -> str:
        if self.family != "llama4":
            return name
        renamed = name.replace("shared_experts", "shared_expert")
        return re.sub(r"^mlp(?=\.|$)", "feed_forward", renamed)

    def _experts(self, layer: str, rest: str, shape: Shape) -> list[Region]:
        found = _EXPERTS.fullmatch(rest)
        assert found is not None
        transposed = self.family == "llama4"
        part, fused = found[1], f"{layer}{self._module('mlp')}.experts."
        wanted = {"w13": "[E, 2, F, D]", "w2": "[E, D, F]"}.get(part, "[E, F, D]")
        is_known = len(shape) == wanted.count(",") + 1 and (part != "w13" or shape[1] == 2)
        if not is_known or self.width not in (None, shape[-2 if part == "w2" else -1]):
            raise CheckpointError(
                f"{layer}{rest}: expected the weights of all experts, {wanted} with D = {self.width}, got "
                f"{shape}; torchtitan's first layouts had them transposed: convert those with torchtitan"
            )
        low = (0,) * len(shape)
        if part == "w2":
            return [Region(low, shape, f"{fused}down_proj", (0, 0, 0), transposed=transposed)]
        behind = (0, 0, shape[-2]) if transposed else (0, shape[-2], 0)
        if part != "w13":
            at = behind if part == "w3" else (0, 0, 0)
            return [Region(low, shape, f"{fused}gate_up_proj", at, transposed=transposed)]
        sizes = (shape[0], 1, *shape[2:])
        return [
            Region((0, half, 0, 0), sizes, f"{fused}gate_up_proj", at, (1,), transposed)
            for half, at in enumerate(((0, 0, 0), behind))
        ]

    def _qkv(self, module: str, leaf: str, shape: Shape) -> list[Region]:
        """Each group of queries has its queries, its key and its value behind each other."""
        config = self.config or {}
        heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
        if not isinstance(heads, int) or not isinstance(groups, int):
            raise ConfigError(
                f"{module}wqkv: queries, keys and values are one tensor, and config.json says how they are "
                "split: pass the folder of the Hugging Face model with --config-from"
            )
        lead = len(shape) - (2 if leaf == "weight" else 1)
        rows, queries = shape[lead], heads // groups
        if rows % (groups * (queries + 2)):
            raise CheckpointError(
                f"{module}wqkv: {shape} is not {heads} heads in {groups} groups, as --config-from says"
            )
        head = rows // (groups * (queries + 2))
        regions, tail = [], shape[lead + 1 :]
        for group in range(groups):
            start = group * (queries + 2) * head
            for word, first, count in (("q", 0, queries), ("k", queries, 1), ("v", queries + 1, 1)):
                low = (*(0,) * lead, start + first * head, *(0,) * len(tail))
                sizes = (*(1,) * lead, count * head, *tail)
                at = (group * count * head, *(0,) * len(tail))
                regions.append(Region(low, sizes, f"{module}{word}_proj.{leaf}", at, tuple(range(lead))))
        return regions


def _whole(memory: str, shape: Shape, dims: int) -> Region:
    """All of a tensor; torchtitan's newest linear layers have a leading dim of size 1."""
    lead = len(shape) == dims + 1 and shape[0] == 1
    return Region((0,) * len(shape), shape, memory, (0,) * (len(shape) - lead), (0,) if lead else ())


def _unstacked(names: list[str], shape: Shape) -> list[Region]:
    sizes, rest = (1, *shape[1:]), (0,) * (len(shape) - 1)
    if shape[0] != len(names):
        raise CheckpointError(f"{names[0]}: expected {len(names)} tensors in one, got {shape}")
    return [Region((index, *rest), sizes, name, rest, (0,)) for index, name in enumerate(names)]


def apply_rules(rules: Rules, name: str) -> str | None:
    """What the first rule that matches makes of a name; None where none does."""
    for pattern, replacement in rules:
        found = pattern.fullmatch(name)
        if found is not None:
            try:
                return found.expand(replacement)
            except (re.error, IndexError) as error:
                raise ConfigError(f"--map {pattern.pattern}={replacement}: {error}") from error
    return None


def parse_rule(text: str) -> tuple[re.Pattern[str], str]:
    """``regex=replacement`` of the command line; the last ``=`` divides."""
    pattern, equals, replacement = text.rpartition("=")
    if not equals or not pattern:
        raise ConfigError(f"--map: expected 'regex=replacement', got {text!r}")
    try:
        return re.compile(pattern), replacement
    except re.error as error:
        raise ConfigError(f"--map {text!r}: {error}") from error


def family_of(names: Sequence[str]) -> Family | None:
    """Whose names torchtitan's are; None where they are not torchtitan's."""
    if not any(name.startswith("tok_embeddings.") or _LAYER.fullmatch(name) for name in names):
        return None
    if any(name.endswith(".attention.wkv_a.weight") for name in names):
        return "deepseek_v3"
    if any(name.endswith(".attention.k_norm.weight") for name in names):
        return "qwen3"
    raise ConfigError(
        "--family: these are torchtitan's names, and they do not tell of which model: name one of "
        f"{', '.join(get_args(Family))} (Llama 3 orders its rotary pairs in another way: convert it with "
        "torchtitan)"
    )
