"""One small batch, routed by one process in pools or by several ranks in a layout, for comparing the two.

Legend: B rows, N tokens a row, D width, E experts, K choices, T = B * N tokens of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.router import Router, RouterSpec, RoutingContext
from fsdmoe.mesh import Axis, MeshConfig, build_meshes

ROWS, ROW_LENGTH, WIDTH, EXPERTS, TOP_K = 4, 13, 16, 8, 2
NUM_TOKENS = ROWS * ROW_LENGTH


@dataclass(frozen=True)
class Outcome:
    """What must not depend on the layout; sums over all ranks."""

    loss: Tensor
    output_TE: Tensor
    """Weight of each expert for each token: zero where it was not chosen, or dropped."""
    x_grad_TD: Tensor
    weight_grad_ED: Tensor
    load_E: Tensor

    def assert_close(self, expected: Outcome) -> None:
        for name, value in vars(expected).items():
            assert torch.isfinite(value).all(), name
            assert value.abs().max() > 0 or name == "loss", name
            torch.testing.assert_close(
                getattr(self, name), value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


class Case:
    """The batch, a skewed router, and a fixed cotangent for every (token, expert)."""

    def __init__(self, config: ExpertsConfig, score: str = "softmax_topk") -> None:
        generator = torch.Generator().manual_seed(3)
        self.x_TD = torch.randn(NUM_TOKENS, WIDTH, generator=generator) + 0.5
        self.x_TD.requires_grad_()
        self.cotangent_TE = torch.randn(NUM_TOKENS, EXPERTS, generator=generator)
        self.mask_T = torch.rand(NUM_TOKENS, generator=generator) < 0.85
        spec = RouterSpec(num_experts=EXPERTS, top_k=TOP_K, score=score, norm_topk=True)  # type: ignore[arg-type]
        self.router = Router(spec, WIDTH, config)
        with torch.no_grad():
            self.router.weight.copy_(torch.randn(EXPERTS, WIDTH, generator=generator) * 0.3)
            self.router.weight[:2] += 0.1
        self.loss = torch.zeros(())
        self.output_TE = torch.zeros(NUM_TOKENS, EXPERTS)
        self.load_E = torch.zeros(EXPERTS)
        self.rows_T = torch.arange(ROWS).repeat_interleave(ROW_LENGTH)
        self.positions_T = torch.arange(ROW_LENGTH).repeat(ROWS)

    def route(self, tokens: Tensor, context: RoutingContext) -> None:
        """Route these tokens of the batch together and add up what comes out."""
        _, sequence_ids = self.rows_T[tokens].unique(return_inverse=True)
        rows = int(sequence_ids.max()) + 1 if len(tokens) else 0
        context = replace(
            context, sequence_ids_T=sequence_ids, num_sequences=max(rows, context.num_sequences),
            sequence_positions_T=self.positions_T[tokens], token_mask_T=self.mask_T[tokens],
            num_global_tokens=int(self.mask_T.sum()),
        )  # fmt: skip
        routing = self.router(self.x_TD[tokens], context=context)
        made_TK = routing.ids_TK >= 0
        spread_TE = torch.zeros(len(tokens), EXPERTS).scatter_add(
            1, routing.ids_TK.clamp_min(0), routing.weights_TK * made_TK
        )
        (routing.loss + (spread_TE * self.cotangent_TE[tokens]).sum() / NUM_TOKENS).backward()
        self.loss += routing.loss.detach()
        self.output_TE[tokens] += spread_TE.detach()
        self.load_E += routing.load_E

    def outcome(self) -> Outcome:
        x_grad_TD, weight_grad_ED = self.x_TD.grad, self.router.weight.grad
        assert x_grad_TD is not None
        assert weight_grad_ED is not None
        return Outcome(self.loss, self.output_TE, x_grad_TD, weight_grad_ED, self.load_E)


def in_one_process(
    config: ExpertsConfig, pools: list[Tensor], *, score: str = "softmax_topk", num_devices: int = 1
) -> Outcome:
    """Route the pools one after another; loads of earlier pools are the later ones' prior loads."""
    case = Case(config, score)
    for pool in pools:
        case.route(
            pool, RoutingContext(num_devices=num_devices, prior_load_LE=case.load_E.unsqueeze(0).clone())
        )
    return case.outcome()


def pieces(dp: int, sequence: int, num_micro_batches: int = 1) -> dict[tuple[int, int, int], Tensor]:
    """Tokens by (data-parallel rank, sequence rank, micro-batch); rows are cut unevenly and interleaved."""
    rows_T = torch.arange(NUM_TOKENS) // ROW_LENGTH
    # Position p of a row goes to a rank by p's distance from both ends, as in zig-zag context parallelism.
    owner_T = torch.arange(NUM_TOKENS) % ROW_LENGTH % (2 * sequence)
    owner_T = torch.minimum(owner_T, 2 * sequence - 1 - owner_T)
    rows_a_batch = ROWS // (dp * num_micro_batches)
    batch_T = rows_T // rows_a_batch  # rows of one data-parallel rank are neighbours
    return {
        (d, s, m): ((batch_T == d * num_micro_batches + m) & (owner_T == s)).nonzero().flatten()
        for d in range(dp)
        for s in range(sequence)
        for m in range(num_micro_batches)
    }


def on_ranks(
    config: ExpertsConfig, mesh: MeshConfig, num_micro_batches: int = 1, score: str = "softmax_topk"
) -> Outcome:
    """Run by every rank: route this rank's pieces in the layout, and sum the outcome over the world."""
    meshes = build_meshes(mesh)
    case = Case(config, score)
    dp = meshes.size(Axis.BATCH)
    mine = pieces(dp, meshes.size(Axis.SEQUENCE), num_micro_batches)
    for micro_batch in range(num_micro_batches):
        context = RoutingContext(
            sequence_group=meshes.group(Axis.SEQUENCE),
            global_group=meshes.group(Axis.WORLD),
            num_devices=meshes.size(Axis.EP),
            num_sequences=ROWS // (dp * num_micro_batches),
            prior_load_LE=case.load_E.unsqueeze(0).clone(),
        )
        case.route(mine[meshes.rank(Axis.BATCH), meshes.rank(Axis.SEQUENCE), micro_batch], context)
    outcome = case.outcome()
    for value in vars(outcome).values():
        dist.all_reduce(value)
    return outcome
