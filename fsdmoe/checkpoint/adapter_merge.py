"""An adapter added to the weights of a Hugging Face folder, tensor by tensor.

All headers are read first, so that what cannot be merged is refused before anything is written. An adapter
names modules as they are in memory, or single experts as they are on disk; what it changes of a tensor of the
folder is a region of one of the two::

    mlp.experts.base_layer.lora_A (of gate_up_proj [E, 2I, H])  ->  rows I to 2I of expert 3
    mlp.experts.3.up_proj.lora_A                                ->  all of it               of experts.3.up_proj.weight

A sum is computed in float32 and rounded once. A quantised base is merged as ordinary numbers, or quantised
again, where that leaves the adapter more than half of what it does.
"""  # noqa: E501

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

import torch

from fsdmoe.checkpoint.adapter_base import other_weight
from fsdmoe.checkpoint.adapter_export import CONFIG, WEIGHTS, adapter_content
from fsdmoe.checkpoint.adapter_names import SHELL, stored_name
from fsdmoe.checkpoint.adapter_updates import Factors, find_factors, refuse_other_kinds
from fsdmoe.checkpoint.agree import from_first, together
from fsdmoe.checkpoint.errors import CheckpointError, listed
from fsdmoe.checkpoint.format import Index, parse_object
from fsdmoe.checkpoint.gpt_oss import in_memory, on_disk
from fsdmoe.checkpoint.hf_export import (
    DEFAULT_SHARD_BYTES,
    KEEP_DTYPE,
    fp8_boxes,
    natural_order,
    write_folder,
)
from fsdmoe.checkpoint.hf_folder import HFFolder, open_hf_folder, read_header
from fsdmoe.checkpoint.hf_import import folder_reader
from fsdmoe.checkpoint.hf_names import Names, Piece
from fsdmoe.checkpoint.quantised import FP8_BLOCK, block_size, dequantise, quantise
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.saved_box import Boxes, Progress, SavedBox, no_progress
from fsdmoe.checkpoint.session import open_newest
from fsdmoe.checkpoint.storage import Storage, StrPath, read_file, split_address
from fsdmoe.checkpoint.tree import Tree

logger = logging.getLogger(__name__)
_MOST_LOST = 0.5
"""Of an update, by its norm."""


@dataclass(frozen=True, kw_only=True)
class MergePolicy:
    """How a merged model is written."""

    any_base: bool = False
    """Merge into the base even if the adapter's configuration names another model, or the checkpoint has
    other weights."""
    dtype: torch.dtype | None = None
    """Of all weights; None keeps each one's own."""
    requantise: bool = False
    """Write a base in FP8 as FP8 again. Weights that the adapter leaves alone keep their codes."""
    replace: bool = False
    """Write also where an earlier export is, in its place once all is written."""
    shard_bytes: int = DEFAULT_SHARD_BYTES
    """Largest size of a file."""


def merge_adapter(
    base: StrPath,
    adapter: StrPath,
    target: StrPath,
    policy: MergePolicy | None = None,
    *,
    name: str = "default",
    progress: Progress = no_progress,
) -> None:
    """Write the model of a Hugging Face folder with an adapter merged into its weights. Collective.

    No rank ever holds the model; ranks write different files. The result is what peft's
    ``merge_and_unload`` computes.

    Args:
        base: The folder that the adapter was trained on. A quantised one needs ``dtype`` or ``requantise``.
        adapter: A folder of peft or ``to_adapter``, or a checkpoint of a run with adapters.
        target: The folder to write. Configuration, tokenizer and generation files are those of ``base``.
        policy: Which base is taken, and what is written.
        name: Of the adapter in a checkpoint.
        progress: Called with the number of bytes that were done since the last call.

    Raises:
        CheckpointError: The base is quantised and would round most of the update away, the adapter is of
            another base, or of a kind that is not merged here.
    """
    policy = policy or MergePolicy()
    dtype, requantise = policy.dtype, policy.requantise
    storage, called = split_address(base)
    if from_first(lambda: storage.size(called, CONFIG) is not None):
        raise CheckpointError(
            f"{base}: expected the folder of a model, got that of an adapter; name the model first, then the "
            "adapter, then the folder to make"
        )
    folder = together(lambda: open_hf_folder(storage, called))
    found, config, checkpoint = _open_adapter(adapter, name)
    if os.path.realpath(adapter) == os.path.realpath(target):
        raise CheckpointError(f"{target}: expected a folder to make, got that of the adapter")
    if os.path.realpath(base) == os.path.realpath(target):
        raise CheckpointError(f"{target}: expected a folder to make, got that of the model; name another")
    _refuse_quantised(os.fspath(base), folder, dtype, requantise=requantise)
    if not policy.any_base:
        together(lambda: _refuse_another_base(os.fspath(adapter), os.fspath(base), config))
        if checkpoint is not None:
            other = together(lambda: other_weight(checkpoint, storage, called, folder))
            _refuse_other_weights(os.fspath(adapter), os.fspath(base), other)
    changes = together(lambda: _plan(os.fspath(adapter), os.fspath(base), folder, found, config))
    changed = {*changes.factors, *changes.replaced}
    reader = folder_reader(storage, called, folder)
    raw = RegionReader(storage, called, Index(folder.tensors, {}, folder.files), threads=1)
    boxes: Boxes = {}
    again: dict[str, _Merged] = {}
    scales = folder.scales() if requantise else {}
    for disk, pieces in sorted(_pieces(folder).items(), key=lambda each: natural_order(each[0])):
        stored = folder.readable[disk]
        is_kept = disk.endswith(KEEP_DTYPE) or not stored.dtype.is_floating_point
        kind = stored.dtype if dtype is None or is_kept else dtype
        own = [piece for piece in pieces if piece.memory in changed]
        read = partial(reader.read_tensor, disk)
        if disk not in scales:
            boxes[SavedBox.whole(disk, stored.shape, kind)] = partial(changes.merged, read, own, kind)
        elif own:
            again[disk] = _Merged(read, partial(changes.merged, read, own, torch.float32))
            boxes |= fp8_boxes(disk, stored.shape, again[disk].merged)
        else:
            for name in (disk, scales[disk]):
                held = folder.tensors[name]
                boxes[SavedBox.whole(name, held.shape, held.dtype)] = partial(raw.read_tensor, name)
    together(lambda: _refuse_lost_updates(again))
    stated = folder.config
    if dtype is not None:
        stated = {key: value for key, value in stated.items() if key != "quantization_config"}
        stated["dtype"] = str(dtype).removeprefix("torch.")
    write_folder(
        target,
        boxes,
        stated,
        os.fspath(base),
        replace=policy.replace,
        shard_bytes=policy.shard_bytes,
        progress=progress,
    )


class _Merged(NamedTuple):
    """A weight before and after."""

    base: Callable[[], torch.Tensor]
    merged: Callable[[], torch.Tensor]


def _refuse_quantised(base: str, folder: HFFolder, dtype: torch.dtype | None, *, requantise: bool) -> None:
    kind = folder.quantisation
    if requantise and (dtype is not None or kind != "FP8"):
        raise CheckpointError(
            f"--requantise: expected a base in FP8 and no --dtype, got {kind or 'one that is not quantised'}"
            f"{' in ' + str(dtype) if dtype is not None else ''}; four bits would round the update away: "
            "write ordinary numbers (--dtype bfloat16)"
        )
    if requantise and block_size(folder.config) != (FP8_BLOCK, FP8_BLOCK):
        raise CheckpointError(
            f"--requantise: expected blocks of 128 x 128, got {block_size(folder.config)}; write ordinary "
            "numbers (--dtype bfloat16)"
        )
    if kind is not None and dtype is None and not requantise:
        raise CheckpointError(
            f"{base}: expected weights that are not quantised, got {kind}, which would round the sum; write "
            "ordinary numbers (--dtype bfloat16)"
            + (", or FP8 again (--requantise), which says what it loses" if kind == "FP8" else "")
        )


def _refuse_lost_updates(changed: Mapping[str, _Merged]) -> None:
    """Compare what FP8 rounds away with the update, in a few weights of each projection, before anything is
    written."""
    kinds: dict[str, list[str]] = {}
    for name in changed:
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "", name), []).append(name)
    tried = [dict.fromkeys((names[0], names[len(names) // 2], names[-1])) for names in kinds.values()]
    for name in chain.from_iterable(tried):
        merged = changed[name].merged()
        update = (merged - changed[name].base().float()).norm().item()
        codes, scales = quantise(merged)
        lost = (dequantise(codes, scales, (FP8_BLOCK, FP8_BLOCK), torch.float32) - merged).norm().item()
        share = lost / update if update else 0.0
        logger.info("%s: FP8 rounds away %.0f %% of the update", name, 100 * share)
        if share > _MOST_LOST:
            raise CheckpointError(
                f"--requantise: {name}: rounding to FP8 changes it {share:.1f} times as much as the adapter "
                "does, so little would be left of the adapter; write ordinary numbers (--dtype bfloat16), or "
                "keep the adapter next to the base"
            )


@dataclass(frozen=True)
class _Changes:
    """What an adapter does to weights, by their names in memory or on disk."""

    factors: dict[str, Factors]
    replaced: Mapping[str, Callable[[], torch.Tensor]]
    """Weights that the adapter holds as a whole (``modules_to_save``, biases)."""

    def merged(
        self, read: Callable[[], torch.Tensor], pieces: list[Piece], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor of the folder, as it is to be written."""
        values = read()
        shape = values.shape
        for piece in pieces:
            if piece.memory in self.replaced:
                values = on_disk(self.replaced[piece.memory]()[_slices(piece)], piece.form).view(shape)
            if piece.memory in self.factors:
                # a copy, because what was read may be used again
                weight = in_memory(values.to(torch.float32, copy=True), piece.form).view(piece.sizes)
                values = on_disk(self.factors[piece.memory].added_to(weight, piece.low), piece.form).view(
                    shape
                )
        return values.to(dtype)


def _slices(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(piece.low, piece.sizes, strict=True))


def _pieces(folder: HFFolder) -> dict[str, list[Piece]]:
    """By names on disk: the tensor as a region of one in memory, and as a tensor of its own."""
    in_model = {piece.disk: piece for piece in folder.pieces()}
    if isinstance(folder.names, Names):  # DeepSeek-V3 repeats embedding and head for its further layers
        num_copies = int(folder.config.get("num_nextn_predict_layers") or 0)
        for memory, shape in folder.memory_shapes().items():
            for copy in folder.names.copies(memory, num_copies):
                in_model[copy] = Piece(copy, memory, (0,) * len(shape), shape)
    found = {}
    for disk, stored in folder.readable.items():
        own = Piece(disk, disk, (0,) * len(stored.shape), stored.shape)
        found[disk] = list({piece.memory: piece for piece in (own, in_model.get(disk, own))}.values())
    return found


def _open_adapter(source: StrPath, name: str) -> tuple[Boxes, Tree, RegionReader | None]:
    """The tensors of an adapter by their names in peft's file, its configuration, and the checkpoint that it
    is in, unless it is a folder of its own."""
    storage, called = split_address(source)
    checkpoint = None
    if from_first(lambda: storage.size(called, CONFIG) is not None):
        boxes, config = together(lambda: _open_folder(storage, called))
    else:
        reader = checkpoint = open_newest(source)
        boxes, config = together(lambda: adapter_content(reader, name, "peft"))
    read = lru_cache(maxsize=4)(lambda box: boxes[box]())  # an expert's neighbours use the same tensors
    return {box: partial(read, box) for box in boxes}, config, checkpoint


def _open_folder(storage: Storage, called: str) -> tuple[Boxes, Tree]:
    config = parse_object(read_file(storage, called, CONFIG), f"{called}/{CONFIG}")
    if storage.size(called, WEIGHTS) is None:
        raise CheckpointError(f"{called}: expected {WEIGHTS}, got none; load and save the adapter with peft")
    tensors, record = read_header(storage, called, WEIGHTS)
    reader = RegionReader(storage, called, Index(tensors, {}, {WEIGHTS: record}), threads=1)
    boxes: Boxes = {}
    for name, stored in tensors.items():
        boxes[SavedBox.whole(name, stored.shape, stored.dtype)] = partial(reader.read_tensor, name)
    return boxes, config


def _refuse_another_base(where: str, base: str, config: Tree) -> None:
    """Weights of another base may fit as well, so the name in the adapter's configuration decides."""
    named = str(config.get("base_model_name_or_path") or "")
    if not named or os.path.realpath(named) == os.path.realpath(base):
        return
    is_here = os.path.isdir(named)
    if is_here or not _model_names(named) & _model_names(base):
        found = "another folder that is here" if is_here else "a model of another name"
        raise CheckpointError(
            f"{where}: base_model_name_or_path: expected {base}, got {named}, {found}; merge into "
            "the model that the adapter was trained on, or say that both are the same with --any-base"
        )


def _refuse_other_weights(where: str, base: str, other: str | None) -> None:
    if other is not None:
        raise CheckpointError(
            f"{where}: expected an adapter of the weights in {base}, got one that was trained on others "
            f"({other} differs): checkpoint.load put them in their place; write those to a folder with to-hf "
            "and merge into that, or merge all the same with --any-base"
        )


def _model_names(path: str) -> set[str]:
    """The last name of a path or of a model on the hub; in the hub's cache also that of the model."""
    parts = path.rstrip("/").split("/")
    return {parts[-1], *(part.split("--")[-1] for part in parts if part.startswith("models--"))}


def _plan(where: str, base: str, folder: HFFolder, found: Boxes, config: Tree) -> _Changes:
    """What is to be done, or CheckpointError with all that cannot be."""
    refuse_other_kinds(where, config)
    parameters = {piece.disk: piece.memory for piece in folder.pieces()}
    shapes = {name: stored.shape for name, stored in folder.readable.items()} | folder.memory_shapes()
    tied = {alias.partition("/")[2]: owner.partition("/")[2] for alias, owner in folder.tied.items()}
    shapes |= {alias: shapes[owner] for alias, owner in tied.items() if owner in shapes}
    factors, rest, problems = find_factors(found, config, shapes, parameters)
    whole = {stored_name(box.name): box for box in rest}
    for name, box in whole.items():
        if not box.name.startswith(SHELL) or name not in shapes:
            problems.append(f"{box.name}: the base has no such weight")
        elif box.shape != shapes[name]:
            problems.append(
                f"{box.name}: expected {list(shapes[name])} as in the base, got {list(box.shape)}"
            )
    for name in {*tied, *tied.values()} & {*factors, *whole}:
        problems.append(
            f"{name}: embedding and head are one weight in the base (tie_word_embeddings), and the adapter "
            "changes one of its two uses; save the base with two weights first"
        )
    parts = Counter(parameters.values())
    for name, each in factors.items():
        if each.magnitude is not None and parts[name] != 1:
            problems.append(f"{name}: DoRA of a weight that is not one tensor in the folder")
    if problems:
        shown = listed(sorted(problems), 10)
        raise CheckpointError(f"{where} is no adapter that can be merged into {base}:{shown}")
    return _Changes(factors, {name: rest[box] for name, box in whole.items()})
