"""The ``checkpoint`` section: when a run is saved, where it resumes from, what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import at_least

RUN_FOLDER = "checkpoints"
"""Where a run keeps its checkpoints, in its own folder."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    interval: int = 500
    """Steps between saves; 0 saves only at the end and on a signal, -1 never."""
    folder: str = ""
    """Where checkpoints go: a folder that all ranks share, or an fsspec address such as
    s3://bucket/run. Empty takes the folder "checkpoints" inside train.output_dir."""
    load: str = "latest"
    """What to start from. "latest" resumes the newest whole checkpoint of this run's folder, or starts from
    scratch when there is none. "none" starts from scratch. Anything else is the folder of a checkpoint, of
    another run's checkpoints or of a Hugging Face model, and the run stops when it cannot be loaded.
    Restarted with the same path, a run goes on from its own newest checkpoint; so does one that its launcher
    starts again (a lost rank, a requeued job), whatever it was told."""
    load_only_model: bool = False
    """Take the model's weights only: a new optimizer, step 0, data from the beginning."""
    keep_last: int = 2
    """Newest checkpoints that are kept; older ones are deleted after the next one is whole."""
    keep_every: int = 0
    """Checkpoints of steps divisible by this are kept for good; 0 keeps none beyond keep_last."""
    asynchronous: bool = True
    """Copy the state to host memory, go on training, and write in the background; one save at a time."""
    in_memory: int = 0
    """Steps between copies of the state in host memory (/dev/shm), each on two nodes. After a lost rank or
    node the run goes on from there, not from the last checkpoint. 0 makes none. The last two copies of each
    rank stay in memory, on both nodes."""
    verify: Literal["fast", "full"] = "fast"
    """Loading with "fast" checks every file's size and the checksum of every block it reads; "full"
    checks the whole checkpoint before anything is loaded."""
    threads: int = 4
    """Files that one rank writes or reads at a time."""
    retries: int = 3
    """How often an operation of the storage (the write of a file, a read, a listing) is tried again after an
    error that may pass: of a network, of a busy server. The pause before is a second, then twice as long each
    time. Each failure is a line with rank, operation and file."""
    hang_seconds: float = 300.0
    """An operation of the storage that makes no progress for so long is given up and named, and the save or
    load fails. Less than 600, for which ranks wait for each other. 0: no limit."""
    max_failed_saves: int = 0
    """Saves that may fail in a row (a full disk, say) before the run stops; each failure is reported."""

    def __post_init__(self) -> None:
        lowest = {"interval": -1, "keep_last": 1, "keep_every": 0, "threads": 1, "max_failed_saves": 0}
        lowest |= {"in_memory": 0, "retries": 0, "hang_seconds": 0}
        problems = at_least("checkpoint", vars(self), lowest)
        if self.hang_seconds >= 600:
            problems.append(
                "checkpoint.hang_seconds: expected less than 600, for which ranks wait for each other, "
                f"got {self.hang_seconds:g}; lower it, or set it to 0 for no limit"
            )
        if self.in_memory and self.interval < 0:
            problems.append(
                "checkpoint.in_memory: expected a run that saves its end, since copies in memory go with it, "
                "got checkpoint.interval = -1; set it to 0 or more"
            )
        if not self.load:
            problems.append(
                'checkpoint.load: expected "latest", "none" or a path, got nothing; write one of them'
            )
        if self.load_only_model and self.load == "none":
            problems.append(
                "checkpoint.load_only_model: there is nothing to load; set checkpoint.load as well"
            )
        refuse(problems)
