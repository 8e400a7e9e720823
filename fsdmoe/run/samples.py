"""Samples during training: how the model goes on with the prompts of ``train.sample_prompts``.

All ranks generate together, since each holds a part of the weights: the same prompts, and the same number of
tokens, so that no rank runs a layer that another one does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdmoe.core.errors import ConfigError
from fsdmoe.data import DataConfig
from fsdmoe.data.tokenizer import load_tokenizer
from fsdmoe.experts.context import RoutingContext
from fsdmoe.models.decoder import Decoder

NEW_TOKENS = 32
_ROWS_OF = 128  # the length of a row is a multiple of it: mesh.tp divides rows evenly


class Samples:
    """Goes on greedily with each prompt. A prompt is text as the model sees it: markers such as
    ``<|im_start|>`` are the tokens that they name.

    Raises:
        ConfigError: A prompt has no tokens, or one that the model does not know.
    """

    def __init__(
        self, prompts: Sequence[str], data: DataConfig, device: torch.device, *, vocab_size: int
    ) -> None:
        self._device = device
        self._ids: dict[str, list[int]] = {}
        if not prompts:
            return
        self._tokenizer = load_tokenizer(data.tokenizer, eos_token=data.eos_token, bos_token=data.bos_token)
        head = [] if self._tokenizer.bos_id is None else [self._tokenizer.bos_id]
        for prompt in prompts:
            ids = self._ids[prompt] = head + self._tokenizer.encode_prompt(prompt)
            if not 0 <= max(ids, default=-1) < vocab_size:
                raise ConfigError(
                    f"train.sample_prompts: expected one or more of the model's {vocab_size} tokens in each, "
                    f"got {ids} for {prompt!r}; write another, or take the model's own tokenizer"
                )

    @torch.no_grad()
    def generate(self, model: Any) -> dict[str, str]:
        """Prompt -> what follows it. Collective; ``model`` is the run's :class:`CausalLM`."""
        found = {}
        for prompt, ids in self._ids.items():
            model.eval()
            new = self._of_decoder(model, ids) if isinstance(model, Decoder) else self._of_wrapped(model, ids)
            model.train()
            end = self._tokenizer.eos_id
            found[prompt] = self._tokenizer.decode(new[: new.index(end)] if end in new else new)
        return found

    def _of_decoder(self, model: Decoder, ids: list[int]) -> list[int]:
        length = len(ids) + NEW_TOKENS
        tokens_1S = torch.zeros(1, length + -length % _ROWS_OF, dtype=torch.long, device=self._device)
        tokens_1S[0, : len(ids)] = torch.tensor(ids)
        places_1S = torch.arange(tokens_1S.shape[1], device=self._device)[None]
        for place in range(len(ids), length):
            is_text_1S = places_1S < place  # the rest is no token
            # Rotary positions that follow a document's length are to follow that of the text alone.
            documents_1S = (~is_text_1S).long() if model.config.rope.depends_on_length else None
            routing = RoutingContext(token_mask_T=is_text_1S)
            out = model(tokens_1S, document_ids_BS=documents_1S, routing=routing)
            tokens_1S[0, place] = out.logits_BSV[0, place - 1].argmax()
        return tokens_1S[0, len(ids) : length].tolist()

    def _of_wrapped(self, model: Any, ids: list[int]) -> list[int]:
        tokens_1S = torch.tensor([ids], device=self._device)
        out_1S = model.module.generate(
            input_ids=tokens_1S,
            attention_mask=torch.ones_like(tokens_1S),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=self._tokenizer.eos_id,
        )
        return out_1S[0, len(ids) :].tolist()
