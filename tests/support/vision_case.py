"""A tiny vision-language model with experts, and rows with images of different numbers and sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.hf_pairs import randomize

IMAGE, VIDEO, START, END, VOCABULARY = 60, 61, 62, 63, 64
_PATCH, _MERGE, _CHANNELS, _FRAMES = 4, 2, 3, 2


def tiny_vision_model(*, frozen_tower: bool = False) -> nn.Module:
    import transformers

    text = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 12,
        "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "in_channels": _CHANNELS,
        "patch_size": _PATCH, "spatial_merge_size": _MERGE, "temporal_patch_size": _FRAMES,
        "out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = transformers.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model: Any = transformers.Qwen3VLMoeForConditionalGeneration(config)
    randomize(model, 0.3)
    if frozen_tower:
        model.model.visual.requires_grad_(False)
    return model.train()


def rows_with(images: list[list[int]], videos: int = 0, *, seed: int, length: int = 40) -> dict[str, Any]:
    """One row for each entry, with an image for each number in it: as many patches high, in merged ones. The
    first row has the videos."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, IMAGE, (len(images), length), generator=random)
    kinds = torch.zeros_like(tokens)
    grids: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}
    for row, heights in enumerate(images):
        at = 1
        wanted = [(IMAGE, 1, height) for height in heights] + [(VIDEO, 2, 1)] * (videos if row == 0 else 0)
        for token, frames, height in wanted:
            for _ in range(frames):  # a video's frames stand apart
                tokens[row, at] = START
                tokens[row, at + 1 : at + 1 + height * 2] = token
                kinds[row, at + 1 : at + 1 + height * 2] = 1 if token == IMAGE else 2
                tokens[row, at + 1 + height * 2] = END
                at += height * 2 + 3
            grids[token].append([frames, height * _MERGE, 2 * _MERGE])
    labels = tokens.masked_fill((kinds > 0) | (tokens >= IMAGE), -100)
    batch: dict[str, Any] = {"input_ids": tokens, "labels": labels, "mm_token_type_ids": kinds}
    patch = _CHANNELS * _FRAMES * _PATCH**2
    for token, pixels, grid in ((IMAGE, "pixel_values", "image_grid_thw"),
                                (VIDEO, "pixel_values_videos", "video_grid_thw")):  # fmt: skip
        if grids[token]:
            batch[grid] = torch.tensor(grids[token])
            batch[pixels] = torch.randn(int(batch[grid].prod(1).sum()), patch, generator=random)
    return batch
