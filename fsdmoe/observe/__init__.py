"""What the user sees: console, ``metrics.jsonl``, TensorBoard, traces, and the summary of a run."""
# ruff: noqa: F401  what the package offers

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdmoe.core.lazy import lazy_names

if TYPE_CHECKING:
    from fsdmoe.observe.config import ObserveConfig
    from fsdmoe.observe.console import print_evaluation, print_table
    from fsdmoe.observe.observer import Observer
    from fsdmoe.observe.progress import progress_line
    from fsdmoe.observe.record import RunFacts, StepRecord

__getattr__ = lazy_names(__name__, __file__)
