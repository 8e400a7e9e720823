"""The one object the training loop talks to: it turns step records into everything the user sees.

    StepRecord -> row -> metrics.jsonl          <run folder>/metrics.jsonl
                      -> screen                 live line or plain lines
                      -> board                  <run folder>/tensorboard/
                      -> loggers                Weights & Biases, MLflow
                      -> prometheus             http://HOST:PORT/metrics
                      -> history -> summary     <run folder>/summary.txt, loss.svg
    step_profile(n)   -> profiler               <run folder>/profile/trace_rank<r>_....json.gz, exposed_...

Every rank builds one. Only the first rank's writes and prints; the others' serve the profiler.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.observe.busy_ranks import BusyRanks, busiest_rank
from fsdmoe.observe.config import ObserveConfig
from fsdmoe.observe.console import Screen
from fsdmoe.observe.dead_experts import DeadExperts
from fsdmoe.observe.devices import device_name, peak_for, peak_memory_gib
from fsdmoe.observe.drawing import charts_for
from fsdmoe.observe.expert_load import load_figures, loads_to_host
from fsdmoe.observe.history import History
from fsdmoe.observe.metrics import MetricsFile, Row, finite_or_none, row_scalars, unknown_scalars
from fsdmoe.observe.profiler import StepProfiler
from fsdmoe.observe.progress import Clock, progress_line
from fsdmoe.observe.rank_times import by_rank, rank_facts, rank_lines
from fsdmoe.observe.record import RunFacts, StepRecord
from fsdmoe.observe.summary import summary_text


class Observer:
    """Shows and records one start of a run, from step ``facts.start_step + 1`` to ``facts.total_steps``."""

    def __init__(
        self,
        config: ObserveConfig,
        facts: RunFacts,
        *,
        output_dir: str | Path,
        is_main: bool,
        clock: Clock | None = None,
    ) -> None:
        folder = Path(output_dir)
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._config, self._facts, self._clock = config, facts, clock
        self._folder = folder
        self._first_step = ExitStack()
        self._profiler = StepProfiler(
            config, folder=folder / "profile", rank=rank, start_step=facts.start_step
        )
        self._main = _MainRank(config, folder, facts) if is_main else None

    def wants(self, step: int) -> bool:
        """Whether ``step`` will be logged, so that a loop can spare itself the expert loads of the others."""
        first, last = self._facts.start_step + 1, self._facts.total_steps
        return step % self._config.log_interval == 0 or step in (first, last)

    def log_step(self, record: StepRecord) -> None:
        """A step is over: write and show it if it is to be logged, else only move the progress line."""
        self._first_step.close()  # its own line stands before the row
        if self._main is not None:
            self._main.log_step(record, due=self.wants(record.step))

    def log_eval(self, step: int, eval_loss: float, averaged: float | None = None) -> None:
        """An evaluation after ``step`` is over; ``averaged``: of averaged weights."""
        if self._main is not None:
            self._main.log_eval(step, eval_loss, averaged)

    def lacks_evaluation(self, step: int) -> bool:
        """Whether an earlier start ended in the evaluation after ``step``, which this one begins with.
        Collective."""
        return any(from_all_ranks(self._main is not None and self._main.lacks_evaluation(step)))

    def log_samples(self, step: int, samples: Mapping[str, str]) -> None:
        """How the model goes on with each prompt after ``step``; none, and nothing is said."""
        if self._main is not None and samples:
            self._main.log_samples(step, samples)

    @contextmanager
    def step_profile(self, step: int) -> Iterator[None]:
        """Wraps the whole of a step, on every rank: ``with observer.step_profile(step): ...``.

        A first step that lasts, because it compiles, is told about while it does.
        """
        if step == self._facts.start_step + 1:
            what = f"step {step}, the first of this start: compiling and warming up"
            self._first_step.enter_context(progress_line(what, say=self.note, clock=self._clock))
        with self._profiler.step(step), self._first_step:
            yield
        if self._config.exposed and step == self._profiler.last_step:
            self._tell_exposed()

    def _tell_exposed(self) -> None:
        """What the profiled steps were made of, by rank. Collective: all ranks have just done the last."""
        found, num_steps = by_rank(self._profiler.exposure), self._config.profile_steps
        for line in rank_lines(found, num_steps=num_steps):
            self.note(line)
        if found:
            self.describe(rank_facts(found, num_steps=num_steps))

    def leave(self) -> None:
        """The folder is another run's by now: nothing more is written there."""
        if self._main is not None:
            self._main.close_what_is_elsewhere("failed")
            self._main = None

    def go_back(self, step: int, tokens: int | None = None) -> None:
        """The run continues after ``step``, which was earlier, and so many tokens: what was recorded since is
        dropped."""
        self._facts = replace(self._facts, start_step=step, start_tokens=tokens)
        if self._main is not None:
            facts = replace(self._main.facts, start_step=step, start_tokens=tokens)
            self._main.close_files("went back")
            self._main = _MainRank(self._config, self._folder, facts)

    def note(self, text: str) -> None:
        """A line on the console that leaves the progress line whole."""
        if self._main is not None:
            self._main.screen.note(text)

    def card(self, card: Mapping[str, str]) -> None:
        """Show at the start what the run is, a line a fact, and keep it for the summary."""
        width = max(map(len, card))
        for name, text in card.items():
            self.note(f"{name:<{width}}  {text}")
        self.describe(card)

    def describe(self, facts: Mapping[str, object]) -> None:
        """Add lines to the first section of the summary: preset, meshes, optimizer, what made this run."""
        if self._main is not None:
            self._main.facts = replace(self._main.facts, described={**self._main.facts.described, **facts})

    def close(self, status: str) -> None:
        """The run is over, well or not (``status`` says how, in the summary): write what it leaves behind."""
        self._profiler.finish()
        if self._main is not None:
            if self._profiler.missed:
                first = self._profiler.first_step
                self.note(f"no profile: the run ended before step {first}; lower observe.profile_start")
            elif self._profiler.trace_path is not None:
                self.note(f"profile written to {self._profiler.trace_path}")
            self._main.close(status)
            self._main = None


class _MainRank:
    """What the first rank alone does."""

    def __init__(self, config: ObserveConfig, folder: Path, facts: RunFacts) -> None:
        self.facts, self._folder, self._loss_axis = facts, folder, config.loss_axis
        self._peak = peak_for(config, device_name(facts.device))
        self._metrics = MetricsFile(folder / "metrics.jsonl", start_step=facts.start_step)
        self._history = History()
        for row in self._metrics.kept:
            self._history.add(row)
        self._metrics.kept.clear()
        self._board = _open_board(config, folder, facts.start_step) if config.tensorboard else None
        self._loggers = _open_loggers(config, folder, facts.start_step)
        self._server = _open_server(config, folder) if config.prometheus else None
        self._dead_experts = DeadExperts()
        self._busy_ranks = BusyRanks(facts.ep, facts.when_uneven)
        self._pace = Pace()
        self._begin = time.monotonic()
        self._pace.add(self._begin, facts.start_step)
        # What the row before this one ended with; a row tells of everything since.
        self._row_step, self._row_seconds = facts.start_step, 0.0
        self._row_tokens = facts.start_tokens
        self._row_skipped = self._history.skipped
        self._unlogged: StepRecord | None = None
        """The last step, where it has no row yet: the end of the run writes one."""
        self.screen = Screen(config.progress, total_steps=facts.total_steps, start_step=facts.start_step)
        if self._metrics.num_dropped:
            self.screen.note(
                f"metrics.jsonl: dropped {self._metrics.num_dropped} rows that an earlier start wrote after "
                f"step {facts.start_step}"
            )
        if self._peak.tflops is None and facts.device.type != "cpu":
            self.screen.note(f"MFU is not shown: {self._peak.reason}")

    def log_step(self, record: StepRecord, *, due: bool) -> None:
        if record.operands is not None:
            self._metrics.write(finite_or_none({"step": record.step, "operands": record.operands}))
        self._row_seconds += record.seconds
        self._pace.add(time.monotonic(), record.step)
        if not due and record.skipped <= self._row_skipped:
            # Without the loads: they may be on a device, and fetching them at the end could wait for ever.
            self._unlogged = replace(record, loads=None)
            eta_seconds = self._pace.seconds_left(self.facts.total_steps)
            self.screen.advance(record.step, finite_or_none(record.loss), eta_seconds)
            return
        self._log_row(record)

    def _log_row(self, record: StepRecord) -> None:
        self._unlogged = None
        loads = loads_to_host(record.loads or {})
        row = self._make_row(record, loads)
        self._metrics.write(row)
        self._history.add(row)
        if self._board is not None:
            with self._leaving_a_full_disk():
                self._board.step(row, loads)
        for each in self._loggers:
            each.log(record.step, row_scalars(row))
        if self._server is not None:
            counts = {"step": record.step, "skipped": record.skipped}
            self._server.update(counts | unknown_scalars(row) | row_scalars(row))
        self.screen.show(row, self._pace.seconds_left(self.facts.total_steps))
        for line in (self._dead_experts.add(loads), self._busy_ranks.add(row.get("busiest_rank"))):
            if line is not None:
                self.screen.note(line)

    def _make_row(self, record: StepRecord, loads: Mapping[str, Tensor]) -> Row:
        if self._row_tokens is None:  # the first row of this start, in a loop that does not say
            tokens = (record.step - self._row_step) * self.facts.tokens_per_step
        else:
            tokens = record.tokens - self._row_tokens
        seconds = self._row_seconds
        tokens_per_s = tokens / seconds if seconds > 0 else None
        tflops = mfu = None
        if tokens_per_s is not None:
            tflops = tokens_per_s * self.facts.flops_per_token / self.facts.num_ranks / 1e12
            mfu = tflops / self._peak.tflops if self._peak.tflops is not None else None
        row: Row = {
            "step": record.step,
            "tokens": record.tokens,
            "loss": record.loss,
            "lr": record.lr,
            "grad_norm": record.grad_norm,
            "tokens_per_s": tokens_per_s,
            "tflops": tflops,
            "mfu": mfu,
            "memory_gib": peak_memory_gib(self.facts.device),
            "seconds": seconds,
            "skipped": record.skipped,
        }
        if record.loss_scale is not None:
            row["loss_scale"] = record.loss_scale
        if record.sources:
            row["sources"] = dict(record.sources)
        if record.exchange:
            row["exchange"] = dict(record.exchange)
        if record.rewards:
            row |= record.rewards
        if record.attention_logits:
            row["attention_logits"] = dict(record.attention_logits)
        if loads:
            row["experts"] = {layer: asdict(figures) for layer, figures in load_figures(loads).items()}
            if self.facts.ep > 1:
                row["busiest_rank"] = busiest_rank(loads, self.facts.ep, self.facts.num_experts)
        self._row_step, self._row_tokens, self._row_seconds = record.step, record.tokens, 0.0
        self._row_skipped = record.skipped
        return finite_or_none(row)

    def log_eval(self, step: int, eval_loss: float, averaged: float | None = None) -> None:
        row = {"step": step, "eval_loss": eval_loss}
        row = finite_or_none(row if averaged is None else row | {"eval_loss_ema": averaged})
        self._metrics.write(row)
        self._history.add(row)
        if self._server is not None:
            self._server.update(row_scalars(row))
        value = row["eval_loss"]
        if value is None:
            self.screen.note(f"step {step}: evaluation loss is not finite")
            return
        if self._board is not None:
            with self._leaving_a_full_disk():
                self._board.evaluation(row)
        for each in self._loggers:
            each.log(step, row_scalars(row))
        of_average = "" if averaged is None else f", of averaged weights {averaged:.4f}"
        self.screen.note(f"step {step}: evaluation loss {value:.4f}{of_average}")

    def lacks_evaluation(self, step: int) -> bool:
        evals = self._history.evals
        # The step itself may have no row: one that is not due is written at the end, and a kill is none.
        return self._history.last_step > 0 and not (evals and evals[-1].step == step)

    def log_samples(self, step: int, samples: Mapping[str, str]) -> None:
        self._metrics.write({"step": step, "samples": dict(samples)})
        for prompt, text in samples.items():
            self.screen.note(f"step {step}: {prompt!r} goes on with {text!r}")

    def close(self, status: str) -> None:
        if self._unlogged is not None:
            self._log_row(self._unlogged)
        self.close_files(status)
        # A start without a step (the run was finished, or failed at once) leaves the page of the last one.
        if self._history.last_step > self.facts.start_step or not (self._folder / "summary.txt").exists():
            with suppress(OSError):  # a full disk, which is said
                self._write_summary(status)

    @contextmanager
    def _leaving_a_full_disk(self) -> Iterator[None]:
        """What TensorBoard cannot write is the end of its files, not of the run."""
        try:
            yield
        except OSError as error:
            self._board = None
            self.screen.note(f"no more is written for TensorBoard: {error}")

    def close_files(self, status: str) -> None:
        """Nothing more is recorded here."""
        self._metrics.close()
        if self._board is not None:
            with self._leaving_a_full_disk():
                self._board.close()
        self.close_what_is_elsewhere(status)

    def close_what_is_elsewhere(self, status: str) -> None:
        """All that is not in the folder."""
        self.screen.close()
        for each in self._loggers:
            each.close(status)
        if self._server is not None:
            self._server.close()

    def _write_summary(self, status: str) -> None:
        elapsed = time.monotonic() - self._begin
        text = summary_text(self._history, self.facts, status=status, elapsed_seconds=elapsed)
        (self._folder / "summary.txt").write_text(text, encoding="utf-8")
        written = f"summary in {self._folder}/summary.txt"
        history = self._history
        if charts := charts_for("loss.svg"):
            title = f"Loss over {history.last_step} steps"
            chart = charts.loss_chart(
                history.losses,
                history.evals,
                title=title,
                tokens=history.tokens_at,
                loss_axis=self._loss_axis,
            )
            (self._folder / "loss.svg").write_text(chart, encoding="utf-8")
            written = f"summary and loss curve in {self._folder}/summary.txt and loss.svg"
        self.screen.note(f"{status}: {written}")


class Pace:
    """Steps per second over the last records, everything included (evaluation and checkpoints too)."""

    def __init__(self, num_records: int = 50) -> None:
        self._records: deque[tuple[float, int]] = deque(maxlen=num_records)

    def add(self, now: float, step: int) -> None:
        self._records.append((now, step))

    def seconds_left(self, total_steps: int) -> float | None:
        """Estimate until ``total_steps``; None before two different steps are known."""
        (first_time, first_step), (last_time, last_step) = self._records[0], self._records[-1]
        if last_step <= first_step:
            return None
        return (last_time - first_time) / (last_step - first_step) * max(0, total_steps - last_step)


def _open_loggers(config: ObserveConfig, folder: Path, start_step: int) -> list[Any]:
    if not config.loggers:
        return []
    from fsdmoe.observe.loggers import RunLogger

    return [RunLogger(name, folder, project=config.project, start_step=start_step) for name in config.loggers]


def _open_server(config: ObserveConfig, folder: Path) -> Any:
    from fsdmoe.observe.prometheus import MetricsServer  # only where it is asked for

    return MetricsServer(config.prometheus, folder.resolve().name)


def _open_board(config: ObserveConfig, folder: Path, start_step: int) -> Any:
    from fsdmoe.observe.board import Board  # TensorBoard takes a second to import: only where it is asked for

    try:
        return Board(
            folder / "tensorboard",
            start_step=start_step,
            heatmap_interval=config.heatmap_interval,
            heatmap_columns=config.heatmap_columns,
        )
    except OSError as error:  # a full disk does not end the run
        logging.getLogger(__name__).warning("nothing is written for TensorBoard: %s", error)
        return None
