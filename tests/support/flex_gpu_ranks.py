"""One of four ranks that share a GPU and each other's memory: the ``flex`` dispatcher through its kernels.

``python -m tests.support.flex_gpu_ranks FOLDER CHECK...`` on every rank; the checks are the functions below.
Ranks are started once for all of them: that takes longer than any of them. What came of a check is written to
``FOLDER/CHECK.RANK``. A rank that fails ends, and with it all checks that follow."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from fsdmoe import train
from fsdmoe.experts.dispatch import UNPACKED, ClonePolicy, FlexDispatcher, FlexPolicy, Packing
from fsdmoe.experts.dispatch.cloning import NO_CLONES
from fsdmoe.experts.dispatch.flex_peer import WrittenTransport
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.router import Router, RouterSpec
from fsdmoe.fsdp import engine_of
from fsdmoe.precision.config import PrecisionConfig
from tests.support import chunks_nccl_ranks
from tests.support.chunks_nccl_ranks import meshes_of
from tests.support.coordinates import use_local_tensors
from tests.support.moe_case import Case, check_case, relative
from tests.support.tiny_run import tiny_config

E, D, N, K = 16, 256, 128, 4
ROOMY = FlexPolicy(rows=8.0, seconds=60.0)
TWO = ClonePolicy(2)


def _layer(
    dispatcher: str,
    flex: FlexPolicy = ROOMY,
    packing: Packing = UNPACKED,
    chunks: int = 1,
    clones: ClonePolicy = NO_CLONES,
    recipe: str = "bf16",
    **degrees: int,
) -> MoE:
    torch.manual_seed(3)
    spec = RouterSpec(num_experts=E, top_k=K, norm_topk=True)
    with torch.device("cuda"):
        layer = MoE(Router(spec, D), GroupedExperts(E, D, N)).bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    with torch.no_grad():
        if clones.slots:
            layer.gate.weight[:3] *= 8  # of large logits, and chosen by most tokens
    meshes = meshes_of(**(degrees or {"ep": 4}))
    options = {"packing": packing, "flex": flex, "chunks": chunks, "clones": clones}
    parallelize_experts(layer, meshes, dispatcher=dispatcher, **options)
    use_local_tensors(layer)
    built = PrecisionConfig(recipe=recipe).build_recipe()
    layer.experts.policy = layer.experts.policy._replace(recipe=built, emulate=False)
    return layer


def _tokens(seed: int = 0, num_tokens: int = 300) -> Tensor:
    random = torch.Generator("cuda").manual_seed(10 * seed + dist.get_rank())
    return torch.randn(num_tokens, D, device="cuda", dtype=torch.bfloat16, generator=random)


def _step(layer: MoE, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y, _ = layer(x)
    (y.float() * torch.linspace(0.5, 1.5, D, device="cuda")).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def _state(layer: MoE) -> Any:
    assert isinstance(layer.dispatcher, FlexDispatcher)
    return layer.dispatcher.state


def check_layouts() -> None:
    """Every layout and kind of tokens against one process, in fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    worst = 0.0
    cases: list[dict[str, Any]] = [
        {"routing": "random", "tokens": "uneven"},
        {"policy": "padded", "bias": True},
        {"routing": "skewed", "tokens": "even"},
        {"policy": "expert_choice"},
        {"routing": "dropped", "tokens": "one"},
        {"chunks": 3, "extras": "shared"},
    ]
    sample: list[tuple[dict[str, int], slice]] = [
        ({"ep": 4}, slice(None)), ({"ep": 2, "etp": 2}, slice(0, None, 2)), ({"ep": 2}, slice(0, 1)),
        ({"etp": 4}, slice(1, 2)),
    ]  # fmt: skip
    for degrees, some in sample:
        meshes = meshes_of(**degrees)
        torch.set_default_device("cuda")
        for options in cases[some]:
            began = time.monotonic()
            worst = max(worst, *check_case(Case("flex", flex=ROOMY, **options), meshes).values())
            print(degrees, options, f"{time.monotonic() - began:.1f} s", flush=True)
        torch.set_default_device("cpu")
    assert worst <= 1e-5, worst
    print(f"flex over shared memory: worst relative error {worst:.1e}")


def check_across_nodes() -> None:
    """Four ranks as two nodes of two take the padded exchange."""
    meshes_of.cache_clear()  # ranks agree on their nodes when meshes are built
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        _exchange_padded()
    meshes_of.cache_clear()


def _exchange_padded() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    worst = 0.0
    for degrees in ({"ep": 4}, {"ep": 2, "etp": 2}):
        meshes = meshes_of(**degrees)
        torch.set_default_device("cuda")
        for options in ({"tokens": "uneven"}, {"routing": "skewed", "tokens": "one"}):
            worst = max(worst, *check_case(Case("flex", flex=ROOMY, **options), meshes).values())
        torch.set_default_device("cpu")
    assert worst <= 1e-5, worst
    layer = _layer("flex")
    _step(layer, _tokens())
    assert _state(layer).transport.name == "padded"
    _without_waits(layer)
    print(f"padded exchanges over NCCL: worst relative error {worst:.1e}")


def _without_waits(layer: MoE) -> None:
    _state(layer).defers = True
    _step(layer, _tokens())
    x = _tokens(1).requires_grad_()
    weights = torch.linspace(0.5, 1.5, D, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, _ = layer(x)
        (y.float() * weights).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(y).all()
    assert not _state(layer).must_repeat(False)


def check_waits() -> None:
    """No synchronising call in forward and backward of a layer."""
    layer = _layer("flex")
    _step(layer, _tokens())
    assert isinstance(_state(layer).transport, WrittenTransport)
    _without_waits(layer)


def check_bf16() -> None:
    """Rows in bf16 and in eight bits, beside all_to_all."""
    for packing, bound in ((Packing(), 5e-3), (Packing(rows=True, grads=True), 5e-3)):
        for degrees in ({"ep": 4}, {"ep": 2, "etp": 2}):
            wanted = _step(_layer("all_to_all", packing=packing, **degrees), _tokens())
            layer = _layer("flex", packing=packing, **degrees)
            for found in (_step(layer, _tokens()), _step(layer, _tokens())):  # buffers are used again
                worst = max(relative(a.float(), b.float()) for a, b in zip(found, wanted, strict=True))
                assert worst <= bound, (packing, degrees, worst)
        print(f"{packing}: worst relative difference to all_to_all {worst:.1e}")


def check_graph() -> None:
    """Forward and backward captured once and replayed with other tokens, whole and in chunks."""
    for chunks in (1, 3):
        _replay(_layer("flex", chunks=chunks))


def _replay(layer: MoE, bound: float = 5e-3, **options: Any) -> None:
    _state(layer).defers = True
    still, x = _tokens(), _tokens().requires_grad_()
    weights = torch.linspace(0.5, 1.5, D, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            (layer(x)[0].float() * weights).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    layer.zero_grad()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)[0]
        (y.float() * weights).sum().backward()
    for seed in (1, 2):
        tokens = _tokens(seed)
        with torch.no_grad():
            x.copy_(tokens)
            for held in (x, *layer.parameters()):
                held.grad.zero_()
        graph.replay()
        replayed = [y.clone(), x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
        wanted = _step(copy_of(layer, **options), tokens)
        for found, other in zip(replayed, wanted, strict=True):
            assert relative(found.float(), other.float()) < bound
    assert still.shape == x.shape


def check_clones() -> None:
    """Clones against one process in fp32, from skewed loads to all rows for one expert."""
    torch.backends.cuda.matmul.allow_tf32 = False
    worst = 0.0
    cases: list[dict[str, Any]] = [
        {"routing": "skewed"},
        {"routing": "skewed", "clones": TWO._replace(keep=False), "chunks": 3},
        {"routing": "one", "top_k": 1, "tokens": "one"},
        {"routing": "random", "tokens": "even"},
        {"routing": "skewed", "bias": True, "extras": "shared"},
        {"routing": "dropped", "clones": ClonePolicy(1, 2), "chunks": 2},
    ]
    for degrees in ({"ep": 4}, {"ep": 2}):
        meshes = meshes_of(**degrees)
        torch.set_default_device("cuda")
        for options in cases:
            case = Case("flex", **({"flex": ROOMY, "clones": TWO} | options))
            worst = max(worst, *check_case(case, meshes).values())
            print(degrees, options, f"{worst:.1e}", flush=True)
        torch.set_default_device("cpu")
    assert worst <= 1e-5, worst


def check_clones_bf16() -> None:
    """By the kernels for bf16, with fresh memory that is not a number: twice, the same bit by bit, and what
    all_to_all gives without clones."""
    for chunks, keep in ((1, True), (3, False)):
        layer = _layer("flex", chunks=chunks, clones=TWO._replace(keep=keep))
        wanted = _step(copy_of(layer), _tokens())
        with _poisoned():
            one, two = (_step(layer, _tokens()) for _ in range(2))
        for found, again, other in zip(one, two, wanted, strict=True):
            assert torch.equal(found, again)
            assert relative(found.float(), other.float()) <= 5e-3
        assert isinstance(_state(layer).transport, WrittenTransport)
        assert layer.dispatcher.traffic.calls["clones"] == 2 * (1 if keep else 2)
        _without_waits(layer)


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """``torch.empty`` gives NaN: what a free slot holds must not matter."""
    empty = torch.Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = empty(self, *args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with mock.patch.object(torch.Tensor, "new_empty", poisoned):
        yield


def check_clones_graph() -> None:
    """Captured once, and replayed with tokens that are routed otherwise: other experts are cloned."""
    for chunks in (1, 3):
        _replay(_layer("flex", chunks=chunks, clones=TWO))


def check_clones_fp8() -> None:
    """By the kernels for fp8: gradients as exact as without clones, the same bits again, and as a graph."""
    exact = [each.float() for each in _step(_layer("all_to_all", clones=TWO), _tokens())]
    for chunks, keep in ((1, True), (3, False)):
        clones = TWO._replace(keep=keep)
        layer = _layer("flex", chunks=chunks, clones=clones, recipe="fp8_blockwise")
        with _poisoned():
            one, two = (_step(layer, _tokens()) for _ in range(2))
        plain = copy_of(layer, chunks=chunks, recipe="fp8_blockwise")
        wanted = _step(plain, _tokens())
        for found, again, other, true in zip(one, two, wanted, exact, strict=True):
            assert torch.equal(found, again)
            error, usual = relative(found.float(), true), relative(other.float(), true)
            print(f"fp8 with clones: {error:.4f} from bf16, without: {usual:.4f}", flush=True)
            assert 1e-3 < error <= 1.1 * usual
        assert layer.dispatcher.traffic.calls["clones"] == 2 * (1 if keep else 2)
        _without_waits(layer)
    _replay(_layer("flex", clones=TWO, recipe="fp8_blockwise"), bound=0.08, recipe="fp8_blockwise")


def check_clones_model() -> None:
    """A model with buffers that turn to NaN when they are let go, in bf16 and on weights that are codes."""
    _compare_models({"model__moe_intermediate_size": 64}, 5e-3)
    codes = {"precision__recipe": "fp8_blockwise", "precision__quantized_weights": True}
    _compare_models({"model__moe_intermediate_size": 128} | codes, 1e-2)


def _compare_models(shape: dict[str, Any], bound: float) -> None:
    folder = tempfile.mkdtemp(prefix=f"clones-model-{dist.get_rank()}-")
    folders: list[Any] = [folder]
    dist.broadcast_object_list(folders, 0)
    (folder,) = folders
    shape = shape | {"data__seq_len": 128, "model__hidden_size": 128, "model__head_dim": 32}
    shape |= {"precision__param_dtype": "bfloat16", "mesh__ep": 4, "fsdp__debug": True}
    losses = {}
    for name, keys in {
        "plain": {"experts__dispatcher": "all_to_all"},
        "clones": {"experts__dispatcher": "flex", "experts__clones": 2},
        "sent again": {"experts__dispatcher": "flex", "experts__clones": 2, "experts__clone_keep": False},
    }.items():
        keys = (
            {"experts__flex__rows": 8.0, "experts__clone_rows": 0} | keys if "clones" in str(keys) else keys
        )
        config = tiny_config(f"{folder}/{name}", 4, **(shape | keys))
        run = train.Run(config, meshes_of(ep=4))
        records = [run.train_step() for _ in range(4)]
        losses[name] = [value for record in records for value in (record.loss, record.grad_norm)]
        assert not (records[-1].exchange or {}).get("repeated")
        run.close("finished")
    for name in ("clones", "sent again"):
        assert losses[name] == pytest.approx(losses["plain"], rel=bound), losses
    print(f"losses and norms {losses}")


def copy_of(layer: MoE, **options: Any) -> MoE:
    """The same weights through all_to_all."""
    other = _layer("all_to_all", **options)
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    return other


def check_overflow() -> None:
    """Checked, a layer that does not fit takes all_to_all; deferred, its output is NaN and the flag
    raised."""
    wanted = _step(_layer("all_to_all"), _tokens())
    layer = _layer("flex", FlexPolicy(rows=0.5, seconds=60.0))
    for found, other in zip(_step(layer, _tokens()), wanted, strict=True):
        assert relative(found.float(), other.float()) < 5e-3
    state = _state(layer)
    assert state.num_rerouted == 1
    state.defers = True
    y = _step(layer, _tokens())[0]
    assert y.isnan().all()
    assert state.must_repeat(False)
    for found, other in zip(_step(layer, _tokens()), wanted, strict=True):
        assert relative(found.float(), other.float()) < 5e-3
    assert not state.must_repeat(True)
    figures = state.figures()
    assert (figures["repeated"], figures["rerouted"]) == (1, 1)
    assert figures["fill"] > 1
    # More tokens than ever before do not fit once, then do.
    layer = _layer("flex", FlexPolicy(rows=4.0, seconds=60.0))
    _step(layer, _tokens(num_tokens=100))
    for _ in range(2):
        wanted = _step(_layer("all_to_all"), _tokens(num_tokens=300))
        for found, other in zip(_step(layer, _tokens(num_tokens=300)), wanted, strict=True):
            assert relative(found.float(), other.float()) < 5e-3
        assert _state(layer).num_rerouted == 1


def check_model() -> None:
    """A whole model trains step by step; nothing waits from the first forward to the norm of the gradient."""
    folder = f"/tmp/flex-model-{os.environ['MASTER_PORT']}"
    shape = {"data__seq_len": 128, "model__hidden_size": 128, "model__head_dim": 32}
    shape |= {"model__moe_intermediate_size": 64, "precision__param_dtype": "bfloat16", "mesh__ep": 4}
    losses = {}
    for dispatcher, bounds in (("all_to_all", {}), ("flex", {"experts__flex__rows": 8.0})):
        settings = shape | bounds | {"experts__dispatcher": dispatcher, "observe__log_interval": 100}
        config = tiny_config(f"{folder}/{dispatcher}", 4, **settings)
        run = train.Run(config, meshes_of(ep=4))
        losses[dispatcher] = [run.train_step().loss for _ in range(2)]
        if dispatcher == "flex":
            _forward_and_backward_without_waits(run)
            before, after = _waits_of_a_step(run)
            print(f"a step waits {before} before the norm of its gradient, {after} before its optimizer")
            assert (before, len(after)) == ([], 1), (before, after)
        run.close("finished")
    assert losses["flex"] == pytest.approx(losses["all_to_all"], rel=5e-3), losses
    print(f"losses {losses}")


_WAIT = re.compile(r"cu(da)?[A-Z]\w*Synchronize|cudaMemcpy|cuMemcpy(?!\w*Async)\w*")
"""Calls of the runtime and of the driver in which the host waits for the device."""


def _waits_of_a_step(run: train.Run) -> tuple[list[str], list[str]]:
    """Of a whole step as the profiler sees it, and of whoever called: from its start to the norm of its
    gradient, and from there to its optimizer, which is where the loss is read."""

    def marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(name):
                return function(*args, **kwargs)

        return call

    stepping = mock.patch.object(run.optimizer, "step", marked("optimizer step", run.optimizer.step))
    clipping = mock.patch.object(train, "clip_grad_norm", marked("gradient norm", train.clip_grad_norm))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace, stepping, clipping:
        with record_function("whole step"):
            run.train_step()
        torch.cuda.synchronize()
    events = sorted(trace.events(), key=lambda event: event.time_range.start)
    marks = {event.name: event.time_range.start for event in reversed(events)}
    # Of this thread and of autograd's: data of later steps are prepared in others, which may wait.
    own = ("whole step", "autograd::engine")
    threads = {event.thread for event in events if event.name.startswith(own)}
    events = [event for event in events if event.thread in threads]
    assert any("LaunchKernel" in event.name for event in events), "the runtime's calls are not in the trace"
    found: tuple[list[str], list[str]] = ([], [])
    for event in events:
        if (
            _WAIT.fullmatch(event.name)
            and marks["whole step"] <= event.time_range.start < marks["optimizer step"]
        ):
            caller = event.cpu_parent.name if event.cpu_parent is not None else "nobody"
            found[event.time_range.start >= marks["gradient norm"]].append(f"{event.name} in {caller}")
    return found


def _forward_and_backward_without_waits(run: Any) -> None:
    inputs = run.feed.inputs(run.data.next_step())
    counts = run.feed.count(run.decoder, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index, batch in enumerate(inputs):
            with engine_of(run.model).micro_batch(last=index == len(inputs) - 1):
                run.decoder(**batch, counts=counts, routing=run.feed.routing(batch)).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.optimizer.zero_grad()


def check_chunks() -> None:
    """In bf16 chunks are as exact as the whole, and one is computed while another is under way."""
    meshes = meshes_of(ep=4)
    exact, whole, cut = (
        chunks_nccl_ranks.results(
            chunks_nccl_ranks.layer_of(meshes, "flex", chunks, dtype, shared=True), dtype
        )
        for chunks, dtype in ((1, torch.float32), (1, torch.bfloat16), (3, torch.bfloat16))
    )
    ratios = {
        name: relative(cut[name], value) / relative(whole[name], value) for name, value in exact.items()
    }
    print("error of three chunks over that of one, in bf16:", {k: round(v, 3) for k, v in ratios.items()})
    assert max(ratios.values()) < 1.5, ratios
    with tempfile.TemporaryDirectory() as folder:
        (none, _, num_whole), (some, _, num_cut) = (
            chunks_nccl_ranks.beside(meshes, chunks, Path(folder), "flex") for chunks in (1, 4)
        )
    print(
        f"experts' kernels that began during an exchange: {none} of {num_whole} in one chunk, {some} of "
        f"{num_cut} in four",
        flush=True,
    )
    assert num_whole > 0
    assert none == 0, "one chunk's compute waits for its rows"
    assert some > 0, "another chunk's rows are under way"


def check_late() -> None:
    """Rows of an exchange that a rank comes to too late are not used, and the step that needed them raises;
    the wait for counts had gone well."""
    layer = _layer("flex", FlexPolicy(rows=8.0, seconds=3.0))
    _state(layer).defers = True
    assert torch.isfinite(_step(layer, _tokens())[0]).all()
    torch.cuda.synchronize()
    dist.barrier()
    transport, is_late = _state(layer).transport, dist.get_rank() == 2
    wait, delays = transport._wait_for_all, [6.0]

    def wait_late() -> None:
        time.sleep(delays.pop() if delays else 0.0)
        wait()

    with mock.patch.object(transport, "_wait_for_all", wait_late if is_late else wait):
        found = _step(layer, _tokens())
    if not is_late:
        assert found[0].isnan().all()
        assert any(gradient.isnan().any() for gradient in found[2:]), "the optimizer would not know"
        with pytest.raises(dist.DistNetworkError, match="rank 2 did not answer"):
            _state(layer).must_repeat(False)
    torch.cuda.synchronize()
    dist.barrier()


def check_missing() -> None:
    """A rank that is gone is named once the limit has passed. The last check: rank 2 ends with it."""
    layer = _layer("flex", FlexPolicy(rows=8.0, seconds=3.0))
    _step(layer, _tokens())
    dist.barrier()
    if dist.get_rank() == 2:
        print("rank 2 ends", flush=True)
        return
    began = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="rank 2 did not answer"):
        _step(layer, _tokens())
    print(f"rank {dist.get_rank()}: named after {time.monotonic() - began:.1f} s", flush=True)


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): check
    for name, check in globals().copy().items()
    if name.startswith("check_") and name != "check_case"
}


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    for name in sys.argv[2:] or CHECKS:
        began, problem = time.monotonic(), ""
        try:
            CHECKS[name]()
        except BaseException:
            problem = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(problem)
        if rank == "0" or problem:
            print(f"{name} took {time.monotonic() - began:.1f} s {problem}", flush=True)
        if problem:
            os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # a rank is gone by now: nothing can be closed together


if __name__ == "__main__":
    main()
