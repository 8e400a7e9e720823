"""The ``observe`` section: what a run shows on the console and leaves in its folder."""

import importlib.util
import re
from dataclasses import dataclass
from typing import Literal, get_args

from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import at_least, one_of

Progress = Literal["auto", "on", "off"]
Precision = Literal["bf16", "fp8", "fp32"]
LossAxis = Literal["auto", "linear", "log"]
LoggerName = Literal["wandb", "mlflow"]


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """What the user sees while a run goes on, and what it leaves behind."""

    log_interval: int = 10
    """Steps between two rows of metrics.jsonl (and of TensorBoard, and two plain console lines). The first
    step of a start, the last step done and every skipped step are logged too."""

    progress: Progress = "auto"
    """The live progress line. auto: on a terminal yes, into a file or a pipe plain lines instead; on and off
    force the one or the other."""

    tensorboard: bool = True
    """Write TensorBoard scalars and expert-load heat maps into <run folder>/tensorboard."""

    heatmap_interval: int = 100
    """Steps after which the expert loads of all MoE layers are saved for the picture in TensorBoard. It is
    drawn then if the run is half as long again as in the last one, and at the end. 0 turns both off."""

    heatmap_columns: int = 256
    """Most columns of a heat map. When it is full, neighbouring columns are added up in pairs, so that the
    picture spans the whole run in bounded memory."""

    loggers: tuple[LoggerName, ...] = ()
    """Where rows go besides the run's folder: wandb (Weights & Biases) and mlflow, each with the extra of its
    name. They take their own environment variables: WANDB_MODE=offline, MLFLOW_TRACKING_URI. A logger that
    fails is left out with a warning, and the run goes on."""

    project: str = "fsdmoe"
    """The project of Weights & Biases, or the experiment of MLflow, that the run belongs to."""

    prometheus: str = ""
    """Where the newest row can be asked for by Prometheus, as HOST:PORT: 0.0.0.0:9400 for other machines,
    127.0.0.1:9400 for this one. Empty: nowhere."""

    loss_axis: LossAxis = "auto"
    """The loss axis of loss.svg: linear or log. auto takes log where the highest loss is at least three times
    the lowest, whose tail would be flat on a linear axis."""

    profile: bool = False
    """Write a Chrome trace (CPU and, where there is one, GPU) of some steps into <run folder>/profile, to be
    opened at ui.perfetto.dev or chrome://tracing."""

    profile_start: int = 10
    """First step to profile, counted from the start of this process: 10 is step 10 of a new run and step 510
    of a run resumed at 500. The step before it warms the profiler up."""

    profile_steps: int = 3
    """How many steps in a row to profile. Traces are large: a few steps are enough."""

    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that write a trace, each into a file of its own; empty means every rank."""

    exposed: bool = False
    """Turn the profiled steps into a table and a picture of compute and of hidden and exposed time by kind of
    traffic: <run folder>/profile/exposed_*.txt and .svg. Profiles, whether profile says so or not. With
    several profile_ranks the slowest of them is named."""

    ranges: bool = False
    """Name each layer's forward and backward, and its attention's and experts', as NVTX ranges for Nsight
    Systems. Traces have these names in any case."""

    peak_precision: Precision = "bf16"
    """Which peak of the device MFU is measured against: that of the precision most matrix products run in."""

    peak_tflops: float | None = None
    """Peak dense TFLOP/s of one device, for MFU on a device that the built-in table does not know (or to
    measure against another figure than the data sheet's)."""

    @property
    def profiles(self) -> bool:
        """Whether some steps are traced."""
        return self.profile or self.exposed

    @property
    def names_ranges(self) -> bool:
        """Whether a profiler may look at this run."""
        return self.profiles or self.ranges

    def __post_init__(self) -> None:
        lowest = {
            "log_interval": 1, "heatmap_interval": 0, "heatmap_columns": 2, "profile_start": 1,
            "profile_steps": 1,
        }  # fmt: skip
        choices = {
            "progress": get_args(Progress),
            "peak_precision": get_args(Precision),
            "loss_axis": get_args(LossAxis),
        }
        problems = at_least("observe", vars(self), lowest) + one_of("observe", vars(self), choices)
        for name in self.loggers:
            problems += one_of("observe", {"loggers": name}, {"loggers": get_args(LoggerName)})
            if name in get_args(LoggerName) and importlib.util.find_spec(name) is None:
                problems.append(
                    f"observe.loggers: expected {name} to be installed, found no such package; "
                    f"pip install 'fsdmoe[{name}]', or leave it out"
                )
        if self.prometheus and not re.fullmatch(r"[^:\s]+:\d+", self.prometheus):
            problems.append(
                f"observe.prometheus: expected HOST:PORT, got {self.prometheus!r}; write 127.0.0.1:9400, or "
                "0.0.0.0:9400 for other machines"
            )
        if any(rank < 0 for rank in self.profile_ranks):
            problems.append(
                f"observe.profile_ranks: expected ranks of 0 or more, got {list(self.profile_ranks)}; "
                "list global ranks, or leave it empty for all of them"
            )
        if self.peak_tflops is not None and not 0 < self.peak_tflops < float("inf"):
            problems.append(
                f"observe.peak_tflops: expected a positive number, got {self.peak_tflops}; "
                "give the dense peak of one device in TFLOP/s or leave the key out"
            )
        refuse(problems)
