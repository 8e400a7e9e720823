"""Checkpoints that reshard to anything and cannot be lost; Hugging Face and stock DCP interchange."""
# ruff: noqa: F401  what the package offers

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdmoe.core.lazy import lazy_names

if TYPE_CHECKING:
    from fsdmoe.checkpoint.adapter_export import to_adapter
    from fsdmoe.checkpoint.adapter_merge import MergePolicy, merge_adapter
    from fsdmoe.checkpoint.api import LoadPolicy, load, save
    from fsdmoe.checkpoint.checkpointer import Checkpointer
    from fsdmoe.checkpoint.config import RUN_FOLDER, CheckpointConfig
    from fsdmoe.checkpoint.dcp_export import DCPExportPolicy, to_dcp
    from fsdmoe.checkpoint.dcp_import import DCPImportPolicy, from_dcp
    from fsdmoe.checkpoint.dcp_placements import plain_placements
    from fsdmoe.checkpoint.errors import CheckpointError, DamagedCheckpointError
    from fsdmoe.checkpoint.hf_export import ExportPolicy, to_hf
    from fsdmoe.checkpoint.hf_import import from_hf
    from fsdmoe.checkpoint.parts import Checkpointed
    from fsdmoe.checkpoint.upcycling import UpcyclePolicy, upcycle

__getattr__ = lazy_names(__name__, __file__)
