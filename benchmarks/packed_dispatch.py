"""Rows in eight bits on their way to experts: bytes, and errors of gradients beside those of bfloat16 itself.

One MoE layer over four ranks, each of whose values is the same in all runs; gradients are compared with those
of the layer in float32. Every leg of an exchange is counted as it is sent:

    dispatch             rows to their experts              experts.dispatch_dtype
    combine              their outputs back                 never packed: summed at the other end
    combine.backward     gradients of outputs to experts    experts.dispatch_grad_dtype
    dispatch.backward    gradients of rows back             never packed

    python benchmarks/packed_dispatch.py            four processes on CPUs, a few seconds
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.core.placement import local_tensor
from fsdmoe.experts.dispatch import Packing
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.router import Router
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import run_ranks

RANKS, NUM_EXPERTS, TOP_K = 4, 16, 4
RUNS = {
    "bfloat16": Packing(),
    "rows in eight bits": Packing(rows=True),
    "rows and gradients": Packing(rows=True, grads=True),
}


def one_rank(
    hidden: int, width: int, tokens: int
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, float]]]:
    """Bytes by run and phase, squared errors by run and result; the last run's name is '' and its errors are
    the squares of float32's own results."""
    sent, squares = {}, {}
    exact, _ = results(torch.float32, Packing(), hidden, width, tokens)
    squares[""] = {name: value.square().sum().item() for name, value in exact.items()}
    for run, packing in RUNS.items():
        found, sent[run] = results(torch.bfloat16, packing, hidden, width, tokens)
        squares[run] = {name: (found[name] - value).square().sum().item() for name, value in exact.items()}
    return sent, squares


def results(
    dtype: torch.dtype, packing: Packing, hidden: int, width: int, tokens: int
) -> tuple[dict[str, Tensor], dict[str, int]]:
    torch.manual_seed(0)
    spec = RouterSpec(num_experts=NUM_EXPERTS, top_k=TOP_K, norm_topk=True)
    layer = MoE(Router(spec, hidden), GroupedExperts(NUM_EXPERTS, hidden, width))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
        parameter.data = parameter.data.bfloat16().to(dtype)
    parallelize_experts(layer, build_meshes(ep=RANKS), dispatcher="all_to_all", packing=packing)
    experts: Any = layer.experts
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, torch.nn.Parameter(local_tensor(getattr(experts, name))))
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(tokens, hidden).bfloat16().to(dtype).requires_grad_()
    y = layer(x)[0]
    y.backward(torch.randn(tokens, hidden).bfloat16().to(dtype))
    found = {"outputs": y.detach(), "gradients of rows": x.grad}
    found["gradients of gate_up"] = experts.gate_up_proj.grad
    found["gradients of down"] = experts.down_proj.grad
    found["gradients of the router"] = layer.gate.weight.grad
    return {name: value.float() for name, value in found.items()}, dict(layer.dispatcher.traffic.bytes_sent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    args = parser.parse_args()
    ranks = run_ranks(one_rank, RANKS, args.hidden, args.width, args.tokens)
    phases = [phase for phase in ranks[0][0]["bfloat16"] if phase != "counts"]
    print(f"{'kB sent by all ranks':24}" + "".join(f"{run:>22}" for run in RUNS))
    for phase in phases:
        sums = [sum(sent[run][phase] for sent, _ in ranks) / 1e3 for run in RUNS]
        print(f"{phase:24}" + "".join(f"{each:22.0f}" for each in sums))
    print(f"\n{'error to float32':24}" + "".join(f"{run:>22}" for run in RUNS))
    for name in ranks[0][1][""]:
        whole = sum(squares[""][name] for _, squares in ranks)
        errors = [(sum(squares[run][name] for _, squares in ranks) / whole) ** 0.5 for run in RUNS]
        print(f"{name:24}" + "".join(f"{each:22.5f}" for each in errors))


if __name__ == "__main__":
    main()
