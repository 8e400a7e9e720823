"""A quantised weight, and layers that ask for one."""

import copy
from pathlib import Path

import torch
from torch import nn

from fsdmoe.precision.formats import E4M3, Scaling
from fsdmoe.precision.quantized_weight import (
    QuantizedWeight,
    WeightCoding,
    WeightScales,
    decoded,
    quantize_for_gather,
    scales_of,
    weight_coding,
)


def test_a_quantised_weight_is_a_parameter_with_scales_and_what_is_made_of_it_is_not() -> None:
    scales = WeightScales(torch.full((1, 2), 0.5), (2, 2))
    layer = nn.Linear(4, 2, bias=False)
    layer.weight = QuantizedWeight(torch.ones(2, 4).to(torch.float8_e4m3fn), False, scales=scales)
    assert scales_of(layer.weight) is scales
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    for made in (layer.weight.detach(), layer.weight.view(4, 2), layer.weight.data, nn.Parameter(scales[0])):
        assert scales_of(made) is None


def test_a_copy_has_its_scales(tmp_path: Path) -> None:
    scales = WeightScales(torch.full((1, 1), 2.0), (128, 128))
    weight = QuantizedWeight(torch.ones(2, 4).to(torch.float8_e4m3fn), False, scales=scales)
    torch.save(weight, tmp_path / "weight.pt")
    for made in (copy.deepcopy(weight), torch.load(tmp_path / "weight.pt", weights_only=False)):
        found = scales_of(made)
        assert found is not None
        assert not made.requires_grad
        assert decoded(made, found, torch.float32).tolist() == [[2.0] * 4] * 2


def test_a_weight_is_coded_as_any_of_the_layers_that_share_it_asks() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    coding = WeightCoding(Scaling(E4M3, (128, 128)), transposed=True)
    quantize_for_gather(second, "weight", coding)
    assert weight_coding([(first, "weight"), (second, "weight")]) == coding
    assert weight_coding([(first, "weight")]) is None
    assert weight_coding([(second, "bias")]) is None
