"""The convention by which a model's weights are named on disk.

==========================  ==================================================================================
a native decoder, and       our own table (:mod:`fsdmoe.checkpoint.hf_names`), so that folders are read and
its family in transformers  written without transformers; a test compares the two
any other model             transformers' table (:mod:`fsdmoe.checkpoint.hf_table`)
unknown to transformers     as in memory, to read a folder: the model says whether it fits. Nothing is written
==========================  ==================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any, Protocol

from torch import nn

from fsdmoe.checkpoint.errors import CheckpointError, listed
from fsdmoe.checkpoint.hf_config import CLASSES
from fsdmoe.checkpoint.hf_names import Names, Piece
from fsdmoe.checkpoint.tree import Tree

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]
_TIED = "tie_word_embeddings"


class Convention(Protocol):
    """How the tensors of one model are named on disk."""

    @property
    def tied(self) -> dict[str, str] | None:
        """Names of tied parameters, with the name each is saved under; None where config.json says it."""
        ...

    def is_in_float32(self, name: str) -> bool:
        """Whether transformers keeps it in float32, whatever the dtype of the model."""
        ...

    def to_disk(self, name: str, shape: Shape) -> list[Piece]:
        """The tensors on disk that a tensor in memory becomes."""
        ...

    def from_disk(self, name: str, shape: Shape) -> Piece | None:
        """Where a tensor on disk belongs; None for what is not kept."""
        ...


NAMES_AS_IN_MEMORY = Names(fused_experts=True)
"""Every tensor on disk has the name and the shape that it has in memory."""


def disk_names(config: Tree, *, native: bool = False) -> Convention:
    """The convention of the model that a config.json describes.

    Args:
        config: The configuration.
        native: For our own decoder, where it makes a difference.

    Raises:
        CheckpointError: It is not known.
    """
    if config.get("model_type") in CLASSES:
        return Names.of(config, native=native)
    return _table().build_names(config)


def names_to_read(config: Tree, *, native: bool = False) -> Convention:
    """The same for a folder that is read: what transformers cannot build has the names that it has in memory,
    and so have the dense models that a native decoder is made from."""
    if config.get("model_type") not in CLASSES and native:
        return NAMES_AS_IN_MEMORY
    try:
        return disk_names(config, native=native)
    except MissingTransformersError:
        raise
    except CheckpointError as error:
        logger.warning("names of weights are taken to be those in memory: %s", error)
        return NAMES_AS_IN_MEMORY


def tied_by(config: Tree, names: Convention) -> dict[str, str]:
    """Names of parameters that a config.json ties, with the name each is saved under."""
    if names.tied is not None:
        return names.tied
    is_tied = config.get(_TIED)
    return {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}


def config_as_held(config: Tree, names: Convention, held: Container[str]) -> Tree:
    """The configuration of a model that holds these tensors in memory: ``tie_word_embeddings`` is false there
    where both of a tied pair are held, each with values of its own. ``from_pretrained`` makes such a model of
    a folder with both, and so does an adapter whose trained head is merged."""
    apart = any(alias in held and owner in held for alias, owner in tied_by(config, names).items())
    return _untied(config) if apart else config


def _untied(config: Tree) -> Tree:
    """With those of its parts that have the key."""
    parts = {k: _untied(v) for k, v in config.items() if isinstance(v, dict) and _TIED in v}
    return config | parts | {_TIED: False}


def check_written(names: Convention, written: Mapping[str, Shape], extra: set[str], config: Tree) -> None:
    """Refuse names and shapes that are not those that transformers expects of a model of this configuration.

    Where it is not installed nothing is compared: the tests compare the table of native families with it.

    Args:
        names: The convention that they were named by.
        written: The shape of every tensor that is to be written.
        extra: Those of them that transformers passes over: multi-token prediction modules.
        config: The configuration that is written next to them.
    """
    if isinstance(names, Names):
        try:
            names = _table().build_names(config)
        except MissingTransformersError:
            return
    expected: dict[str, Shape] = names.disk_shapes  # type: ignore[attr-defined]
    problems = [
        f"{name}: expected, and not in the checkpoint"
        for name in expected.keys() - written.keys()
        if 0 not in expected[name]  # what has no elements changes nothing
    ]
    problems += [f"{name}: not expected" for name in written.keys() - expected.keys() - extra]
    problems += [
        f"{name}: expected {expected[name]}, got {shape}"
        for name, shape in written.items()
        if name in expected and shape != expected[name]
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint cannot be exported as {config.get('model_type')}, because transformers expects "
            f"other weights of its configuration:{listed(sorted(problems), 10)}"
        )


def architectures_of(model: nn.Module, config: Any) -> Tree:
    """The class of transformers that the weights are of, which ``save_pretrained`` writes as well. The
    configuration itself has none if it comes from no folder, and one of a folder may name another class."""
    for module in model.modules():  # an adapter's shell around it comes first
        if getattr(module, "config", None) is config:
            for kind in type(module).__mro__:
                if kind.__module__.startswith("transformers.models."):
                    return {"architectures": [kind.__name__]}
    return {}


class MissingTransformersError(CheckpointError):
    """Names cannot be known, since transformers is not installed."""


def _table() -> Any:
    try:
        from fsdmoe.checkpoint import hf_table  # optional: only when chosen
    except ImportError as error:
        raise MissingTransformersError(str(error)) from error
    return hf_table
