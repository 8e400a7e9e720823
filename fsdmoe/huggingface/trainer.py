"""``transformers.Trainer``, and every trainer built on it (TRL's), around a sharded model: one call.

::

    trainer = fsdmoe.prepare_trainer(Trainer(model, arguments, train_dataset=rows))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))

The loop, its schedule, logs, callbacks and data stay the trainer's own. What changes is in two classes of
methods that the objects get: :mod:`fsdmoe.huggingface.accelerator`, and here what a trainer does without its
accelerator::

    checkpoint-8/
      fsdmoe/              model and optimizer, sharded: any number of ranks and any layout resumes it
      scheduler.pt, rng_state_0.pth, trainer_state.json, ...                         the trainer's own files

``save_model()`` writes a folder that ``from_pretrained`` loads. Trainers of TRL compute log-probabilities
from ``lm_head.weight`` outside of the head's forward: with a sharded model that is the head's forward.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rewrites import Rewrite, rewrite
from fsdmoe.fsdp import Engine, engine_of, is_fully_sharded
from fsdmoe.fsdp.unit import Unit
from fsdmoe.huggingface.accelerator import (
    FOLDER,
    inner_optimizer,
    load_parts,
    prepare_accelerator,
    refuse_unfit,
    whole_weights,
    with_methods_of,
)
from fsdmoe.huggingface.lora import peel
from fsdmoe.huggingface.lora_life import whole_adapters
from fsdmoe.huggingface.reference import settle_reference
from fsdmoe.huggingface.routing import policies_of, refuse_passed_over
from fsdmoe.optim import AdamW

TrainerT = TypeVar("TrainerT")
logger = logging.getLogger(__name__)

_ROWS = "fsdmoe_rows.json"
_SCHEDULER, _STATE, _ARGUMENTS = "scheduler.pt", "trainer_state.json", "training_args.bin"
_OWN_ADAMW = ("adamw_torch", "adamw_torch_fused")


def prepare_trainer(trainer: TrainerT) -> TrainerT:
    """Let a trainer of transformers or TRL train a model that ``parallelize`` has sharded.

    To be called once, on a trainer as it was made. Training, evaluation, accumulation, clipping, early
    stopping, saving and resuming are then those of the same trainer on an unsharded model under data
    parallelism.

    Args:
        trainer: A ``transformers.Trainer`` or one of a class made on it. It gets other methods for saving and
            loading, and for its accelerator.

    Returns:
        ``trainer`` itself.

    Raises:
        ConfigError: Its model is not sharded, or its arguments ask for what sharding does otherwise; the
            message names the argument.
    """
    if isinstance(trainer, ShardedTrainer):
        return trainer
    given: Any = trainer
    _refuse_unsharded(given.model)
    refuse_unfit(given.model)
    _refuse_arguments(given.args)
    models = [getattr(given, name, None) for name in ("model", "ref_model")]  # of preference optimization
    sharded = [each for each in models if isinstance(each, nn.Module) and is_fully_sharded(each)]
    for model in sharded:
        refuse_passed_over(model, type(trainer).__name__)
    settle_reference(given.model)
    given.accelerator = prepare_accelerator(given.accelerator)
    for model in sharded:
        _let_head_compute(model)
    return with_methods_of(ShardedTrainer, trainer)


class ShardedTrainer:
    """What a trainer does for a sharded model; all ranks save, load and make the optimizer together."""

    model: nn.Module
    args: Any
    optimizer: Any
    lr_scheduler: Any
    _collects = False
    """Batches of a training step are collected; evaluation counts its tokens by the same method."""
    _pushes = False
    """What is saved goes to the Hub."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """For torch's AdamW the same update over flat shards; any other is the trainer's to make."""
        given: Any = self.args
        is_default = self.optimizer_cls_and_kwargs is None and not given.optim_args  # type: ignore[attr-defined]
        if self.optimizer is None and is_default and given.optim in _OWN_ADAMW:
            decayed = set(self.get_decay_parameter_names(self.model))  # type: ignore[attr-defined]
            self.optimizer = AdamW(
                self.model, given.learning_rate, (given.adam_beta1, given.adam_beta2), given.adam_epsilon,
                given.weight_decay, decays=lambda name, parameter: name in decayed,
            )  # fmt: skip
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        policies = policies_of(peel(self.model))
        if policies is not None:
            optimizer.register_step_post_hook(lambda *_: policies.end_step())
        return optimizer

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._collects = True
        try:
            return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._collects = False

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Before ranks count the tokens of a step together: all of them must have batches to count."""
        if self._collects:
            _refuse_uneven(len(batch_samples), self.state.global_step)  # type: ignore[attr-defined]
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A folder that ``from_pretrained`` loads; for the trainer's own checkpoints, a sharded one."""
        folder = self.args.output_dir if output_dir is None else output_dir
        if _internal_call and not self._pushes:
            optimizer = None if self.args.save_only_model else inner_optimizer(self.optimizer)
            checkpoint.save(os.path.join(folder, FOLDER), self.model, optimizer, overwrite=True)
            if self.args.should_save:
                self._save_small_files(folder)
            return
        self._save_folder(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model, as :meth:`save_model` writes it."""
        self._pushes = True
        try:
            return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._pushes = False

    def _save_folder(self, folder: str) -> None:
        config: Any = getattr(self.model, "config", None)
        dtype = _stated_dtype(config)
        is_adapter = hasattr(self.model, "peft_config")
        if is_adapter:
            whole = whole_adapters(self.model)
        else:
            whole = whole_weights(self.model, keep=self.args.should_save, dtype=dtype)
        if self.args.should_save:
            self._save(folder, state_dict=whole)  # type: ignore[attr-defined]
            if dtype is not None and not is_adapter:
                config.dtype = dtype  # save_pretrained has put the dtype of the main weights there
                config.save_pretrained(folder)
        dist.barrier()

    def _save_small_files(self, folder: str) -> None:
        parts: list[Any] = [getattr(self.model, "config", None), self.processing_class]  # type: ignore[attr-defined]
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, _ARGUMENTS))
        with open(os.path.join(folder, _ROWS), "w", encoding="utf-8") as file:
            json.dump({"rows_per_step": self._rows_per_step}, file)

    @property
    def _rows_per_step(self) -> int:
        return self.args.world_size * self.args.train_batch_size * self.args.gradient_accumulation_steps

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The schedule; the optimizer was saved with the model."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    # Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = _sharded_folder(resume_from_checkpoint)
        if self.is_in_train and not self.args.ignore_data_skip:  # type: ignore[attr-defined]
            _warn_of_other_rows(resume_from_checkpoint, self._rows_per_step)
        if not self.is_in_train or not _has_optimizer(resume_from_checkpoint):  # type: ignore[attr-defined]
            load_parts(folder, model=model or self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """The optimizer, with the model: moments are found by the names of its parameters."""
        if checkpoint is None or not _has_optimizer(checkpoint):
            return
        optimizer = inner_optimizer(self.optimizer)
        load_parts(_sharded_folder(checkpoint), model=self.model, optimizer=optimizer)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        load_parts(_sharded_folder(best), model=self.model)


def _sharded_folder(folder: str) -> str:
    """The sharded checkpoint in a trainer's; one that a killed run has left unfinished is named."""
    path = os.path.join(folder, FOLDER)
    if not os.path.isfile(os.path.join(folder, _STATE)):
        raise CheckpointError(
            f"{folder} is not whole: expected {_STATE}, which is written last; the run ended while it saved. "
            "Resume from the checkpoint before it, and remove this one"
        )
    if not os.path.isdir(path):
        raise CheckpointError(
            f"{folder}: expected a folder {FOLDER} with a sharded checkpoint, got none: an unsharded model"
            " was saved there; start from its weights with fsdmoe.parallelize(model, meshes, load=...)"
        )
    return path


def _warn_of_other_rows(folder: str, rows: int) -> None:
    """The trainer counts its place in the data in steps, whatever a step's rows."""
    path = os.path.join(folder, _ROWS)
    if not os.path.isfile(path):  # saved before it was kept
        return
    with open(path, encoding="utf-8") as file:
        before = json.load(file)["rows_per_step"]
    if before != rows and dist.get_rank() == 0:
        seen = "are left out" if rows > before else "are seen twice"
        logger.warning(
            "%s: its steps had %d rows, this run's have %d, so some rows %s: the trainer counts its place in "
            "the data in steps; keep ranks x per_device_train_batch_size x gradient_accumulation_steps",
            folder,
            before,
            rows,
            seen,
        )


def _has_optimizer(folder: str) -> bool:
    """Whether it was saved without ``save_only_model``."""
    return os.path.isfile(os.path.join(folder, _SCHEDULER))


def _let_head_compute(model: nn.Module) -> None:
    """TRL's trainers call a model with ``fused_lm_head=True``: it runs its decoder, asks for its head and
    computes with ``lm_head.weight``. From there on that is the forward of the head's unit: its weights are
    whole, and what comes out begins its backward."""
    engine = engine_of(model)
    for owner in model.modules():
        has_head = hasattr(type(owner), "get_output_embeddings")  # of its own: PEFT's wrappers hand it on
        head = owner.get_output_embeddings() if has_head else None  # type: ignore[operator]
        unit = next((unit for unit in engine.units[:-1] if unit.module is head), None)
        if unit is not None:
            _enter_head(engine, unit, owner)
            return
    # none has a unit: the head is tied to the embedding, part of the root, which runs around every forward


def _enter_head(engine: Engine, unit: Unit, owner: Any) -> None:
    find_head = owner.get_output_embeddings

    def run(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head"):
            return compute(*args, **kwargs)
        entered = False

        def enter() -> Any:
            nonlocal entered
            if not entered:  # not before: decoder layers may compute in the head's memory
                entered = True
                engine.pre_forward(unit)
            return find_head()

        owner.get_output_embeddings = enter
        output = None
        try:
            output = compute(*args, **kwargs)
        finally:
            del owner.get_output_embeddings
            if entered:
                engine.post_forward(unit, (args, kwargs), output)
        return output

    rewrite(owner, Rewrite.TRAINER, run)


def _refuse_unsharded(model: nn.Module) -> None:
    if is_fully_sharded(model):
        return
    if any(map(is_fully_sharded, model.modules())):
        raise ConfigError(
            f"trainer.model: expected what fsdmoe.parallelize returned, got {type(model).__name__} around "
            "it; pass what it returns"
        )
    raise ConfigError(
        f"trainer.model: expected a sharded model, got a {type(model).__name__} that is not; call "
        "fsdmoe.parallelize(model, meshes) before the trainer is made"
    )


def _refuse_arguments(args: Any) -> None:
    """What would be done by each rank for itself, or to parameters that are shards."""
    fixes = {
        "auto_find_batch_size": "ranks would retry alone; choose per_device_train_batch_size",
        "fp16_full_eval": "the model keeps the precision it was sharded with",
        "bf16_full_eval": "the model keeps the precision it was sharded with",
        "use_liger_kernel": "its kernels replace forwards that are in use; fsdmoe has its own",
        "sync_ref_model": "the two models are sharded differently; leave the reference as it is",
        "use_vllm": "it would be sent shards; let the model generate, or link a server (docs/rl.md)",
        "use_transformers_continuous_batching": "ranks would batch alone; leave it out, generate() works",
    }
    for name, why in fixes.items():
        if getattr(args, name, False):
            raise ConfigError(f"{name}: expected False with a sharded model, got True: {why}")
    if args.push_to_hub and args.hub_strategy != "end":
        raise ConfigError(
            f"hub_strategy: expected end with a sharded model, got {args.hub_strategy.value}: checkpoints "
            "are sharded; the whole model is pushed at the end, or by trainer.push_to_hub()"
        )
    if getattr(args.accelerator_config, "even_batches", True) is False:
        raise ConfigError(
            "accelerator_config.even_batches: expected True with a sharded model, got False: all ranks "
            "must run as many batches; leave it out"
        )


def _refuse_uneven(num_batches: int, step: int) -> None:
    counts = from_all_ranks(num_batches)
    if len(set(counts)) > 1:
        fewest = min(counts)
        raise ConfigError(
            f"train_dataset: expected as many batches on every rank, but after {step} steps rank "
            f"{counts.index(fewest)} has {fewest} more for the next one and rank "
            f"{counts.index(max(counts))} has {max(counts)}; give all ranks one dataset, which the trainer"
            " splits, or rows of the same number"
        )


def _stated_dtype(config: Any) -> torch.dtype | None:
    stated = getattr(config, "dtype", None)
    return getattr(torch, stated) if isinstance(stated, str) else stated
