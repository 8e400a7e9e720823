"""Chrome traces of chosen steps, one file a rank, and what they say of hidden and exposed time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fsdmoe.observe.config import ObserveConfig
from fsdmoe.observe.drawing import charts_for
from fsdmoe.observe.exposed import Exposure, exposure, table
from fsdmoe.observe.exposed_trace import read_trace


class StepProfiler:
    """Records ``profile_steps`` steps from the ``profile_start``-th of this process on, if this rank is asked
    to.

        step        ...   first - 1   first  ...  last
        profiler    off   warm-up     recording   written, off

    The warm-up step keeps the start-up cost of the tracer out of the trace.
    """

    def __init__(self, config: ObserveConfig, *, folder: Path, rank: int, start_step: int = 0) -> None:
        chosen = not config.profile_ranks or rank in config.profile_ranks
        self._wanted = config.profiles and chosen
        self._takes_apart = config.exposed
        self.first_step = start_step + config.profile_start
        self.last_step = self.first_step + config.profile_steps - 1
        has_step_before = config.profile_start > 1
        self._warm_up = self.first_step - 1 if has_step_before else self.first_step
        self._folder = folder
        self._rank = rank
        self._profile: profile | None = None
        self._recorded: list[int] = []
        self.trace_path: Path | None = None
        """The file written, once it is."""
        self.exposure: Exposure | None = None
        """Of the steps in it, with ``observe.exposed``."""

    @property
    def missed(self) -> bool:
        """Whether a trace was asked for and has not been written (yet)."""
        return self._wanted and self.trace_path is None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Wrap one whole step."""
        if not self._wanted or not self._warm_up <= step <= self.last_step or self.trace_path is not None:
            yield
            return
        if self._profile is None:
            self._profile = self._start(warm_up=step < self.first_step)
        with record_function(f"train step {step}"):
            yield
        if step >= self.first_step:
            self._recorded.append(step)
        self._profile.step()  # after the last of them this writes the trace
        if step == self.last_step:
            self.finish()

    def _start(self, *, warm_up: bool) -> profile:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        num_steps = self.last_step - self.first_step + 1
        started = profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=int(warm_up), active=num_steps, repeat=1),
            on_trace_ready=self._export,
        )
        started.start()
        return started

    def finish(self) -> None:
        """Stop; a run that ends amid the chosen steps writes what it has."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _export(self, finished: profile) -> None:
        if not self._recorded:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        steps = f"steps{self._recorded[0]}-{self._recorded[-1]}"
        path = self._folder / f"trace_rank{self._rank}_{steps}.json.gz"
        finished.export_chrome_trace(str(path))
        self.trace_path = path
        if self._takes_apart:
            self._take_apart(path, steps)

    def _take_apart(self, trace: Path, steps: str) -> None:
        timeline, name = read_trace(trace), f"exposed_rank{self._rank}_{steps}"
        self.exposure = exposure(*timeline)
        title = f"Rank {self._rank}, {steps.replace('steps', 'steps ')}: compute and traffic"
        text = "\n".join([title, *table(self.exposure, num_steps=len(self._recorded))])
        (self._folder / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")
        if charts := charts_for(f"{name}.svg"):
            picture = charts.exposed_chart({f"rank {self._rank}": timeline}, title=title)
            (self._folder / f"{name}.svg").write_text(picture, encoding="utf-8")
