"""A checkpoint to a Hugging Face folder, tensor by tensor, ranks writing different files in parallel.

No rank ever holds the model: each tensor on disk is a region of a stored one, read (and verified) when it is
written.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdmoe.checkpoint.adapter_names import is_adapter_name
from fsdmoe.checkpoint.agree import from_first, together, world
from fsdmoe.checkpoint.deployed import (
    MadeOnce,
    RoundedWeights,
    coded_boxes,
    quantization_config,
    read_roundings,
)
from fsdmoe.checkpoint.disk_names import Convention, check_written, config_as_held, disk_names
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import Index, Shape, is_scale_history
from fsdmoe.checkpoint.gpt_oss import on_disk
from fsdmoe.checkpoint.hf_config import export_config, refuse_lines, refuse_not_held
from fsdmoe.checkpoint.hf_folder import CONFIG, INDEX, SCALE_SUFFIX, SINGLE
from fsdmoe.checkpoint.hf_held import routing_not_held
from fsdmoe.checkpoint.hf_names import Names, Piece
from fsdmoe.checkpoint.quantised import FP8_BLOCK, is_projection, quantise
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.saved_box import Boxes, Progress, SavedBox, no_progress, write_safetensors
from fsdmoe.checkpoint.session import open_newest
from fsdmoe.checkpoint.storage import Storage, StrPath, read_file, split_address
from fsdmoe.checkpoint.tree import Tree

logger = logging.getLogger(__name__)
DEFAULT_SHARD_BYTES = 5_000_000_000
_FP8_CONFIG: Tree = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}  # fmt: skip
_PLAIN_LINEAR = re.compile(r"(^lm_head|_gate|\.eh_proj|_latent_proj|\.gate)\.weight$")
KEEP_DTYPE = ("e_score_correction_bias", "expert_bias")
TOKENIZER = "tokenizer.json"
EXPORT = "fsdmoe_export.json"
"""In a folder that was written here: which files of it were."""
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "chat_template*", "generation_config.json", "*processor_config.json", "*.py",
)  # fmt: skip


@dataclass(frozen=True)
class FileTensor:
    """A tensor to be written: its name on disk, and the region it comes from."""

    disk: str
    piece: Piece
    dtype: torch.dtype
    is_further: bool = False
    """Of multi-token prediction, which transformers passes over."""

    def stored(self, reader: RegionReader) -> torch.Tensor:
        """Its values in the dtype of the checkpoint."""
        region = reader.read_tensor(f"model/{self.piece.memory}", self.piece.low, self.piece.sizes)
        return on_disk(region, self.piece.form).view(self.piece.disk_shape)

    def read(self, reader: RegionReader) -> torch.Tensor:
        return self.stored(reader).to(self.dtype)

    def matrices(self, reader: RegionReader) -> torch.Tensor:
        """All rows of what it is a piece of, contracted elements last."""
        if len(self.piece.disk_shape) == 3:
            return self.stored(reader).mT
        name = f"model/{self.piece.memory}"
        sizes = (*self.piece.sizes[:-2], *reader.index.tensors[name].shape[-2:])
        return reader.read_tensor(name, (*self.piece.low[:-2], 0, 0), sizes)


@dataclass(frozen=True, kw_only=True)
class ExportPolicy:
    """How a folder is written."""

    fp8: bool = False
    """Projections of decoder layers in blockwise FP8, DeepSeek-V3's layout: E4M3 with a float32 scale for
    each block of 128 x 128, named ``weight_scale_inv``. The rest in ``dtype``."""
    dtype: torch.dtype | None = None
    """Of all weights; None takes the ``dtype`` of the model's configuration, or leaves them as stored."""
    shard_bytes: int = DEFAULT_SHARD_BYTES
    """Largest size of a file."""
    config: Tree | None = None
    """config.json; None takes what the checkpoint says about its model."""
    ema: bool = False
    """The averaged weights (``optim.ema``) instead of the last ones."""
    files_from: str | None = None
    """A folder from which tokenizer files and the like are copied; None takes those of the run's tokenizer,
    if it is still where it was."""
    replace: bool = False
    """Write also where an earlier export is, in its place once all is written."""


def to_hf(
    source: StrPath, target: StrPath, policy: ExportPolicy | None = None, *, progress: Progress = no_progress
) -> str | None:
    """Write the model of a checkpoint as a folder that ``transformers`` loads. Collective.

    Tensors are written one by one, never holding the model; ranks write different files.

    Args:
        source: A checkpoint, or a folder of them: then the newest.
        target: The folder to write.
        policy: Its dtype, file size, configuration and further files.
        progress: Called with the number of bytes that were done since the last call.

    Returns:
        Where the tokenizer's files came from; None if there are none in the folder.
    """
    policy = policy or ExportPolicy()
    reader = open_newest(source)
    if policy.ema:
        reader.index = averaged(reader.name, reader.index)
    index = reader.index
    _refuse_adapters(reader.name, index)
    _refuse_not_held(index)
    config = policy.config or export_config(index.about)
    tokenizer = policy.files_from or from_first(lambda: _tokenizer_of(index.about))
    names = disk_names(config, native=_is_native(index))
    stated, config = config, config_as_held(config, names, _held(index))
    if config is not stated:
        names = disk_names(config, native=_is_native(index))
    tensors = plan_tensors(index, names, config, policy.dtype)
    further = {tensor.disk for tensor in tensors if tensor.is_further}
    shapes = {tensor.disk: tensor.piece.disk_shape for tensor in tensors}
    from_first(lambda: check_written(names, shapes, further, config))
    if policy.fp8:
        plain = [t.disk.removesuffix(".weight") for t in tensors if _PLAIN_LINEAR.search(t.disk)]
        stated = {**_FP8_CONFIG, "modules_to_not_convert": sorted(plain)}
        config = {**config, "quantization_config": stated}
    rounded = read_roundings(index.about)
    if rounded is None:
        boxes = _boxes(tensors, reader, policy.fp8)
    elif policy.fp8:
        raise CheckpointError(
            f"{reader.name}: expected an export in {rounded.format}, which its weights were trained for "
            "(precision.qat), got --fp8; leave it out"
        )
    else:
        boxes = _rounded_boxes(tensors, reader, rounded)
        kept = [
            t.disk for t in tensors if len(t.piece.disk_shape) == 2 and t.piece.memory not in rounded.names
        ]
        is_gpt_oss = config.get("model_type") == "gpt_oss"
        stated = quantization_config(rounded, kept, is_gpt_oss=is_gpt_oss)
        config = {**config, "quantization_config": stated}
    is_copied = write_folder(
        target,
        boxes,
        config,
        tokenizer,
        replace=policy.replace,
        shard_bytes=policy.shard_bytes,
        progress=progress,
    )
    return tokenizer if is_copied else None


def write_folder(
    target: StrPath,
    boxes: Boxes,
    config: Tree,
    files_from: str | None,
    *,
    replace: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress = no_progress,
) -> bool:
    """Write a Hugging Face folder, ranks different files of it; whether there is a tokenizer in it.
    Collective."""
    files = _fill_files(boxes, shard_bytes)
    there, called = split_address(target)
    rank, num_ranks = world()
    from_first(lambda: _begin(there, called, target, replace=replace))

    def write() -> None:
        for number, part in list(enumerate(files))[rank::num_ranks]:
            write_file(there, called, _file_name(number, len(files)), part, progress)

    try:
        together(write)
        is_copied: bool = from_first(lambda: _finish(there, called, files, config, files_from))
    except BaseException:
        if rank == 0:
            there.discard(called)
        raise
    return is_copied


def _begin(there: Storage, called: str, target: StrPath, *, replace: bool) -> None:
    """Make the folder to write. What is there is replaced if it is an earlier export and nothing else."""
    is_export = there.size(called, EXPORT) is not None
    if replace and is_export:
        known = {EXPORT, *json.loads(read_file(there, called, EXPORT))["files"]}
        is_here = "://" not in str(target)
        others = sorted({path.name for path in Path(target).iterdir()} - known) if is_here else []
        if others:
            raise CheckpointError(
                f"{target}: expected an earlier export alone, got other files too, which --replace would "
                f"delete ({', '.join(others[:3])}); move them"
            )
    elif is_export:
        raise CheckpointError(
            f"{target}: expected a folder to make, got an earlier export; --replace writes the new one in "
            "its place"
        )
    there.begin(called, replaces=is_export)


def _refuse_adapters(name: str, index: Index) -> None:
    if index.about.get("adapters") or any(is_adapter_name(tensor) for tensor in index.tensors):
        raise CheckpointError(
            f"{name}: expected the weights of a model, got a model with adapters, which a folder "
            "of weights would leave out; write the adapters with to-adapter, or merge them into the folder "
            "that the run started from with merge-adapter"
        )


def _refuse_not_held(index: Index) -> None:
    """What its family in transformers has not. A wrapped model's bias of ``bias_rate`` is found later, by its
    name."""
    experts = (index.about.get("run") or {}).get("experts") or {}
    selection = experts.get("selection", "top_k")
    fields = index.about.get("model_config")
    if isinstance(fields, dict):
        has_bias = any(tensor.endswith(".e_score_correction_bias") for tensor in index.tensors)
        refuse_not_held(fields, has_bias=has_bias, selection=selection)
    elif "hf_config" in index.about:
        name = (index.about["hf_config"].get("architectures") or ["this model"])[0]
        refuse_lines(name, routing_not_held(name, has_bias=False, selection=selection))


def _tokenizer_of(about: Tree) -> str | None:
    """The tokenizer that the run read its data with: the file or the folder, if it is still there."""
    name = ((about.get("run") or {}).get("data") or {}).get("tokenizer")
    if not name or name == "bytes" or not Path(name).expanduser().exists():
        return None
    return str(Path(name).expanduser())


def _is_native(index: Index) -> bool:
    """Of gpt-oss, whose router has another name in the native decoder; of others it makes no difference."""
    return not any(".mlp.router." in name for name in index.tensors)


def _held(index: Index) -> set[str]:
    """Names in memory of the model's tensors."""
    return {name.removeprefix("model/") for name in index.tensors if name.startswith("model/")}


def averaged(name: str, index: Index) -> Index:
    """With averaged weights where there are any; what is not trained has none."""
    averages = {
        key.replace("ema/tensors/", "model/", 1): stored
        for key, stored in index.tensors.items()
        if key.startswith("ema/tensors/")
    }
    if not averages:
        raise CheckpointError(
            f"{name}: expected averaged weights, got a checkpoint of a run without optim.ema; leave --ema out"
        )
    return replace(index, tensors=index.tensors | averages)


def plan_tensors(
    index: Index, names: Convention, config: Tree, dtype: torch.dtype | None
) -> list[FileTensor]:
    """All tensors of the folder, in the order of the model."""
    wanted = dtype or _stated_dtype(config)
    has_mtp = any(".mtp_layers." in name for name in index.tensors)
    num_copies = int(config.get("num_nextn_predict_layers") or 0) if has_mtp else 0
    found: list[FileTensor] = []
    for full, stored in index.tensors.items():
        section, _, memory = full.partition("/")
        if section != "model" or is_scale_history(memory):
            continue
        keep = memory.endswith(KEEP_DTYPE) or names.is_in_float32(memory)
        keep = keep or wanted is None or not stored.dtype.is_floating_point
        kind = stored.dtype if keep else wanted
        assert kind is not None
        for piece in names.to_disk(memory, stored.shape):
            is_further = memory.startswith("model.mtp_layers.")
            found.append(FileTensor(piece.disk, piece, kind, is_further=is_further))
            if isinstance(names, Names):  # transformers writes every tensor once
                copies = names.copies(memory, num_copies)
                found += [FileTensor(copy, piece, kind, is_further=True) for copy in copies]
    if not found:
        raise CheckpointError("there is no model in this checkpoint: no tensors under 'model'")
    return sorted(found, key=lambda tensor: natural_order(tensor.disk))


def _boxes(tensors: list[FileTensor], reader: RegionReader, fp8: bool) -> Boxes:
    """What goes into the files; with ``fp8`` codes and scales in place of each projection of a decoder
    layer."""
    boxes: Boxes = {}
    projections = []
    for tensor in tensors:
        shape = tensor.piece.disk_shape
        if fp8 and is_projection(tensor.disk, shape):
            projections.append(tensor)
            boxes |= fp8_boxes(tensor.disk, shape, partial(tensor.stored, reader))
        else:
            boxes[SavedBox.whole(tensor.disk, shape, tensor.dtype)] = partial(tensor.read, reader)
    if fp8:
        _check_fp8(tensors, projections)
    return boxes


def fp8_boxes(disk: str, shape: Shape, read: Callable[[], torch.Tensor]) -> Boxes:
    """Codes and scales in place of a matrix."""
    made = MadeOnce(lambda: dict(zip(("codes", "scales"), quantise(read()), strict=True)))
    scales = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
    name = disk.removesuffix(".weight") + SCALE_SUFFIX
    return {
        SavedBox.whole(disk, shape, torch.float8_e4m3fn): partial(made.take, "codes"),
        SavedBox.whole(name, scales, torch.float32): partial(made.take, "scales"),
    }


def _rounded_boxes(tensors: list[FileTensor], reader: RegionReader, rounded: RoundedWeights) -> Boxes:
    """What goes into the files, with codes in place of what was rounded in training."""
    boxes: Boxes = {}
    for tensor in tensors:
        piece = tensor.piece
        if piece.memory in rounded.names:
            whole = reader.index.tensors[f"model/{piece.memory}"].shape
            boxes |= coded_boxes(piece, whole, rounded, partial(tensor.matrices, reader))
        else:
            box = SavedBox.whole(tensor.disk, piece.disk_shape, tensor.dtype)
            boxes[box] = partial(tensor.read, reader)
    return boxes


def _check_fp8(tensors: list[FileTensor], projections: list[FileTensor]) -> None:
    """Refuse what the layout cannot say, and warn of what transformers reads otherwise: it finds the size of
    blocks by dividing a weight's sides by those of its scales."""
    fused = [tensor.disk for tensor in tensors if len(tensor.piece.disk_shape) == 3]
    if fused or not projections:
        what = f"{fused[0]} holds all experts in one tensor" if fused else "there is no projection in it"
        raise CheckpointError(f"fp8: {what}, which DeepSeek-V3's layout cannot say; export it without --fp8")
    cut = [
        tensor for tensor in projections
        if any(n > FP8_BLOCK and n % FP8_BLOCK for n in tensor.piece.disk_shape)
    ]  # fmt: skip
    if cut and world()[0] == 0:
        logger.warning(
            "fp8: %d projections have sides that are no multiples of %d, %s %s first: from-hf reads them; "
            "transformers, where it dequantises (on a CPU), takes all blocks to be of one size, and reads "
            "other weights without a word",
            len(cut), FP8_BLOCK, cut[0].disk, cut[0].piece.disk_shape,
        )  # fmt: skip


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Numbers by value: layer 10 comes after layer 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _stated_dtype(config: Tree) -> torch.dtype | None:
    name = config.get("dtype") or config.get("torch_dtype")
    known = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}
    return known.get(str(name))


def _fill_files(boxes: Boxes, limit: int) -> list[Boxes]:
    files: list[Boxes] = [{}]
    size = 0
    for box, make in boxes.items():
        if files[-1] and size + box.num_bytes > limit:
            files.append({})
            size = 0
        files[-1][box] = make
        size += box.num_bytes
    return files


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_file(
    storage: Storage, name: str, file: str, boxes: Boxes, progress: Progress = no_progress
) -> None:
    """One safetensors file of whole tensors."""
    storage.write(
        name, file, lambda handle: write_safetensors(handle, boxes, lambda box: box.name, progress=progress)
    )


def _finish(storage: Storage, name: str, files: list[Boxes], config: Tree, tokenizer: str | None) -> bool:
    """Whether there is a tokenizer in the folder."""
    written = [_file_name(number, len(files)) for number in range(len(files))]
    if len(files) > 1:
        weights = {box.name: file for file, boxes in zip(written, files, strict=True) for box in boxes}
        total = sum(box.num_bytes for boxes in files for box in boxes)
        write_json(storage, name, INDEX, {"metadata": {"total_size": total}, "weight_map": weights})
        written.append(INDEX)
    write_json(storage, name, CONFIG, config)
    copied = [] if tokenizer is None else _copy_tokenizer(storage, name, Path(tokenizer))
    write_json(storage, name, EXPORT, {"files": [*written, CONFIG, *copied]})
    storage.commit(name)
    return any(each.startswith("tokenizer") for each in copied)


def _copy_tokenizer(storage: Storage, name: str, source: Path) -> list[str]:
    """A tokenizer's files and what transformers keeps with them; their names. A single file may have any
    name."""
    if source.is_file():
        paths = {TOKENIZER: source}
    else:
        paths = {path.name: path for pattern in _TOKENIZER_FILES for path in source.glob(pattern)}
    for called, path in sorted(paths.items()):
        storage.write(name, called, partial(_copy_file, path))
    return sorted(paths)


def _copy_file(path: Path, handle: Any) -> None:
    with path.open("rb") as file:
        shutil.copyfileobj(file, handle)


def write_json(storage: Storage, name: str, file: str, document: Tree) -> None:
    data = (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
    storage.write(name, file, lambda handle: handle.write(data))
