"""Hugging Face models in ``train.py``: a wrapped model as a :class:`fsdmoe.models.causal_lm.CausalLM`.

What differs from a native decoder is here and nowhere in the loop: arguments, the division of the loss by
global counts, the auxiliary loss, expert loads, and which tokens of rows that several ranks share are this
rank's.
Sizes: B rows, S tokens, V vocabulary, E experts, L layers.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.config import Mode
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import split_rows
from fsdmoe.core.capturing import is_capturing
from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.labels import check_labels, expect_labels
from fsdmoe.experts.bias import BiasedRouter
from fsdmoe.experts.context import RoutingContext
from fsdmoe.huggingface.balance import AuxiliaryLoss
from fsdmoe.huggingface.limits import attention_limits, shortest_window
from fsdmoe.huggingface.loss import has_fused_loss, refuse_own_loss
from fsdmoe.huggingface.probe import (
    DocumentLimit,
    TrialRows,
    chunk_size,
    find_differing,
    find_mixing,
    has_values,
)
from fsdmoe.huggingface.replay import follow_routing
from fsdmoe.huggingface.rotary import DocumentRotary
from fsdmoe.huggingface.routing import policies_of
from fsdmoe.huggingface.tensor_plan import tensor_group_of
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of
from fsdmoe.models.attention import SplitRows
from fsdmoe.models.causal_lm import LossOutput, StepCounts
from fsdmoe.models.pieces import Pieces, positions_in_documents
from fsdmoe.tensor_parallel.vocabulary import split_cross_entropy

_IGNORED = -100

logger = logging.getLogger(__name__)


class WrappedCausalLM:
    """A wrapped causal language model of transformers, called as a native decoder is.

    The loss is this rank's share of the global mean, as a decoder's: next-token losses divided by their
    count over the step; the model's own auxiliary loss, which is a mean over a micro-batch, weighed by the
    micro-batch's share of the step's tokens. Where several ranks share the rows of a micro-batch, the
    auxiliary loss is that of all of its tokens, as if one rank had them.
    """

    def __init__(self, module: nn.Module, *, packed_rows: int = 0) -> None:
        refuse_own_loss(module)
        self.module = module
        self._tensor = tensor_group_of(module)
        self._auxiliary = AuxiliaryLoss(module)
        self._rotary = DocumentRotary(module)
        self._longest_row = 0
        named = {name: parallel_forward_of(m) for name, m in module.named_modules()}
        found = {name: forward for name, forward in named.items() if forward is not None}
        same = len({forward.spec.num_experts for forward in found.values()}) == 1
        self._experts = found if same else {}
        self._policies = policies_of(module)
        for forward in self._experts.values():
            forward.counts_load = self._policies is None
        self._split_is_checked = False
        self._limit = self._separate_documents()
        if self._limit is not None and packed_rows > self._limit.longest:
            self._limit.refuse()

    def __call__(
        self,
        tokens_BS: torch.Tensor,
        *,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        labels_BS: torch.Tensor,
        loss_mask_BS: torch.Tensor,
        counts: StepCounts | None = None,
        routing: RoutingContext | None = None,
        split: SplitRows | None = None,
    ) -> LossOutput:
        """Run this rank's rows, or with ``split`` its piece of rows that several ranks share: all of them
        are given the whole rows. A router that no policy changes is the model's own; of ``routing`` it
        follows the tape alone."""
        if positions_BS is None and document_ids_BS is not None:
            positions_BS = positions_in_documents(document_ids_BS)
        if self._limit is not None and not is_capturing():
            self._limit.check(positions_BS, loss_mask_BS)
        if split is None and self._tensor.size > 1:
            split = self._whole_rows(tokens_BS, document_ids_BS)
        if positions_BS is None and split is not None:
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        if split is not None:
            self._plan_attention(split.plan.split.seq_len, split.attention.mode)
        pieces = Pieces(tokens_BS, split, self._tensor)
        lengths_BL = self._document_lengths(tokens_BS, positions_BS, document_ids_BS, pieces)
        positions_BL = None if positions_BS is None else pieces.cut(positions_BS)
        counts = counts or StepCounts.from_vector(self.count_tokens(labels_BS, loss_mask_BS, document_ids_BS))
        token_mask_BS = None if routing is None else routing.token_mask_T
        if self._policies is not None or (routing is not None and routing.replay is not None):
            routing = pieces.describe(routing or RoutingContext(), counts.tokens)
        own_mask_T = None
        if self._policies is None and (token_mask_BS is not None or split is not None):
            own_mask_T = pieces.describe(RoutingContext(token_mask_T=token_mask_BS), None).token_mask_T
        for forward in self._experts.values():
            forward.token_mask_T = own_mask_T
        targets = pieces.cut(labels_BS), pieces.cut(loss_mask_BS)
        packed = document_ids_BS is not None
        with (
            self._routing_by(routing) as follow_again,
            self._rotary.following(lengths_BL),
            _masks(packed=packed),
        ):
            out = self._run(pieces.cut(tokens_BS), positions_BL, split, (*targets, counts.loss_tokens))
        cross_entropy = out.loss
        if cross_entropy is None:
            cross_entropy = self._loss_sum(out.logits, *targets) / counts.loss_tokens
        balance, loads_LE = self._balance(cross_entropy, routing)
        if self._auxiliary.is_in(out):
            balance = balance + self._family_balance(out, pieces, token_mask_BS, counts.tokens)
        loss = cross_entropy + balance
        if follow_again is not None:
            follow_again(loss)
        if self._policies is not None and routing is not None:
            self._policies.follow_backward(loss, routing)
        return LossOutput(
            loss,
            cross_entropy=cross_entropy.detach(),
            balance_loss=balance.detach(),
            loads_LE=loads_LE,
        )

    def _routing_by(
        self, routing: RoutingContext | None
    ) -> contextlib.AbstractContextManager[Callable[[Any], None] | None]:
        if self._policies is not None:
            return self._policies.following(routing)
        if routing is None or routing.replay is None:
            return contextlib.nullcontext()
        return follow_routing(self.module, self._experts, routing)

    def _balance(
        self, like: torch.Tensor, routing: RoutingContext | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the forward that was just made: what policies add to the loss, and the loads."""
        if self._policies is not None and routing is not None:
            return self._policies.collect(routing)
        loads = [forward.load_E for forward in self._experts.values() if forward.load_E is not None]
        loads_LE = torch.stack(loads) if loads else torch.zeros((0, 1), device=like.device)
        return torch.zeros_like(like), loads_LE

    def _family_balance(
        self, out: Any, pieces: Pieces, token_mask_BS: torch.Tensor | None, num_tokens: torch.Tensor
    ) -> torch.Tensor:
        """The model's own auxiliary loss, over the tokens of all ranks that share the rows. The model does
        not know which of them are padding."""
        if pieces.are_whole and (token_mask_BS is None or not self._auxiliary.is_known):
            counted = pieces.num_tokens if token_mask_BS is None else token_mask_BS.sum()
            return self._auxiliary.own(out, counted / num_tokens)
        routing = pieces.describe(RoutingContext(token_mask_T=token_mask_BS), num_tokens)
        return self._auxiliary.shared(out, routing)

    def _run(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None,
        split: SplitRows | None = None,
        targets: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> Any:
        """Documents that share a row are separated by positions that restart: transformers builds the mask
        from them, but only where no cache is asked for. A split determines itself which tokens attend to
        which. A model with a fused loss sums the losses of ``targets`` (labels, mask, what to divide by)
        itself, if it can."""
        given: dict[str, Any] = {"loss_targets": targets} if has_fused_loss(self.module) else {}
        if split is not None:
            given["attention_plan"] = split.plan
        return self.module(input_ids=tokens_BS, position_ids=positions_BS, use_cache=False, **given)

    def follow_plans(self, seq_len: int) -> bool:
        """From now on attend by plans, and only by them, if that computes the same for rows of this length.
        Collective."""
        from fsdmoe.huggingface.transformers_api import use_own_attention

        try:
            self._plan_attention(seq_len, "ring")
        except ConfigError as error:
            logger.info("attention of the model's own, with masks: %s", error)
            use_own_attention(self.module)
            return False
        return True

    def _plan_attention(self, seq_len: int, mode: Mode) -> None:
        """Before any routing is followed: trials have tokens of their own."""
        from fsdmoe.huggingface.transformers_api import use_planned_attention  # optional: only when chosen

        self._check_rows(seq_len)
        use_planned_attention(self.module, mode)
        if not self._split_is_checked and not is_capturing():
            self._check_split()

    def _document_lengths(
        self,
        tokens_BS: torch.Tensor,
        positions_BS: torch.Tensor | None,
        document_ids_BS: torch.Tensor | None,
        pieces: Pieces,
    ) -> torch.Tensor | None:
        """Of this rank's tokens, where rotary frequencies follow them."""
        if positions_BS is None:  # what transformers takes then: one document a row
            positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
        lengths_BS = self._rotary.lengths(positions_BS, document_ids_BS)
        return None if lengths_BS is None else pieces.cut(lengths_BS)

    def _check_rows(self, seq_len: int) -> None:
        """Refuse what the model's configuration wants of longer rows than any before."""
        if seq_len > self._longest_row:
            self._longest_row = seq_len
            limits = attention_limits(self.module.config, seq_len)
            limits += [
                f"mesh.cp: expected rotary frequencies that do not depend on the rows, got {name}, whose "
                "form is not known here; choose linear, yarn or llama3, or set mesh.cp = 1 and mesh.tp = 1"
                for name in self._rotary.unknown
            ]
            refuse(limits)

    def _loss_sum(
        self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor, mask_BS: torch.Tensor
    ) -> torch.Tensor:
        logits_TV, row_length = logits_BSV.flatten(0, 1), labels_BS.shape[-1]
        labels_T, mask_T = labels_BS.flatten(), mask_BS.flatten()
        if self._tensor.size > 1:
            return split_cross_entropy(logits_TV, labels_T, mask_T, self._tensor, row_length=row_length)
        expect_labels(logits_TV.shape[-1], row_length)
        labels_T, mask_T, outside = check_labels(labels_T, mask_T, logits_TV.shape[-1])
        labels_T = labels_T.masked_fill(~mask_T, _IGNORED)
        loss = F.cross_entropy(logits_TV.float(), labels_T, ignore_index=_IGNORED, reduction="sum")
        return loss + outside

    def _whole_rows(self, tokens_BS: torch.Tensor, document_ids_BS: torch.Tensor | None) -> SplitRows:
        """A plan for rows that are this rank's alone, but for ``tp``. A feed makes it ahead of the step."""
        ids_BS = torch.zeros_like(tokens_BS) if document_ids_BS is None else document_ids_BS
        plan = AttentionPlan(split_rows(ids_BS, 1, multiple_of=self._tensor.size), None, tokens_BS.device)
        return SplitRows(plan, ContextAttention(), self._tensor.group)

    def _separate_documents(self) -> DocumentLimit | None:
        """What keeps documents of a row from being separated, if anything; a model that does not look at
        positions is given masks. Collective: it runs a few short rows through the model."""
        if self._tensor.size > 1 or not has_values(self.module):
            return None  # under tp, the plan separates documents, masks are not used
        from fsdmoe.huggingface.transformers_api import mask_documents, short_chunks, unplanned_attention

        rows, chunk = TrialRows.make(self.module, "packed"), chunk_size(self.module)
        # The model may have followed plans before, through another of these.
        with unplanned_attention(self.module):
            with short_chunks(self.module, chunk and rows.tokens_BS.shape[1]):
                found = find_mixing(self.module, self._try, rows)
            if found and not self._separates_by(mask_documents(self.module), rows):
                self._refuse_shared_batches()
                return DocumentLimit(type(self.module).__name__, found)
            if chunk is None:
                return None
            with short_chunks(self.module, rows.length // 4):
                found = find_mixing(self.module, self._try, rows)
        return DocumentLimit(type(self.module).__name__, found, chunk) if found else None

    def _separates_by(self, masks: RemovableHandle, rows: TrialRows) -> bool:
        """Whether documents are separated with these masks, which are removed where they are not."""
        try:
            found = bool(find_mixing(self.module, self._try, rows))
        except Exception:  # a forward that does not expect such masks
            found = True
        if found:
            masks.remove()
        return not found

    def _refuse_shared_batches(self) -> None:
        """Of a model whose rows change each other, or whose tokens see later ones, whatever a row holds."""
        found = find_mixing(self.module, self._try, TrialRows.make(self.module, "first"))
        if found:
            raise ConfigError(
                f"model.hf: expected rows that do not change each other, but {found[0]} of "
                f"{type(self.module).__name__} returns something else for a document where other tokens are "
                "behind it or in other rows; take another model"
            )

    def _check_split(self) -> None:
        """Refuse a model whose rows cannot be split, by trying it once. Collective."""
        self._split_is_checked = True
        if self._tensor.size > 1 or not has_values(self.module):
            return
        from fsdmoe.huggingface.transformers_api import lone_attention, unplanned_attention

        def own(rows: TrialRows) -> None:
            with unplanned_attention(self.module):
                self._try(rows)

        def planned(rows: TrialRows) -> None:
            self._try(rows, attention_plan=self._whole_rows(rows.tokens_BS, rows.document_ids_BS).plan)

        window = shortest_window(self.module.config)  # that of the rows was checked before
        with lone_attention(self.module):
            rows = TrialRows.make(self.module, "split", window)
            found = find_mixing(self.module, self._try, rows)
        if found:
            raise ConfigError(
                f"mesh.cp: expected {type(self.module).__name__} to look at other tokens in attention only, "
                f"got {found[0]}, which ranks with other pieces of a row know nothing of; set mesh.cp = 1"
            )
        found = find_differing(self.module, planned, own, TrialRows.make(self.module, "packed", window))
        if found:
            raise ConfigError(
                f"mesh.cp: expected causal attention inside each document, got {found[0]} of "
                f"{type(self.module).__name__}, which computes something else; set mesh.cp = 1"
            )

    def _try(self, rows: TrialRows, **given: Any) -> None:
        lengths_BS = self._rotary.lengths(rows.positions_BS, rows.document_ids_BS)
        if lengths_BS is not None and rows.trial == "split":
            lengths_BS = torch.full_like(lengths_BS, rows.tokens_BS.shape[1])
        if "logits_to_keep" in inspect.signature(type(self.module).forward).parameters:
            given["logits_to_keep"] = 1
        # Policies may let tokens compete for experts; that is not what is tried.
        alone = contextlib.nullcontext() if self._policies is None else self._policies.following(None)
        with alone, self._rotary.following(lengths_BS):
            self.module(input_ids=rows.tokens_BS, position_ids=rows.positions_BS, use_cache=False, **given)

    def count_tokens(
        self, labels_BS: torch.Tensor, loss_mask_BS: torch.Tensor, document_ids_BS: torch.Tensor | None
    ) -> torch.Tensor:
        """``[all tokens, tokens with loss]``, to be summed over the step."""
        return torch.stack(
            (loss_mask_BS.new_full((), loss_mask_BS.numel(), dtype=torch.int64), loss_mask_BS.sum())
        )

    def routers(self) -> list[BiasedRouter]:
        """Those that policies change; the others are the model's own."""
        return [] if self._policies is None else list(self._policies.by_experts.values())

    def moe_layers(self) -> list[int]:
        """The layer numbers, as names have them, of the rows of ``loads_LE``."""
        called = [name for name, forward in self._experts.items() if forward.load_E is not None]
        named = called or self._experts
        numbers = ([int(part) for part in name.split(".") if part.isdigit()] for name in named)
        return [(found or [index])[0] for index, found in enumerate(numbers)]

    def eval(self) -> None:
        self.module.eval()

    def train(self) -> None:
        self.module.train()


def _masks(*, packed: bool) -> contextlib.AbstractContextManager[None]:
    """How transformers masks the rows of a call."""
    if not is_capturing():
        return contextlib.nullcontext()
    from fsdmoe.huggingface.transformers_api import capturable_masks  # optional: only when chosen

    return capturable_masks(packed=packed)
