"""What the user sees: console, ``metrics.jsonl``, TensorBoard, traces, and the summary of a run."""

from fsdmoe.observe.config import ObserveConfig
from fsdmoe.observe.console import print_evaluation, print_table
from fsdmoe.observe.flops import MLAShape, ModelShape, forward_flops_per_token, training_flops_per_token
from fsdmoe.observe.observer import Observer
from fsdmoe.observe.progress import progress_line
from fsdmoe.observe.record import RunFacts, StepRecord

__all__ = [
    "MLAShape",
    "ModelShape",
    "ObserveConfig",
    "Observer",
    "RunFacts",
    "StepRecord",
    "forward_flops_per_token",
    "print_evaluation",
    "print_table",
    "progress_line",
    "training_flops_per_token",
]
