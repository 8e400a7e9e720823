"""Train a Mixture-of-Experts language model: ``torchrun train.py --config configs/quickstart.toml --mesh.ep
2``.

Read this file first: it builds everything in order, then loops. A batch goes from ``fsdmoe/data`` through
``fsdmoe/models/decoder.py`` and ``fsdmoe/experts/moe.py`` to the loss; gradients come back through
``fsdmoe/fsdp`` to ``fsdmoe/optim``.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from fsdmoe.config import Config, load_config
from fsdmoe.data import Batch, build_data
from fsdmoe.errors import ConfigError
from fsdmoe.experts.bias import update_biases
from fsdmoe.experts.context import RoutingContext
from fsdmoe.lifecycle import any_rank, catch_signals, lost_peer_message
from fsdmoe.mesh import Axis, Meshes, build_meshes
from fsdmoe.models import Decoder, StepCounts, build_model, model_shape
from fsdmoe.observe import Observer, StepRecord, print_table
from fsdmoe.optim import build_optimizer, learning_rate
from fsdmoe.parallelize import ParallelPolicy, parallelize


class Run:
    """One training run: what was built, and how far it got."""

    def __init__(self, config: Config, meshes: Meshes) -> None:
        self.config, self.meshes = config, meshes
        train = config.train
        self.data = build_data(
            config.data,
            dp_rank=meshes.rank(Axis.BATCH),
            dp_size=meshes.size(Axis.BATCH),
            micro_batch_size=train.micro_batch_size,
            global_batch_size=train.global_batch_size,
            seed=train.seed,
        )
        if self.data.vocab_size > config.model.vocab_size:
            raise ConfigError(
                f"model.vocab_size: the tokenizer has {self.data.vocab_size} tokens, the model "
                f"{config.model.vocab_size}; raise it to at least {self.data.vocab_size}"
            )
        policy = ParallelPolicy.from_config(config)
        self.model: Decoder = parallelize(build_model(config.model, config.experts), meshes, policy)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.step = self.tokens = self.skipped = self.skipped_in_a_row = 0
        self.observer = Observer(
            config.observe,
            output_dir=train.output_dir,
            shape=model_shape(config.model, config.data.seq_len),
            total_steps=train.steps,
            tokens_per_step=train.global_batch_size * config.data.seq_len,
            num_ranks=meshes.size(Axis.WORLD),
            device=meshes.device,
            is_main=dist.get_rank() == 0,
            start_step=self.step,
        )

    def inputs(self, batch: Batch) -> dict[str, torch.Tensor | None]:
        """The model's arguments on the device; a batch of whole rows needs no document mask."""
        packed = bool(batch.document_ids_BS[:, -1].any())
        batch = batch.to(self.meshes.device)
        return {
            "tokens_BS": batch.tokens_BS,
            "positions_BS": batch.positions_BS,
            "document_ids_BS": batch.document_ids_BS if packed else None,
            "labels_BS": batch.labels_BS,
            "loss_mask_BS": batch.loss_mask_BS,
        }

    def train_step(self) -> StepRecord:
        """Forward and backward of every micro-batch, one reduction of what all ranks must know, one
        optimizer step."""
        began = time.perf_counter()
        batches = [self.inputs(batch) for batch in self.data.next_step()]
        counts = self.count_tokens(batches)
        loads_LE, loss = None, torch.zeros((), device=self.meshes.device)
        for index, batch in enumerate(batches):
            routing = RoutingContext(
                micro_batch=self.step * len(batches) + index,
                global_group=self.meshes.group(Axis.WORLD),
                num_devices=self.meshes.size(Axis.EP),
                prior_load_LE=loads_LE,
            )
            with self.optimizer.accumulation(is_last=index == len(batches) - 1):
                out = self.model(**batch, counts=counts, routing=routing)
                out.loss.backward()
            loss += out.cross_entropy
            loads_LE = out.loads_LE if loads_LE is None else loads_LE + out.loads_LE
        grad_norm = self.optimizer.clip_grad_norm(self.config.optim.grad_clip)
        dist.all_reduce(loss, group=self.meshes.group(Axis.LOSS))
        dist.all_reduce(loads_LE, group=self.meshes.group(Axis.WORLD))
        loss_value, norm_value = torch.stack((loss, grad_norm)).tolist()  # the step's one wait for the device

        self.step += 1
        rate = learning_rate(self.config.optim, self.step, self.config.train.steps)
        if math.isfinite(loss_value) and math.isfinite(norm_value):
            self.optimizer.step(lr=rate)
            if self.config.experts.balance.bias_rate:
                update_biases(zip(self.model.routers(), loads_LE), rate=self.config.experts.balance.bias_rate)
            self.skipped_in_a_row = 0
        else:
            self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
        self.optimizer.zero_grad()
        self.tokens += self.config.train.global_batch_size * self.config.data.seq_len
        return StepRecord(
            step=self.step,
            tokens=self.tokens,
            loss=loss_value,
            lr=rate,
            grad_norm=norm_value,
            seconds=time.perf_counter() - began,
            loads={f"layer {i}": load_E for i, load_E in enumerate(loads_LE)},
            skipped=self.skipped,
        )

    def count_tokens(self, batches: list[dict[str, torch.Tensor | None]]) -> StepCounts:
        """Each loss term's tokens over all ranks and micro-batches: the divisor that makes gradients plain
        sums."""
        keys = ("labels_BS", "loss_mask_BS", "document_ids_BS")
        vector = torch.stack(
            [self.model.count_tokens(*(batch[key] for key in keys)) for batch in batches]
        ).sum(0)
        dist.all_reduce(vector, group=self.meshes.group(Axis.BATCH))
        return StepCounts.from_vector(vector)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean next-token loss over the same held-out rows every time."""
        self.model.eval()
        totals = torch.zeros(2, device=self.meshes.device, dtype=torch.float64)
        for batch in self.data.eval_batches(self.config.train.eval_batches):
            inputs = self.inputs(batch)
            out = self.model(**inputs)
            valid = inputs["loss_mask_BS"].sum()
            totals += torch.stack((out.cross_entropy.double() * valid, valid.double()))
        self.model.train()
        dist.all_reduce(totals, group=self.meshes.group(Axis.LOSS))
        return (totals[0] / totals[1].clamp(min=1)).item()

    def loop(self, received: list[int]) -> str:
        """Step until the run is done or asked to stop; returns how it ended."""
        train = self.config.train
        while self.step < train.steps:
            with self.observer.step_profile(self.step + 1):
                self.observer.log_step(self.train_step())
            if self.skipped_in_a_row > train.max_skipped_steps:
                raise ConfigError(
                    f"train.max_skipped_steps: {self.skipped_in_a_row} steps in a row had a non-finite loss or gradient; "
                    "lower optim.lr or look at the data"
                )
            is_last = self.step == train.steps
            if train.eval_interval >= 0 and (
                is_last or (train.eval_interval and self.step % train.eval_interval == 0)
            ):
                self.observer.log_eval(self.step, self.evaluate())
            if not is_last and any_rank(bool(received), self.meshes.group(Axis.WORLD), self.meshes.device):
                return f"stopped by {signal.Signals(received[0]).name if received else 'another rank'}"
        return "finished"

    def close(self, status: str) -> None:
        self.data.close()
        self.observer.close(status)


def main() -> int:
    command = load_config(sys.argv[1:])
    if command.dry_run:
        return dry_run(command)
    run, status, code = None, "failed", 1
    try:
        meshes = build_meshes(command.config.mesh)
        is_main = dist.get_rank() == 0
        print_table("Meshes", ("axis", "size", "ranks of rank 0's group"), meshes.table(), is_main=is_main)
        with catch_signals() as received:
            run = Run(command.config, meshes)
            status, code = run.loop(received), 0
    except ConfigError as error:
        status, code = str(error), 2
        if os.environ.get("RANK", "0") == "0":
            print(f"fsdmoe: {error}", file=sys.stderr)
    except (RuntimeError, dist.DistError) as error:
        status = lost_peer_message(error, run.step + 1 if run else 0)
        if status is None:
            raise
        print(status, file=sys.stderr, flush=True)
    finally:
        if run is not None:
            run.close(status)
    return code


if __name__ == "__main__":
    sys.exit(main())
