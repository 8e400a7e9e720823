"""A stock torch.distributed.checkpoint folder to a checkpoint of ours, chunk by chunk, ranks in parallel.

What FSDP2 or torchtitan saved becomes the parts ``model``, ``optimizer`` (AdamW), ``step`` and ``progress``.
A position in the data is not among them: a run that starts from it begins its data anew.
"""

from __future__ import annotations

import logging
import os
import reprlib
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from fsdmoe.checkpoint.agree import together, world
from fsdmoe.checkpoint.dcp_folder import DCPChunk, DCPFolder, DCPTensor, open_dcp_folder
from fsdmoe.checkpoint.dcp_keys import DCPState, plain_name, sort_keys
from fsdmoe.checkpoint.dcp_names import Family, NameRules, Region, Rules, apply_rules, family_of
from fsdmoe.checkpoint.errors import CheckpointError, listed
from fsdmoe.checkpoint.format import check_tiling
from fsdmoe.checkpoint.saved_box import Boxes, Progress, SavedBox, no_progress
from fsdmoe.checkpoint.session import save_boxes
from fsdmoe.checkpoint.storage import Storage, StrPath, split_address
from fsdmoe.checkpoint.tree import SEPARATOR, Tree
from fsdmoe.optim.group_config import DECAYED, NOT_DECAYED
from fsdmoe.optim.groups import is_matrix_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SETTINGS = ("lr", "initial_lr", "betas", "eps", "weight_decay")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class DCPImportPolicy:
    """How a folder is taken over."""

    rules: Rules = ()
    """(pattern, replacement): a name that a pattern matches as a whole becomes the replacement."""
    family: Family | None = None
    """Whose torchtitan names they are, where they do not tell."""
    config: Tree | None = None
    """config.json of the model, recorded for loads and exports."""
    only_model: bool = False
    """Leave the optimizer state."""
    step: int | None = None
    """Of the run; None takes the one that was saved, or the optimizer's count."""


@dataclass(frozen=True)
class _Content:
    """All that a checkpoint will hold: every box, and how to make it."""

    boxes: Boxes
    values: Tree
    step: int
    passed_over: list[str]


def from_dcp(
    source: StrPath,
    target: StrPath,
    policy: DCPImportPolicy | None = None,
    *,
    progress: Progress = no_progress,
) -> None:
    """Convert a folder of ``torch.distributed.checkpoint`` to a checkpoint. Collective.

    Its pickled metadata is read by an unpickler that knows DCP's own classes only. All names, sizes and files
    are checked before anything is written; no rank holds more than a few chunks.

    Args:
        source: The folder, as FSDP2 (``dcp.save`` of ``get_state_dict``) or torchtitan writes it.
        target: The checkpoint to write.
        policy: Names, and what is taken over.
        progress: Called with the number of bytes that were done since the last call.
    """
    policy = policy or DCPImportPolicy()
    storage, name = split_address(source)
    plan = together(lambda: _plan(storage, name, policy))
    if plan.passed_over and world()[0] == 0:
        logger.warning("%s: not taken over: %s", name, ", ".join(plan.passed_over))
    about: Tree = {"from": os.fspath(source), "step": plan.step, "without": ["data"]}
    if policy.config is not None:
        about |= {"hf_config": policy.config, "tied": _tied(policy.config)}
    save_boxes(target, plan.boxes, about, plan.values, progress)


def _plan(storage: Storage, name: str, policy: DCPImportPolicy) -> _Content:
    folder = open_dcp_folder(storage, name)
    state = sort_keys(folder)
    if not state.weights:
        raise CheckpointError(f"{name}: no weights in it: expected keys like model.NAME, or bare names")
    is_tied = bool((policy.config or {}).get("tie_word_embeddings"))
    regions = _regions(folder, state, policy)
    layout = _Layout(folder, state.weights, regions, is_tied)
    boxes = layout.boxes(state.weights, "model/{}")
    values: Tree = {}
    steps: dict[str, float] = {}
    if state.moments and not policy.only_model:
        moments = _by_state(folder, state)
        for key in _MOMENTS:
            boxes |= layout.boxes(moments[key], f"optimizer/state/{{}}/{key}")
        steps = layout.steps(moments["step"])
        for memory, count in steps.items():
            box = SavedBox.whole(f"optimizer/state/{memory}/step", (), torch.float32)
            boxes[box] = partial(torch.tensor, count, dtype=torch.float32)
        matrices = {name for name, found in regions.items() if found and is_matrix_of(name, len(found[0].at))}
        values["optimizer"] = {"groups": _groups(folder, state, matrices)}
    step = _step(folder, state, policy, steps)
    tokens = int(folder.read_number(state.tokens)) if state.tokens else 0
    values |= {"step": step, "progress": {"step": step, "tokens": tokens}}
    return _Content(boxes, values, step, state.passed_over)


def _regions(folder: DCPFolder, state: DCPState, policy: DCPImportPolicy) -> dict[str, list[Region]]:
    """The regions of ours that each weight is; names that nothing is known of are an error."""
    free = [name for name in state.weights if apply_rules(policy.rules, name) is None]
    table = state.weights.get("tok_embeddings.weight")
    width = folder.tensors[table].shape[-1] if table is not None else None
    rules = NameRules(policy.rules, policy.family or family_of(free), policy.config, width)
    found = {name: rules.regions(name, folder.tensors[key].shape) for name, key in state.weights.items()}
    unknown = [name for name, regions in found.items() if regions is None]
    if unknown:
        raise CheckpointError(
            f"{folder.name}: names that no rule knows:{listed(unknown, 20)}\n  map them with --map "
            "'regex=replacement' (--map '(.*)=\\1' takes all as they are, --map 'regex=' leaves some out)"
        )
    return {name: regions for name, regions in found.items() if regions is not None}


def _by_state(folder: DCPFolder, state: DCPState) -> dict[str, dict[str, str]]:
    """The optimizer's keys by kind of state, then by parameter; only AdamW's kinds are known."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in (*_MOMENTS, "step")}
    for name, kinds in state.moments.items():
        for kind, key in kinds.items():
            if kind not in found or kinds.keys() != found.keys():
                raise CheckpointError(
                    f"{folder.name}: {key}: the state of {name} is {', '.join(sorted(kinds))}; only AdamW's "
                    f"({', '.join(found)}) is known; --only-model leaves it"
                )
            found[kind][name] = key
    strangers = sorted(state.moments.keys() - state.weights.keys())
    if strangers:
        raise CheckpointError(
            f"{folder.name}: there is optimizer state of {', '.join(strangers[:5])}"
            f"{' …' if len(strangers) > 5 else ''}, but no such weights; --only-model leaves it"
        )
    return found


class _Layout:
    """Where the tensors of one folder lie in ours."""

    def __init__(
        self, folder: DCPFolder, weights: dict[str, str], regions: dict[str, list[Region]], is_tied: bool
    ) -> None:
        self._folder, self._weights, self._regions, self._is_tied = folder, weights, regions, is_tied

    def boxes(self, keys: dict[str, str], form: str) -> Boxes:
        """Boxes of the tensors that are named; ``form`` makes their names in the checkpoint."""
        found: dict[str, list[tuple[DCPTensor, Region]]] = {}
        for name, key in keys.items():
            tensor, weight = self._folder.tensors[key], self._folder.tensors[self._weights[name]]
            if tensor.shape != weight.shape:
                raise CheckpointError(
                    f"{self._folder.name}: {key}: {tensor.shape}, and its weight is {weight.shape}"
                )
            for region in self._regions[name]:
                found.setdefault(region.memory, []).append((tensor, region))
        boxes: Boxes = {}
        for memory, parts in self._untied(found).items():
            if SEPARATOR in memory:
                raise CheckpointError(f"{memory}: a name cannot have {SEPARATOR!r} in it; look at --map")
            boxes |= self._tensor(form.format(memory), parts)
        return boxes

    def steps(self, keys: dict[str, str]) -> dict[str, float]:
        """The step count of every tensor of ours; where several became one, the largest."""
        counts: dict[str, set[float]] = {}
        for name, key in keys.items():
            count = float(self._folder.read_number(key))
            for region in self._regions[name]:
                counts.setdefault(region.memory, set()).add(count)
        uneven = sorted(memory for memory, found in counts.items() if len(found) > 1)
        if uneven and world()[0] == 0:
            text = "%s: the parts of %s (and %d more) took different numbers of steps; the largest is kept"
            logger.warning(text, self._folder.name, uneven[0], len(uneven) - 1)
        return {memory: max(found) for memory, found in self._untied(counts).items()}

    def _untied(self, found: dict[str, T]) -> dict[str, T]:
        """A tied head is the embedding, whichever of the two names it was saved under."""
        if self._is_tied and _HEAD in found:
            head = found.pop(_HEAD)
            found.setdefault(_EMBEDDING, head)
        return found

    def _tensor(self, name: str, parts: list[tuple[DCPTensor, Region]]) -> Boxes:
        dtype = parts[0][0].dtype
        reach = [region.end for _, region in parts]
        if len({len(end) for end in reach}) > 1:
            raise CheckpointError(f"{self._folder.name}: the parts of {name} have different numbers of dims")
        shape = tuple(map(max, zip(*reach, strict=True)))
        boxes: Boxes = {}
        for tensor, region in parts:
            if tensor.dtype != dtype:
                raise CheckpointError(f"{self._folder.name}: the parts of {name} have different dtypes")
            for chunk in tensor.chunks:
                if (common := region.common(chunk.offsets, chunk.sizes)) is not None:
                    box = SavedBox(name, shape, dtype, region.place_of(common[0]), region.box_of(common[1]))
                    boxes[box] = partial(_make, self._folder, tensor, chunk, region)
        try:
            check_tiling(name, shape, [(box.offsets, box.sizes) for box in boxes])
        except ValueError as error:
            raise CheckpointError(f"{self._folder.name}: {error}; are parts of it missing?") from error
        return boxes


def _make(folder: DCPFolder, tensor: DCPTensor, chunk: DCPChunk, region: Region) -> torch.Tensor:
    """The part of a region that a chunk holds."""
    common = region.common(chunk.offsets, chunk.sizes)
    assert common is not None
    low, sizes = common
    part = folder.read_chunk(tensor, chunk)
    for dim, (first, size) in enumerate(zip(low, sizes, strict=True)):
        part = part.narrow(dim, first - chunk.offsets[dim], size)
    if region.transposed:
        part = part.transpose(-2, -1)
    # The copy lets the chunk go: a small part of it would keep all of it in memory.
    return part.clone(memory_format=torch.contiguous_format).view(region.box_of(sizes))


def _step(folder: DCPFolder, state: DCPState, policy: DCPImportPolicy, steps: dict[str, float]) -> int:
    """The step of the run: as given, as saved, or what the optimizer counted."""
    if policy.step is not None:
        return policy.step
    if state.step is not None:
        return int(folder.read_number(state.step))
    return int(max(steps.values(), default=0))


def _groups(folder: DCPFolder, state: DCPState, matrices: set[str]) -> list[Tree]:
    """The settings of ``fsdmoe.AdamW``'s two groups, which hold matrices and all else, as far as the saved
    ones agree."""
    of_parameter: dict[str, dict[str, str]] = {}
    for name, keys in state.settings.items():
        members = folder.read_object(keys["params"]) if "params" in keys and name.isdigit() else [name]
        if not isinstance(members, list) or not all(isinstance(member, (str, int)) for member in members):
            shown = reprlib.repr(members)
            raise CheckpointError(f"{folder.name}: {keys['params']}: expected names, got {shown}")
        of_parameter |= {plain_name(str(member)): keys for member in members}
    groups: list[Tree] = [{"name": DECAYED}, {"name": NOT_DECAYED}]
    for key in _SETTINGS:
        found: list[list[str]] = [[], []]
        for name, keys in of_parameter.items():
            if key in keys and name in state.moments:
                found[0 if name in matrices else 1].append(keys[key])
        for group, held in zip(groups, found, strict=True):
            settings = {_setting(folder, saved) for saved in set(held)}
            if len(settings) == 1:
                value = settings.pop()
                group[key] = list(value) if isinstance(value, tuple) else value
            elif settings and world()[0] == 0:
                text = "%s: %s of %s parameters differ (%s); the optimizer that loads them keeps its own"
                shown = ", ".join(sorted(map(str, settings)))
                logger.warning(text, folder.name, key, group["name"], shown)
    return groups


def _setting(folder: DCPFolder, key: str) -> float | tuple[float, ...]:
    found = folder.read_object(key)
    numbers = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    if not all(isinstance(number, (int, float)) for number in numbers):
        raise CheckpointError(f"{folder.name}: {key}: expected a number, or some, got {reprlib.repr(found)}")
    return numbers if isinstance(found, (tuple, list)) else numbers[0]


def _tied(config: Tree) -> dict[str, str]:
    return {f"model/{_HEAD}": f"model/{_EMBEDDING}"} if config.get("tie_word_embeddings") else {}
