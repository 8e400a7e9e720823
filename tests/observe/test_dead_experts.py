"""Experts that no token reaches are named, once in a while."""

import torch

from fsdmoe.observe.dead_experts import PAUSE, WINDOW, DeadExperts


def loads(*counts: int) -> dict[str, torch.Tensor]:
    return {"layer 0": torch.ones(4), "layer 3": torch.tensor(counts, dtype=torch.float32)}


def test_a_quarter_of_a_layer_without_tokens_is_named_after_a_while_and_not_at_every_step() -> None:
    watch = DeadExperts()
    said = [watch.add(loads(5, 0, 3, 0)) for _ in range(WINDOW + PAUSE + 1)]
    spoke = [number for number, text in enumerate(said, start=1) if text is not None]
    assert spoke == [WINDOW, WINDOW + PAUSE]
    assert "2 of 4 experts of layer 3 received no token in the last 10 logged steps (1 such layers)" in (
        said[WINDOW - 1] or ""
    )


def test_experts_that_are_reached_now_and_then_are_alive() -> None:
    watch = DeadExperts()
    for step in range(3 * WINDOW):
        assert watch.add(loads(*(1 if step % 4 == expert else 0 for expert in range(4)))) is None
    assert DeadExperts().add({}) is None
