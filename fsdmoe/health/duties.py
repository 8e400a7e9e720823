"""What the ``health`` section adds to the end of each step: an object for a run, with the duties that are on.

======================  ======================================================================================
duty                    when there is one
======================  ======================================================================================
:class:`SpikeDuty`      ``health.on_spike``: an update is left out, lowered or rolled back
:class:`ChecksumDuty`   ``health.checksums``: copies of values are compared
:class:`StepTimeDuty`   ``health.step_times``: the rank that the others wait for is named
:class:`HangDuty`       ``health.hang_seconds``: a step that does not end is explained
:class:`GarbageDuty`    ``health.gc_interval``: garbage collection in the same steps on all ranks
======================  ======================================================================================

Heartbeats (``health.silent_seconds``) are threads and no duty: a step knows nothing of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.core.errors import ConfigError
from fsdmoe.health import host
from fsdmoe.health.checksums import Checksums
from fsdmoe.health.config import HealthConfig
from fsdmoe.health.flight import Lateness, entries, lateness, place_of_ranks, slow_rank
from fsdmoe.health.hang import HangWatch
from fsdmoe.health.heartbeat import Heartbeats, has_several_nodes
from fsdmoe.health.spikes import Spikes
from fsdmoe.mesh import Meshes
from fsdmoe.parallel.step_duties import StepDuty

Tell = Callable[[str], None]
_LOWERED = 0.1
_LOOKS = 3
"""In a row that must find the same slow rank."""


class SpikeDuty(StepDuty):
    def __init__(self, config: HealthConfig, tell: Tell) -> None:
        self._action = config.on_spike
        self._spikes = Spikes(config.spike_factor)
        self._tell = tell
        self.must_go_back = False
        """The last step asks for the newest checkpoint."""

    def begin(self, step: int) -> None:
        self.must_go_back = False

    def before_update(self, optimizer: torch.optim.Optimizer, loss: float) -> bool:
        if not self._spikes.is_spike(loss):
            return True
        self._tell(f"the loss jumped to {loss:.4g}: {self._action} (health.on_spike)")
        if self._action == "lower":
            for group in optimizer.param_groups:
                group["lr"] *= _LOWERED
            return True
        self.must_go_back = self._action == "rollback"
        return False

    def gone_back(self) -> None:
        self._spikes.clear()


class ChecksumDuty(StepDuty):
    def __init__(self, checksums: Checksums, interval: int) -> None:
        self._checksums = checksums
        self._interval = interval
        self._step = 0

    def begin(self, step: int) -> None:
        self._step = step + 1

    def after_update(self, loads_LE: Tensor) -> None:
        if self._step % self._interval == 0:
            self._checksums.compare(self._step)


class StepTimeDuty(StepDuty):
    """Names a rank that was the last in several looks one after another: a single one may be chance."""

    def __init__(self, interval: int, places: list[str], tell: Tell) -> None:
        self._interval = interval
        self._places = places
        self._tell = tell
        self._ends = [time.time_ns()]
        self._slow: list[int | None] = []

    def figures(self, *, is_logged: bool) -> dict[str, Any]:
        self._ends.append(time.time_ns())
        if len(self._ends) > self._interval:
            self._look()
            del self._ends[:-1]
        return {}

    def _look(self) -> None:
        """Collective."""
        seconds = median(after - before for before, after in pairwise(self._ends)) / 1e9
        late = lateness(entries(), self._ends)
        everyones = [Lateness(*each) for each in from_all_ranks([late.seconds, late.where])]
        rank = slow_rank(everyones, seconds)
        self._slow = [*self._slow[1 - _LOOKS :], rank]
        if rank is not None and self._slow == [rank] * _LOOKS:
            found = everyones[rank]
            self._tell(
                f"slow: the others wait at least {found.seconds * 1e3:.0f} of {seconds * 1e3:.0f} ms a step "
                f"for {self._places[rank]}, most in {found.where}"
            )


class HangDuty(StepDuty):
    def __init__(self, watch: HangWatch) -> None:
        self._watch = watch

    def figures(self, *, is_logged: bool) -> dict[str, Any]:
        self._watch.end_step()
        return {}


class GarbageDuty(StepDuty):
    """Collects in the same steps on all ranks: one that does at another time keeps the others waiting."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._num_steps = 0
        gc.collect()
        gc.freeze()  # what was built for the run stays: no later collection looks at it
        gc.disable()

    def figures(self, *, is_logged: bool) -> dict[str, Any]:
        self._num_steps += 1
        if self._num_steps % self._interval == 0:
            gc.collect()
        return {}

    def close(self) -> None:
        gc.enable()
        gc.unfreeze()


class Health:
    """What looks after one run. Building it is collective."""

    def __init__(
        self, config: HealthConfig, model: nn.Module, meshes: Meshes, *, folder: Path, tell: Tell
    ) -> None:
        self.config = config
        self.duties: list[StepDuty] = []
        self.card: dict[str, str] = {}
        self._spikes: SpikeDuty | None = None
        self._closed: list[Callable[[], None]] = []
        self._num_rollbacks = 0
        is_real = dist.get_backend() != "fake"  # in a world that is made up nobody beats
        beats = config.silent_seconds > 0 and is_real and has_several_nodes(meshes.facts)
        asks = config.step_times or config.checksums or config.hang_seconds or beats
        places = place_of_ranks() if asks else []
        if config.on_spike != "none":
            self._spikes = SpikeDuty(config, tell)
            self.duties.append(self._spikes)
        if config.checksums:
            self.duties.append(ChecksumDuty(Checksums(model, meshes, places), config.checksums))
        if config.step_times:
            self.duties.append(StepTimeDuty(config.step_times, places, tell))
        if config.hang_seconds:
            watch = HangWatch(config.hang_seconds, folder, places)
            self.duties.append(HangDuty(watch))
            self._closed.append(watch.close)
        if beats:
            self._closed.append(Heartbeats(config.silent_seconds, folder, places).close)
        if config.gc_interval:
            garbage = GarbageDuty(config.gc_interval)
            self.duties.append(garbage)
            self._closed.append(garbage.close)
            self.card["garbage"] = f"collected every {config.gc_interval} steps, on all ranks at once"
        if config.bind_cores:
            self.card["cores"] = host.bind_cores(meshes.device)

    def must_go_back(self, is_endless: bool) -> bool:
        """Whether the last step asks for the newest checkpoint: its loss was a spike, or it was one of too
        many that were not finite (``is_endless``)."""
        if self.config.on_spike != "rollback" or self._spikes is None:
            return False
        if not (self._spikes.must_go_back or is_endless):
            return False
        if self._num_rollbacks == self.config.max_rollbacks:
            raise ConfigError(
                f"health.max_rollbacks: the loss jumped again after {self.config.max_rollbacks} returns to a "
                "checkpoint; lower optim.lr or look at the data"
            )
        return True

    def gone_back(self) -> None:
        """The run continues from a checkpoint before the spike."""
        assert self._spikes is not None
        self._num_rollbacks += 1
        self._spikes.gone_back()

    def close(self) -> None:
        """The run is over."""
        while self._closed:
            self._closed.pop()()
