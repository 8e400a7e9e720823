"""Which modules of a wrapped model let one document change another, or one piece of a row another: by trying.

Four rows go through the model in one call. All of them hold the same document W::

    row 0   | a a a a a | W W W W W W W | c c |
    row 1   | b b b b b | W W W W W W W | c c |     another document before it
    row 2   | b b b b b b b | W W W W W W W |       a longer one: W is at another place of the row
    row 3   | W W W W W W W | c c c c c c c |       none before it

What a module is given and what it returns for W must be the same in all rows. The first module that is given
the same and returns something else is the one to name. W is then set to the values of row 0 in all rows, so
that every module is tried by itself: rounding does not add up to another choice of a router.

For rows that are split among ranks (``cp``), only attention may look at other positions, since a plan does it
there. So attention is cut to the token itself, and W keeps its positions, whatever is before it. In a second
trial, planned attention must return what the model's own does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import engine_of, is_fully_sharded
from fsdmoe.huggingface.limits import text_config
from fsdmoe.mesh import Axis

_LONGEST = 181
"""Tokens of W, of which convolutions reach over a few, and blocks of keys over up to 128. Row lengths are no
usual size of anything else, so that a dim of tokens is known by its size."""
_FIRST_IDS = 1024  # of a vocabulary: what stands for images and sounds comes later


Trial = Literal["packed", "split", "first"]


@dataclass(frozen=True)
class Finding:
    """A module that passes something on, by its name in the model."""

    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({self.kind})"


@dataclass(frozen=True)
class DocumentLimit:
    """Why rows of several documents would be wrong in a model."""

    model: str
    found: list[Finding]
    longest: int = 0
    """TrialRows of up to so many tokens are right."""

    def refuse(self) -> None:
        """ConfigError: what was found, and what to do."""
        rows, fix = "rows", "data.pack = false (one document a row)"
        if self.longest:
            rows = f"rows of more than attention_chunk_size = {self.longest} tokens"
            fix = f"data.seq_len to at most {self.longest}, or {fix}"
        raise ConfigError(
            f"model.hf: expected documents that share a row not to change each other, but in packed {rows} "
            f"{self.found[0]} of {self.model} returns something else for a document where another one is "
            f"before it; set {fix}"
        )

    def check(self, positions_BS: Tensor | None, loss_mask_BS: Tensor) -> None:
        """Refuse rows with a document that has losses behind another one. Waits for the device."""
        if positions_BS is None or positions_BS.shape[1] <= self.longest:
            return
        is_later_BS = (positions_BS[:, 1:] <= positions_BS[:, :-1]).cumsum(1) > 0
        if bool((is_later_BS & loss_mask_BS[:, 1:]).any()):
            self.refuse()


@dataclass(frozen=True)
class TrialRows:
    """The rows that are tried, and where W begins in each."""

    tokens_BS: Tensor
    positions_BS: Tensor
    document_ids_BS: Tensor
    starts: tuple[int, ...]
    length: int
    trial: Trial
    width: int
    """Of the residual stream."""

    @staticmethod
    def make(model: nn.Module, trial: Trial, seq_len: int | None = None) -> TrialRows:
        """What is tried: rows of documents (``packed``); rows of one document, of which W is a part with the
        same positions (``split``); or rows that begin with W, with something else behind it (``first``). They
        have at most ``seq_len`` tokens."""
        vocabulary, longest, width = _sizes(model)
        length = min(_LONGEST, longest // 2 if trial == "split" else longest)
        if seq_len is not None:
            length = max(min(length, seq_len * 9 // 16), 1)
        before = max(length * 5 // 9, 1), max(length * 7 // 9, 2)
        size = before[1] + length
        random = torch.Generator().manual_seed(0)
        a, b, w, c, d = torch.randint(0, min(vocabulary, _FIRST_IDS), (5, size), generator=random)
        starts = (0, 0, 0, 0) if trial == "first" else (before[0], before[0], before[1], 0)
        ends = (a, b, c, d) if trial == "first" else (c, c, c, c)
        tokens, positions, ids = [], [], []
        for start, first, last in zip(starts, (a, b, b, b), ends, strict=True):
            after = size - start - length
            tokens.append(torch.cat((first[:start], w[:length], last[:after])))
            parts = [torch.arange(n) for n in (start, length, after)]
            if trial == "split":
                parts[1] = parts[1] + before[0]
            positions.append(torch.cat(parts))
            ids.append(torch.repeat_interleave(torch.arange(3), torch.tensor([start, length, after])))
        device = next(model.buffers(), next(model.parameters())).device
        columns = [torch.stack(column).to(device) for column in (tokens, positions, ids)]
        return TrialRows(columns[0], columns[1], columns[2], starts, length, trial, width)

    def has_tokens(self, tensor: Tensor) -> bool:
        """Whether it holds a vector for each token; masks and scores have one for each pair of them."""
        if tensor.shape[:2] != self.tokens_BS.shape or self.tokens_BS.shape[1] in tensor.shape[2:]:
            return False
        # Scores of blocks of keys look like vectors too; those of later blocks are masked afterwards.
        is_vector = self.trial != "first" or tensor.shape[-1] == self.width
        return is_vector and tensor.stride(0) > 0  # else all rows are the same memory

    def of_w(self, tensor_BS: Tensor) -> list[Tensor]:
        """W's part of each row: views."""
        return [tensor_BS[row, start : start + self.length] for row, start in enumerate(self.starts)]


def chunk_size(model: nn.Module) -> int | None:
    """Of chunked attention, whose chunks may be longer than rows that are tried."""
    return getattr(text_config(getattr(model, "config", None)), "attention_chunk_size", None)


def has_values(model: nn.Module) -> bool:
    """Whether there is anything to try: fake tensors and those of the meta device have none."""
    return not any(isinstance(p, FakeTensor) or p.is_meta for p in model.parameters())


@torch.no_grad()
def find_mixing(model: nn.Module, run: Callable[[TrialRows], Any], rows: TrialRows) -> list[Finding]:
    """Modules that return other values for W where something else is around it, innermost first. ``run``
    calls the model with the rows. Collective where the model is."""

    def compare(tensor: Tensor) -> Tensor | None:
        if not rows.has_tokens(tensor):
            return None
        first, *others = rows.of_w(tensor)
        ratios_RW = _ratios(torch.stack(others), first)
        for other in others:
            other.copy_(first)
        # In row 1 nothing has moved, so that sums are taken in the same order. In the others a token may be
        # so near to another choice (of an expert, of the best keys) that rounding decides: not so many.
        moved_RW = ratios_RW[1:].sort().values[:, rows.length * 19 // 20]
        return torch.maximum(8 * ratios_RW[0].amax(), moved_RW.amax())

    with _quiet(model), _Watch(model, compare) as watch:
        run(rows)
    return watch.findings(model)


@torch.no_grad()
def find_differing(
    model: nn.Module, run: Callable[[TrialRows], Any], reference: Callable[[TrialRows], Any], rows: TrialRows
) -> list[Finding]:
    """Modules that return something else in ``run`` than in ``reference``, given the same."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> None:
        if rows.has_tokens(tensor):
            kept.append(tensor.clone())

    def compare(tensor: Tensor) -> Tensor | None:
        if not rows.has_tokens(tensor):
            return None
        wanted = kept.pop(0)
        ratio = _ratios(tensor.flatten(0, 1)[None], wanted.flatten(0, 1)).amax()
        tensor.copy_(wanted)
        return ratio

    with _quiet(model):
        with _Watch(model, keep, leaves=False):
            reference(rows)
        with _Watch(model, compare, leaves=False) as watch:
            run(rows)
    return watch.findings(model)


class _Watch:
    """Compares what modules are given and what they return, while the model runs."""

    def __init__(
        self, model: nn.Module, compare: Callable[[Tensor], Tensor | None], *, leaves: bool = True
    ) -> None:
        self._compare = compare
        self._named = [(n, m) for n, m in model.named_modules() if leaves or any(m.children())]
        self._running: list[str] = []
        """Modules under way, outermost first."""
        self._ratios: list[tuple[str, Tensor]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _Watch:
        for name, module in self._named:
            enter, leave = (functools.partial(hook, name) for hook in (self._enter, self._leave))
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(leave))
        return self

    def __exit__(self, *problem: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._running:  # what differs before a module is run was made by the code around it
            self._look_at(self._running[-1], (args, kwargs))
        self._running.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, returned: Any) -> None:
        self._running.pop()
        self._look_at(name, returned)

    def _look_at(self, name: str, values: Any) -> None:
        for value in tree_leaves(values):
            if type(value) is Tensor and value.is_floating_point() and value.dim() > 2:
                ratio = self._compare(value)
                if ratio is not None:
                    self._ratios.append((name, ratio))

    def findings(self, model: nn.Module) -> list[Finding]:
        """Without repeating a class of modules."""
        if not self._ratios:
            return []
        device = self._ratios[0][1].device
        ratios = torch.stack([ratio.to(device) for _, ratio in self._ratios])
        if is_fully_sharded(model):  # what is done next must be the same on all ranks
            dist.all_reduce(ratios, dist.ReduceOp.MAX, engine_of(model).meshes.group(Axis.WORLD))
        first: dict[str, str] = {}
        for (name, _), is_found in zip(self._ratios, (ratios > 1).tolist(), strict=True):
            if is_found:
                first.setdefault(type(model.get_submodule(name)).__name__, name)
        return [Finding(name, kind) for kind, name in first.items()]


def _ratios(values_RW: Tensor, wanted_W: Tensor) -> Tensor:
    """The largest difference of each token, as a part of what rounding may make of it: [R, W]."""
    wanted_W = wanted_W.float().flatten(1)
    scale_W = wanted_W.square().mean().sqrt() + wanted_W.abs()
    differences_RW = ((values_RW.float().flatten(2) - wanted_W).abs() / scale_W).nan_to_num(0.0)
    return differences_RW.amax(-1) / max(1e-4, 8 * torch.finfo(values_RW.dtype).eps)


def _sizes(model: nn.Module) -> tuple[int, int, int]:
    """Of the vocabulary, of the longest document, of the residual stream."""
    text = text_config(getattr(model, "config", None))
    vocabulary = getattr(text, "vocab_size", None) or 2
    longest = getattr(text, "max_position_embeddings", None) or _LONGEST
    return vocabulary, longest, getattr(text, "hidden_size", None) or 0


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Without dropout and noise, and without compiling anything for these rows and hooks."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
