"""One training run inside a trainer, sharded or under plain data parallelism."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import fsdmoe
from fsdmoe.checkpoint.parts import model_state
from fsdmoe.fsdp import ShardedTensor
from tests.support.hf_tiny import VOCABULARY, tiny_hf


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows with different numbers of labels: a mean of means is not their mean."""

    def __init__(self, num_rows: int, length: int = 10) -> None:
        random = torch.Generator().manual_seed(5)
        self._rows = torch.randint(0, VOCABULARY, (num_rows, length), generator=random)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self._rows[index].clone()
        labels[: index % 8] = -100
        return {"input_ids": self._rows[index], "labels": labels}


def forget_accelerate() -> None:
    """Accelerate keeps the process group of an earlier case, and asks where torchrun's store is."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def made_model(sharded: bool, ep: int = 2, **changes: Any) -> nn.Module:
    torch.manual_seed(1)
    model = tiny_hf("qwen3_moe", **changes)
    return fsdmoe.parallelize(model, fsdmoe.build_meshes(ep=ep)) if sharded else model


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole and copied."""
    found = model_state(model).items()
    return {n: t.full_tensor() if isinstance(t, ShardedTensor) else t.clone() for n, t in found}


def arguments(folder: Path | str, kind: Any = None, **changes: Any) -> Any:
    """Of a short run, as ``kind`` (None: ``TrainingArguments``)."""
    from transformers import TrainingArguments

    settings = {
        "max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "logging_steps": 1,
        "save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "lr_scheduler_type": "cosine",
    }  # fmt: skip
    return (kind or TrainingArguments)(str(folder), **(settings | changes))


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def kill_at(step: int) -> Any:
    """A callback that ends the process, as a machine that goes down does."""
    from transformers import TrainerCallback

    class Kill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                dist.barrier()
                os._exit(9)

    return Kill()
