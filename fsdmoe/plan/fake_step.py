"""``python -m fsdmoe.plan.fake_step --config CONFIG --world 1024``: a whole training step without values.

The model of a configuration is built, sharded and stepped as ``train.py`` does it, as the first rank of a
world that does not exist: every tensor is a fake one (shapes, no memory), every collective returns at once.
So what the planner adds up in formulas is counted from the tensors of the real code: two cores are enough for
DeepSeek-V3 on 1,024 ranks.

Nothing has a value, so routing is taken to be balanced: every rank sends each other as many rows as are to be
expected. Layers are those of a GPU, whose kernels are left out (:mod:`fsdmoe.plan.fake_kernels`): what is
counted is held against the plan that ``--dry-run`` prints.
"""

from __future__ import annotations

import argparse
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdmoe.config import Config, load_config
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.dispatch.base import CountingDispatcher, Dispatcher, DispatchPlan
from fsdmoe.experts.dispatch.chunks import chunk_sizes
from fsdmoe.experts.moe import MoE
from fsdmoe.fsdp import engine_of
from fsdmoe.mesh import Meshes, resolve_degrees
from fsdmoe.models.config import ModelConfig
from fsdmoe.observe import print_table
from fsdmoe.optim import build_optimizer, clip_grad_norm, freeze
from fsdmoe.parallel.auto_model import as_causal_lm, build_any_model
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.plan.activations import expert_layout
from fsdmoe.plan.fake_kernels import kernels_left_out
from fsdmoe.plan.hardware import GIB
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.memory import estimate_memory, held_by_losses


class FakeMeshes(Meshes):
    """Meshes are looked up with values, though nothing else has any."""


def _with_values(name: str) -> Callable[..., Any]:
    plain = getattr(Meshes, name)

    def method(self: FakeMeshes, *args: Any) -> Any:
        with unset_fake_temporarily():
            return plain(self, *args)

    return method


for _name in ("__getitem__", "axis_of", "group", "rank", "size", "submesh"):
    setattr(FakeMeshes, _name, _with_values(_name))


class LiveBytes(TorchDispatchMode):
    """Counts the memory behind all fake tensors that are alive, and the most that there was."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> LiveBytes:
        self._resize = torch.UntypedStorage.resize_
        resize, count = self._resize, self._count

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            """What is recomputed gives its memory up before its tensor."""
            result = resize(storage, num_bytes)
            if storage._cdata in self._sizes:
                count(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*problem)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor):
                self._count(tensor.untyped_storage())
        return result

    def settled(self) -> int:
        """What is alive when nothing waits for the garbage collector."""
        gc.collect()
        return self.now

    def _count(self, storage: torch.UntypedStorage) -> None:
        before = self._sizes.get(storage._cdata)
        if before is None:
            weakref.finalize(storage, self._drop, storage._cdata)
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes() - (before or 0)
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@dataclass(frozen=True)
class FakeStep:
    """Bytes on the first rank."""

    states: int
    """Between two steps: weights, gradients, moments, slots."""
    kept: int
    """By forward, for backward, and apart from both."""
    peak: int


def fake_step(config: Config, world_size: int) -> FakeStep:
    """Build, and step twice: the first time makes what is made once.

    Raises:
        ConfigError: Part of the memory would be the host's, which fake tensors of a CPU cannot be told from.
    """
    if config.memory.offload or config.optim.state_offload or config.fsdp.cpu_offload:
        raise ConfigError(
            "fake step: expected everything on the device, got memory.offload, optim.state_offload or "
            "fsdp.cpu_offload; leave them out, and take `--dry-run` for what they move"
        )
    if config.experts.clones:
        raise ConfigError(
            f"experts.clones: a fake step expected even loads, which need none, got {config.experts.clones}; "
            "set experts.clones = 0"
        )
    if config.experts.dispatcher in ("flex", "by_node"):
        raise ConfigError(
            "experts.dispatcher: a fake step expected one whose counts the host knows, on one node, got "
            f'{config.experts.dispatcher}; set experts.dispatcher = "all_to_all"'
        )
    if config.train.micro_batch_size % config.experts.sub_batches:
        raise ConfigError(
            f"train.micro_batch_size: a fake step expected a multiple of experts.sub_batches = "
            f"{config.experts.sub_batches}, got {config.train.micro_batch_size}; set it to one"
        )
    model = build_any_model(config.model, config.experts, config.adapter)[0]
    freeze(model, config.optim.groups)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.cache_enabled = False  # its keys hold the storages that recomputed tensors are made of
    with _fake_world(world_size), fake, kernels_left_out(), LiveBytes() as live:
        meshes = _meshes(config, world_size)
        model = parallelize(model, meshes, ParallelPolicy.from_config(config))
        tokens = Setting.of(config, world_size).tokens(Job.of(config))
        _balance(model, config, tokens)
        optimizer = build_optimizer(model, config.optim)
        decoder, kept = as_causal_lm(model), 0
        shape = (config.train.micro_batch_size, config.data.seq_len)
        for number in range(2):
            if number == 1:
                states = live.peak = live.settled()
            tokens_BS = torch.zeros(shape, dtype=torch.int64)
            mask_BS = torch.ones(shape, dtype=torch.bool)
            with engine_of(model).micro_batch(last=True):
                out = decoder(tokens_BS, labels_BS=tokens_BS, loss_mask_BS=mask_BS)
                kept = live.settled()
                out.loss.backward()
            clip_grad_norm(model, config.optim.grad_clip or torch.inf)
            optimizer.step()
            optimizer.zero_grad()
            del out, tokens_BS, mask_BS
    return FakeStep(states, kept - states, live.peak)


@contextmanager
def _fake_world(size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # not for every planner's import

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meshes(config: Config, world_size: int) -> Meshes:
    with unset_fake_temporarily():
        return FakeMeshes(resolve_degrees(config.mesh, world_size), "cpu")


def _balance(model: nn.Module, config: Config, tokens: int) -> None:
    """Let dispatchers expect balanced routing instead of asking tensors that have no values."""
    for name, module in model.named_modules():
        if isinstance(module, MoE) and isinstance(module.dispatcher, CountingDispatcher):
            # Depths of multi-token prediction see all rows at once.
            rows = tokens if "mtp_layers" in name else tokens // config.experts.sub_batches
            expected = partial(_balanced, module.dispatcher, config.model, rows)
            module.dispatcher._start_counting = expected  # type: ignore[method-assign]


def _balanced(
    dispatcher: Dispatcher, model: ModelConfig, tokens: int, counts: list[Tensor]
) -> Callable[[], list[DispatchPlan]]:
    ep, etp, chosen = dispatcher.links.ep.size, dispatcher.links.etp.size, model.num_experts_per_tok
    layout = expert_layout(model, ep, etp)
    share = layout.rank_probability if dispatcher.name == "all_to_all" else 1.0
    plans = [
        DispatchPlan(
            rows_sent=[round(size * share)] * ep,
            rows_received=[round(size * share)] * ep,
            rows_gathered=[round(size * share) * ep] * etp,
            max_rows=size * chosen * etp,
            num_ids=chosen,
        )
        for size in chunk_sizes(tokens, len(counts))
    ]
    return lambda: plans


def planned_step(config: Config, world_size: int) -> FakeStep:
    """What the planner says of the same step, without the context and an allocator's slack."""
    job, setting = Job.of(config), Setting.of(config, world_size)
    plan = estimate_memory(job, setting)
    return FakeStep(
        states=plan.states + plan.gather_slots + plan.grad_slots,
        kept=plan.activations + held_by_losses(job, setting),
        peak=plan.total - plan.context - plan.slack,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fsdmoe.plan.fake_step", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--world", type=int, required=True)
    given, others = parser.parse_known_args(arguments)
    plan_only = ["--dry-run", "--files-elsewhere", "--world", str(given.world)]
    command = load_config(["--config", given.config, *plan_only, *others])
    try:
        found, plan = fake_step(command.config, given.world), planned_step(command.config, given.world)
    except ConfigError as error:
        print(f"fsdmoe: {error}", file=sys.stderr)
        return 2
    pairs = {
        "weights, gradients, moments, slots": (found.states, plan.states),
        "kept for backward": (found.kept, plan.kept),
        "at the peak": (found.peak, plan.peak),
    }
    rows = [
        (name, f"{count / GIB:.3f} GiB", f"{planned / GIB:.3f} GiB", f"{planned / count:.3f}")
        for name, (count, planned) in pairs.items()
    ]
    print_table(f"One rank of {given.world}", ("what", "counted", "planned", "planned / counted"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
