"""Pairs of answers in ``train.py``: a wrapped model with adapters, as a language model whose loss is DPO's.

A row holds a pair: the chosen answer with its prompt, then the rejected one with the same prompt, as two
documents, then padding. A micro-batch is two forwards::

    reference   adapters and dropout off, no graph   log-probabilities of both answers
    policy      adapters on                          the loss of the pairs, from both

The head turns hidden states into losses of tokens chunk by chunk, so logits of a whole row never exist
(:func:`fsdmoe.models.head.linear_token_losses`). What is called a loss token elsewhere is a pair here: means
are over pairs of the whole step, whichever rank has them.
Sizes: B rows, S tokens, T = B*S.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.context import RoutingContext
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.huggingface.lora import has_factors
from fsdmoe.huggingface.loss import has_fused_loss
from fsdmoe.huggingface.preference_config import PreferenceConfig
from fsdmoe.models.causal_lm import CausalLM, LossOutput, StepCounts
from fsdmoe.models.head import TokenObjective


class AnswerSums(TokenObjective):
    """Log-probabilities of both answers of each row."""

    def __init__(self, document_ids_BS: Tensor, loss_mask_BS: Tensor) -> None:
        self.of_answer_2BS = torch.stack([(document_ids_BS == answer) & loss_mask_BS for answer in (0, 1)])
        self.sums_2B = torch.zeros(())
        """Known once a loss was computed."""

    def loss_of(self, losses_T: Tensor) -> Tensor:
        losses_BS = losses_T.view(self.of_answer_2BS.shape[1:])
        self.sums_2B = -(losses_BS * self.of_answer_2BS).sum(-1)
        return self.sums_2B.sum()


class PairLosses(AnswerSums):
    """The loss of a micro-batch's pairs: this rank's share of the mean over the step."""

    def __init__(self, reference: AnswerSums, config: PreferenceConfig, num_pairs: Tensor) -> None:
        self.of_answer_2BS = reference.of_answer_2BS
        self._reference_2B = reference.sums_2B
        self._config = config
        self._num_pairs = num_pairs
        self.rewards_2 = torch.zeros(2)
        """Share of the step's mean margin of rewards, and of pairs whose chosen answer has the larger one.
        Known once a loss was computed."""

    def loss_of(self, losses_T: Tensor) -> Tensor:
        super().loss_of(losses_T)
        gains_2B = self.sums_2B - self._reference_2B
        beta = self._config.beta
        is_pair_B = self.of_answer_2BS.any(-1).any(0)  # evaluation fills batches up with rows of padding
        self.rewards_2 = self._rewards(beta * gains_2B.detach(), is_pair_B)
        if self._config.loss == "ipo":
            gains_2B = gains_2B / self.of_answer_2BS.sum(-1).clamp(min=1)
        margin_B = gains_2B[0] - gains_2B[1]
        if self._config.loss == "ipo":
            losses_B = (margin_B - 1 / (2 * beta)) ** 2
        elif self._config.loss == "hinge":
            losses_B = torch.relu(1 - beta * margin_B)
        else:
            losses_B = -F.logsigmoid(beta * margin_B)
        return torch.where(is_pair_B, losses_B, 0.0).sum() / self._num_pairs

    def _rewards(self, rewards_2B: Tensor, is_pair_B: Tensor) -> Tensor:
        """TRL's ``rewards/margins`` and ``rewards/accuracies``, of sums over an answer's tokens, also where
        the loss takes their mean."""
        margin_B = rewards_2B[0] - rewards_2B[1]
        return torch.where(is_pair_B, torch.stack((margin_B, margin_B > 0)), 0.0).sum(-1) / self._num_pairs


class PreferenceLM:
    """A :class:`fsdmoe.models.causal_lm.CausalLM` of pairs around the one of tokens."""

    def __init__(self, inner: CausalLM, config: PreferenceConfig) -> None:
        assert isinstance(inner, WrappedCausalLM), "adapters are around wrapped models alone"
        self._inner = inner
        self._config = config
        self.rewards_2: Tensor | None = None
        """This rank's part of the step's margin and accuracy so far (:class:`PairLosses`); whoever reads them
        takes them away."""
        self._adapters: list[Any] = [layer for layer in inner.module.modules() if has_factors(layer)]
        if not has_fused_loss(inner.module):
            raise ConfigError(
                "model.hf: expected a head of one projection without bias and adapters for pairs of answers, "
                f"got that of {type(inner.module).__name__}; take another model, or TRL's DPOTrainer "
                "(docs/trainers.md)"
            )

    @property
    def module(self) -> nn.Module:
        return self._inner.module

    def __call__(
        self,
        tokens_BS: Tensor,
        *,
        labels_BS: Tensor,
        loss_mask_BS: Tensor,
        document_ids_BS: Tensor | None = None,
        counts: StepCounts | None = None,
        routing: RoutingContext | None = None,
        **rows: Any,
    ) -> LossOutput:
        given: dict[str, Any] = {"labels_BS": labels_BS, "loss_mask_BS": loss_mask_BS, **rows}
        given["document_ids_BS"] = document_ids_BS
        counts = counts or StepCounts.from_vector(self.count_tokens(labels_BS, loss_mask_BS, document_ids_BS))
        if document_ids_BS is None:  # rows without documents: padding alone
            document_ids_BS = torch.zeros_like(tokens_BS)
        reference: Any = AnswerSums(document_ids_BS, loss_mask_BS)
        mask_BS = None if routing is None else routing.token_mask_T
        with torch.no_grad(), self._as_reference():
            self._inner(
                tokens_BS, **given, counts=replace(counts, loss_tokens=reference),
                routing=None if mask_BS is None else RoutingContext(token_mask_T=mask_BS),
            )  # fmt: skip
        pairs: Any = PairLosses(reference, self._config, counts.loss_tokens)
        out = self._inner(tokens_BS, **given, counts=replace(counts, loss_tokens=pairs), routing=routing)
        if self.module.training:
            rewards_2 = pairs.rewards_2
            self.rewards_2 = rewards_2 if self.rewards_2 is None else self.rewards_2 + rewards_2
        return out

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Without adapters, and without what training draws (dropout, jitter): it is what pairs are compared
        with."""
        is_training = self.module.training
        self.eval()
        for layer in self._adapters:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._adapters:
                layer.enable_adapters(True)
            if is_training:
                self.train()

    def count_tokens(self, labels_BS: Tensor, loss_mask_BS: Tensor, document_ids_BS: Tensor | None) -> Tensor:
        """``[all tokens, pairs]``, to be summed over the step."""
        num_tokens = loss_mask_BS.new_full((), loss_mask_BS.numel(), dtype=torch.int64)
        return torch.stack((num_tokens, loss_mask_BS.any(-1).sum()))

    def routers(self) -> list[Any]:
        return self._inner.routers()

    def follow_plans(self, seq_len: int) -> bool:
        """Rows of pairs are summed up without a plan."""
        return False

    def moe_layers(self) -> list[int]:
        return self._inner.moe_layers()

    def train(self) -> None:
        self._inner.train()

    def eval(self) -> None:
        self._inner.eval()
