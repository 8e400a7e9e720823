"""Every kernel against fp64, at full size, beside the plain computation.

Inputs are drawn afresh each time, and whatever a kernel allocates is filled with NaN (integers: with the
largest value) before it runs, so an element that nothing wrote shows. Errors are ‖out − exact‖ / ‖exact‖
against an fp64 computation on the same bf16 inputs; beside each stands the error of the plain torch
computation in the kernel's own precision, and a kernel fails when it is worse than that by more than a
tenth (or not finite, or inexact where copies must be exact). The exit status is the number of failures.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from timing import require_gpu

sys.path.insert(0, str(Path(__file__).parents[1]))

from fsdmoe.experts.config import BalanceConfig, ExpertsConfig
from fsdmoe.kernels.adamw_step import AdamWStep
from fsdmoe.kernels.backend import kernels
from fsdmoe.kernels.expert_mlp import experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertWeights, Rows
from fsdmoe.kernels.permute import group_assignments, take_rows, unpermute
from fsdmoe.kernels.rms_norm import gated_norm_reference, rms_norm_reference
from fsdmoe.kernels.triton import (
    TopKPolicy,
    adamw_,
    cross_entropy_,
    experts_mlp_triton,
    gated_norm_triton,
    rms_norm_triton,
    rope_triton,
    router_input_grad,
    router_topk_triton,
    scale_,
)
from fsdmoe.kernels.triton.permute_kernels import combine_rows, permute_rows
from fsdmoe.kernels.triton.row_map import build_row_map
from fsdmoe.models import Decoder, preset_config
from tests.support.kernel_references import (
    adamw_reference_,
    cross_entropy_reference_,
    rope_reference,
    router_input_grad_reference,
    router_topk_reference,
)

# (hidden size, expert width, experts, choices, rows, share of ids that are -1)
SHAPES = (
    (2048, 768, 128, 8, 16384, 0.0),
    (4096, 1536, 16, 8, 8192, 0.0),
    (7168, 2048, 32, 8, 4096, 0.5),
    (4096, 14336, 8, 2, 8192, 0.0),
    (2048, 768, 128, 8, 2048, 0.9),
    (2880, 1000, 60, 4, 3001, 0.3),
    (512, 200, 5, 1, 0, 0.0),
)
SLACK = 1.1
_failures: list[str] = []


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill every fresh tensor with NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    settings: Any = torch.utils.deterministic  # the module makes its attribute at run time
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def judge(
    name: str, out: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, floor: float = 1e-7
) -> None:
    scale = exact.double().norm().clamp_min(1e-300)
    ours = ((out.double() - exact.double()).norm() / scale).item()
    theirs = ((plain.double() - exact.double()).norm() / scale).item()
    good = ours <= max(SLACK * theirs, floor)  # false for NaN
    print(f"  {name:28} {ours:10.2e}  plain {theirs:10.2e}  {'ok' if good else 'FAILED'}", flush=True)
    if not good:
        _failures.append(name)


def judge_exact(name: str, good: bool) -> None:
    print(f"  {name:28} {'exact' if good else 'FAILED'}", flush=True)
    if not good:
        _failures.append(name)


def draw(shape: tuple[int, int, int, int, int, float]) -> tuple[torch.Tensor, ...]:
    d, n, num_experts, top_k, num_rows, missing = shape

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, device="cuda") * scale).bfloat16()

    # A power law over the experts, the last one never chosen: some are crowded and one is empty.
    odds = -0.5 * torch.arange(1, num_experts + 1, device="cuda").log()
    odds[-1] = float("-inf")
    gumbel = -torch.rand(num_rows, num_experts, device="cuda").log().neg().log()
    ids = (odds + gumbel).topk(top_k).indices
    ids = ids.masked_fill(torch.rand(ids.shape, device="cuda") < missing, -1)
    weights = torch.rand(num_rows, top_k, device="cuda")
    return (
        random(num_rows, d),
        weights,
        ids,
        random(num_experts, 2 * n, d, scale=d**-0.5),
        random(num_experts, d, n, scale=n**-0.5),
        random(num_rows, d),
    )


Grads = tuple[torch.Tensor, ...]


def run(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], dtype: torch.dtype) -> Grads:
    """y and the gradients of x, weights, gate_up and down."""
    x, weights, ids, gate_up, down, dy = inputs
    weights_dtype = torch.promote_types(dtype, torch.float32)
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, gate_up, down)]
    weights = weights.to(weights_dtype).requires_grad_()
    y = function(leaves[0], weights, ids, leaves[1], leaves[2])
    dx, dw, d1, d2 = torch.autograd.grad(y, (leaves[0], weights, leaves[1], leaves[2]), dy.to(dtype))
    return y.detach(), dx, dw, d1, d2


def _reference(*given: torch.Tensor) -> torch.Tensor:
    return experts_mlp_reference(Rows(*given[:3]), ExpertWeights(*given[3:]))


class _Sink:
    def __init__(self, buffer: torch.Tensor, accumulate: bool) -> None:
        self.buffer, self.accumulate = buffer, accumulate

    def claim(self) -> tuple[torch.Tensor, bool]:
        return self.buffer, self.accumulate


def check_sinks(inputs: tuple[torch.Tensor, ...], plain: Grads, exact: Grads) -> None:
    """Weight gradients written or added to buffers in fp32 and bf16."""
    x, weights, ids, gate_up, down, dy = inputs
    for dtype in (torch.float32, torch.bfloat16):
        for accumulate in (False, True):
            parameters = [torch.nn.Parameter(t.clone()) for t in (gate_up, down)]
            sinks = []
            for parameter in parameters:
                start = (
                    torch.randn_like(parameter, dtype=dtype)
                    if accumulate
                    else torch.full_like(parameter, float("nan"), dtype=dtype)
                )
                sinks.append((start.clone(), _Sink(start, accumulate)))
                parameter.grad_sink = sinks[-1][1]  # type: ignore[attr-defined]
            experts_mlp_triton(x.detach().requires_grad_(), weights, ids, *parameters).backward(dy)
            assert all(p.grad is None for p in parameters)
            for (start, sink), p, e, name in zip(sinks, plain[3:], exact[3:], ("gate_up", "down")):
                base = start if accumulate else torch.zeros_like(start)
                label = f"d {name} {'+=' if accumulate else '='} {str(dtype)[6:]}"
                judge(label, sink.buffer, (base.double() + p.double()).to(dtype), base.double() + e.double())


def check_experts(shape: tuple[int, int, int, int, int, float], sinks: bool) -> None:
    print(f"\nexperts d{shape[0]} n{shape[1]} E{shape[2]} k{shape[3]} rows {shape[4]} missing {shape[5]:.0%}")
    inputs = draw(shape)
    exact = run(_reference, inputs, torch.float64)
    plain = run(_reference, inputs, torch.bfloat16)
    with poisoned():
        ours = run(experts_mlp_triton, inputs, torch.bfloat16)
        again = run(experts_mlp_triton, inputs, torch.bfloat16)
        wanted = int((inputs[2] >= 0).sum())

        def bounded(*args: torch.Tensor) -> torch.Tensor:
            return experts_mlp_triton(*args, max_rows=wanted)

        tight = run(bounded, inputs, torch.bfloat16)
        names = ("y", "d x", "d weights", "d gate_up", "d down")
        for name, o, p, e in zip(names, ours, plain, exact):
            judge(name, o, p, e)
        judge_exact("the same twice", all(torch.equal(a, b) for a, b in zip(ours, again)))
        judge_exact("the same with max_rows", all(torch.equal(a, b) for a, b in zip(ours, tight)))
        if wanted - wanted // 2 > 128 * shape[2]:
            short = experts_mlp_triton(*inputs[:5], max_rows=wanted // 2)
            judge_exact("too small a bound is NaN", bool(short.isnan().all()))
        check_rows(inputs, shape[2])
    if sinks:
        with poisoned():
            check_sinks(inputs, plain, exact)


def check_rows(inputs: tuple[torch.Tensor, ...], num_experts: int) -> None:
    """The map is a stable sort with padding; permuting copies; combining sums in fp32."""
    x, _, ids, *_ = inputs
    row_map = build_row_map(ids, num_experts, align=128)
    flat, offsets = ids.flatten(), row_map.offsets.tolist()
    place = row_map.position_RK.flatten().long()
    good = bool(((place < 0) == (flat < 0)).all()) and offsets[-1] == 0
    counts = row_map.counts_E.tolist()
    for expert, (start, end) in enumerate(pairwise(offsets[:-1])):
        mine = (flat == expert).nonzero().flatten()
        segment = row_map.source_M[start:end].long()
        good &= bool(torch.equal(segment[: len(mine)], mine) and (segment[len(mine) :] == -1).all())
        good &= counts[expert] == len(mine) and (end - start) % 128 == 0 and end - start - len(mine) <= 128
        good &= bool((row_map.tile_expert[start // 128 : end // 128] == expert).all())
        good &= torch.equal(place[mine], start + torch.arange(len(mine), device=place.device))
    judge_exact("row map", good)
    rows = permute_rows(x, row_map)[: offsets[-2]]
    source = row_map.source_M[: offsets[-2]].long()
    copied = (
        torch.where((source >= 0)[:, None], x[source.clamp_min(0) // ids.shape[1]], 0) if len(x) else 0 * rows
    )
    judge_exact("permute", torch.equal(rows, copied))
    values = torch.randn_like(rows)
    total = torch.where((place >= 0)[:, None], values[place.clamp_min(0)].double(), 0)
    exact = total.view(*ids.shape, x.shape[1]).sum(1)
    judge("combine", combine_rows(values, row_map), exact.bfloat16(), exact)


def check_router(num_tokens: int, num_experts: int, policy: TopKPolicy, biased: bool) -> None:
    print(f"\nrouter {num_tokens} tokens, {num_experts} experts, {policy}{', bias' if biased else ''}")
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    bias = torch.randn(num_experts, device="cuda") * 0.1 if biased else None
    dweights = torch.randn(num_tokens, policy.top_k, device="cuda")
    dprob = torch.randn(4, num_experts, device="cuda") * 1e-2
    mask = torch.rand(num_tokens, device="cuda") < 0.9

    def one(function: Callable, dtype: torch.dtype) -> Grads:
        leaf = logits.to(dtype).requires_grad_()
        out = function(leaf, bias, policy, num_segments=4, token_mask_T=mask)
        outputs = (out.weights, out.prob_sum, out.z_sum)
        sent = (dweights.to(dtype), dprob.to(dtype), torch.full_like(out.z_sum, 1e-3))
        grad = torch.autograd.grad(outputs, leaf, sent)[0]
        return out.ids, out.load, *(t.detach() for t in outputs), grad

    def choice(ids: torch.Tensor) -> torch.Tensor:
        """What the chosen were chosen by, in fp64; all of it is of the order of one."""
        scores = {"sigmoid": logits.double().sigmoid(), "softmax_topk": logits.double().softmax(-1)}
        by = scores.get(policy.score, logits.double())
        return (by if bias is None else by + bias).gather(1, ids.long())

    exact = one(router_topk_reference, torch.float64)
    plain = one(router_topk_reference, torch.float32)
    with poisoned():
        ours = one(router_topk_triton, torch.float32)
    # fp32 may order two scores otherwise that fp64 tells apart by less than its rounding. A pair of such
    # groups, where groups are chosen first, changes all that follows: there plain fp32 must differ too.
    same = (ours[0] == exact[0]).all(-1)
    tied = (choice(ours[0]) - choice(exact[0])).abs().amax(-1) < 4 * torch.finfo(torch.float32).eps
    judge_exact("ids (but for ties in fp32)", bool((same | tied | (plain[0] != exact[0]).any(-1)).all()))
    judge("load", ours[1], plain[1], exact[1], floor=1e-4)
    judge("weights", ours[2][same], plain[2][same], exact[2][same])
    judge("probability sums", ours[3], plain[3], exact[3], floor=1e-6)
    judge("z sum", ours[4], plain[4], exact[4], floor=1e-6)
    judge("d logits", ours[5][same], plain[5][same], exact[5][same], floor=5e-7)


def check_cross_entropy(num_tokens: int, vocabulary: int) -> None:
    print(f"\ncross-entropy {num_tokens} tokens, vocabulary {vocabulary}")
    logits = torch.randn(num_tokens, vocabulary, device="cuda").mul_(3).bfloat16()
    labels = torch.randint(0, vocabulary, (num_tokens,), device="cuda")
    mask = torch.rand(num_tokens, device="cuda") < 0.9
    divisor = torch.tensor(0.9 * num_tokens, device="cuda")
    exact, plain = logits.double(), logits.clone()
    expected = cross_entropy_reference_(exact, labels, mask, divisor)
    plain_losses = cross_entropy_reference_(plain, labels, mask, divisor)
    with poisoned():
        losses = cross_entropy_(logits, labels, mask, divisor)
    judge("losses", losses, plain_losses, expected, floor=1e-6)
    judge("d logits", logits, plain, exact)
    exact, plain = logits.double() / 3, logits / 3
    judge("scaled", scale_(logits, torch.tensor(1 / 3, device="cuda")), plain, exact)


def check_adamw(num_elements: int, moments: torch.dtype) -> None:
    print(f"\nAdamW {num_elements} elements, moments in {moments}")
    main, grad, first, second = (torch.randn(num_elements, device="cuda") for _ in range(4))
    first, second = first.mul_(0.1).to(moments), second.square_().to(moments)
    numbers = AdamWStep(
        lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=torch.tensor(3.0, device="cuda")
    )
    weight = torch.full((num_elements,), float("nan"), device="cuda", dtype=torch.bfloat16)
    exact = (main.double(), grad.double(), first.double(), second.double())
    plain = (main.clone(), grad.clone(), first.clone(), second.clone())
    adamw_reference_(*exact, numbers)
    adamw_reference_(*plain, numbers)
    adamw_(main, grad, first, second, numbers, weight=weight)
    judge("main", main, plain[0], exact[0])
    judge("first moment", first, plain[2], exact[2])
    judge("second moment", second, plain[3], exact[3])
    judge_exact("rounded weight", torch.equal(weight, main.bfloat16()))


def check_rope(interleaved: bool) -> None:
    print(f"\nrotary positions{', interleaved' if interleaved else ''}")
    x = torch.randn(4, 4096, 32, 128, device="cuda").bfloat16()[..., :64].requires_grad_()
    angles = torch.rand(4, 4096, 32, device="cuda") * 1000
    sent = torch.randn(4, 32, 4096, 64, device="cuda").bfloat16().transpose(1, 2)

    def one(function: Callable, dtype: torch.dtype) -> Grads:
        leaf = x.detach().to(dtype).requires_grad_()
        out = function(leaf, angles.cos().to(dtype), angles.sin().to(dtype), interleaved=interleaved)
        return out.detach(), torch.autograd.grad(out, leaf, sent.to(dtype))[0]

    with poisoned():
        leaf = x.detach().requires_grad_()
        out = rope_triton(leaf, angles.cos(), angles.sin(), interleaved=interleaved)
        ours = out.detach(), torch.autograd.grad(out, leaf, sent)[0]
    for name, o, p, e in zip(
        ("out", "d x"), ours, one(rope_reference, torch.bfloat16), one(rope_reference, torch.float64)
    ):
        judge(name, o, p, e)


def check_rms_norm(rows: int, d: int, parent: int) -> None:
    """``parent`` is the width of what x is a part of."""
    print(f"\nnorm of {rows} rows of {d} in rows of {parent}")
    x = torch.randn(rows, parent, device="cuda").bfloat16()
    weight, dout = torch.randn(d, device="cuda").bfloat16(), torch.randn(rows, d, device="cuda").bfloat16()

    def one(function: Callable, dtype: torch.dtype) -> Grads:
        leaves = [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        out = function(leaves[0][:, :d], leaves[1], 1e-6)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))

    with poisoned():
        ours = one(rms_norm_triton, torch.bfloat16)
    others = one(rms_norm_reference, torch.bfloat16), one(rms_norm_reference, torch.float64)
    for name, o, p, e in zip(("out", "d x", "d weight"), ours, *others):
        judge(name, o, p, e)


def check_gated_norm(rows: int, d: int) -> None:
    """With a gate, and with an offset."""
    print(f"\ngated norm of {rows} rows of {d}")
    both = torch.randn(rows, 2, d, device="cuda").bfloat16()
    weight, dout = torch.randn(d, device="cuda").bfloat16(), torch.randn(rows, d, device="cuda").bfloat16()

    def gated(function: Callable, dtype: torch.dtype, silu: bool) -> Grads:
        leaves = [both.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        out = function(*leaves[0].unbind(1), leaves[1], 1e-6, silu=silu)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))

    def offset(function: Callable, dtype: torch.dtype) -> Grads:
        leaves = [both.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        out = function(leaves[0][:, 0], leaves[1], 1e-6, 1.0)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))

    def compare(kind: str, one: Callable, ours: Callable, reference: Callable, *rest: bool) -> None:
        with poisoned():
            found = one(ours, torch.bfloat16, *rest)
        others = (one(reference, dtype, *rest) for dtype in (torch.bfloat16, torch.float64))
        for name, o, p, e in zip(("out", "d input", "d weight"), found, *others):
            judge(f"{kind} {name}", o, p, e)

    for silu in (True, False):
        compare("silu" if silu else "sigmoid", gated, gated_norm_triton, gated_norm_reference, silu)
    compare("offset", offset, rms_norm_triton, rms_norm_reference)


def check_dispatch(num_rows: int, num_groups: int) -> None:
    print(f"\ndispatcher's permutation: {num_rows} rows over {num_groups} groups")
    ids = torch.randint(-1, num_groups, (num_rows, 4), device="cuda")
    x = torch.randn(num_rows, 1032, device="cuda").bfloat16()
    found = []
    for choice in ("torch", "auto"):
        with kernels(choice), poisoned():
            permutation = group_assignments(ids, num_groups)
            end = int(permutation.ends_G[-1])
            permutation = permutation._replace(sources_M=permutation.sources_M[:end])
            rows = take_rows(x, permutation)
            found.append((*permutation, rows, unpermute(rows, permutation)))
    for name, plain, ours in zip(("slots", "sources", "ends", "rows", "sums"), *found, strict=True):
        judge_exact(name, torch.equal(plain, ours))


def check_router_input_grad(num_rows: int, num_experts: int, width: int) -> None:
    print(f"\ninput gradient of a router, {num_rows} x {num_experts} x {width}")
    dlogits = torch.randn(num_rows, num_experts, device="cuda")
    weight = torch.randn(num_experts, width, device="cuda").bfloat16()
    given = torch.randn(num_rows, width, device="cuda").bfloat16() * num_experts**0.5
    for name, passed in (("alone", None), ("beside the experts'", given)):
        with poisoned():
            dx, halves = router_input_grad(dlogits, weight, passed)
        wanted, wanted_halves = router_input_grad_reference(dlogits, weight, passed)
        exact = dlogits.double() @ weight.double()
        judge(name, dx, wanted, exact if passed is None else exact + passed.double())
        judge_exact("halves", torch.equal(halves, wanted_halves))


def check_model(preset: str) -> None:
    """A small model with kernels against the same in fp64, compared with plain bf16: wiring, not size, is in
    question.

    Near-ties of the router fall otherwise in other precisions, so every token goes to every expert."""
    print(f"\nmodel {preset}")
    grouped = {"n_group": 1, "topk_group": 1} if "deepseek" in preset else {}
    config = preset_config(preset, hidden_size=256, moe_intermediate_size=128, head_dim=64, vocab_size=5003,
                           num_experts=8, num_experts_per_tok=8, **grouped)  # fmt: skip
    experts = ExpertsConfig(balance=BalanceConfig(sequence=0.1, z_loss=0.01))
    with torch.device("cuda"):
        model = Decoder(config, experts)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        stream = torch.randint(config.vocab_size, (4, 257))
    model.bfloat16()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def one(choice: str, dtype: torch.dtype) -> Grads:
        model.to(dtype).load_state_dict(state)
        model.zero_grad(set_to_none=True)
        with kernels(choice):  # type: ignore[arg-type]
            loss = model(stream[:, :-1], labels_BS=stream[:, 1:]).loss
            loss.backward()
        return loss.detach(), *(p.grad for p in model.parameters())

    ours, plain, exact = (
        one("auto", torch.bfloat16),
        one("torch", torch.bfloat16),
        one("torch", torch.float64),
    )
    judge("loss", ours[0], plain[0], exact[0], floor=1e-3)
    flat = [torch.cat([g.double().flatten() for g in gs[1:]]) for gs in (ours, plain, exact)]
    judge("all gradients", flat[0], flat[1], flat[2])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=int, nargs="*", default=list(range(len(SHAPES))))
    args = parser.parse_args()
    require_gpu()
    for index in args.shapes:
        check_experts(SHAPES[index], sinks=index in (0, 5, 6))
        torch.cuda.empty_cache()
    check_router(16384, 128, TopKPolicy(top_k=8, norm_topk=True), False)
    check_router(8192, 60, TopKPolicy(top_k=4, score="topk_softmax"), False)
    deepseek = TopKPolicy(top_k=8, score="sigmoid", norm_topk=True, scaling=2.5, num_groups=8, topk_groups=4)
    check_router(8192, 256, deepseek, True)
    check_cross_entropy(2048, 151936)
    check_cross_entropy(300, 32003)
    check_adamw(100_000_003, torch.float32)
    check_adamw(10_000_000, torch.bfloat16)
    for interleaved in (False, True):
        check_rope(interleaved)
    for rows, d, parent in ((16384, 2048, 2048), (524288, 128, 128), (4096, 512, 576), (300, 7168, 7168)):
        check_rms_norm(rows, d, parent)
    check_gated_norm(8192, 128)
    check_router_input_grad(16384, 128, 2048)
    check_router_input_grad(3001, 72, 2888)
    check_router_input_grad(8192, 256, 7168)
    check_dispatch(8192, 8)
    for preset in ("tiny-qwen3", "tiny-mixtral", "tiny-deepseek-v3"):
        check_model(preset)
    print(f"\n{len(_failures)} failures{': ' if _failures else ''}{', '.join(_failures)}")
    sys.exit(len(_failures))


if __name__ == "__main__":
    main()
