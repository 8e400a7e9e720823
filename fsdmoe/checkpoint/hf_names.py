"""Parameter names in memory and in a Hugging Face folder, of the families that fsdmoe has decoders of.

In memory (ours, and transformers' since version 5) the experts of a layer are two fused tensors; on disk
every expert has three of its own. Each name on disk is thus a box of a tensor in memory, and the other way
round::

    mlp.experts.gate_up_proj [E, 2I, H]  =  experts.N.gate_proj.weight [I, H] at (N, 0, 0)
                                         +  experts.N.up_proj.weight   [I, H] at (N, I, 0)
    mlp.experts.down_proj    [E, H, I]   =  experts.N.down_proj.weight [H, I] at (N, 0, 0)

Mixtral says ``block_sparse_moe`` for ``mlp`` and ``w1, w3, w2`` for gate, up and down. DeepSeek-V3 keeps its
multi-token prediction modules as layers behind the last one, with copies of the embedding and of the head.
gpt-oss has fused tensors on disk as in memory; to the native decoder in another order
(:mod:`fsdmoe.checkpoint.gpt_oss`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fsdmoe.checkpoint.gpt_oss import Form, form_of, swapped_shape

_EXPERT = re.compile(
    r"(?P<layer>.+)\.experts\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_FUSED = re.compile(r"(?P<layer>.+)\.experts\.(?P<part>gate_up_proj|down_proj)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_MTP = re.compile(r"model\.mtp_layers\.(\d+)\.(.+)")
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_MTP_ON_DISK = {
    "join.enorm": "enorm",
    "join.hnorm": "hnorm",
    "join.eh_proj": "eh_proj",
    "norm": "shared_head.norm",
}
_MTP_IN_MEMORY = {disk: memory for memory, disk in _MTP_ON_DISK.items()}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True)
class Piece:
    """One tensor on disk as a box of one in memory."""

    disk: str
    memory: str
    low: tuple[int, ...]
    sizes: tuple[int, ...]
    """In memory; a leading 1 where the tensor on disk is one expert's."""
    form: Form = "plain"
    """What becomes of its values on the way; such a piece is a whole tensor."""
    drops_first: bool = False
    """The tensor on disk is one expert's: the leading 1 is not there."""

    @property
    def disk_shape(self) -> tuple[int, ...]:
        return self.sizes[1:] if self.drops_first else swapped_shape(self.sizes, self.form)


@dataclass(frozen=True)
class Names:
    """The conventions of one model family."""

    mixtral: bool = False
    num_layers: int | None = None
    """Decoder layers; layers on disk beyond them are multi-token prediction modules."""
    fused_experts: bool = False
    """Experts are on disk as in memory; those of gpt-oss are fused, and transposed."""
    native: bool = False
    """gpt-oss: "in memory" is the native decoder's, not that of transformers."""
    tied: dict[str, str] | None = None
    """Not said by names: the configuration says it."""

    @classmethod
    def of(cls, hf_config: Mapping[str, object], *, native: bool = False) -> Names:
        """``native``: for our own decoder, where it makes a difference."""
        layers = hf_config.get("num_hidden_layers")
        kind = hf_config.get("model_type")
        is_gpt_oss = kind == "gpt_oss"
        layers = layers if isinstance(layers, int) else None
        return cls(kind == "mixtral", layers, is_gpt_oss, native and is_gpt_oss)

    def is_in_float32(self, name: str) -> bool:
        """Whether transformers keeps it in float32, whatever the dtype of the model."""
        return name.endswith(".e_score_correction_bias")

    def from_disk(self, name: str, shape: tuple[int, ...]) -> Piece | None:
        """Where a tensor on disk belongs; None for what is not kept (copies, rotary tables)."""
        memory = self._renamed(name)
        if memory is None:
            return None
        if self.native:
            form = form_of(memory)
            return Piece(name, memory, (0,) * len(shape), swapped_shape(shape, form), form)
        found = _EXPERT.fullmatch(memory)
        if found is None or len(shape) != 2 or self.fused_experts:
            return Piece(name, memory, (0,) * len(shape), shape)
        part, expert = _PARTS[found["part"]], int(found["expert"])
        fused = f"{found['layer']}.experts.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        low = (expert, shape[0] if part == "up" else 0, 0)
        return Piece(name, fused, low, (1, *shape), drops_first=True)

    def to_disk(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        """The tensors on disk that a tensor in memory becomes."""
        if self.native:
            return [Piece(self._on_disk(name), name, (0,) * len(shape), shape, form_of(name))]
        found = _FUSED.fullmatch(name)
        if found is None or len(shape) != 3 or self.fused_experts:
            return [Piece(self._on_disk(name), name, (0,) * len(shape), shape)]
        parts = ["down"] if found["part"] == "down_proj" else ["gate", "up"]
        rows = shape[1] // len(parts)
        pieces = []
        for expert in range(shape[0]):
            for index, part in enumerate(parts):
                word = _MIXTRAL[part] if self.mixtral else f"{part}_proj"
                disk = self._on_disk(f"{found['layer']}.experts.{expert}.{word}.weight")
                low, sizes = (expert, index * rows, 0), (1, rows, shape[2])
                pieces.append(Piece(disk, name, low, sizes, drops_first=True))
        return pieces

    def copies(self, name: str, num_mtp_layers: int) -> list[str]:
        """Further names under which the file format of DeepSeek-V3 repeats the embedding and the head."""
        copied = {"model.embed_tokens.weight": _COPIES[0], "lm_head.weight": _COPIES[1]}.get(name)
        if copied is None or self.num_layers is None:
            return []
        return [f"model.layers.{self.num_layers + depth}.{copied}" for depth in range(num_mtp_layers)]

    def _renamed(self, disk: str) -> str | None:
        if disk.endswith("rotary_emb.inv_freq"):
            return None
        name = disk.replace(".block_sparse_moe.", ".mlp.") if self.mixtral else disk
        name = name.replace(".mlp.router.", ".mlp.gate.") if self.native else name
        found = _LAYER.fullmatch(name)
        if found is None or self.num_layers is None or int(found[1]) < self.num_layers:
            return name
        if found[2] in _COPIES:
            return None
        module, _, leaf = found[2].rpartition(".")
        return (
            f"model.mtp_layers.{int(found[1]) - self.num_layers}.{_MTP_IN_MEMORY.get(module, module)}.{leaf}"
        )

    def _on_disk(self, memory: str) -> str:
        name = (
            re.sub(r"\.mlp\.(gate\.|experts\.)", r".block_sparse_moe.\1", memory) if self.mixtral else memory
        )
        name = name.replace(".mlp.gate.", ".mlp.router.") if self.native else name
        found = _MTP.fullmatch(name)
        if found is None or self.num_layers is None:
            return name
        module, _, leaf = found[2].rpartition(".")
        return f"model.layers.{self.num_layers + int(found[1])}.{_MTP_ON_DISK.get(module, module)}.{leaf}"
