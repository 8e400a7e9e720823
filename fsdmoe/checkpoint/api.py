"""``save`` and ``load``: one checkpoint, by path. Collective; for a training loop see ``Checkpointer``."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdmoe.checkpoint.adapter_names import INITIAL, SHELL, is_adapter_name, stored_name
from fsdmoe.checkpoint.agree import from_first, together, world
from fsdmoe.checkpoint.catalog import require
from fsdmoe.checkpoint.deployed import describe_roundings
from fsdmoe.checkpoint.disk_names import architectures_of
from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
from fsdmoe.checkpoint.format import MANIFEST, Index
from fsdmoe.checkpoint.gpt_oss import refuse_other_layout
from fsdmoe.checkpoint.hf_config import differing_fields, refuse_unknown
from fsdmoe.checkpoint.parts import (
    Checkpointed,
    coded_parts,
    collect,
    make_optimizer_state,
    restore,
    tied_names,
)
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.checkpoint.saved_box import held_boxes
from fsdmoe.checkpoint.session import Verify, describe, load_indexed, open_verified, write_state
from fsdmoe.checkpoint.settings import OptimizerSettings
from fsdmoe.checkpoint.storage import Storage, StrPath, open_storage, split_address
from fsdmoe.checkpoint.taken_codes import take_codes, takeable
from fsdmoe.checkpoint.tree import SEPARATOR, Tree, split_tree
from fsdmoe.checkpoint.writer import SaveOrder
from fsdmoe.core.all_ranks import require_alike
from fsdmoe.core.boxes import overlap
from fsdmoe.mesh import Meshes
from fsdmoe.precision.deployed_formats import all_roundings

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadPolicy:
    """How a checkpoint is loaded."""

    verify: Verify = "fast"
    """``fast``: sizes of all files, checksums of all blocks that are read; ``full``: every block,
    beforehand."""
    strict: bool = True
    """Each part must find exactly its tensors; otherwise what is missing stays as it is."""
    threads: int = 4
    """Files that a rank reads at a time."""
    optimizer_settings: OptimizerSettings = "built"
    """Whose ``betas``, ``eps``, ``weight_decay`` and the like are used: those it was ``built`` with,
    or those ``stored`` in the checkpoint, as torch does. The learning rate is the stored one either way."""
    meshes: Meshes | None = None
    """Needed for models that are split over mesh axes (DTensors) and not sharded."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What came out of a checkpoint."""

    name: str
    values: Tree
    """Of the parts that are plain values."""
    about: Tree
    """What the writer recorded about itself."""
    damaged: tuple[str, ...] = ()
    """Newer ones that were passed over."""
    filled_codes: bool = False
    """It had weights that are kept as codes here, which no checkpoint of this model holds."""


def save(
    path: StrPath,
    model: nn.Module | None = None,
    optimizer: Any = None,
    *,
    meshes: Meshes | None = None,
    overwrite: bool = False,
    **extra: Any,
) -> None:
    """Write the folder ``path``: whole when this returns, untouched when it raises. Collective.

    Args:
        path: A folder that all ranks share, or an fsspec address (``s3://...``).
        model: Its parameters and buffers are the part ``model``.
        optimizer: Its state is the part ``optimizer``.
        meshes: Needed for models that are split over mesh axes (DTensors) and not sharded.
        overwrite: A checkpoint that is at ``path`` is to be replaced. It is otherwise too, with a warning.
        **extra: Further parts by name: trees of tensors and JSON values, or objects with
            ``checkpoint_state`` (or torch's ``state_dict``).

    Raises:
        CheckpointError: It could not be written. What was at ``path`` before is still there.
    """
    parts = _parts(model, optimizer, extra)
    storage, name = split_address(path)
    if not overwrite and from_first(lambda: storage.size(name, MANIFEST)) is not None and world()[0] == 0:
        logger.warning(
            "%s: the checkpoint that is there is replaced once the new one is whole; save to another path to "
            "keep it, or pass overwrite=True",
            os.fspath(path),
        )
    # together: a part that fails on one rank would leave the others waiting for it in the save
    tensors, values = together(lambda: snapshot(parts, meshes))
    write_state(SaveOrder(storage, name, values, describe(about_parts(parts, meshes))), tensors)


def load(
    path: StrPath,
    model: nn.Module | None = None,
    optimizer: Any = None,
    *,
    policy: LoadPolicy | None = None,
    **extra: Any,
) -> Tree:
    """Fill the given parts from a checkpoint, under any layout. Collective.

    Tensors are filled in place and converted to the dtype they have here. Parts that are not given are not
    read. An optimizer keeps the weight decay, betas and the like that it was built with; see
    :mod:`fsdmoe.checkpoint.settings`. Nothing is unpickled.

    Args:
        path: A checkpoint, which must be whole; or a folder of checkpoints: then the newest whole one is
            taken, and a damaged one is reported and passed over; or a Hugging Face folder, for the model.
        model: Filled from the part ``model``.
        optimizer: Filled from the part ``optimizer``.
        policy: How much is verified, and whether every tensor must be found.
        **extra: Further parts by the names they were saved under.

    Returns:
        The stored values of those parts that are plain values, by name.

    Raises:
        CheckpointError: There is none at ``path``, or its tensors do not fit; the message lists them.
        DamagedCheckpointError: The checkpoint that was named is truncated, altered or incomplete.
    """
    parts, policy = _parts(model, optimizer, extra), policy or LoadPolicy()
    root, names, explicit = from_first(lambda: _found(path))
    return load_first(open_storage(root), names, parts, policy, explicit=explicit).values


def load_first(
    storage: Storage, names: list[str], parts: Mapping[str, Any], policy: LoadPolicy, *, explicit: bool
) -> Loaded:
    """Load the first of ``names`` that is whole, on all ranks alike."""
    damage: dict[str, str] = {}
    for name in names:
        try:
            loaded = _load_one(storage, name, parts, policy)
            return dataclasses.replace(loaded, damaged=tuple(damage))
        except DamagedCheckpointError as error:
            if explicit:
                raise
            damage[name] = str(error)
            if world()[0] == 0:
                logger.error("%s/%s is passed over: %s", storage.root, name, error)
    raise CheckpointError(f"{storage.root}: every checkpoint is damaged:\n  " + "\n  ".join(damage.values()))


def _load_one(storage: Storage, name: str, parts: Mapping[str, Any], policy: LoadPolicy) -> Loaded:
    index = together(lambda: open_verified(storage, name, policy.verify, policy.threads))
    require_alike({f"{storage.root}/{name}": index.digest()}, "load it from a folder that all ranks share")
    parts = _without(f"{storage.root}/{name}", index, parts)
    coded = coded_parts(parts)
    index, base = _apart(index, [key for _, tree in coded for key in split_tree(tree)[0]])

    def act() -> Tree:
        if policy.strict:
            _refuse_tied(f"{storage.root}/{name}", index, parts)
        _refuse_over_residual(f"{storage.root}/{name}", index, parts)
        _refuse_other_mathematics(f"{storage.root}/{name}", index, parts)
        tree, fitting = _to_fill(index, parts, policy)
        return load_indexed(storage, name, fitting, tree, strict=policy.strict, threads=policy.threads)

    tree = together(act)
    reader = RegionReader(storage, name, base, policy.threads)
    for unit, part in coded if base.tensors else ():
        taken = takeable(unit, part, base)
        if taken.keys() != split_tree(part)[0].keys():
            with unit.opened():
                together(functools.partial(_fill_coded, storage, name, base, part, policy))
        together(functools.partial(take_codes, reader, taken))  # last: values made codes of all
    # together: a part that refuses its state on one rank ends the run on all of them
    values = together(lambda: restore(parts, tree, policy.optimizer_settings))
    return Loaded(name, values, index.about, filled_codes=bool(coded) and bool(base.tensors))


def _to_fill(index: Index, parts: Mapping[str, Any], policy: LoadPolicy) -> tuple[Tree, Index]:
    """The tree of what is to be filled, and the checkpoint as far as it fits that."""
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    for key, part in parts.items():
        if isinstance(part, torch.optim.Optimizer) and not isinstance(part, Checkpointed):
            make_optimizer_state(part, models, index.tensors, key)
    tree = _without_added(_without_new_adapters(collect(parts, policy.meshes), index), index, parts)
    return tree, _fitted(index, split_tree(tree)[0])


def files_to_read(index: Index, parts: Mapping[str, Any], policy: LoadPolicy) -> set[str]:
    """The files of which this rank needs something in a load."""
    tree, fitting = _to_fill(index, parts, policy)
    wanted = {key: tensor for key, tensor in split_tree(tree)[0].items() if key in fitting.tensors}
    return {
        stored.file
        for box in held_boxes(wanted)
        for stored in fitting.tensors[box.name].boxes
        if overlap(stored.offsets, stored.sizes, box.offsets, box.sizes)
    }


def _fill_coded(storage: Storage, name: str, base: Index, part: Tree, policy: LoadPolicy) -> None:
    """Frozen weights of one unit, while it is open."""
    wanted = split_tree(part)[0]
    here = {key: tensor for key, tensor in base.tensors.items() if key in wanted}
    fitting = dataclasses.replace(base, tensors=here)
    load_indexed(storage, name, fitting, part, strict=policy.strict, threads=policy.threads)


def _apart(index: Index, names: list[str]) -> tuple[Index, Index]:
    """Without these tensors, and with no others."""
    chosen = set(names) & index.tensors.keys()
    rest = {key: tensor for key, tensor in index.tensors.items() if key not in chosen}
    base = {key: index.tensors[key] for key in chosen}
    return dataclasses.replace(index, tensors=rest), dataclasses.replace(index, tensors=base)


def _without(where: str, index: Index, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that a checkpoint has. An average of weights may be new to a run. Another program's position
    in the data means nothing here, so the data starts from the beginning."""
    sections = {*index.values, *(key.split(SEPARATOR, 1)[0] for key in index.tensors)}
    new = [key for key, part in parts.items() if getattr(part, "is_optional", False) and key not in sections]
    if new and world()[0] == 0:
        logger.warning("%s has no %s: it starts from the weights", where, ", ".join(new))
    parts = {key: part for key, part in parts.items() if key not in new}
    absent = [key for key in index.about.get("without", []) if key in parts]
    if absent and world()[0] == 0:
        logger.warning(
            "%s was converted and has no %s: it starts from the beginning", where, ", ".join(absent)
        )
    return {key: part for key, part in parts.items() if key not in absent}


def _without_new_adapters(tree: Tree, index: Index) -> Tree:
    """What is to be filled: adapters keep their values where the weights come from a model that had none."""
    if any(map(is_adapter_name, index.tensors)) or not isinstance(tree.get("model"), dict):
        return tree
    return tree | {"model": {name: t for name, t in tree["model"].items() if not is_adapter_name(name)}}


def _without_added(tree: Tree, index: Index, parts: Mapping[str, Any]) -> Tree:
    """The same of buffers that a run has added to its architecture (``experts.balance.bias_rate``): a Hugging
    Face folder has none of them."""
    for key, part in parts.items():
        if index.is_foreign and isinstance(part, nn.Module):
            added = {
                stored_name(f"{path}.{name}")
                for path, module in part.named_modules()
                for name in getattr(module, "added_buffers", ())
            }
            tree = tree | {key: {name: t for name, t in tree[key].items() if name not in added}}
    return tree


def _refuse_other_mathematics(where: str, index: Index, parts: Mapping[str, Any]) -> None:
    """Weights of a Hugging Face model load into the native decoder only if it computes what they were trained
    for; settings that it could have alike and has not are said."""
    config = index.about.get("hf_config")
    for part in parts.values():
        own: Any = getattr(part, "config", None) if isinstance(part, nn.Module) else None
        is_native = _is_native(own)
        if isinstance(config, dict) and is_native:
            refuse_unknown(config, where)
        refuse_other_layout(where, index.tensors, own, is_native=is_native)
        if not isinstance(config, dict) or not is_native:
            continue
        differences = differing_fields(config, dataclasses.asdict(own))
        if differences and world()[0] == 0:
            logger.warning(
                "%s was trained with other settings than this model has (%s); this model's are used",
                where,
                "; ".join(differences),
            )


def _is_native(config: Any) -> bool:
    is_record = dataclasses.is_dataclass(config) and not isinstance(config, type)
    return is_record and hasattr(config, "architecture") and not hasattr(config, "to_dict")


def _refuse_tied(where: str, index: Index, parts: Mapping[str, Any]) -> None:
    """Raise where two tensors are stored, each with values of its own, and are one parameter here."""
    for key, part in parts.items():
        if not isinstance(part, nn.Module):
            continue
        for alias, owner in tied_names(part).items():
            if f"{key}/{alias}" in index.tensors and f"{key}/{owner}" in index.tensors:
                raise CheckpointError(
                    f"{where}: {alias} and {owner} are two tensors with different values, and one parameter "
                    "of this model: set tie_word_embeddings = false in the config.json, or in the "
                    "configuration that the model is built from"
                )


def _refuse_over_residual(where: str, index: Index, parts: Mapping[str, Any]) -> None:
    """Raise where adapters took their first values out of the base (PiSSA, OLoRA), and the stored weights are
    those of a base that still has them: the model would begin with them twice."""
    if any(map(is_adapter_name, index.tensors)):
        return
    for part in parts.values():
        for adapter, config in (getattr(part, "peft_config", None) or {}).items():
            initial = getattr(config, "init_lora_weights", True)
            if initial not in (*INITIAL, "eva", "mica"):
                raise CheckpointError(
                    f"{where}: weights without adapters would replace the base that init_lora_weights = "
                    f"{initial!r} of the adapter {adapter!r} has changed, and the model would begin as "
                    "another; load it with from_pretrained before get_peft_model, and leave load= out"
                )


def snapshot(parts: Mapping[str, Any], meshes: Meshes | None) -> tuple[dict[str, torch.Tensor], Tree]:
    """The live tensors of all parts, and a copy of their plain values."""
    tensors, values = split_tree(collect(parts, meshes))
    return tensors, json.loads(json.dumps(values))


def about_parts(parts: Mapping[str, Any], meshes: Meshes | None) -> Tree:
    """Facts for people and for later loads: the layout, tied names, the model's own configuration."""
    about: Tree = {}
    if meshes is not None:
        about["layout"] = dataclasses.asdict(meshes.degrees)
    for key, part in parts.items():
        if isinstance(part, nn.Module):
            about["tied"] = {f"{key}/{a}": f"{key}/{b}" for a, b in tied_names(part).items()}
            if adapters := getattr(part, "peft_config", None):
                about["adapters"] = {name: _plain_json(own.to_dict()) for name, own in adapters.items()}
            if roundings := all_roundings(part):
                about["qat"] = describe_roundings(roundings)
            config = getattr(part, "config", None)
            if config is not None and hasattr(config, "to_dict"):
                about["hf_config"] = _plain_json(config.to_dict()) | architectures_of(part, config)
            elif dataclasses.is_dataclass(config) and not isinstance(config, type):
                about["model_config"] = _plain_json(dataclasses.asdict(config))
    return about


def _plain_json(values: Any) -> Any:
    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, set) else str(value)

    return json.loads(json.dumps(values, default=plain))


def _fitted(index: Index, wanted: Mapping[str, torch.Tensor]) -> Index:
    """With names that were tied when saved and are not here; without multi-token prediction modules of a
    Hugging Face folder that the model does not have; by today's names."""
    tied, stored = index.about.get("tied", {}), _todays_names(index.tensors, wanted)
    further = {
        alias: stored[owner] for alias, owner in tied.items()
        if alias in wanted and alias not in stored and owner in stored
    }  # fmt: skip
    kept = {
        name: tensor for name, tensor in stored.items()
        if name in wanted or not (index.is_foreign and ".mtp_layers." in name)
    }  # fmt: skip
    return dataclasses.replace(index, tensors={**kept, **further})


def _todays_names(stored: Mapping[str, Any], wanted: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Checkpoints once had peft's names for layers with adapters (``base_layer``)."""
    found = {}
    for name, tensor in stored.items():
        today = stored_name(name.replace(SHELL, ""))
        found[today if name not in wanted and today in wanted else name] = tensor
    return found


def _found(path: StrPath) -> tuple[str, list[str], bool]:
    storage, _ = split_address(path)
    storage.recover()
    return require(path)


def _parts(model: nn.Module | None, optimizer: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    given = {"model": model, "optimizer": optimizer}
    return {**{key: part for key, part in given.items() if part is not None}, **extra}
