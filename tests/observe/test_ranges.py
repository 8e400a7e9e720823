"""Layers and their parts have names in profiles."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fsdmoe.observe.ranges import name_ranges


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.Linear(4, 4)
        self.mlp = nn.Linear(4, 4)

    def forward(self, x):
        x = x + self.self_attn(x)
        return x + self.mlp(torch.exp(x)), None


def run(layers):
    x = torch.ones(2, 4, requires_grad=True)
    for layer in layers:
        x, _ = layer(x)
    x.sum().backward()


def spans(layers):
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run(layers)
    return recorded.events()


def test_kernels_of_forward_and_backward_lie_in_the_ranges_of_their_layer():
    layers = nn.ModuleList([Layer(), Layer()])
    name_ranges(layers)
    events = spans(layers)
    ranges = {e.name: e.time_range for e in events if e.name.startswith("layer ")}
    assert set(ranges) == {
        f"layer {i}{part} {phase}"
        for i in (0, 1)
        for part in ("", " attention", " mlp")
        for phase in ("forward", "backward")
    }
    for operator, phase in (("aten::exp", "forward"), ("ExpBackward0", "backward")):
        found = sorted(e.time_range.start for e in events if e.name == operator)
        order = (0, 1) if phase == "forward" else (1, 0)
        for start, index in zip(found, order, strict=True):
            assert ranges[f"layer {index} {phase}"].start <= start <= ranges[f"layer {index} {phase}"].end
            assert (
                not ranges[f"layer {index} mlp {phase}"].start
                <= start
                <= ranges[f"layer {index} mlp {phase}"].end
            )


def test_gradients_are_what_they_were():
    torch.manual_seed(0)
    plain = nn.ModuleList([Layer(), Layer()])
    named = nn.ModuleList([Layer(), Layer()])
    named.load_state_dict(plain.state_dict())
    name_ranges(named)
    run(plain)
    run(named)
    for one, other in zip(plain.parameters(), named.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
