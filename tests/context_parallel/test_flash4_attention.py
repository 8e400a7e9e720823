"""When whole rows go through FlashAttention-4; its numbers are tested where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.context_parallel import flash4_attention
from fsdmoe.models.attention import attend


def test_compiled_layers_keep_the_attention_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing the question whether the extra is installed ended ``torch.compile`` where it is not."""
    monkeypatch.setattr(flash4_attention, "takes", lambda *_: True)
    monkeypatch.setattr(flash4_attention, "_LEAST_WORK", 0)
    rows = torch.randn(1, 8, 2, 64)
    assert flash4_attention.takes_rows(rows, rows)
    takes_rows = torch.compile(flash4_attention.takes_rows, backend="eager", fullgraph=True)
    assert not takes_rows(rows, rows)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)(rows, rows, rows, None, 0.1)
    monkeypatch.undo()
    assert torch.equal(compiled, attend(rows, rows, rows, None, 0.1))
