"""The adapters of a checkpoint as a folder that ``peft`` or a server loads: ``adapter_config.json`` and one
safetensors file, written by the first rank."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Literal, get_args

from fsdmoe.checkpoint.adapter_base import other_weight
from fsdmoe.checkpoint.adapter_experts import for_servers
from fsdmoe.checkpoint.adapter_names import BASE, SHELL, adapted_module, exported_name
from fsdmoe.checkpoint.agree import from_first
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import Index
from fsdmoe.checkpoint.hf_export import write_file, write_json
from fsdmoe.checkpoint.hf_folder import open_hf_folder
from fsdmoe.checkpoint.hf_held import routing_not_held
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.saved_box import Boxes, SavedBox
from fsdmoe.checkpoint.session import open_newest
from fsdmoe.checkpoint.storage import StrPath, split_address
from fsdmoe.checkpoint.tree import Tree
from fsdmoe.core.rules import one_of

logger = logging.getLogger(__name__)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Layout = Literal["peft", "per_expert"]


def to_adapter(
    source: StrPath,
    target: StrPath,
    *,
    adapter: str = "default",
    layout: Layout = "peft",
    replace: bool = False,
) -> None:
    """Write the adapter of a checkpoint as a folder for ``peft``, or for inference servers. Collective.

    Args:
        source: A checkpoint, or a folder of them: then the newest.
        target: The folder to write.
        adapter: Its name in the model.
        layout: ``peft``: the factors of all experts of a layer in one tensor, as peft loads them.
            ``per_expert``: a pair of factors for each expert and projection, as vLLM and SGLang read them.
        replace: Put it in place of an earlier adapter in that folder.

    Raises:
        CheckpointError: The checkpoint has no adapter of this name, or none that can have this layout.
    """
    if problems := one_of("to-adapter", {"layout": layout}, {"layout": get_args(Layout)}):
        raise CheckpointError(*problems)
    reader = open_newest(source)
    there, called = split_address(target)

    def write() -> None:
        boxes, config = adapter_content(reader, adapter, layout)
        config = _with_known_base(reader, config)
        is_adapter = there.size(called, CONFIG) is not None
        if is_adapter and not replace:
            raise CheckpointError(
                f"{target}: expected a folder to make, got an adapter that is there; --replace writes the "
                "new one in its place"
            )
        there.begin(called, replaces=is_adapter)
        try:
            write_file(there, called, WEIGHTS, boxes)
            write_json(there, called, CONFIG, config)
            there.commit(called)
        except BaseException:
            there.discard(called)
            raise

    from_first(write)


def _with_known_base(reader: RegionReader, config: Tree) -> Tree:
    """Without the name of its base where that folder has other weights than the run was trained on."""
    named = str(config.get("base_model_name_or_path") or "")
    if not os.path.isdir(named):
        return config
    storage, called = split_address(named)
    other = other_weight(reader, storage, called, open_hf_folder(storage, called))
    if other is None:
        return config
    logger.warning(
        "the adapter was not trained on the weights in %s (%s differs): checkpoint.load put others in their "
        "place. base_model_name_or_path is left empty; write those to a folder with to-hf, and name it there",
        named, other,
    )  # fmt: skip
    return {**config, "base_model_name_or_path": ""}


def adapter_content(reader: RegionReader, adapter: str, layout: Layout) -> tuple[Boxes, Tree]:
    """What goes into the file, in the layout's names, and the adapter's configuration."""
    _refuse_more_than_factors(reader)
    index = reader.index
    config = (index.about.get("adapters") or {}).get(adapter)
    boxes: Boxes = {}
    biases = {} if config is None else _biases(index, str(config.get("bias", "none")))
    owners = {**{full: full for full in index.tensors}, **index.about.get("tied", {})}
    for full, owner in owners.items():
        section, _, memory = full.partition("/")
        disk = exported_name(memory, adapter) or biases.get(memory)
        if section == "model" and disk is not None:
            stored = index.tensors[owner]
            box = SavedBox.whole(disk, stored.shape, stored.dtype)
            boxes[box] = partial(reader.read_tensor, owner)
    if config is None or not boxes:
        known = ", ".join(index.about.get("adapters") or {}) or "none"
        raise CheckpointError(
            f"{reader.name}: expected an adapter named {adapter!r}, got a checkpoint with {known}; to-hf "
            "writes the weights of a model without adapters"
        )
    config = config | {"inference_mode": True}
    if layout == "per_expert":
        return for_servers(boxes, config, index.about.get("hf_config") or {})
    return boxes, config


def _refuse_more_than_factors(reader: RegionReader) -> None:
    """Factors fit the weights that were trained with them, and the routing."""
    about = reader.index.about
    run = about.get("run") or {}
    experts = run.get("experts") or {}
    base = ((about.get("hf_config") or {}).get("architectures") or ["the base"])[0]
    problems = routing_not_held(base, has_bias=False, selection=experts.get("selection", "top_k"))
    bias_rate = (experts.get("balance") or {}).get("bias_rate", 0)
    if bias_rate:
        problems.append(
            f"experts.balance.bias_rate: expected 0, got {bias_rate}: an adapter has no place for the biases "
            "that moved; train it with 0"
        )
    if (run.get("adapter") or {}).get("freeze_base") is False:
        problems.append(
            "adapter.freeze_base: expected true, got false: the run trained the model's own weights too, "
            "which the base does not have; load it, call merge_and_unload, save it and use to-hf"
        )
    if problems:
        raise CheckpointError(f"{reader.name}: " + "\n  ".join(problems))


def _biases(index: Index, trained: str) -> dict[str, str]:
    """The biases of the model that are trained with its adapters (``bias`` of peft's configuration), with
    their names in peft's file."""
    if trained == "none":
        return {}
    names = [full.partition("/")[2] for full in index.tensors if full.startswith("model/")]
    inside = dict(found for name in names if (found := adapted_module(name)) is not None)
    biases = {}
    for name in names:
        module = name.removesuffix(".bias")
        if module == name or adapted_module(name) is not None:
            continue
        if inside.get(module) == BASE or (module in inside and trained == "all"):
            biases[name] = f"{SHELL}{module}.{inside[module]}.bias"
        elif trained == "all":
            biases[name] = SHELL + name
    return biases
