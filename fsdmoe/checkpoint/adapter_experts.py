"""The adapters of fused experts, taken apart: a pair of factors for each expert and projection, as inference
servers read them.

peft stacks the factors of all experts of a fused weight; which of two wrappers is whose follows from shapes
(:mod:`fsdmoe.checkpoint.adapter_updates`)::

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

from torch import Tensor

from fsdmoe.checkpoint.adapter_names import FACTORS, SHELL
from fsdmoe.checkpoint.adapter_updates import Factors, find_factors
from fsdmoe.checkpoint.disk_names import disk_names
from fsdmoe.checkpoint.errors import CheckpointError, listed
from fsdmoe.checkpoint.format import Shape
from fsdmoe.checkpoint.hf_names import Names, Piece
from fsdmoe.checkpoint.saved_box import Boxes, SavedBox
from fsdmoe.checkpoint.tree import Tree

_STACKED = re.compile(
    rf"{re.escape(SHELL)}(?P<experts>.+\.experts)(\.base_layer)*\.({'|'.join(FACTORS)})\.weight"
)
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_WIDTHS = ("moe_intermediate_size", "intermediate_size")


def take_experts_apart(found: Boxes, adapter: Tree, config: Tree) -> Boxes:
    """An adapter's tensors, by their names in peft's file, with the factors of all experts one by one.

    Args:
        found: The tensors as peft has them.
        adapter: The adapter's configuration.
        config: The model's.

    Raises:
        CheckpointError: The model's experts are fused for servers too, or shapes do not tell what is whose.
    """
    matches = {box: match for box in found if (match := _STACKED.fullmatch(box.name))}
    if not matches:
        return found
    names = disk_names(config)
    num_experts, width = (
        next((config[key] for key in keys if config.get(key)), None) for keys in (_NUM_EXPERTS, _WIDTHS)
    )
    if not isinstance(num_experts, int) or (isinstance(names, Names) and names.fused_experts):
        raise _fused_on_disk(config)
    hidden, width = config.get("hidden_size") or 0, width or 0
    shapes: dict[str, Shape] = {}
    for module in {match["experts"]: None for match in matches.values()}:
        shapes[f"{module}.gate_up_proj"] = (num_experts, 2 * width, hidden)
        shapes[f"{module}.down_proj"] = (num_experts, hidden, width)
    read = functools.lru_cache(maxsize=2)(lambda box: found[box]())  # neighbours in the file use the same
    stacked: Boxes = {box: functools.partial(read, box) for box in matches}
    factors, _, problems = find_factors(stacked, adapter, shapes, {})
    if problems:
        raise CheckpointError(
            "layout per_expert: shapes do not tell whose factors these are; leave the layout at peft:"
            + listed(problems, 10)
        )
    boxes = {box: make for box, make in found.items() if box not in matches}
    for weight, each in factors.items():
        boxes |= _factors_of(each, names.to_disk(weight, shapes[weight]), config)
    return boxes


def _fused_on_disk(config: Tree) -> CheckpointError:
    return CheckpointError(
        f"layout per_expert: expected a model whose experts have names of their own in a folder, got "
        f"{config.get('model_type')}, whose experts are fused there; leave the layout at peft"
    )


def _factors_of(stacked: Factors, pieces: list[Piece], config: Tree) -> Boxes:
    """Both factors of every expert's part of one fused weight."""
    left = stacked.second
    right = stacked.first
    if stacked.is_transposed:
        left, right = right, left
    rank = stacked.first.shape[0] // stacked.num_experts
    boxes: Boxes = {}
    for piece in pieces:
        if not piece.drops_first:
            raise _fused_on_disk(config)
        (expert, low, _), (_, num_rows, into) = piece.low, piece.sizes
        a, b = (f"{SHELL}{piece.disk.removesuffix('.weight')}.{factor}.weight" for factor in FACTORS)
        boxes[SavedBox.whole(a, (rank, into), right.dtype)] = functools.partial(_right, stacked, expert)
        boxes[SavedBox.whole(b, (num_rows, rank), left.dtype)] = functools.partial(
            _left, stacked, expert, slice(low, low + num_rows)
        )
    return boxes


def _right(stacked: Factors, expert: int) -> Tensor:
    return stacked.right(expert).contiguous()


def _left(stacked: Factors, expert: int, rows: slice) -> Tensor:
    return stacked.left(expert)[rows].contiguous()
