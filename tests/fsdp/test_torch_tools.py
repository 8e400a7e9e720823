"""torch's own tools on a fully sharded model: state dicts, checkpoints, clipping and optimizers agree with
one process."""

import contextlib
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from fsdmoe.fsdp import ShardedTensor, engine_of, fully_shard
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, relative, run_plain, run_sharded, shard_tiny
from tests.support.tiny_modules import batch_of, reference

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
FORMS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}, "default": {},
}  # fmt: skip


def build(degrees: dict[str, int], kind: str = "default", **model: Any) -> tuple[nn.Module, Any]:
    wrapped = shard_tiny(Case(degrees=degrees, model={"num_layers": 2, **model}), build_meshes(**degrees))
    if kind == "ours":
        return wrapped, AdamW(wrapped, **SETTINGS)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), **SETTINGS, **FORMS[kind])


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        run_sharded(model, Case(), step)
        optimizer.step()
        optimizer.zero_grad()


def whole(state: Any) -> Any:
    """The same tree with whole tensors, to be compared bit by bit."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [whole(value) for value in state]
    return state.full_tensor().clone() if isinstance(state, ShardedTensor) else state


def assert_same(got: Any, want: Any, where: str = "") -> None:
    if isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            assert_same(got[key], want[key], f"{where}/{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for index, value in enumerate(want):
            assert_same(got[index], value, f"{where}/{index}")
    elif isinstance(want, torch.Tensor):
        assert type(got) is torch.Tensor, where
        assert got.dtype == want.dtype, where
        assert torch.equal(got, want), where
    else:
        assert got == want, where


# Optimizers and clipping


def clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of its gradients before they are clipped, and the one that clipping returns."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])  # type: ignore[misc]
    clipped = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return norm, clipped


def step_beside_one_process(degrees: dict[str, int]) -> dict[str, float]:
    """Clip and step three times with each form of AdamW, beside the plain model; the worst difference."""
    case, steps = Case(model={"num_layers": 1}), range(3)
    plain = reference(num_layers=1)
    theirs, wanted = torch.optim.AdamW(plain.parameters(), **SETTINGS), []
    for step in steps:
        run_plain(plain, case, step)
        wanted.append(clip_and_step(plain, theirs))
    targets, worst = dict(plain.named_parameters()), {"norm": 0.0, "clipped": 0.0}
    for form in FORMS:
        model, optimizer = build(degrees, form, num_layers=1)
        for step in steps:
            run_sharded(model, case, step)
            norms = zip(clip_and_step(model, optimizer), wanted[step], strict=True)
            for name, (got, want) in zip(("norm", "clipped"), norms, strict=True):
                worst[name] = max(worst[name], relative(got, want))
            optimizer.zero_grad()
        worst[form] = max(relative(p.full_tensor(), targets[n]) for n, p in model.named_parameters())
    return worst


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, {"ep": 2}),
        pytest.param(2, {}, marks=pytest.mark.full),
        pytest.param(4, {"ep": 2, "etp": 2}, marks=pytest.mark.full),
        pytest.param(4, {"dp_outer": 2, "tp": 2, "ep": 2}, marks=pytest.mark.full),
    ],
)
def test_torchs_adamw_and_clipping_equal_one_process(world: int, degrees: dict[str, int]) -> None:
    for worst in run_ranks(step_beside_one_process, world, degrees):
        assert worst.keys() == {"norm", "clipped", *FORMS}
        assert all(difference < 1e-6 for difference in worst.values()), worst


def count_reductions() -> list[int]:
    model, _ = build({"ep": 2})
    run_sharded(model, Case(), 0)
    calls, original = [], dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    dist.all_reduce = counted
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    finally:
        dist.all_reduce = original
    return [len(calls), len(list(model.parameters()))]


def test_clipping_reduces_once_a_mesh_not_once_a_parameter() -> None:
    for num_reductions, num_parameters in run_ranks(count_reductions, 4):
        assert num_parameters > 20
        assert num_reductions <= 3


# State dicts


def check_whole_state(degrees: dict[str, int], kind: str) -> None:
    model, optimizer = build(degrees, kind, tied=True, num_layers=1)
    train(model, optimizer, range(2))
    for cpu_offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
        for state in (
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options),
        ):
            if cpu_offload and dist.get_rank() > 0:
                assert not state
        sharded, full = get_state_dict(model, optimizer), get_state_dict(model, optimizer, options=options)
        want = whole(sharded)  # collective
        if dist.get_rank() == 0 or not cpu_offload:
            assert_same(list(full), want)
    offloaded, _ = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    assert all(isinstance(value, ShardedTensor) for value in offloaded.values())
    assert_same(whole(offloaded), want[0])


@pytest.mark.parametrize("kind", ["default", pytest.param("ours", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, {"ep": 2}),
        pytest.param(4, {"ep": 2, "etp": 2}, marks=pytest.mark.full),
        pytest.param(3, {}, marks=pytest.mark.full),
    ],
)
def test_whole_state_dicts_are_those_of_one_process(world: int, degrees: dict[str, int], kind: str) -> None:
    run_ranks(check_whole_state, world, degrees, kind)


def check_whole_state_comes_back(kind: str, from_rank_0: bool) -> None:
    model, optimizer = build({"ep": 2}, kind, num_layers=1)
    train(model, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=from_rank_0)
    state = get_state_dict(model, optimizer, options=options)
    want = whole(get_state_dict(model, optimizer))
    other, resumed = build({"etp": 2}, kind, num_layers=1)
    train(other, resumed, range(5, 6))
    loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    set_model_state_dict(other, state[0], options=loading)
    set_optimizer_state_dict(other, resumed, state[1], options=loading)
    assert all(
        isinstance(value, ShardedTensor)
        for entry in resumed.state.values()
        for name, value in entry.items()
        if name != "step"
    )
    assert_same(whole(get_state_dict(other, resumed)), want)
    losses = [run_sharded(each, Case(), 7)[0] for each in (model, other)]
    assert relative(*losses) < 1e-6
    resumed.step()


@pytest.mark.parametrize("kind", [pytest.param("foreach", marks=pytest.mark.full), "ours"])
@pytest.mark.parametrize("from_rank_0", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_whole_state_dicts_load_under_another_layout(world: int, kind: str, from_rank_0: bool) -> None:
    run_ranks(check_whole_state_comes_back, world, kind, from_rank_0)


# Checkpoints


def save(folder: str, degrees: dict[str, int], kind: str, is_async: bool) -> Any:
    model, optimizer = build(degrees, kind, num_layers=1)
    train(model, optimizer, range(2))
    return _save(folder, model, optimizer, is_async)


def load_and_save(source: str, folder: str, degrees: dict[str, int], kind: str, is_async: bool) -> Any:
    model, optimizer = build(degrees, kind, num_layers=1)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=source)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return _save(folder, model, optimizer, is_async)


def _save(folder: str, model: nn.Module, optimizer: Any, is_async: bool) -> Any:
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    if is_async:
        future: Any = dcp.async_save(state, checkpoint_id=folder)
        future.result()
    else:
        dcp.save(state, checkpoint_id=folder)
    return whole(state)


@pytest.mark.parametrize("kind", ["fused", pytest.param("ours", marks=pytest.mark.full)])
@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.full)])
def test_state_goes_from_4_to_2_to_3_ranks_bit_by_bit(kind: str, is_async: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        want = run_ranks(save, 4, f"{folder}/4", {"ep": 2, "etp": 2}, kind, is_async)[0]
        two = run_ranks(load_and_save, 2, f"{folder}/4", f"{folder}/2", {"tp": 2}, kind, is_async)
        three = run_ranks(load_and_save, 3, f"{folder}/2", f"{folder}/3", {}, kind, is_async)
        assert want["optim"]["state"]
        for got in (*two, *three):
            assert_same(got, want)


def check_load_into_a_live_state_dict(folder: str) -> None:
    """``dcp.load`` writes the parameters themselves; gathered weights must not outlive it on any rank."""
    model, _ = build({})
    engine = engine_of(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    before = model(*batch_of(0, 0, dist.get_rank()), 12).item()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    other = model(*batch_of(0, 0, dist.get_rank()), 12).item()
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    assert other != before
    assert model(*batch_of(0, 0, dist.get_rank()), 12).item() == before
    epochs = [unit.weights_epoch for unit in engine.units]
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    model(*batch_of(0, 0, dist.get_rank()), 12)
    assert [unit.weights_epoch for unit in engine.units] == epochs, "a save counts as no write"


def test_a_stock_load_is_taken_up_by_the_next_forward() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(check_load_into_a_live_state_dict, 3, folder)


# torchao's optimizer on the host


class Stream:
    """That of a device whose copies are there at once."""

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> "Stream":
        return Stream()


@contextlib.contextmanager
def a_device() -> Iterator[None]:
    """Let torchao take the CPU for a device, and host memory for pinned."""
    from torchao.optim import cpu_offload

    made_up = SimpleNamespace(
        Stream=Stream,
        current_stream=Stream,
        stream=lambda stream: contextlib.nullcontext(),
        is_available=lambda: False,
    )
    make, name = torch.empty_like, "get_available_devices"
    with (
        mock.patch.object(torch, "xpu", made_up),
        mock.patch.object(cpu_offload, name, return_value=["cpu", "xpu"]),
        mock.patch.object(
            torch, "empty_like", lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)
        ),
    ):
        yield


def step_on_the_host(degrees: dict[str, int]) -> Any:
    import torchao.optim

    model, optimizer = build(degrees, "fused")
    train(model, optimizer, range(3))
    wanted = whole(dict(model.named_parameters()))
    model, _ = build(degrees)
    with a_device():
        offloaded = torchao.optim.CPUOffloadOptimizer(model.parameters(), minimal_size=0, **SETTINGS)
        train(model, offloaded, range(3))
    return wanted, whole(dict(model.named_parameters()))


def test_torchaos_offloading_optimizer_steps_as_torchs() -> None:
    for wanted, found in run_ranks(step_on_the_host, 2, {}):
        assert_same(found, wanted)


def count_hooks() -> list[int]:
    model, _ = build({})
    parameters, counts = list(model.parameters()), []
    seen: list[Any] = []
    handles = [parameter.register_post_accumulate_grad_hook(seen.append) for parameter in parameters]
    run_sharded(model, Case(), 0)
    counts.append(sum(a is b for a, b in zip(seen, parameters, strict=True)) - len(parameters))
    for handle in handles:
        handle.remove()
    run_sharded(model, Case(), 1)
    return [*counts, len(seen) - len(parameters)]


def test_hooks_for_accumulated_gradients_are_called_once_a_step_until_they_are_removed() -> None:
    assert run_ranks(count_hooks, 2) == [[0, 0], [0, 0]]


# What is refused


def step_low_bit(kind: str) -> str:
    if kind == "by hand":
        model, _ = build({})
        parameter = next(model.parameters())
        with pytest.raises(NotImplementedError) as caught, torch.no_grad():
            torch.zeros(parameter.shape).lerp(parameter, 0.5)  # what their step begins with
        return str(caught.value)
    import torchao.optim

    model = fully_shard(nn.Linear(128, 128), build_meshes())
    run: Any = getattr(torchao.optim, kind)(model.parameters(), lr=1e-3)
    model(torch.ones(2, 128, dtype=torch.bfloat16)).sum().backward()
    with (
        pytest.raises(NotImplementedError, match="low-bit") as raised,
        torch.compiler.set_stance("force_eager"),  # compiled, it would need a C++ compiler
    ):
        run.step()
    return str(raised.value)


@pytest.mark.parametrize("kind", ["by hand", "AdamW8bit", "AdamWFp8"])
def test_low_bit_optimizers_of_torchao_are_refused_by_name(kind: str) -> None:
    for message in run_ranks(step_low_bit, 2, kind):
        assert "torchao's low-bit optimizers" in message
        assert "moment_dtype='torchao_8bit'" in message
