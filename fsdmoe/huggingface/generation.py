"""``generate()`` of wrapped models: transformers' own loop, around weights and experts that ranks share.

============  ================================================================================================
``ep``, fsdp  every rank generates for its own prompts; all of them run as many steps as the one that needs
              most, for they share weights and experts
``cp``        the same: rows are whole on every rank, and attention is the model's own, with its cache
``tp``        its ranks generate for the same prompts: all of them hold all tokens, and their heads' caches
============  ================================================================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.for_a_while import set_for_a_while
from fsdmoe.huggingface.tensor_plan import tensor_group_of
from fsdmoe.tensor_parallel.group import TensorGroup


def follow_folder(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Generate as the folder whose weights the model has says: where it ends, and how it draws. What was set
    by hand stays."""
    own = getattr(model, "generation_config", None)
    if not getattr(own, "_from_model_config", False):
        return
    # Optional: only when chosen.
    from fsdmoe.huggingface.transformers_api import changed_generation, read_generation_config

    found = read_generation_config(Path(folder).expanduser())
    if found is not None:
        for key, value in changed_generation(own, model.config).items():
            setattr(found, key, value)
        model.generation_config = found


def generate_together(model: nn.Module) -> None:
    """Let ``model.generate`` work on all ranks, which must all call it."""
    generate = getattr(model, "generate", None)
    if generate is None or dist.get_world_size() == 1:
        return

    @functools.wraps(generate)
    def together(*args: Any, **kwargs: Any) -> Any:
        from fsdmoe.huggingface.transformers_api import unplanned_attention  # optional: only when chosen

        first = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        tensor = tensor_group_of(model)
        _require_same_prompts([first, kwargs.get("inputs_embeds"), kwargs.get("attention_mask")], tensor)
        _draw_alike(tensor)
        with unplanned_attention(model), _all_tokens_everywhere(model), _without_auxiliary_loss(model):
            return generate(*args, **({"synced_gpus": True} | kwargs))

    model.generate = together  # type: ignore[assignment]


def _require_same_prompts(prompts: Sequence[Any], tensor: TensorGroup) -> None:
    """Refuse ranks of ``tp`` with different prompts: each would attend with its heads to its own tokens."""
    given = [each for each in prompts if isinstance(each, Tensor)]
    if tensor.size == 1 or not given:
        return
    shapes = torch.tensor([crc32(repr([*map(_shape_of, prompts)]).encode())], device=given[0].device)
    if not all(_is_everywhere(each, tensor) for each in (shapes, *given)):
        raise ConfigError(
            f"generate: expected the same prompts on the {tensor.size} ranks of mesh.tp, got others; give "
            "each group of tp its own prompts, and all of its ranks the same"
        )


_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _is_everywhere(value: Tensor, tensor: TensorGroup) -> bool:
    """Whether all ranks have the same bits; each of them is told the same."""
    value = value.contiguous()
    value = value.view(_OF_SIZE[value.element_size()]) if value.is_floating_point() else value.long()
    lowest, highest = (tensor.all_reduce(value.clone(), op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
    return torch.equal(lowest, highest)


@contextlib.contextmanager
def _all_tokens_everywhere(model: nn.Module) -> Iterator[None]:
    """Replicate tokens over ``tp``: a step of one token cannot be shared."""
    split: list[tuple[Any, TensorGroup]] = [
        (module, group)
        for module in model.modules()
        if isinstance(group := getattr(module, "tensor", None), TensorGroup) and group.size > 1
    ]
    with contextlib.ExitStack() as stack:
        for module, group in split:
            replicated = dataclasses.replace(group, replicated=True)
            stack.enter_context(set_for_a_while(module, "tensor", replicated))
        yield


def _without_auxiliary_loss(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """transformers computes it without labels too, and fails where a step's mask covers earlier tokens."""
    config = getattr(model, "config", None)
    if not getattr(config, "output_router_logits", None):
        return contextlib.nullcontext()
    return set_for_a_while(config, "output_router_logits", False)


def _draw_alike(tensor: TensorGroup) -> None:
    """Ranks of ``tp`` that sample must draw alike: they go on from the first one's random state."""
    if tensor.size == 1 or tensor.group is None:
        return
    has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    first = dist.get_global_rank(tensor.group, 0)
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if has_gpu else [])]
    device = torch.device("cuda") if has_gpu else torch.device("cpu")
    for index, state in enumerate(states):
        shared = state.to(device)
        dist.broadcast(shared, first, group=tensor.group)
        (torch.cuda.set_rng_state if index else torch.set_rng_state)(shared.cpu())
