"""The router and the row map: how long they take, and what share of the layer that is.

Each piece is captured in a CUDA graph and replayed: the figures are the GPU's time, not the host's.
"plain" is the same in torch operations, eager and compiled, with a stable sort for the map, as peers do it.

    python benchmarks/router.py --json router.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from moe_layer_contenders import SHAPES, Data, FsdmoeLayer
from timing import alternate, graph_of, require_gpu

sys.path.insert(0, str(Path(__file__).parents[1]))

from fsdmoe.experts.scores import router_logits
from fsdmoe.kernels.triton import TopKPolicy, router_topk_triton
from fsdmoe.kernels.triton.row_map import build_row_map
from fsdmoe.kernels.triton.tiles import tiles_for
from tests.support.kernel_references import router_topk_reference


def plain_map(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    order = ids_TK.flatten().sort(stable=True).indices
    counts = torch.histc(ids_TK.flatten().int(), bins=num_experts, min=0, max=num_experts - 1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return order, inverse, counts.cumsum(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", type=int, default=0, help="index into the shapes of moe_layer.py")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    require_gpu()
    shape = SHAPES[args.shape]
    data = Data(shape, skewed=False)
    policy = TopKPolicy(top_k=shape.top_k, norm_topk=True)
    x_TD = data.x.detach().view(-1, shape.d).requires_grad_()
    weight = torch.nn.Parameter(data.router)
    logits = router_logits(x_TD, weight).detach().requires_grad_()
    dweights = torch.randn(shape.num_tokens, shape.top_k, device="cuda")
    dlogits = torch.randn_like(logits)
    ids = router_topk_triton(logits.detach(), None, policy).ids
    layer = FsdmoeLayer(data)
    align = tiles_for(ids.numel(), shape.num_experts, shape.d, shape.n).align
    compiled = torch.compile(router_topk_reference)

    def project() -> object:
        return torch.autograd.grad(router_logits(x_TD, weight), (x_TD, weight), dlogits)

    def choose(route: Callable) -> Callable[[], object]:
        return lambda: torch.autograd.grad(route(logits, None, policy).weights, logits, dweights)

    def whole() -> object:
        return torch.autograd.grad(layer(data.x), [data.x, *layer.parameters()], data.dy)

    runs = {
        "logits and their gradients": project,
        "top-k, forward and backward": choose(router_topk_triton),
        "plain top-k": choose(router_topk_reference),
        "plain top-k, compiled": choose(compiled),
        "row map": lambda: build_row_map(ids, shape.num_experts, align=align),
        "plain row map": lambda: plain_map(ids, shape.num_experts),
        "whole layer": whole,
    }
    times = alternate({name: graph_of(run) for name, run in runs.items()}, seconds=0.05, rounds=6)
    medians = {name: sorted(t)[len(t) // 2] for name, t in times.items()}
    layer_ms = medians["whole layer"]
    print(f"{shape}, milliseconds of the GPU, and share of the layer")
    for name, ms in medians.items():
        print(f"  {name:30}{ms:8.3f}{ms / layer_ms:8.1%}")
    routing = medians["top-k, forward and backward"] + medians["row map"]
    total = routing + medians["logits and their gradients"]
    print(f"  {'top-k and row map':30}{routing:8.3f}{routing / layer_ms:8.1%}")
    print(f"  {'with the logits':30}{total:8.3f}{total / layer_ms:8.1%}")
    if args.json:
        args.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
