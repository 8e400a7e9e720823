"""Accelerate's ``Accelerator`` around a sharded model: what it would do as for a model that every rank holds
whole is done as the sharding engine wants it.

==================================  ========================================================================
``prepare``                         the model stays as it is: no DistributedDataParallel, no autocast
``accumulate``, ``no_sync``         ``engine.micro_batch(last=False)``
``clip_grad_norm_``                 :func:`fsdmoe.clip_grad_norm`, over the shards of all ranks
``save_state``, ``load_state``      model and optimizer as a sharded checkpoint, ``fsdmoe`` in their folder
``save_model``, ``get_state_dict``  whole weights, gathered by all ranks for the main process
==================================  ========================================================================

Data loaders, schedulers, random numbers and registered objects are Accelerate's, and so is every model that
is not sharded. Nothing here imports accelerate: the object that a user has made gets these methods.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fsdmoe import checkpoint
from fsdmoe.checkpoint.hf_export import KEEP_DTYPE
from fsdmoe.checkpoint.parts import model_state, refuse_codes
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import Engine, ShardedTensor, engine_of, is_fully_sharded
from fsdmoe.huggingface.kept_float32 import names_in_float32
from fsdmoe.huggingface.lora import has_factors
from fsdmoe.mesh import Axis
from fsdmoe.optim import clip_grad_norm

FOLDER = "fsdmoe"
"""The sharded checkpoint inside a checkpoint folder of Accelerate or Trainer."""

Instance = TypeVar("Instance")
_OTHERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


def prepare_accelerator(accelerator: Instance) -> Instance:
    """Let an ``accelerate.Accelerator`` train models that ``parallelize`` has sharded.

    To be called before ``accelerator.prepare``; the loop stays as Accelerate's guide has it.

    Args:
        accelerator: The accelerator. It gets other methods for sharded models, see
            :mod:`fsdmoe.huggingface.accelerator`, and none for others.

    Returns:
        ``accelerator`` itself.

    Raises:
        ConfigError: It shards by itself (FSDP, DeepSpeed), compiles, or does not know of all ranks.
    """
    if isinstance(accelerator, ShardedAccelerator):
        return accelerator
    known: Any = accelerator
    kind = known.distributed_type.value
    if kind in _OTHERS or known.parallelism_config is not None:
        other = kind if kind in _OTHERS else "a parallelism_config"
        raise ConfigError(
            f"accelerator: expected one that leaves sharding to fsdmoe, got {other}; start it without (the "
            "meshes are those of fsdmoe.build_meshes)"
        )
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if (known.process_index, known.num_processes) != ranks:
        raise ConfigError(
            f"accelerator: expected rank {ranks[0]} of {ranks[1]}, got {known.process_index} of "
            f"{known.num_processes}: batches would be split over other ranks than the model; start with "
            "torchrun, and on a machine without GPUs set use_cpu=True (cpu=True)"
        )
    if getattr(known.state.dynamo_plugin.backend, "value", "NO") != "NO":
        raise ConfigError(
            "torch_compile: expected none, got one for the whole model; leave it out, or compile each layer "
            "yourself: layer.forward = torch.compile(layer.forward)"
        )
    return with_methods_of(ShardedAccelerator, accelerator)


def with_methods_of(methods: type, instance: Instance) -> Instance:
    """``instance``, as one of a class that has these methods before its own."""
    kind = type(instance)
    instance.__class__ = type(kind.__name__, (methods, kind), {"__module__": kind.__module__})
    return instance


class ShardedAccelerator:
    """What an accelerator does for sharded models; everything else is handed on."""

    _models: list[nn.Module]
    _optimizers: list[Any]

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not is_fully_sharded(model):
            return super().prepare_model(model, *args, **kwargs)  # type: ignore[misc]
        refuse_unfit(model)
        _refuse_other_precision(self.mixed_precision, engine_of(model))  # type: ignore[attr-defined]
        if not any(model is other for other in self._models):
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if _holds_shards(optimizer):
            device_placement = False  # its state lies with its shards
        return super().prepare_optimizer(optimizer, device_placement)  # type: ignore[misc]

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        if is_fully_sharded(model):
            return engine_of(model).micro_batch(last=False)
        return super().no_sync(model)  # type: ignore[misc]

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        trained = {id(parameter) for parameter in given if parameter.requires_grad}
        for model in filter(is_fully_sharded, self._models):
            if norm_type == 2 and trained == {id(p) for p in model.parameters() if p.requires_grad}:
                return clip_grad_norm(model, float(max_norm)).total
        return super().clip_grad_norm_(given, max_norm, norm_type)  # type: ignore[misc]

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        if any(map(is_fully_sharded, self._models)):
            raise ConfigError(
                "join_uneven_inputs: torch's join does not know of shards; iterate over "
                "fsdmoe.join_batches(loader, meshes) instead, on all ranks"
            )
        return super().join_uneven_inputs(joinables, even_batches)  # type: ignore[misc]

    # Saving and loading

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Whole weights on the main process, none on the others. Collective."""
        if is_fully_sharded(model):
            return whole_weights(model, keep=self.is_main_process)  # type: ignore[attr-defined]
        return super().get_state_dict(model, unwrap)  # type: ignore[misc]

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        save = functools.partial(checkpoint.save, overwrite=True)
        with self._without_sharded(self.register_save_state_pre_hook, save):  # type: ignore[attr-defined]
            found = super().save_state(*args, **kwargs)  # type: ignore[misc]
        self.wait_for_everyone()  # type: ignore[attr-defined]  # other files are the main process's
        return found

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        with self._without_sharded(self.register_load_state_pre_hook, load_parts):  # type: ignore[attr-defined]
            super().load_state(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _without_sharded(self, register: Callable[[Any], Any], act: Callable[..., Any]) -> Iterator[None]:
        """``act`` on sharded models with their optimizers, as parts of a checkpoint in a folder of their own;
        Accelerate, which would write this rank's shards as the whole, does not see them meanwhile."""
        models, optimizers = self._models, self._optimizers
        sharded: dict[str, dict[str, Any]] = {}
        for index, model in enumerate(filter(is_fully_sharded, models)):
            held = {id(parameter) for parameter in model.parameters()}
            own = [o for o in optimizers if any(id(p) in held for g in o.param_groups for p in g["params"])]
            names = ["optimizer", *(f"optimizer_{n}" for n in range(1, len(own)))]
            parts = {name: inner_optimizer(o) for name, o in zip(names, own, strict=False)}
            sharded[f"{FOLDER}_{index}" if index else FOLDER] = {"model": model, **parts}
        self._models = [model for model in models if not is_fully_sharded(model)]
        self._optimizers = [optimizer for optimizer in optimizers if not _holds_shards(optimizer)]

        def act_on_all(*given: Any) -> None:
            for name, parts in sharded.items():
                act(os.path.join(given[-1], name), **parts)

        handle = register(act_on_all)
        try:
            yield
        finally:
            handle.remove()
            self._models, self._optimizers = models, optimizers


def load_parts(folder: str, **parts: Any) -> None:
    """Fill model and optimizer as a trainer that is resumed does: the stored settings of the optimizer win,
    as with torch's own state."""
    checkpoint.load(folder, policy=checkpoint.LoadPolicy(optimizer_settings="stored"), **parts)


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def whole_weights(
    model: nn.Module, *, keep: bool, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Whole weights in host memory by their name in the model, where they are to be kept; ``dtype`` casts.
    Collective, one tensor at a time."""
    if not any(map(has_factors, model.modules())):  # else the adapters are wanted
        refuse_codes(model, "is saved whole")
    found, is_kept = {}, names_in_float32(model)
    for name, tensor in model_state(model).items():
        whole = tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
        if keep:
            casts = whole.is_floating_point() and not name.endswith(KEEP_DTYPE) and not is_kept(name)
            found[name] = whole.to("cpu", dtype if dtype is not None and casts else whole.dtype)
    return found


def refuse_unfit(model: nn.Module) -> None:
    """ConfigError for a model whose ranks need the same rows, or whose gradients are not averaged."""
    meshes, divisor = engine_of(model).meshes, engine_of(model).policy.grad_divisor
    if divisor not in (None, meshes.size(Axis.LOSS)):
        raise ConfigError(
            f"grad_divisor: expected None inside of a trainer, whose losses are means that it takes to be "
            f"averaged over {meshes.size(Axis.LOSS)} ranks, got {divisor}; leave it out of ParallelPolicy"
        )
    for axis in (Axis.TP, Axis.CP):
        if meshes.size(axis) > 1:
            raise ConfigError(
                f"mesh.{axis.value}: expected 1 inside of a trainer, which gives every rank other rows, got "
                f"{meshes.size(axis)}, whose ranks need the same rows; set it to 1 (mesh.ep splits experts), "
                "or use train.py or a loop of your own (docs/trainers.md says why)"
            )


def _refuse_other_precision(wanted: str, engine: Engine) -> None:
    numels: dict[torch.dtype, int] = {}
    for group in engine.groups:
        if not group.plan.keeps_codes:  # which are decoded to what the others are
            numels[group.plan.dtype] = numels.get(group.plan.dtype, 0) + group.plan.layout.numel
    computes_in = max(numels, key=lambda dtype: numels[dtype])
    if wanted == "no" or (wanted == "bf16" and computes_in == torch.bfloat16):
        return
    raise ConfigError(
        f"mixed_precision: expected the precision that the model was sharded with, {computes_in}, got "
        f"{wanted}: autocast would not reach its experts; set bf16=False and fp16=False "
        "(mixed_precision='no'), and choose with fsdmoe.parallelize(model, meshes, "
        "fsdmoe.ParallelPolicy(precision=...))"
    )


def _holds_shards(optimizer: Any) -> bool:
    return any(isinstance(p, ShardedTensor) for group in optimizer.param_groups for p in group["params"])
