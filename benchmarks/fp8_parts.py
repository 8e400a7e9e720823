"""What fp8 keeps and multiplies beyond layers' products, next to what it replaces, on one GPU.

    python benchmarks/fp8_parts.py codes        experts and q, k, v that keep codes: error, time, kept bytes
    python benchmarks/fp8_parts.py head         the loss with the head's products in fp8
    python benchmarks/fp8_parts.py embedding    the embedding's gradient by sorted segments

Contenders run in turn, in changing orders: what counts is the ratio within one run. Errors are relative to
the same in float64 (``codes``: bf16, which is several times closer than fp8). Each takes less than a minute.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import Run, alternate, require_gpu
from torch import Tensor

from fsdmoe.kernels.embedding_grad import add_rows_by_id_
from fsdmoe.kernels.expert_mlp import experts_mlp
from fsdmoe.kernels.expert_operands import ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.fp8_linears import fp8_linears
from fsdmoe.kernels.head_products import fp8_head
from fsdmoe.models.head import LossRows, PlainProducts, ProductsOf, linear_cross_entropies
from fsdmoe.precision.formats import FP8_BLOCKWISE
from fsdmoe.precision.operand_state import UNWATCHED

TOKENS, HIDDEN, WIDTH, EXPERTS, CHOICES = 16384, 2048, 768, 16, 8
VOCABULARY = 151_936
MIB = 2**20


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (torch.randn(shape, device="cuda", generator=generator) * scale).bfloat16()


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def kept_mib(run: Run) -> float:
    """What a forward leaves on the device for its backward."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    left = run()
    torch.cuda.synchronize()
    found = (torch.cuda.memory_allocated() - before) / MIB
    del left
    return found


def report(title: str, runs: dict[str, Run], seconds: float) -> None:
    times = {name: statistics.median(each) for name, each in alternate(runs, seconds, rounds=4).items()}
    first = next(iter(times.values()))
    print(f"\n{title}")
    for name, ms in times.items():
        print(f"  {name:28}{ms:9.3f} ms   {first / ms:.3f} x")


def compare(title: str, forwards: dict[str, Callable[[list[Tensor]], Any]], leaves: list[Tensor]) -> None:
    """Gradients' errors against the first contender, kept bytes, and the time of forward and backward."""
    own = [each.requires_grad_() for each in leaves]
    exact: list[Tensor] = []
    runs: dict[str, Run] = {}
    for name, forward in forwards.items():

        def both(forward: Callable[[list[Tensor]], Any] = forward) -> list[Tensor]:
            outputs = forward(own)
            dys = [random(*y.shape, scale=1e-4, seed=5) for y in outputs]
            return list(torch.autograd.grad(outputs, own, dys))

        found = both()
        exact = exact or found
        errors = " ".join(f"{error(one, other):.4f}" for one, other in zip(found, exact, strict=True))
        print(
            f"{title}, {name}: kept {kept_mib(partial(forward, own)):.0f} MiB, errors of gradients {errors}"
        )
        runs[name] = both
    report(f"{title}, forward and backward", runs, 0.2)


def codes() -> None:
    """Experts of Qwen3-30B-A3B over 8 ranks, and the projections in front of its attention."""
    ids = torch.rand(TOKENS, EXPERTS, device="cuda").topk(CHOICES, -1).indices
    spread = random(TOKENS, 1).exp()
    leaves = [
        random(TOKENS, HIDDEN) * spread, torch.rand(TOKENS, CHOICES, device="cuda"),
        random(EXPERTS, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5),
        random(EXPERTS, HIDDEN, WIDTH, scale=WIDTH**-0.5),
    ]  # fmt: skip

    def experts(policy: ExpertPolicy, given: list[Tensor]) -> list[Tensor]:
        x, weights, gate_up, down = given
        # A copy, as received rows are: nobody else keeps it.
        return [experts_mlp(Rows(x * 1, weights, ids), ExpertWeights(gate_up, down), policy)]

    policy = ExpertPolicy(recipe=FP8_BLOCKWISE, emulate=False)
    compare("experts", {
        "bf16": partial(experts, ExpertPolicy()),
        "fp8": partial(experts, policy),
        "fp8, codes": partial(experts, policy._replace(keeps_codes=True, has_own_rows=True)),
    }, leaves)  # fmt: skip

    def projections(given: list[Tensor], *, keeps_codes: bool) -> list[Tensor]:
        x, *weights = given
        none = [None] * len(weights)
        watches = [UNWATCHED] * len(weights)
        return list(fp8_linears(x * 1, weights, FP8_BLOCKWISE, watches, none, keeps_codes=keeps_codes))

    def plain(given: list[Tensor]) -> list[Tensor]:
        x = given[0] * 1
        return [torch.nn.functional.linear(x, weight) for weight in given[1:]]

    qkv = [random(size, HIDDEN, scale=HIDDEN**-0.5, seed=size) for size in (4096, 512, 512)]
    compare("q, k, v", {
        "bf16": plain,
        "fp8": partial(projections, keeps_codes=False),
        "fp8, codes": partial(projections, keeps_codes=True),
    }, [random(TOKENS, HIDDEN) * spread, *qkv])  # fmt: skip


def head() -> None:
    """The loss of 16,384 tokens, with both of its gradients."""
    hidden = random(TOKENS, HIDDEN).requires_grad_()
    weight = random(VOCABULARY, HIDDEN, scale=0.02).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    mask = torch.ones_like(labels, dtype=torch.bool)
    ways: dict[str, ProductsOf] = {"bf16": PlainProducts, "fp8": partial(fp8_head, FP8_BLOCKWISE, False)}

    def loss(products_of: ProductsOf, tokens: int = TOKENS) -> tuple[Tensor, ...]:
        rows = [LossRows(hidden[:tokens], labels[:tokens], mask[:tokens], float(tokens))]
        total, _ = linear_cross_entropies(rows, weight, products_of=products_of)
        return total.detach(), *torch.autograd.grad(total, (hidden, weight))

    few = 512
    wide, wide_weight = hidden.detach()[:few].double(), weight.detach().double()
    wide.requires_grad_()
    wide_weight.requires_grad_()
    total = torch.nn.functional.cross_entropy(wide @ wide_weight.t(), labels[:few])
    exact = total.detach(), *torch.autograd.grad(total, (wide, wide_weight))
    for name, products_of in ways.items():
        found = loss(products_of, few)
        found = found[0], found[1][:few], found[2]
        errors = " ".join(f"{error(one, other):.5f}" for one, other in zip(found, exact, strict=True))
        print(f"head, {name}: errors of loss, hidden states' and weight's gradient {errors}")
    del exact, wide, wide_weight, total
    report("head, forward and backward", {n: partial(loss, way) for n, way in ways.items()}, 0.5)


def embedding() -> None:
    """65,536 rows of few ids, of a large vocabulary evenly, and as words are: most rows of few ids."""
    tokens, width = 65_536, 1152
    rows = random(tokens, width)
    ranks = torch.rand(tokens, device="cuda")
    ids = {
        "264 ids": torch.randint(0, 264, (tokens,), device="cuda"),
        "as words": (VOCABULARY**ranks).long() - 1,
        "151,936 ids": torch.randint(0, VOCABULARY, (tokens,), device="cuda"),
    }
    for name, ids_T in ids.items():
        out = torch.zeros(VOCABULARY, width, device="cuda")

        def torchs(ids_T: Tensor = ids_T, out: Tensor = out) -> None:
            out.index_put_((ids_T,), rows.float(), accumulate=True)

        exact = torch.zeros_like(out, dtype=torch.float64).index_put_(
            (ids_T,), rows.double(), accumulate=True
        )
        add_rows_by_id_(out, ids_T, rows)
        again = torch.zeros_like(out)
        add_rows_by_id_(again, ids_T, rows)
        if not torch.equal(out, again):
            raise SystemExit("embedding: two runs gave different sums")
        print(f"embedding, {name}: error {error(out, exact):.2e}, the same bits twice")
        del exact, again
        ours = partial(add_rows_by_id_, out, ids_T, rows)
        report(f"embedding, {name}", {"index_put_": torchs, "sorted segments": ours}, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"codes": codes, "head": head, "embedding": embedding}
    parser.add_argument("part", choices=parts)
    chosen = parser.parse_args().part
    require_gpu()
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}")
    parts[chosen]()


if __name__ == "__main__":
    main()
