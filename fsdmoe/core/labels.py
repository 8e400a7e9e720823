"""Labels outside of the vocabulary: found where they are read, raised where the host waits for the device.

A GPU cannot raise, and asking it would hold the host up in every step. So what reads labels there leaves a
note in host memory, and gives the token no gradient and a loss that is not a number::

    plain CPU tensors          raise at once
    a kernel                   stores the note itself, in pinned memory: no launch and no copy more
    torch's operations (tp)    the same through a copy without a wait

Checking the note costs the host one read of its own memory. What checks it, and when:

    train.py, evaluation       behind the step's one wait, all ranks together, before the optimizer
    ``AdamW.step``             before it changes anything
    ``GradNorm.is_finite``     behind its wait
    a sharded model's forward  if weights have changed since the last: whatever the optimizer

In a loop of one's own, a read of the loss or of the norm waits for the device, and after it ``AdamW.step``
knows for certain. Without any, a later step may be the one that raises: until then weights only lack the
gradient of that token. There the rank with the label raises alone, never inside of an accumulation, and the
launcher ends the others.

Tokens that are masked out may have any label.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.core.errors import LabelError

_LOW_HALF = 2**32 - 1
_MAX_LINES = 8


class _Notes:
    """The process's notes, each one number: ``(1 + index of the token) << 32 | low half of its label``; 0 is
    none."""

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        """Host memory, int64: what kernels stored, and the copy of what torch's operations found."""
        self.found: dict[torch.device, Tensor] = {}
        """What those found, on their device."""
        self.vocabulary, self.row_length = 0, 0
        """Of the last loss."""

    def slots_for(self, device: torch.device) -> Tensor:
        pinned = device.type == "cuda"
        if self.slots is None or (pinned and not self.slots.is_pinned()):
            self.slots = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=pinned)
        return self.slots

    def add(self, note: Tensor) -> None:
        slots = self.slots_for(note.device)
        found = self.found.setdefault(note.device, torch.zeros_like(note))
        torch.maximum(found, note, out=found)  # a later loss without a finding must not wipe an earlier one
        slots[1].copy_(found, non_blocking=True)

    def take(self) -> str | None:
        """What is wrong, in words, once. Waits for nothing."""
        if self.slots is None:
            return None
        memory = self.slots.numpy()  # past torch's dispatcher, which would trace or fake it
        note = int(memory.max())
        if note == 0:
            return None
        memory[:] = 0
        self.found.clear()
        label = note & _LOW_HALF
        return self.words((note >> 32) - 1, label if label < 2**31 else label - 2**32)

    def words(self, index: int, label: int) -> str:
        rank = dist.get_rank() if dist.is_initialized() else 0
        row, token = divmod(index, self.row_length or index + 1)
        return (
            f"labels: expected numbers below {self.vocabulary}, got {label} on rank {rank}, in row {row} of "
            f"a micro-batch, token {token}; mask the token, fix the data or raise model.vocab_size"
        )


_notes = _Notes()


def note_for_kernels(device: torch.device) -> Tensor:
    """Where a kernel on ``device`` stores its note: the first number."""
    return _notes.slots_for(device)


def expect_labels(vocabulary: int, row_length: int) -> None:
    """A loss is about to read labels, in rows of ``row_length``: for the words of a note."""
    _notes.vocabulary, _notes.row_length = vocabulary, row_length


def check_labels(labels_T: Tensor, mask_T: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor | float]:
    """For a loss that is not one kernel: labels that are all inside of the vocabulary, the mask without the
    tokens whose label was not, and what to add to the loss for them: not a number, or 0. On a CPU such a
    token raises instead."""
    if not len(labels_T) or isinstance(labels_T, FakeTensor):
        return labels_T, mask_T, 0.0
    outside_T = ((labels_T < 0) | (labels_T >= vocabulary)) & mask_T
    inside_T = labels_T.masked_fill(outside_T | ~mask_T, 0)
    if _is_on_host(labels_T):
        if outside_T.any():
            index = int(outside_T.nonzero()[0])
            raise LabelError(_notes.words(index, int(labels_T[index])))
        return inside_T, mask_T, 0.0
    index_T = torch.arange(1, len(labels_T) + 1, device=labels_T.device)
    notes_T = (index_T << 32) | (labels_T.clamp(-(2**31), 2**31 - 1).long() & _LOW_HALF)
    note = notes_T.where(outside_T, 0).amax()
    _notes.add(note)
    return inside_T, mask_T & ~outside_T, torch.where(note > 0, torch.nan, 0.0)


def _is_on_host(tensor: Tensor) -> bool:
    """Whether it can be read without waiting for the device."""
    return tensor.device.type == "cpu"


def raise_noted() -> None:
    """Raise :class:`LabelError` if this rank has a note."""
    problem = _notes.take()
    if problem is not None:
        raise LabelError(problem)


def raise_noted_anywhere() -> None:
    """The same on every rank if one of them has a note. Collective: for when a loss that all ranks know is
    not a number."""
    told = [problem for problem in from_all_ranks(_notes.take()) if problem is not None]
    if told:
        raise LabelError(*told[:_MAX_LINES])
