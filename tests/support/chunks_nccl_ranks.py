"""One of four NCCL ranks that share a GPU: a layer whose rows travel in chunks, against one process in fp32,
in bf16 beside the layer in one chunk, and on the device's own timeline."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fsdmoe.experts.dispatch import FlexPolicy
from fsdmoe.experts.dispatch.by_node import NodeDispatcher
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.router import Router
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.experts.shared import SharedExperts
from fsdmoe.mesh import Meshes, build_meshes
from tests.support.coordinates import use_local_tensors
from tests.support.moe_case import Case, check_case, loss_of, relative

NUM_EXPERTS, HIDDEN, WIDTH, TOP_K, TOKENS = 16, 1024, 512, 4, 4096
ROW_KERNELS = ("_gate_up_kernel", "_project_kernel", "_swiglu")
WEIGHT_KERNELS = ("_weight_grad",)
EXCHANGES = {
    "all_to_all": ("ncclDevKernel_SendRecv",),
    "by_node": ("ncclDevKernel_SendRecv",),
    "flex": ("_deliver_kernel", "_return_kernel", "_barrier_kernel"),
}


def dispatchers_for(meshes: Meshes) -> tuple[str, ...]:
    if meshes.degrees.ep == 1:
        return ("local",)
    return ("allgather", "all_to_all", *(["by_node"] if meshes.degrees.ep == 4 else []))


@contextlib.contextmanager
def _late(self: NodeDispatcher, like: Tensor) -> Iterator[None]:
    """The stream of second exchanges, so late that a missing wait shows."""
    with _aside(self, like):
        torch.cuda._sleep(20_000_000)
        yield


_aside = NodeDispatcher._aside


@functools.cache
def meshes_of(**degrees: int) -> Meshes:
    """Made once: every communicator takes a while to connect."""
    return build_meshes(**degrees)


def in_fp32() -> float:
    """The worst relative error to one process, over layouts, dispatchers and numbers of chunks."""
    torch.backends.cuda.matmul.allow_tf32 = False
    worst = 0.0
    for degrees in ({"ep": 4}, {"ep": 2, "etp": 2}, {"etp": 4}):
        meshes = meshes_of(**degrees)
        torch.set_default_device("cuda")
        for dispatcher in dispatchers_for(meshes):
            for chunks, extras, routing, tokens in (
                (2, "shared", "random", "uneven"),
                (3, "none", "skewed", "one"),
                (3, "latent", "dropped", "even"),
            ):
                case = Case(dispatcher, routing, tokens, extras=extras, chunks=chunks)
                worst = max(worst, *check_case(case, meshes).values())
        torch.set_default_device("cpu")
    return worst


def layer_of(meshes: Meshes, dispatcher: str, chunks: int, dtype: torch.dtype, *, shared: bool) -> MoE:
    torch.manual_seed(3)
    spec = RouterSpec(num_experts=NUM_EXPERTS, top_k=TOP_K, norm_topk=True)
    with torch.device("cuda"):
        layer = MoE(
            Router(spec, HIDDEN),
            GroupedExperts(NUM_EXPERTS, HIDDEN, WIDTH),
            shared_experts=SharedExperts(HIDDEN, WIDTH) if shared else None,
        )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
        parameter.data = parameter.data.bfloat16().to(dtype)  # the same values in either dtype
    flex = FlexPolicy(rows=8.0, seconds=60.0)
    parallelize_experts(layer, meshes, dispatcher=dispatcher, chunks=chunks, flex=flex)
    use_local_tensors(layer)
    return layer


def results(layer: MoE, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(10 + dist.get_rank())
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16().to(dtype).requires_grad_()
    torch.set_default_device("cuda")
    y = layer(x)[0]
    loss_of(y.float()).backward()
    torch.set_default_device("cpu")
    gradients = {name: parameter.grad.float() for name, parameter in layer.named_parameters()}
    return {"y": y.detach().float(), "dx": x.grad.float()} | gradients


def in_bf16(meshes: Meshes) -> dict[str, float]:
    """By result: the error of chunks to fp32 over that of one chunk."""
    found = {}
    for dispatcher in dispatchers_for(meshes):
        exact = results(layer_of(meshes, dispatcher, 1, torch.float32, shared=True), torch.float32)
        whole, cut = (
            results(layer_of(meshes, dispatcher, chunks, torch.bfloat16, shared=True), torch.bfloat16)
            for chunks in (1, 3)
        )
        for name, value in exact.items():
            found[f"{dispatcher} {name}"] = relative(cut[name], value) / relative(whole[name], value)
    return found


def beside(meshes: Meshes, chunks: int, folder: Path, dispatcher: str = "all_to_all") -> tuple[int, int, int]:
    """Of the experts' kernels in a step that work on rows, and of those that make gradients of weights, how
    many began while an exchange was under way; and how many of the former there were."""
    layer = layer_of(meshes, dispatcher, chunks, torch.bfloat16, shared=False)
    for _ in range(2):
        results(layer, torch.bfloat16)
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        results(layer, torch.bfloat16)
        torch.cuda.synchronize()
    path = folder / f"{dispatcher}-chunks{chunks}-rank{dist.get_rank()}.json"
    profile.export_chrome_trace(str(path))
    kernels = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    sent = [(e["ts"], e["ts"] + e["dur"]) for e in kernels if e["name"].startswith(EXCHANGES[dispatcher])]
    assert sent, sorted({e["name"] for e in kernels})

    def of(names: tuple[str, ...]) -> list[bool]:
        found = [e["ts"] for e in kernels if e["name"].startswith(names)]
        return [any(start <= at < end for start, end in sent) for at in found]

    return sum(of(ROW_KERNELS)), sum(of(WEIGHT_KERNELS)), len(of(ROW_KERNELS))


def main() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # as on two nodes
    worst = in_fp32()
    assert worst <= 1e-5, worst
    with mock.patch.object(NodeDispatcher, "_aside", _late):
        worst = max(worst, in_fp32())
    assert worst <= 1e-5, worst
    print(f"worst relative error in fp32 over NCCL: {worst:.1e}")
    meshes = meshes_of(ep=4)
    ratios = in_bf16(meshes)
    print("error of three chunks over that of one, in bf16:", {k: round(v, 3) for k, v in ratios.items()})
    assert max(ratios.values()) < 1.5, ratios
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        whole, cut = (beside(meshes, chunks, folder) for chunks in (1, 4))
        by_node, _, num_by_node = beside(meshes, 4, folder, "by_node")
    (none, late, num_whole), (some, _, num_cut) = whole, cut
    print(
        f"rank {os.environ['RANK']}: experts' kernels that began during an exchange: {none} of {num_whole} "
        f"in one chunk, {some} of {num_cut} in four; and {late} for gradients of weights in one chunk"
    )
    print(f"rank {os.environ['RANK']}: by node, in four chunks: {by_node} of {num_by_node}")
    assert by_node > 0, "another chunk's rows are under way, by either exchange"
    assert num_whole > 0
    assert none == 0, "one chunk's compute waits for its rows"
    assert late > 0, "weights' gradients wait until those of rows are on their way"
    assert some > 0, "another chunk's rows are under way"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
