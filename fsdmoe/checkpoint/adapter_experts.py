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
so that A is ``[E*Q, 2I]``. Nothing is computed: products of the factors are the same numbers. gpt-oss has its
weights transposed, and gates and ups in turns.

What servers do with it (``tests/support/server_adapters.py`` has their rules):

- vLLM wants all three projections of an expert or none: what has no adapter gets factors of zeros.
- Modules have their names in the folder of the model (Mixtral: ``block_sparse_moe.gate``). vLLM passes over
  others without a word.
- SGLang knows experts by ``gate_proj``, ``up_proj`` and ``down_proj`` in ``target_modules``, also where the
  tensors are called ``w1``, ``w3`` and ``w2``. It wants one rank, and counts every update ``lora_alpha / r``:
  smaller ranks are filled up with zeros, and what counts otherwise (``alpha_pattern``) is multiplied into B.

Sizes: E experts, Q rank, H hidden, I the width of an expert.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdmoe.checkpoint.adapter_names import EMBEDDING_FACTORS, FACTORS, SHELL
from fsdmoe.checkpoint.adapter_updates import Factors, find_factors, rank_and_alpha, scaling_of
from fsdmoe.checkpoint.disk_names import Convention, disk_names
from fsdmoe.checkpoint.errors import CheckpointError, listed
from fsdmoe.checkpoint.format import Shape
from fsdmoe.checkpoint.hf_names import Names
from fsdmoe.checkpoint.saved_box import Boxes, SavedBox
from fsdmoe.checkpoint.tree import Tree

_STACKED = re.compile(
    rf"{re.escape(SHELL)}(?P<experts>.+\.experts)(\.base_layer)*\.({'|'.join(FACTORS)})\.weight"
)
_OTHER = re.compile(
    rf"{re.escape(SHELL)}(?P<module>.+)\.(?P<factor>{'|'.join((*FACTORS, *EMBEDDING_FACTORS))})(\.weight)?"
)
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_WIDTHS = ("moe_intermediate_size", "intermediate_size")
_WORDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_UNREAD = ("use_dora", "modules_to_save", "lora_bias")
_IN_TURNS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
"""Of gpt-oss: the outputs of each projection."""


@dataclass(frozen=True)
class _Projection:
    """One projection of one expert."""

    module: str
    expert: int
    rows: slice
    """Of all outputs of the fused weight."""


@dataclass(frozen=True)
class _ServedPair:
    """The factors of one linear layer, as servers name them."""

    names: tuple[str, str]
    made: tuple[SavedBox, SavedBox]
    """What the makers give."""
    scaling: float
    first: Callable[[], Tensor]
    second: Callable[[], Tensor]

    @property
    def rank(self) -> int:
        return self.made[0].shape[0]

    def boxes(self, rank: int, factor: float) -> Boxes:
        """With zeros up to ``rank``, and B times ``factor``."""
        (_, inputs), (outputs, _) = self.made[0].shape, self.made[1].shape
        fill = rank - self.rank
        return {
            SavedBox.whole(self.names[0], (rank, inputs), self.made[0].dtype): lambda: F.pad(
                self.first(), (0, 0, 0, fill)
            ).contiguous(),
            SavedBox.whole(self.names[1], (outputs, rank), self.made[1].dtype): lambda: F.pad(
                self.second().mul(factor), (0, fill)
            ).contiguous(),
        }


def for_servers(found: Boxes, adapter: Tree, config: Tree) -> tuple[Boxes, Tree]:
    """An adapter's tensors with the names that servers look for and the factors of all experts one by one,
    and its configuration.

    Args:
        found: The tensors as peft has them.
        adapter: The adapter's configuration.
        config: The model's.

    Raises:
        CheckpointError: Servers do not read such an adapter, the model's experts are fused in its folder, or
            shapes do not tell what is whose.
    """
    _refuse_unread(adapter)
    names = disk_names(config)
    stacked = {box: match["experts"] for box in found if (match := _STACKED.fullmatch(box.name))}
    pairs = _others({box: make for box, make in found.items() if box not in stacked}, adapter, names)
    pairs += _of_experts(found, stacked, adapter, config, names) if stacked else []
    rank = max([adapter["r"], *(pair.rank for pair in pairs)])
    scaling = scaling_of(adapter, adapter["r"], adapter["lora_alpha"])
    boxes: Boxes = {}
    for pair in pairs:
        boxes |= pair.boxes(rank, pair.scaling / scaling)
    modules = {pair.names[0].removesuffix(".weight").split(".")[-2] for pair in pairs}
    return boxes, adapter | {
        "target_modules": sorted({_WORDS.get(name, name) for name in modules}),
        "target_parameters": None,
        "r": rank,
        "lora_alpha": scaling * rank,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _refuse_unread(adapter: Tree) -> None:
    """SGLang loads an adapter with these, and computes something else."""
    stated = {key: adapter[key] for key in _UNREAD if adapter.get(key)}
    if adapter.get("bias", "none") != "none":
        stated["bias"] = adapter["bias"]
    if stated:
        shown = ", ".join(f"{key} = {value}" for key, value in stated.items())
        raise CheckpointError(
            f"layout per_expert: expected low-rank factors alone, which is what servers read, got {shown}; "
            "merge the adapter into the model (merge-adapter) and serve that"
        )


def _others(found: Boxes, adapter: Tree, names: Convention) -> list[_ServedPair]:
    """Of all modules but experts, with the names that these have in the model's folder."""
    by_name = {box.name: box for box in found}
    pairs = []
    for name, box in by_name.items():
        match = _OTHER.fullmatch(name)
        if match is None or match["factor"] not in (FACTORS[0], EMBEDDING_FACTORS[0]):
            continue
        other = name.replace(".lora_A", ".lora_B").replace(".lora_embedding_A", ".lora_embedding_B")
        module, second = match["module"], by_name[other]
        weight = disk = f"{module}.weight"
        if match["factor"] == FACTORS[0] and weight not in (names.tied or {}):
            pieces = names.to_disk(weight, (second.shape[0], box.shape[1]))
            disk = pieces[0].disk if len(pieces) == 1 else disk
        rank, alpha = rank_and_alpha(adapter, module, weight, weight, num_experts=1)
        called = tuple(each.replace(module, disk.removesuffix(".weight")) for each in (name, other))
        scaling = scaling_of(adapter, rank, alpha)
        pairs.append(_ServedPair((called[0], called[1]), (box, second), scaling, found[box], found[second]))
    return pairs


def _of_experts(
    found: Boxes, stacked: dict[SavedBox, str], adapter: Tree, config: Tree, names: Convention
) -> list[_ServedPair]:
    num_experts, width = (
        next((config[key] for key in keys if config.get(key)), 0) for keys in (_NUM_EXPERTS, _WIDTHS)
    )
    hidden, is_gpt_oss = config.get("hidden_size") or 0, config["model_type"] == "gpt_oss"
    shapes: dict[str, Shape] = {}
    for module in dict.fromkeys(stacked.values()):
        for weight, outputs, inputs in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            ends = (inputs, outputs) if is_gpt_oss else (outputs, inputs)
            shapes[f"{module}.{weight}"] = (num_experts, *ends)
    read = functools.lru_cache(maxsize=2)(lambda box: found[box]())  # neighbours in the file use the same
    factors, _, problems = find_factors(
        {box: functools.partial(read, box) for box in stacked}, adapter, shapes, {}
    )
    if problems:
        raise CheckpointError(
            "layout per_expert: shapes do not tell whose factors these are; leave the layout at peft:"
            + listed(problems, 10)
        )
    pairs = []
    for weight, shape in shapes.items():
        inputs, outputs = shape[1:] if is_gpt_oss else (shape[2], shape[1])
        own = factors.get(weight)
        like = next(iter(factors.values())) if own is None else own
        rank = like.first.shape[0] // num_experts
        for part in _parts(weight, shape, names, config):
            a, b = (f"{SHELL}{part.module}.{factor}.weight" for factor in FACTORS)
            first = SavedBox.whole(a, (rank, inputs), like.first.dtype)
            second = SavedBox.whole(b, (len(range(outputs)[part.rows]), rank), like.first.dtype)
            makes = [functools.partial(_zeros, each) for each in (first, second)]
            if own is not None:
                makes = [functools.partial(_factor, own, part, is_gpt_oss, i) for i in (0, 1)]
            pairs.append(_ServedPair((a, b), (first, second), like.scaling, *makes))
    return pairs


def _parts(weight: str, shape: Shape, names: Convention, config: Tree) -> Iterator[_Projection]:
    """Each expert's projections of a fused weight."""
    module, _, last = weight.rpartition(".")
    if config["model_type"] == "gpt_oss":
        for expert in range(shape[0]):
            for word, rows in _IN_TURNS[last].items():
                yield _Projection(f"{module}.{expert}.{word}", expert, rows)
        return
    pieces = [] if isinstance(names, Names) and names.fused_experts else names.to_disk(weight, shape)
    if not all(piece.drops_first for piece in pieces) or not pieces:
        raise CheckpointError(
            f"layout per_expert: expected a model whose experts have names of their own in a folder, got "
            f"{config['model_type']}, whose experts are fused there; leave the layout at peft"
        )
    for piece in pieces:
        (expert, low, _), (_, num_rows, _) = piece.low, piece.sizes
        yield _Projection(piece.disk.removesuffix(".weight"), expert, slice(low, low + num_rows))


def _zeros(box: SavedBox) -> Tensor:
    return torch.zeros(box.shape, dtype=box.dtype)


def _factor(stacked: Factors, part: _Projection, is_swapped: bool, which: int) -> Tensor:
    """A or B of one projection."""
    b, a = stacked.left(part.expert), stacked.right(part.expert)
    if is_swapped:
        a, b = b.t(), a.t()
    return b[part.rows] if which else a
