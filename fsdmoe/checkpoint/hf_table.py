"""Names on disk of a transformers model, from transformers' own conversion table.

Imports transformers, so it is itself imported only when chosen (:mod:`fsdmoe.checkpoint.disk_names`).

The model is built on the meta device and its parameters, which are views of one meta tensor, go through what
``save_pretrained`` does to them. What comes out is a view again, and its offset and strides say which box of
which parameter it is::

    mlp.experts.gate_up_proj [E, 2I, H]  ->  split, chunk, rename  ->  mlp.experts.3.up_proj.weight [I, H]
                                                                       at (3*2I + I) * H elements

Then the names go through what ``from_pretrained`` does to them, and must come back to the parameters that
they were taken from. Where they do not, or where a tensor on disk is no box of one parameter (interleaved, or
joined from several), parameters keep their own names, if ``from_pretrained`` takes those as they are. Else
the family is refused.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.gpt_oss import Form
from fsdmoe.checkpoint.hf_names import Piece
from fsdmoe.checkpoint.tree import Tree

try:
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
        revert_weight_conversion,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
except ImportError as error:
    raise ImportError(
        f"transformers 5 is needed for the names of this family's weights: pip install 'fsdmoe[hf]' ({error})"
    ) from error

CONFIG = "config.json"
Shape = tuple[int, ...]


class TransformersNames:
    """The convention of one transformers model: where every tensor on disk belongs."""

    def __init__(self, model: Any) -> None:
        self._kind = str(model.config.model_type)
        self.tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
        """Names of tied parameters, with the name each is saved under."""
        self._shapes: dict[str, Shape] = {
            name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in self.tied
        }
        self._kept = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
        self._loading = _Loading(model)
        pieces = _checked(_saved_pieces(model, self._shapes), self._loading)
        pieces = pieces or _checked(_pieces_as_they_are(self._shapes), self._loading)
        if pieces is None:
            raise CheckpointError(
                f"{self._kind}: transformers {transformers.__version__} does not find all weights again that "
                "it saves itself, so what it looks for in a folder is not known"
            )
        self._by_memory: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._by_memory.setdefault(piece.memory, []).append(piece)
        self._by_renamed = {self._loading.renamed(piece.disk): piece for piece in pieces}

    @property
    def disk_shapes(self) -> dict[str, Shape]:
        """Every tensor of a folder that holds the model and nothing else; those without elements too."""
        return {piece.disk: piece.disk_shape for each in self._by_memory.values() for piece in each}

    def is_in_float32(self, name: str) -> bool:
        """Whether transformers keeps it in float32, whatever the dtype of the model."""
        return any(re.search(pattern.replace("*", ".*"), name) for pattern in self._kept)

    def to_disk(self, name: str, shape: Shape) -> list[Piece]:
        """The tensors on disk that a tensor in memory becomes."""
        saved = self.tied.get(name, name)
        expected = self._shapes.get(saved)
        if expected != shape:
            what = "no such weight" if expected is None else f"{expected}"
            raise CheckpointError(
                f"{name}: a {self._kind} of transformers {transformers.__version__} has {what} there, got "
                f"{shape}; expected the weights that the model's configuration says"
            )
        return [replace(piece, memory=name) for piece in self._by_memory[saved]]

    def from_disk(self, name: str, shape: Shape) -> Piece | None:
        """Where a tensor on disk belongs; None for what ``from_pretrained`` passes over."""
        piece = self._by_renamed.get(self._loading.renamed(name))
        if piece is not None and piece.disk_shape == shape:
            return replace(piece, disk=name)
        memory, is_converted = self._loading.found(name)
        if is_converted:
            raise CheckpointError(
                f"{name}: transformers makes {memory} of it by a conversion that is not read here; load the "
                "model with from_pretrained, and wrap it without load="
            )
        if memory not in self._shapes and self._loading.ignores(memory):
            return None
        return Piece(name, memory, (0,) * len(shape), shape)


def build_names(config: Tree) -> TransformersNames:
    """The names of the model that a config.json describes.

    Raises:
        CheckpointError: transformers cannot build the model, or its weights are no boxes of parameters.
    """
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"model_type: transformers {transformers.__version__} knows no {kind!r}, so the names of its "
            "weights on disk are not known; install the version that has it"
        )
    try:
        parsed = _parsed(config)
        named = getattr(transformers, str((config.get("architectures") or [None])[0]), None)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(parsed) if named is None else named(parsed)
    except Exception as error:  # a model's own code, which may raise anything
        raise CheckpointError(
            f"{kind}: transformers {transformers.__version__} cannot build the model of this configuration "
            f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        ) from error
    return TransformersNames(model)


def _parsed(config: Tree) -> Any:
    """As ``from_pretrained`` reads it from a file, where infinities have a form of their own; for the model
    before it is quantised."""
    stated = {key: value for key, value in config.items() if key != "quantization_config"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(stated))
        return CONFIG_MAPPING[config["model_type"]].from_pretrained(folder)


class _Loading:
    """What ``from_pretrained`` does to names."""

    def __init__(self, model: Any) -> None:
        table = get_model_conversion_mapping(model)
        self._model = model
        self._renamings = [each for each in table if isinstance(each, WeightRenaming)]
        self._converters = [each for each in table if isinstance(each, WeightConverter)]
        self._prefix: str = model.base_model_prefix
        self._state: dict[str, Any] = model.state_dict()
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._ignored = [re.compile(pattern) for pattern in ignored]

    def found(self, name: str) -> tuple[str, bool]:
        """The parameter that a tensor on disk is taken for, and whether its values are converted."""
        renamed, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        if renamed not in self._state and name in self._state:
            renamed, pattern = rename_source_key(name, [], [], self._prefix, self._state)
        return renamed, pattern is not None

    def leaves(self, name: str, shape: Shape) -> bool:
        """Whether the converter of a name leaves a tensor of this shape as it is, as one does that transposes
        only where shapes differ."""
        renamed = self.renamed(name)
        for converter in copy.deepcopy(self._converters):
            memory, pattern = converter.rename_source_key(renamed)
            if pattern is None:
                continue
            if len(converter.source_patterns) > 1 or len(converter.target_patterns) > 1:
                return False
            given: Any = torch.empty(shape, device="meta")
            converter.add_tensor(memory, name, pattern, given)
            with _Views():
                made = converter.convert(memory, model=self._model, config=self._model.config).get(memory)
            made = made[0] if isinstance(made, list) else made
            return made is given
        return True

    def renamed(self, name: str) -> str:
        """The name before conversions: equal for all spellings of one tensor."""
        return rename_source_key(name, self._renamings, [], self._prefix, self._state)[0]

    def ignores(self, name: str) -> bool:
        is_table = name.endswith("rotary_emb.inv_freq")
        return is_table or any(pattern.search(name) for pattern in self._ignored)


@dataclass(frozen=True)
class _Parameter:
    """A parameter as a range of the one meta tensor."""

    name: str
    shape: Shape
    start: int


class _Views(TorchFunctionMode):
    """Keeps views: what would copy them into another order leaves them as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _saved_pieces(model: Any, shapes: Mapping[str, Shape]) -> list[Piece] | None:
    """What ``save_pretrained`` writes; None where a tensor of it is no box of one parameter."""
    parameters: list[_Parameter] = []
    end = 0
    for name, shape in shapes.items():
        parameters.append(_Parameter(name, shape, end))
        end += max(torch.Size(shape).numel(), 1)  # one without elements has its own place too
    whole = torch.empty(end, device="meta")
    views = {
        each.name: whole[each.start : each.start + torch.Size(each.shape).numel()].view(each.shape)
        for each in parameters
    }
    with _Views():
        saved = revert_weight_conversion(model, views)
    starts = [each.start for each in parameters]
    pieces = []
    for disk, view in saved.items():
        if view._base is not whole:
            return None
        parameter = parameters[bisect_right(starts, view.storage_offset()) - 1]
        piece = _piece_of(disk, view, parameter)
        if piece is None:
            return None
        pieces.append(piece)
    return pieces


def _piece_of(disk: str, view: Tensor, parameter: _Parameter) -> Piece | None:
    """The box of a parameter that a view of it is."""
    if not view.numel():
        whole = Piece(disk, parameter.name, (0,) * view.ndim, tuple(view.shape))
        return whole if whole.sizes == parameter.shape else None
    strides = torch.empty(parameter.shape, device="meta").stride()
    rest = view.storage_offset() - parameter.start
    low = []
    for size, stride in zip(parameter.shape, strides, strict=True):
        low.append(rest // stride % size)
    # dims of one element have any stride; those of several have one each, as the parameter is contiguous
    dim_of = {
        stride: dim for dim, (n, stride) in enumerate(zip(parameter.shape, strides, strict=True)) if n > 1
    }
    sizes = [1] * len(parameter.shape)
    order = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        dim = dim_of.get(stride)
        if dim is None or low[dim] + size > parameter.shape[dim]:
            return None
        sizes[dim] = size
        order.append(dim)
    forms: tuple[Form, ...] = ("plain", "swapped") if len(sizes) > 1 else ("plain",)
    for form in forms:
        for drops_first in (False, True):
            piece = Piece(disk, parameter.name, tuple(low), tuple(sizes), form, drops_first)
            is_possible = not drops_first or (len(sizes) > 1 and sizes[0] == 1 and form == "plain")
            if is_possible and piece.disk_shape == tuple(view.shape) and order == _order(sizes, form):
                return piece
    return None


def _order(sizes: list[int], form: Form) -> list[int]:
    """The dims of several elements, as they follow each other on disk."""
    dims = list(range(len(sizes)))
    if form == "swapped":
        dims[-2:] = reversed(dims[-2:])
    return [dim for dim in dims if sizes[dim] > 1]


def _pieces_as_they_are(shapes: Mapping[str, Shape]) -> list[Piece]:
    return [Piece(name, name, (0,) * len(shape), shape) for name, shape in shapes.items()]


def _checked(pieces: list[Piece] | None, loading: _Loading) -> list[Piece] | None:
    """The pieces, if ``from_pretrained`` takes each for the parameter that it is of; None if not."""
    for piece in sorted(pieces or [], key=lambda piece: dot_natural_key(piece.disk)):
        memory, is_converted = loading.found(piece.disk)
        is_as_it_is = piece.disk == piece.memory and piece.form == "plain" and not piece.drops_first
        if memory != piece.memory:
            return None
        if is_as_it_is and is_converted and not loading.leaves(piece.disk, piece.sizes):
            return None
    return pieces
