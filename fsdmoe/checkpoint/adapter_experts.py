"""The adapters of fused experts, taken apart: a pair of factors for each expert and projection, as inference
servers read them.

peft stacks the factors of all experts of a fused weight; which of two wrappers is whose follows from shapes::

    mlp.experts.base_layer.lora_A [E*Q, H]    lora_B [2I, Q*E]    of gate_up_proj [E, 2I, H]
    mlp.experts.lora_A            [E*Q, I]    lora_B [H, Q*E]     of down_proj    [E, H, I]

    mlp.experts.N.gate_proj.lora_A [Q, H]     lora_B [I, Q]       A is that of up_proj too
    mlp.experts.N.up_proj.lora_A   [Q, H]     lora_B [I, Q]
    mlp.experts.N.down_proj.lora_A [Q, I]     lora_B [H, Q]

Experts are the slow index of A's rows and the fast index of B's columns. peft 0.18 has in and out exchanged,
so that A is ``[E*Q, 2I]``. Nothing is computed: products of the factors are the same numbers.

Sizes: E experts, Q rank, H hidden, I the width of an expert.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from fsdmoe.checkpoint.adapter_names import FACTORS
from fsdmoe.checkpoint.disk_names import disk_names
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import Index, StoredTensor
from fsdmoe.checkpoint.hf_names import Names, Piece
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.tree import Tree

_STACKED = re.compile(
    r"model/(?P<experts>.+\.experts)(?P<around>(\.base_layer)*)\.lora_A\.(?P<adapter>\w+)\.weight"
)
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class _Stacked:
    """The two factors of one fused weight, by their names in the checkpoint."""

    weight: str
    first: str
    """The factor with the experts in its rows."""
    second: str
    is_exchanged: bool
    """To peft 0.18 the input is the output."""


class _LastRead:
    """The factor that was read last: consecutive tensors of a file are parts of the same."""

    def __init__(self) -> None:
        self._name, self._value = "", torch.empty(0)

    def read(self, reader: RegionReader, name: str) -> torch.Tensor:
        if name != self._name:
            self._name, self._value = name, reader.read_tensor(name)
        return self._value


@dataclass(frozen=True)
class ExpertFactor:
    """One factor of one expert's projection, to be written."""

    disk: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: str
    """The stacked factor."""
    in_rows: bool
    """Experts are in its rows; else they take turns along its columns."""
    expert: int
    num_experts: int
    turned: bool
    rows: slice
    """Of the factor, once it lies as it is to be written."""
    cache: _LastRead

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self, reader: RegionReader) -> torch.Tensor:
        stacked = self.cache.read(reader, self.source)
        if self.in_rows:
            own = stacked.unflatten(0, (self.num_experts, -1))[self.expert]
        else:
            own = stacked[:, self.expert :: self.num_experts]
        return (own.t() if self.turned else own)[self.rows].contiguous()


def is_stacked(name: str) -> bool:
    """Whether a tensor of a checkpoint (``model/...``) is a factor of fused experts."""
    return _STACKED.fullmatch(name.replace(f".{FACTORS[1]}.", f".{FACTORS[0]}.")) is not None


def unstacked(index: Index, adapter: str) -> list[ExpertFactor]:
    """All factors of experts, one by one, without peft's name of the model around them.

    Raises:
        CheckpointError: The model's experts are fused for servers too, or shapes do not tell what is whose.
    """
    config: Tree = index.about.get("hf_config") or {}
    num_experts = next((config[k] for k in _NUM_EXPERTS if config.get(k)), None)
    layers: dict[str, list[tuple[str, str]]] = {}
    for name in index.tensors:
        found = _STACKED.fullmatch(name)
        if found is not None and found["adapter"] == adapter:
            second = name.replace(f".{FACTORS[0]}.", f".{FACTORS[1]}.")
            layers.setdefault(found["experts"], []).append((name, second))
    if not layers:
        return []
    names = disk_names(config)
    if not isinstance(num_experts, int) or (isinstance(names, Names) and names.fused_experts):
        raise _fused_on_disk(config)
    made: list[ExpertFactor] = []
    for experts, pairs in layers.items():
        for stacked in _told_apart(experts, pairs, index.tensors, config):
            ends = (index.tensors[stacked.first].shape[1], index.tensors[stacked.second].shape[0])
            into, out = reversed(ends) if stacked.is_exchanged else ends
            pieces = names.to_disk(stacked.weight, (num_experts, out, into))
            if not all(piece.drops_first for piece in pieces):
                raise _fused_on_disk(config)
            made += _factors_of(stacked, index.tensors, pieces, num_experts)
    return made


def _fused_on_disk(config: Tree) -> CheckpointError:
    return CheckpointError(
        f"layout per_expert: expected a model whose experts have names of their own in a folder, got "
        f"{config.get('model_type')}, whose experts are fused there; leave the layout at peft"
    )


def _told_apart(
    experts: str, pairs: list[tuple[str, str]], tensors: dict[str, StoredTensor], config: Tree
) -> list[_Stacked]:
    """Which weight each pair belongs to, and which way round it is."""
    hidden = config.get("hidden_size")
    ends = {pair: (tensors[pair[0]].shape[1], tensors[pair[1]].shape[0]) for pair in pairs}
    widths = _expert_widths(config)
    found = []
    for pair, (first, second) in ends.items():
        kinds = [
            (weight, exchanged)
            for width in widths
            for weight, into, out in (("gate_up_proj", hidden, 2 * width), ("down_proj", width, hidden))
            for exchanged in (False, True)
            if (first, second) == ((out, into) if exchanged else (into, out))
        ]
        found.append((pair, kinds))
    sure = [kinds[0][1] for _, kinds in found if len(kinds) == 1]  # one peft wrote both
    known = []
    for (first_name, second_name), kinds in found:
        kinds = [kind for kind in kinds if len(kinds) == 1 or kind[1] in sure]
        if len(kinds) != 1:
            raise CheckpointError(
                f"layout per_expert: expected factors of gate_up_proj or down_proj at {experts}, got in and "
                f"out widths {ends[first_name, second_name]} with hidden_size {hidden} and expert widths "
                f"{widths}, which do not tell which; leave the layout at peft"
            )
        weight, is_exchanged = kinds[0]
        known.append(_Stacked(f"{experts}.{weight}", first_name, second_name, is_exchanged))
    return known


def _expert_widths(config: Tree) -> list[int]:
    names = ("moe_intermediate_size", "intermediate_size")
    width = next((config[name] for name in names if isinstance(config.get(name), int)), None)
    return [] if width is None else [width]


def _factors_of(
    stacked: _Stacked, tensors: dict[str, StoredTensor], pieces: list[Piece], num_experts: int
) -> list[ExpertFactor]:
    first, second = tensors[stacked.first], tensors[stacked.second]
    rank = first.shape[0] // num_experts
    into = second.shape[0] if stacked.is_exchanged else first.shape[1]
    a: dict[str, Any] = {"source": stacked.first, "in_rows": True, "dtype": first.dtype, "turned": False}
    b: dict[str, Any] = {"source": stacked.second, "in_rows": False, "dtype": second.dtype, "turned": False}
    if stacked.is_exchanged:
        a, b = b | {"turned": True}, a | {"turned": True}
    cache_a, cache_b = _LastRead(), _LastRead()
    made_a, made_b = [], []
    for piece in pieces:
        (expert, low, _), (_, num_rows, _) = piece.low, piece.sizes
        module = piece.disk.removesuffix(".weight")
        own: dict[str, Any] = {"num_experts": num_experts, "expert": expert}
        made_a.append(
            ExpertFactor(
                f"{module}.{FACTORS[0]}.weight", (rank, into), rows=slice(None), cache=cache_a, **a, **own
            )
        )
        rows = slice(low, low + num_rows)
        made_b.append(
            ExpertFactor(
                f"{module}.{FACTORS[1]}.weight", (num_rows, rank), rows=rows, cache=cache_b, **b, **own
            )
        )
    return made_a + made_b
