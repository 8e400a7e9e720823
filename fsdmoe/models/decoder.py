"""A decoder-only language model in Hugging Face style, with a MoE layer behind every attention.

The path of a batch::

    tokens -> embed -> [ norm -> attention -> + -> norm -> MoE or MLP -> + ] x layers -> norm -> head + loss
                                                       |
                                            balance terms and expert loads: returned, never kept

Parameter names are those of the model's Hugging Face counterpart. How it is called, and what its loss means
on several ranks: see :mod:`fsdmoe.models.causal_lm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.moe import MoE, MoEAux, total_balance
from fsdmoe.experts.router import Router
from fsdmoe.experts.shared import SharedExperts
from fsdmoe.kernels.linear import Embedding
from fsdmoe.kernels.rms_norm import RMSNorm
from fsdmoe.memory.calls import plain_calls
from fsdmoe.models.attention import AttentionContext, GroupedQueryAttention, LatentAttention, SplitRows
from fsdmoe.models.causal_lm import LogitsOutput, LossOutput, StepCounts
from fsdmoe.models.config import ModelConfig
from fsdmoe.models.head import LMHead, LossRows
from fsdmoe.models.moe import build_moe
from fsdmoe.models.mtp import MTPJoin, Targets, all_targets
from fsdmoe.models.pieces import Pieces, WholeRows, positions_in_documents
from fsdmoe.models.projections import scatter_projection
from fsdmoe.models.sub_batches import SubBatch, split_sub_batches, summed
from fsdmoe.tensor_parallel.group import TensorGroup
from fsdmoe.tensor_parallel.split import TensorPlan
from fsdmoe.tensor_parallel.vocabulary import embed


class DenseMLP(SharedExperts):
    """The MLP of layers without experts: every token's, and split by tensor parallelism."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(hidden_size, intermediate_size)
        self.tensor = TensorGroup()
        self.memory_calls |= plain_calls("shared_experts")

    def tensor_plan(self) -> TensorPlan:
        return {"gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 1}

    def forward(self, x_BsD: torch.Tensor) -> torch.Tensor:
        h_BSN = self.memory_calls["shared_experts"](self._hidden, self.tensor.gather(x_BsD))
        if self.tensor.size == 1:
            return self.down_proj(h_BSN)
        return scatter_projection(self.down_proj, h_BSN, self.tensor)

    def _hidden(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.memory_calls["activation"](self.activation, self.gate_proj(x_BSD), self.up_proj(x_BSD))


class DecoderLayer(nn.Module):
    """Attention, then experts (or a dense MLP), each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, mlp: nn.Module, window: int | None = None) -> None:
        super().__init__()
        self.self_attn = LatentAttention(config) if config.is_mla else GroupedQueryAttention(config, window)
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.memory_calls = plain_calls("input_norm", "attention", "mlp_norm", "mlp")

    def forward(
        self,
        x_BSD: torch.Tensor | list[SubBatch],
        attention: AttentionContext | None = None,
        routing: RoutingContext | None = None,
    ) -> tuple[Any, MoEAux | None]:
        """Rows whole, with what is known of them; or sub-batches, which know it themselves and come back as
        sub-batches."""
        if isinstance(x_BSD, list):
            return self._in_sub_batches(x_BSD)
        assert attention is not None
        assert routing is not None
        x_BSD, normed_BSD = self.attend(x_BSD, attention)
        if isinstance(self.mlp, MoE):
            y_BSD, aux = self.memory_calls["mlp"](self.mlp, normed_BSD, routing)
        else:
            y_BSD, aux = self.memory_calls["mlp"](self.mlp, normed_BSD), None
        return x_BSD + y_BSD, aux

    def _in_sub_batches(self, batches: list[SubBatch]) -> tuple[list[SubBatch], MoEAux | None]:
        experts = self.mlp if isinstance(self.mlp, MoE) else None
        done, dispatched, auxes = [], [], []
        for batch in batches:
            x_BSD, normed_BSD = self.attend(batch.joined(), batch.attention)
            if experts is None:
                x_BSD = x_BSD + self.memory_calls["mlp"](self.mlp, normed_BSD)
            else:
                start = experts.start_dispatch
                started, aux = self.memory_calls["mlp"](start, normed_BSD, batch.routing)
                dispatched.append(started)
                auxes.append(aux)
            done.append(batch._replace(x_BSD=x_BSD, experts=experts, combining=None))
        for index, started in enumerate(dispatched):
            assert experts is not None
            done[index] = done[index]._replace(combining=experts.start_combine(started))
        if experts is not None and not experts.combines_late:
            done = [each._replace(x_BSD=each.joined(), combining=None) for each in done]
        return done, summed(auxes)

    def attend(self, x_BSD: torch.Tensor, attention: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention side: the residual stream behind it, and the same normed, for the experts. What it
        launches depends on shapes alone."""
        calls = self.memory_calls
        normed_BSD = calls["input_norm"](self.input_layernorm, x_BSD)
        x_BSD = x_BSD + calls["attention"](self.self_attn, normed_BSD, attention)
        return x_BSD, calls["mlp_norm"](self.post_attention_layernorm, x_BSD)


class MTPLayer(DecoderLayer):
    """One multi-token prediction depth; see :mod:`fsdmoe.models.mtp`. Its output is normed for the head."""

    def __init__(self, config: ModelConfig, mlp: nn.Module) -> None:
        super().__init__(config, mlp)
        self.join = MTPJoin(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_BSD: torch.Tensor,
        embedded_BSD: torch.Tensor,
        attention: AttentionContext,
        routing: RoutingContext,
    ) -> tuple[torch.Tensor, torch.Tensor, MoEAux | None]:
        """Hidden states for the next depth, the same normed for the head, and the layer's aux."""
        x_BSD, aux = super().forward(self.join(embedded_BSD, hidden_BSD), attention, routing)
        return x_BSD, self.norm(x_BSD), aux


class DecoderBody(nn.Module):
    """Everything below the head; ``model`` in Hugging Face's names."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config,
                DenseMLP(config.hidden_size, config.intermediate_size)
                if index < config.first_k_dense_replace
                else build_moe(config, experts),
                config.window_of(index),
            )
            for index in range(config.num_hidden_layers)
        )
        self.mtp_layers = nn.ModuleList(
            MTPLayer(config, build_moe(config, experts)) for _ in range(config.num_nextn_predict_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.tensor = TensorGroup()

    def tensor_plan(self) -> TensorPlan:
        return {"embed_tokens.weight": 0, "norm.weight": "tokens", "layers": "own", "mtp_layers": "own"}


class Decoder(nn.Module):
    """The whole model: tokens in, loss (or logits) out."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.experts = experts or ExpertsConfig()
        self.model = DecoderBody(config, self.experts)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size)
        self.sub_batches = 1
        """In how many the rows of a training micro-batch go through the layers."""
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight  # type: ignore[assignment]

    def forward(
        self,
        tokens_BS: torch.Tensor,
        *,
        positions_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        labels_BS: torch.Tensor | None = None,
        loss_mask_BS: torch.Tensor | None = None,
        counts: StepCounts | None = None,
        routing: RoutingContext | None = None,
        split: SplitRows | None = None,
    ) -> LossOutput | LogitsOutput:
        """Run this rank's rows, or with ``split`` its piece of rows that several ranks share: all of them
        are given the whole rows.

        ``labels`` are already shifted: the token after each token. Without ``document_ids`` a row is one
        document; without ``positions`` each document counts its own. Without ``counts`` the loss is the mean
        over these rows alone (a rank's share of it); without labels the logits of the piece come back. What
        ``routing`` says of ranks, tapes and earlier micro-batches is kept; what it must say of the rows is
        added.
        """
        if positions_BS is None:
            ids_BS = torch.zeros_like(tokens_BS) if document_ids_BS is None else document_ids_BS
            positions_BS = positions_in_documents(ids_BS)
        pieces = Pieces(tokens_BS, split, self.model.tensor)
        targets: list[Targets] = []
        if labels_BS is not None:
            mask_BS = torch.ones_like(labels_BS, dtype=torch.bool) if loss_mask_BS is None else loss_mask_BS
            if counts is None:
                counts = StepCounts.from_vector(self.count_tokens(labels_BS, mask_BS, document_ids_BS))
            # Chunks of a row lie on different ranks: whatever looks ahead is done before the row is cut.
            now = Targets(tokens_BS, labels_BS, mask_BS)
            targets = [Targets(*map(pieces.cut, each)) for each in self._targets(now, document_ids_BS)]
        batch = WholeRows(
            tokens_BS, positions_BS, document_ids_BS, split, routing or RoutingContext(),
            None if counts is None else counts.tokens,
        )  # fmt: skip
        attention, routing = batch.describe(self.config, self.model.tensor)
        hidden_BSD = self._embed(pieces.cut(tokens_BS))
        auxes: list[MoEAux] = []
        count = min(len(tokens_BS), self.sub_batches)
        if count > 1 and torch.is_grad_enabled():
            batches = split_sub_batches(count, hidden_BSD, batch, self.config, self.model.tensor)
            for layer in self.model.layers:
                batches, aux = layer([each.at_layer(len(auxes)) for each in batches])
                auxes += [aux] if aux is not None else []
            hidden_BSD = torch.cat([each.joined() for each in batches])
        else:
            for layer in self.model.layers:
                hidden_BSD, aux = layer(hidden_BSD, attention, routing.at_layer(len(auxes)))
                auxes += [aux] if aux is not None else []
        normed_BSD = self.model.norm(hidden_BSD)
        if not targets or counts is None:
            return LogitsOutput(self.lm_head(normed_BSD), self._loads(auxes, hidden_BSD.device))
        now = targets[0]
        of_next = normed_BSD, now.labels_BS, now.mask_BS, counts.loss_tokens
        if self.model.mtp_layers:
            further, mtp_auxes = self._predict_ahead(hidden_BSD, targets[1:], counts, attention, routing)
            auxes += mtp_auxes
            loss, losses = self.lm_head(*of_next, further)
            cross_entropy = losses[0]
        else:
            loss = cross_entropy = self.lm_head(*of_next)
        balance = torch.zeros_like(loss)
        if auxes:
            top_k = self.config.num_experts_per_tok
            balance = total_balance(auxes, self.experts.balance, routing, top_k=top_k)
        return LossOutput(
            loss + balance,
            cross_entropy=cross_entropy.detach(),
            balance_loss=balance.detach(),
            loads_LE=self._loads(auxes, hidden_BSD.device),
        )

    def _predict_ahead(
        self,
        hidden_BSD: torch.Tensor,
        targets: list[Targets],
        counts: StepCounts,
        attention: AttentionContext,
        routing: RoutingContext,
    ) -> tuple[list[LossRows], list[MoEAux]]:
        """Rows of the multi-token prediction losses, of which the loss takes the weighted mean."""
        further, auxes = [], []
        share = self.config.mtp_loss_coef / self.num_depths
        for depth, (layer, now) in enumerate(zip(self.model.mtp_layers, targets, strict=True)):
            embedded_BSD = self._embed(now.inputs_BS)
            hidden_BSD, normed_BSD, aux = layer(
                hidden_BSD, embedded_BSD, attention, routing.at_layer(self.config.num_moe_layers + depth)
            )
            divisor = counts.mtp_tokens[depth] / share
            further.append(LossRows(normed_BSD, now.labels_BS, now.mask_BS, divisor))
            auxes += [aux] if aux is not None else []
        return further, auxes

    def _targets(self, now: Targets, document_ids_BS: torch.Tensor | None) -> list[Targets]:
        """Those of the next token, and of every prediction depth beyond."""
        return all_targets(now, document_ids_BS, self.num_depths) if self.model.mtp_layers else [now]

    def _embed(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        if self.model.tensor.size == 1:
            return self.model.embed_tokens(tokens_BS)
        return embed(self.model.embed_tokens, tokens_BS, self.model.tensor)

    @property
    def num_depths(self) -> int:
        """Predictions beyond the next token."""
        return len(self.model.mtp_layers)

    def _loads(self, auxes: list[MoEAux], device: torch.device) -> torch.Tensor:
        if not auxes:
            return torch.zeros((0, self.config.num_experts), device=device)
        return torch.stack([aux.load_E.detach() for aux in auxes])

    def routers(self) -> list[Router]:
        """In the order of the rows of ``loads_LE``."""
        return [
            layer.mlp.gate
            for layer in [*self.model.layers, *self.model.mtp_layers]
            if isinstance(layer.mlp, MoE)
        ]

    def follow_plans(self, seq_len: int) -> bool:
        """Its attention takes plans of any rows."""
        return True

    def moe_layers(self) -> list[int]:
        """The model's layer numbers of the rows of ``loads_LE``; prediction depths count on behind the last
        layer."""
        layers = [*self.model.layers, *self.model.mtp_layers]
        return [number for number, layer in enumerate(layers) if isinstance(layer.mlp, MoE)]

    def count_tokens(
        self, labels_BS: torch.Tensor, loss_mask_BS: torch.Tensor, document_ids_BS: torch.Tensor | None
    ) -> torch.Tensor:
        """``[all tokens, tokens with loss, tokens with loss at each further depth]``, to be summed over the
        step."""
        all_tokens = loss_mask_BS.new_full((), loss_mask_BS.numel(), dtype=torch.int64)
        targets = self._targets(Targets(labels_BS, labels_BS, loss_mask_BS), document_ids_BS)
        return torch.stack([all_tokens, *(each.mask_BS.sum() for each in targets)])


def build_model(config: ModelConfig, experts: ExpertsConfig | None = None) -> Decoder:
    """The decoder on the meta device: shapes and names, no memory."""
    with torch.device("meta"):
        return Decoder(config, experts)
