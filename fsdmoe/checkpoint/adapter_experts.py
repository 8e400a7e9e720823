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

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsdmoe.checkpoint.adapter_names import FACTORS, SHELL
from fsdmoe.checkpoint.disk_names import disk_names
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import StoredTensor
from fsdmoe.checkpoint.hf_names import Names, Piece
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.saved_box import Boxes, SavedBox
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


def is_stacked(name: str) -> bool:
    """Whether a tensor of a checkpoint (``model/...``) is a factor of fused experts."""
    return _STACKED.fullmatch(name.replace(f".{FACTORS[1]}.", f".{FACTORS[0]}.")) is not None


def unstacked(reader: RegionReader, adapter: str) -> Boxes:
    """All factors of experts, one by one, by their names in peft's file.

    Raises:
        CheckpointError: The model's experts are fused for servers too, or shapes do not tell what is whose.
    """
    tensors = reader.index.tensors
    config: Tree = reader.index.about.get("hf_config") or {}
    num_experts = next((config[k] for k in _NUM_EXPERTS if config.get(k)), None)
    layers: dict[str, list[tuple[str, str]]] = {}
    for name in tensors:
        found = _STACKED.fullmatch(name)
        if found is not None and found["adapter"] == adapter:
            second = name.replace(f".{FACTORS[0]}.", f".{FACTORS[1]}.")
            layers.setdefault(found["experts"], []).append((name, second))
    if not layers:
        return {}
    names = disk_names(config)
    if not isinstance(num_experts, int) or (isinstance(names, Names) and names.fused_experts):
        raise _fused_on_disk(config)
    read = functools.lru_cache(maxsize=1)(reader.read_tensor)  # neighbours in the file are parts of the same
    boxes: Boxes = {}
    for experts, pairs in layers.items():
        for stacked in _told_apart(experts, pairs, tensors, config):
            ends = (tensors[stacked.first].shape[1], tensors[stacked.second].shape[0])
            into, out = reversed(ends) if stacked.is_exchanged else ends
            pieces = names.to_disk(stacked.weight, (num_experts, out, into))
            if not all(piece.drops_first for piece in pieces):
                raise _fused_on_disk(config)
            boxes |= _factors_of(stacked, tensors, pieces, num_experts, read)
    return boxes


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
    names = ("moe_intermediate_size", "intermediate_size")
    widths = [config[name] for name in names if isinstance(config.get(name), int)][:1]
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


def _factors_of(
    stacked: _Stacked,
    tensors: dict[str, StoredTensor],
    pieces: list[Piece],
    num_experts: int,
    read: Callable[[str], torch.Tensor],
) -> Boxes:
    """Both factors of every expert's part of one fused weight."""
    rank = tensors[stacked.first].shape[0] // num_experts
    sources = (stacked.first, stacked.second)
    boxes: Boxes = {}
    for factor, source in zip(FACTORS, reversed(sources) if stacked.is_exchanged else sources, strict=True):
        for piece in pieces:
            (expert, low, _), (_, num_rows, into) = piece.low, piece.sizes
            is_a = factor == FACTORS[0]
            shape = (rank, into) if is_a else (num_rows, rank)
            name = f"{SHELL}{piece.disk.removesuffix('.weight')}.{factor}.weight"
            boxes[SavedBox.whole(name, shape, tensors[source].dtype)] = functools.partial(
                _part,
                functools.partial(read, source),
                expert=expert,
                num_experts=num_experts,
                in_rows=source == stacked.first,
                is_transposed=stacked.is_exchanged,
                rows=slice(None) if is_a else slice(low, low + num_rows),
            )
    return boxes


def _part(
    read: Callable[[], torch.Tensor],
    *,
    expert: int,
    num_experts: int,
    in_rows: bool,
    is_transposed: bool,
    rows: slice,
) -> torch.Tensor:
    """One expert's part of a stacked factor. ``in_rows``: experts are in its rows; else they take turns along
    its columns. ``rows``: of the part, once it lies as it is to be written."""
    stacked = read()
    own = stacked.unflatten(0, (num_experts, -1))[expert] if in_rows else stacked[:, expert::num_experts]
    return (own.t() if is_transposed else own)[rows].contiguous()
