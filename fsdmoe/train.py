"""A training run: ``torchrun train.py --config configs/quickstart.toml``, or ``fsdmoe train``.

Read this file first: it builds everything in order, then loops. A batch goes from ``fsdmoe/data`` through
``fsdmoe/models/decoder.py`` and ``fsdmoe/experts/moe.py`` to the loss; gradients come back through
``fsdmoe/fsdp`` to ``fsdmoe/optim``.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.check.self_check import run_self_check, wants_self_check
from fsdmoe.checkpoint import RUN_FOLDER, Checkpointer
from fsdmoe.config import CommandLine, Config, load_config, start_meshes
from fsdmoe.config.elastic import fit_mesh, told_mesh
from fsdmoe.core import events, failures, lifecycle
from fsdmoe.core.hush import hush_libraries
from fsdmoe.feed import Feed, open_data
from fsdmoe.graphs import build_micro_batches
from fsdmoe.health.duties import Health
from fsdmoe.huggingface.folder import require_weights
from fsdmoe.huggingface.preference import PreferenceLM
from fsdmoe.kernels.backend import choose_kernels, use_fixed_order
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.observe import Observer, StepRecord, print_evaluation, progress_line
from fsdmoe.optim import (
    WeightAverage,
    build_optimizer,
    clip_grad_norm,
    freeze,
    group_lines,
    learning_rate,
    set_learning_rates,
)
from fsdmoe.parallel.auto_model import ModelKind, build_any_model
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.parallel.step_duties import step_duties
from fsdmoe.plan.dry_run import dry_run
from fsdmoe.plan.recompute import decide_memory, free_bytes
from fsdmoe.precision.config import torch_dtype
from fsdmoe.run import kept_config, lock
from fsdmoe.run.facts import run_facts, start_card
from fsdmoe.run.samples import Samples


class Run:
    """One training run: what was built, and how far it got."""

    def __init__(
        self,
        config: Config,
        meshes: Meshes,
        *,
        trains: bool = True,
        told: frozenset[str] = frozenset(),
        decisions: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.meshes = meshes
        self._folder = Path(config.train.output_dir).expanduser()
        self._is_main = trains and dist.get_rank() == 0
        model, kind = build_any_model(config.model, config.experts, config.adapter)
        freeze(model, config.optim.groups)
        self._open_data(kind, trains=trains)
        self._open_checkpoints(told, trains=trains)
        self._shard(model, kind)
        self._build_step(trains=trains)
        is_resumed = self._resume(trains=trains)
        self._watch(told, decisions, is_resumed=is_resumed, trains=trains)

    def _open_data(self, kind: ModelKind, *, trains: bool) -> None:
        config = self.config
        dtype = torch_dtype(config.precision.param_dtype)
        self.feed = Feed(
            self.meshes,
            config.context_parallel,
            config.experts,
            own_attention=kind.own_attention,
            dtype=dtype,
        )
        with progress_line("opening the data"):
            self.data = open_data(
                config.data,
                dp_rank=self.meshes.rank(self.feed.data_axis),
                dp_size=self.meshes.size(self.feed.data_axis),
                micro_batch_size=config.train.micro_batch_size,
                global_batch_size=config.train.global_batch_size,
                seed=config.train.seed,
                prepare=self.feed.prepare,
                trains=trains,
            )

    def _open_checkpoints(self, told: frozenset[str], *, trains: bool) -> None:
        checkpoint = self.config.checkpoint
        if not trains:
            checkpoint = replace(checkpoint, in_memory=0, interval=-1)
        about = asdict(self.config)
        self.checkpoints = Checkpointer(
            checkpoint, self._folder / RUN_FOLDER, meshes=self.meshes, about=about
        )
        self.checkpoints.told = told

    def _shard(self, model: nn.Module, kind: ModelKind) -> None:
        """The model as ranks share it, and how its loss is computed."""
        config = self.config
        load = require_weights(config.model, config.precision, resumes=self.checkpoints.will_load())
        with progress_line("sharding the model" if load is None else f"sharding the model, loading {load}"):
            self.model = parallelize(model, self.meshes, ParallelPolicy.from_config(config), load=load)
        self.decoder = kind.causal_lm(packed_rows=config.data.seq_len if config.data.pack else 0)
        if config.data.pack:
            self.feed.plan_packed_rows(self.decoder, config.data.seq_len)
        if config.data.has_pairs:
            self.decoder = PreferenceLM(self.decoder, config.preference)

    def _build_step(self, *, trains: bool) -> None:
        """What a step calls, and how far the run is."""
        config = self.config
        train = config.train
        self.optimizer = build_optimizer(self.model, config.optim)
        self.average = WeightAverage(self.model, config.optim.ema) if config.optim.ema.decay else None
        bias_rate = config.experts.balance.bias_rate
        self.duties = step_duties(
            self.model, self.decoder, bias_rate, config.optim, self.average, seed=train.seed
        )
        self.moe_layers = [f"layer {number}" for number in self.decoder.moe_layers()]
        self.max_norm = config.optim.grad_clip or math.inf
        self.scaler = config.precision.build_scaler(num_tokens=train.global_batch_size * config.data.seq_len)
        self.micro_batches = build_micro_batches(self.model, self.decoder, self.scaler, train, trains=trains)
        vocab_size = config.model.vocab_size
        self.samples = Samples(train.sample_prompts, config.data, self.meshes.device, vocab_size=vocab_size)
        self.progress = {"step": 0, "tokens": 0, "skipped": 0, "skipped_in_a_row": 0}

    def _resume(self, *, trains: bool) -> bool:
        """From a checkpoint, if there is one to resume from; whether there was."""
        with progress_line("loading a checkpoint, taking memory for the next ones"):
            if trains:
                loaded = self.checkpoints.load(self.state())
            else:
                parts = self.state_without_data()  # an evaluation may read other documents
                is_optional = self.config.model.hf is not None
                loaded = self.checkpoints.load_only(parts, is_optional=is_optional)
        if loaded is not None:
            self._take_up(loaded)
        return loaded is not None

    def _watch(
        self, told: frozenset[str], decisions: Mapping[str, str] | None, *, is_resumed: bool, trains: bool
    ) -> None:
        """Open what the user sees, and say what is about to run."""
        config = self.config
        step = self.progress["step"]
        facts = run_facts(config, self.meshes, self.model, step, self.progress["tokens"])
        self.observer = Observer(config.observe, facts, output_dir=self._folder, is_main=self._is_main)
        card = start_card(
            config,
            self.meshes,
            self.model,
            self.data,
            resumed_at=step if is_resumed else None,
            loaded=self.checkpoints.loaded,
            decisions=decisions,
        )
        # An evaluation leaves the folder as it is: stacks are written there.
        health = config.health if trains else replace(config.health, hang_seconds=0)
        self.health = Health(health, self.model, self.meshes, folder=self._folder, tell=self._tell)
        self.duties += self.health.duties
        groups = group_lines(self.model, self.optimizer, config.optim.groups)
        self.observer.card(card | groups | self.health.card | self.checkpoints.card)
        self._note_event(
            "restart" if events.read(self._folder) else "start",
            step=step,
            ranks=dist.get_world_size(),
            began=failures.started_at(),
            **({"changed": sorted(told)} if told else {}),
        )
        if trains and step >= config.train.steps:
            logging.info("nothing left to train: raise train.steps, or start anew: --checkpoint.load none")

    def state(self) -> dict[str, Any]:
        """Everything that this run is, for a checkpoint."""
        progress = {**self.progress, "loss_scale": self.scaler.state_dict()}
        parts = {n: getattr(self, n) for n in ("model", "optimizer", "data")} | {"progress": progress}
        return parts if self.average is None else parts | {"ema": self.average}

    def state_without_data(self) -> dict[str, Any]:
        """The same without the place in the training documents."""
        return {name: part for name, part in self.state().items() if name != "data"}

    def train_step(self, inputs: Any = None, began: float = 0.0) -> StepRecord:
        """Forward and backward of every micro-batch, then one optimizer step if all is finite."""
        began = began or time.perf_counter()
        progress = self.progress
        for duty in self.duties:
            duty.begin(progress["step"])
        inputs = inputs or self.feed.inputs(self.data.next_step())
        counts = self.feed.count(self.decoder, inputs)
        loads_LE: Any = None
        loss = torch.zeros((), device=self.meshes.device)
        for index, batch in enumerate(inputs):
            number = progress["step"] * len(inputs) + index
            routing = self.feed.routing(batch, micro_batch=number, prior_load_LE=loads_LE)
            out = self.micro_batches.run(batch, counts, routing, last=index == len(inputs) - 1)
            loss += out.cross_entropy
            loads_LE = out.loads_LE if loads_LE is None else loads_LE + out.loads_LE
        norm = clip_grad_norm(self.model, self.max_norm, self.scaler)
        self.meshes.add_up(loss, Axis.LOSS)
        self.meshes.add_up(loads_LE, Axis.WORLD)
        # The step's one wait for the device.
        loss_value, norm_value, num_tokens = torch.stack((loss, norm.total, counts.tokens)).tolist()
        is_finite = math.isfinite(loss_value + norm_value)
        asked_again = [duty.must_repeat(is_finite) for duty in self.duties]  # all of them: it is collective
        if any(asked_again):
            self.optimizer.zero_grad()
            for duty in self.duties:
                duty.discard()
            return self.train_step(inputs, began)
        self.feed.end_step(progress["step"], loss_value)

        progress["step"] += 1
        rate = learning_rate(self.config.optim, progress["step"], self.config.train.steps)
        if self.scaler.enabled:
            self.scaler.update(norm_value if math.isfinite(loss_value) else loss_value)
        is_taken = is_finite
        if is_finite:
            set_learning_rates(self.optimizer, self.config.optim, progress["step"], self.config.train.steps)
            is_taken = all(duty.before_update(self.optimizer, loss_value) for duty in self.duties)
        if is_taken:
            self.optimizer.step()
            for duty in self.duties:
                duty.after_update(loads_LE)
        self.optimizer.zero_grad()
        progress["skipped"] += not is_taken
        in_a_row = progress["skipped_in_a_row"] + (not self.scaler.fell)
        progress["skipped_in_a_row"] = 0 if is_taken else in_a_row
        progress["tokens"] += round(num_tokens)  # without padding
        is_logged = self.observer.wants(progress["step"])
        figures: dict[str, Any] = {}
        for duty in self.duties:
            figures |= duty.figures(is_logged=is_logged)
        return StepRecord(
            step=progress["step"],
            tokens=progress["tokens"],
            loss=loss_value,
            lr=rate,
            grad_norm=norm_value,
            seconds=time.perf_counter() - began,
            loads=dict(zip(self.moe_layers, loads_LE, strict=True)),
            sources=self.data.figures() if is_logged else None,
            skipped=progress["skipped"],
            loss_scale=self.scaler.value if self.scaler.enabled else None,
            **figures,
        )

    def evaluate(self, received: Sequence[int] = ()) -> float:
        """The mean loss over the held-out documents; :class:`~fsdmoe.core.lifecycle.AskedToStop`
        at a signal."""
        return self.feed.held_out_loss(
            self.decoder,
            self.data.eval_batches(self.config.train.eval_batches),
            before_each=lambda: lifecycle.leave_if_asked(received, self.meshes.device),
        )

    def evaluate_average(self, received: Sequence[int] = ()) -> float | None:
        """The same of the averaged weights, if there are any."""
        if self.average is None:
            return None
        with self.average.applied():
            return self.evaluate(received)

    def loop(self, received: list[int]) -> str:
        """Step until the run is done or asked to stop; returns how it ended."""
        train = self.config.train
        progress = self.progress
        first = progress["step"] + 1
        is_due = train.evaluates_at(first - 1) and self.observer.lacks_evaluation(first - 1)
        if is_due and (asked := self._evaluate_and_log(first - 1, received)):
            return f"{lifecycle.STOPPED}{asked}"
        while progress["step"] < train.steps:
            step = progress["step"] + 1
            with self.observer.step_profile(step):
                self.observer.log_step(self.train_step())
            if step == first:
                self._note_event("ready", step=step)
            is_endless = progress["skipped_in_a_row"] > train.max_skipped_steps
            if self.health.must_go_back(is_endless) and self._go_back():
                continue
            lifecycle.refuse_endless_skips(progress["skipped_in_a_row"], train.max_skipped_steps)
            is_last = step == train.steps
            asked = lifecycle.signal_of_any_rank(received, self.meshes.device)
            is_saved = self._save(step, is_end=is_last or bool(asked))  # first: an evaluation may fail
            if not asked and train.evaluates_at(step):
                asked = self._evaluate_and_log(step, received)
                if asked and not (is_saved and self.checkpoints.is_saved()):
                    self._save(step, is_end=True)
                is_last = is_last and not asked  # its evaluation is yet to be made
            if asked and not is_last:
                return f"{lifecycle.STOPPED}{asked}"
        return "finished"

    def _save(self, step: int, *, is_end: bool) -> bool:
        """Where it is due or the run ends here; whether it was."""
        is_end = is_end and self.config.checkpoint.interval >= 0
        is_saved = self.checkpoints.maybe_save(step, self.state, is_last=is_end)
        if is_saved:
            assert self.checkpoints.record is not None
            self._note_event("save", step=step, stall=round(self.checkpoints.record.stall_seconds, 3))
        return is_saved

    def _evaluate_and_log(self, step: int, received: list[int]) -> str:
        """The name of a signal that came meanwhile, for which the evaluation was left; empty without one."""
        try:
            losses = self.evaluate(received), self.evaluate_average(received)
        except lifecycle.AskedToStop as asked:
            return str(asked)
        self.observer.log_eval(step, *losses)
        self.observer.log_samples(step, self.samples.generate(self.decoder))
        return ""

    def _go_back(self) -> bool:
        """To the newest checkpoint, with the data behind what was read: the same rows would do the same.
        Whether there was one."""
        loaded = self.checkpoints.go_back(self.state_without_data())
        if loaded is None:
            self._tell("there is no checkpoint of this run to go back to yet: the step's update is left out")
            return False
        self.health.gone_back()
        self._take_up(loaded)
        self.progress["skipped_in_a_row"] = 0
        self.observer.go_back(self.progress["step"], self.progress["tokens"])
        self._note_event("rollback", step=self.progress["step"])
        return True

    def _take_up(self, loaded: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: ``loaded`` are its plain values, its tensors are in place."""
        if self.average is not None:
            self.average.follow_load()
        stored = dict(loaded.get("progress", {}))
        self.scaler.load_state_dict(stored.pop("loss_scale", {}))
        self.progress |= stored

    def _tell(self, text: str) -> None:
        self.observer.note(text)
        self._note_event("fault", step=self.progress["step"], text=text)

    def _note_event(self, event: str, **facts: Any) -> None:
        if self._is_main:
            events.append(self._folder, event, **facts)

    def leave_folder(self) -> None:
        """Write nothing more there: it is another run's."""
        self._is_main = False
        self.observer.leave()

    def close(self, status: str) -> None:
        self.health.close()
        self._note_event("end", step=self.progress["step"], status=status)
        if status == "finished":
            self.checkpoints.end_course()
        self.data.close()
        self.micro_batches.close()
        self.observer.close(status)


def train(command: CommandLine) -> int:
    """Train, evaluate or plan as the command line asks; returns the exit code. Collective."""
    hush_libraries()
    config = fit_mesh(command.config, command.world_size)
    if command.dry_run:
        return dry_run(config, command.world_size, command.problems, command.gpu)
    command.warn_of_device(has_gpu=torch.cuda.is_available())
    is_main = failures.own_rank() == 0
    logging.basicConfig(level=logging.INFO if is_main else logging.ERROR, format="%(message)s")
    folder = Path(command.config.train.output_dir).expanduser()
    with lifecycle.Ending(folder) as ending:
        choose_kernels(command.config.train.kernels)
        if command.config.train.deterministic:
            use_fixed_order()
        meshes = start_meshes(config)
        failures.register_rank()
        received = [] if command.evaluate_only else ending.catch_signals()
        with lifecycle.watch_launcher(folder, received):
            failures.expect_kill()
            if command.check_only or (wants_self_check(config, meshes) and not command.evaluate_only):
                code = run_self_check(config, meshes, only=command.check_only)
                if command.check_only:
                    ending.status, ending.code = "checked", code
                    dist.destroy_process_group()  # also after a failed check: all ranks are here
                    return code
            locks = lock.hold_folders(command, ending)
            decision = decide_memory(config, command.world_size, free_bytes(meshes.device))
            decisions = decision.told | told_mesh(command.config, config, command.world_size)
            kept = kept_config.keep_config(command, meshes, decisions)
            trains = not command.evaluate_only
            run = Run(decision.config, meshes, trains=trains, told=kept.told, decisions=decisions)
            kept.write()  # not earlier where checkpoints are: until they are loaded, the old one is theirs
            locks.guard(run.checkpoints, ending, run.leave_folder)
            ending.on_close = run.close
            ending.progress = run.progress
            if command.evaluate_only:
                print_evaluation(run.evaluate(), run.progress["step"], is_main=is_main)
            status = "evaluated" if command.evaluate_only else run.loop(received)
            run.checkpoints.close()
            ending.status, ending.code = status, lifecycle.exit_code(status, received)
    return ending.code


if __name__ == "__main__":  # torchrun -m fsdmoe.train
    code = train(load_config(sys.argv[1:]))
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()  # NCCL warns otherwise
    sys.exit(code)
