"""Deployed formats on disk: compressed-tensors' own code reads back what training rounded to."""

from __future__ import annotations

import pytest
import torch

from fsdmoe.checkpoint.deployed import RoundedWeights, coded_boxes, quantization_config
from fsdmoe.checkpoint.gpt_oss import dequantise_mxfp4
from fsdmoe.checkpoint.hf_names import Piece
from fsdmoe.precision.deployed_formats import BLOCKS, WeightRounding, round_weight_
from fsdmoe.precision.formats import DeployedFormat

ROWS, COLUMNS = 24, 64


def rounded_experts(kind: DeployedFormat, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``[E, 2I, H]`` as it is stored, and what forward sees of it."""
    values = torch.randn(3, 2 * ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    seen = values.to(dtype, copy=True)
    round_weight_(seen, WeightRounding(kind, dtype))
    return values, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(BLOCKS))
def test_compressed_tensors_decodes_what_forward_saw_bit_by_bit(
    kind: DeployedFormat, dtype: torch.dtype
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    memory = "model.layers.0.mlp.experts.gate_up_proj"
    values, seen = rounded_experts(kind, dtype)
    rounded = RoundedWeights(kind, dtype, frozenset({memory}))
    up = Piece(
        "model.layers.0.mlp.experts.1.up_proj.weight", memory, (1, ROWS, 0), (1, ROWS, COLUMNS),
        drops_first=True,
    )  # fmt: skip
    boxes = coded_boxes(up, tuple(values.shape), rounded, lambda: values[1:2])
    stored = {box.name.rpartition(".")[2]: make() for box, make in boxes.items()}
    for box in boxes:
        made = stored[box.name.rpartition(".")[2]]
        assert (tuple(made.shape), made.dtype) == (box.shape, box.dtype)
    config = quantization_config(rounded, ["lm_head.weight"], is_gpt_oss=False)
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    decoded = BaseCompressor.get_value_from_registry(config["format"]).decompress(stored, scheme)["weight"]
    if kind == "nvfp4":  # which it decodes to bfloat16 always
        seen = seen.to(torch.bfloat16)
    assert torch.equal(decoded.to(seen.dtype), seen[1, ROWS:])


def test_experts_of_gpt_oss_are_read_back_as_released_ones_are() -> None:
    values, seen = rounded_experts("mxfp4", torch.bfloat16)
    piece = Piece("experts.gate_up_proj", "experts.gate_up_proj", (0, 0, 0), (3, COLUMNS, 2 * ROWS))
    rounded = RoundedWeights("mxfp4", torch.bfloat16, frozenset({piece.memory}))
    boxes = coded_boxes(piece, piece.sizes, rounded, lambda: values)
    stored = {box.name: make() for box, make in boxes.items()}
    assert {name: tuple(made.shape) for name, made in stored.items()} == {
        box.name: box.shape for box in boxes
    }
    decoded = dequantise_mxfp4(stored["experts.gate_up_proj_blocks"], stored["experts.gate_up_proj_scales"])
    assert torch.equal(decoded, seen.mT)
