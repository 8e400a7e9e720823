"""What the user sees: console, ``metrics.jsonl``, TensorBoard, traces, and the summary of a run."""

from fsdmoe.observe.config import ObserveConfig
from fsdmoe.observe.console import print_evaluation, print_table
from fsdmoe.observe.observer import Observer
from fsdmoe.observe.progress import progress_line
from fsdmoe.observe.record import RunFacts, StepRecord

__all__ = [
    "ObserveConfig",
    "Observer",
    "RunFacts",
    "StepRecord",
    "print_evaluation",
    "print_table",
    "progress_line",
]
