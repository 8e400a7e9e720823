"""What users do to gradients, beside what torch does with a plain model."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import TensorWeakRef

from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, exchange, fully_shard
from fsdmoe.kernels.linear import Linear
from fsdmoe.mesh import build_meshes
from fsdmoe.models.head import LMHead
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing.ranks import run_ranks

WIDTH = 64
FP32 = PrecisionConfig(param_dtype="float32", reduce_dtype="float32")


class Model(nn.Module):
    """Layers whose weight gradients go straight into their buffers; ``plan`` is the order they run in."""

    def __init__(self, plan: tuple[int, ...] = (0, 1), width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Linear(width, width) for _ in range(2))
        self.plan = plan

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.plan:
            x = torch.tanh(self.layers[index](x))
        return x.square().mean()


def rows(seed: int, rank: int | None = None, width: int = WIDTH) -> torch.Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * seed + rank))


def models(**fsdp: object) -> tuple[nn.Module, nn.Module]:
    """The plain model, which every rank runs on the rows of all ranks, and the sharded one."""
    plain = Model()
    policy = FSDPPolicy(fsdp=FSDPConfig(**fsdp), precision=FP32)  # type: ignore[arg-type]
    return plain, fully_shard(copy.deepcopy(plain), build_meshes(), policy)


def backward(plain: nn.Module, model: nn.Module, seed: int) -> None:
    for rank in range(dist.get_world_size()):
        (plain(rows(seed, rank)) / dist.get_world_size()).backward()
    model(rows(seed)).backward()


def worst(plain: nn.Module, model: nn.Module) -> float:
    """The largest relative difference of a gradient, one that is missing on one side counted as 1."""
    found = [0.0]
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        if (theirs.grad is None) != (ours.grad is None):
            found.append(1.0)
        elif theirs.grad is not None:
            off = (ours.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()  # type: ignore[union-attr]
            found.append(off.item())
    return max(found)


def run_a_layer_twice() -> float:
    plain = Model(plan=(0, 1, 0))
    plain.layers[1].requires_grad_(False)  # nothing trained lies between the two
    model = fully_shard(copy.deepcopy(plain), build_meshes(dp_outer=2), FSDPPolicy(precision=FP32))
    backward(plain, model, 0)
    return worst(plain, model)


def test_replicas_that_reach_a_unit_twice_sum_both_gradients() -> None:
    assert max(run_ranks(run_a_layer_twice, 2)) < 1e-5


def step_a_subset() -> list[float]:
    plain, model = models()
    found = []
    optimizers = [torch.optim.SGD(list(side.parameters())[1::2], lr=0.1) for side in (plain, model)]
    for seed in range(3):
        backward(plain, model, seed)
        found.append(worst(plain, model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_an_optimizer_over_some_parameters_gets_their_gradients_in_every_step() -> None:
    assert max(max(found) for found in run_ranks(step_a_subset, 2)) < 1e-5


def drop_one(index: int) -> tuple[float, float]:
    """Gradients, and weights after a step of fsdmoe's optimizer, where one gradient was set to None."""
    plain, model = models()
    ours = AdamW(model, lr=0.01, weight_decay=0.0)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for seed in range(3):
        backward(plain, model, seed)
        if seed == 1:
            for side in (plain, model):
                list(side.parameters())[index].grad = None
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    weights = max((q.full_tensor() - p).abs().max().item() for p, q in pairs)
    backward(plain, model, 7)
    list(plain.parameters())[index].grad = list(model.parameters())[index].grad = None
    backward(plain, model, 8)
    return worst(plain, model), weights


@pytest.mark.parametrize("index", [0, 1])
def test_a_gradient_set_to_none_is_dropped_alone(index: int) -> None:
    for gradients, weights in run_ranks(drop_one, 2, index):
        assert gradients < 1e-5
        assert weights < 1e-6


def keep_a_gradient() -> tuple[bool, bool]:
    plain, model = models()
    backward(plain, model, 0)
    kept = next(model.parameters()).grad
    assert kept is not None
    before, alias = kept.full_tensor().clone(), kept.detach()  # type: ignore[attr-defined]
    model.zero_grad()
    backward(plain, model, 1)
    try:
        is_alias_right = torch.equal(alias.full_tensor(), before)  # type: ignore[attr-defined]
    except RuntimeError:
        is_alias_right = True
    return torch.equal(kept.full_tensor(), before), is_alias_right  # type: ignore[attr-defined]


def keep_nothing() -> bool:
    plain, model = models()
    backward(plain, model, 0)
    shown = [TensorWeakRef(parameter.grad) for parameter in model.parameters()]  # type: ignore[arg-type]
    model.zero_grad()
    backward(plain, model, 1)
    return any(gradient() is not None for gradient in shown)


def test_a_gradient_that_nobody_keeps_is_gone_with_zero_grad() -> None:
    assert run_ranks(keep_nothing, 2) == [False, False]


def keep_a_gradient_elsewhere() -> bool:
    """No name in Python refers to it: another tensor has it as its gradient."""
    plain, model = models()
    backward(plain, model, 0)
    weight = next(model.parameters())
    before = weight.grad.full_tensor().clone()  # type: ignore[union-attr,operator]
    other = torch.zeros_like(weight)
    other.grad = weight.grad
    model.zero_grad()
    backward(plain, model, 1)
    return torch.equal(other.grad.full_tensor(), before)  # type: ignore[attr-defined]


def test_a_gradient_that_another_tensor_keeps_has_its_value() -> None:
    assert run_ranks(keep_a_gradient_elsewhere, 2) == [True, True]


def test_a_gradient_kept_past_zero_grad_keeps_its_value() -> None:
    for kept, alias in run_ranks(keep_a_gradient, 2):
        assert kept
        assert alias


def ask_for_the_inputs_gradient() -> tuple[list[bool], float, float]:
    plain, model = models()
    given = rows(0).requires_grad_()
    (ours,) = torch.autograd.grad(model(given), given)
    absent = [parameter.grad is None for parameter in model.parameters()]
    (theirs,) = torch.autograd.grad(plain(given), given)
    backward(plain, model, 1)
    model(given).backward(inputs=[given])
    return absent, (ours - theirs).abs().max().item(), worst(plain, model)


def test_autograd_grad_leaves_the_gradients_of_parameters_alone() -> None:
    for absent, difference, gradients in run_ranks(ask_for_the_inputs_gradient, 2):
        assert gradients < 1e-5
        assert all(absent)
        assert difference < 1e-6


def break_a_backward(model: nn.Module) -> None:
    """Raise when the last layer's gradient is on its way to the other ranks already."""

    def boom(_: torch.Tensor) -> None:
        raise ValueError("boom")

    given = rows(5).requires_grad_()
    given.register_hook(boom)
    with contextlib.suppress(ValueError):
        model(given).backward()


def drop_what_is_half_done(how: str, fsdp: dict[str, object]) -> float:
    plain, model = models(**fsdp)
    if how == "a backward that raised":
        break_a_backward(model)
    else:
        with engine_of(model).micro_batch(last=False):
            model(rows(5)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    backward(plain, model, 0)
    return worst(plain, model)


@pytest.mark.parametrize("fsdp", [{}, {"reduce": "last"}], ids=["each", "last"])
@pytest.mark.parametrize("how", ["a backward that raised", "an abandoned accumulation"])
def test_torchs_zero_grad_drops_what_is_half_done(how: str, fsdp: dict[str, object]) -> None:
    assert max(run_ranks(drop_what_is_half_done, 2, how, fsdp)) < 1e-5


def add_to_what_a_failure_left() -> str:
    _, model = models()
    break_a_backward(model)
    try:
        model(rows(0)).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_backward_onto_what_a_failure_left_says_what_to_do() -> None:
    assert all("call zero_grad()" in found for found in run_ranks(add_to_what_a_failure_left, 2))


def read_before_the_last_micro_batch() -> str:
    _, model = models()
    with engine_of(model).micro_batch(last=False):
        model(rows(0)).backward()
    try:
        next(model.parameters()).grad.full_tensor()  # type: ignore[union-attr]
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_gradient_that_is_not_complete_refuses_to_be_read() -> None:
    assert all("last=True" in found for found in run_ranks(read_before_the_last_micro_batch, 2))


def end_with_a_micro_batch_that_trains_nothing(replicas: int) -> tuple[float, int]:
    plain = Model()
    plain.layers[0].requires_grad_(False)
    model = fully_shard(copy.deepcopy(plain), build_meshes(dp_outer=replicas), FSDPPolicy(precision=FP32))
    told: list[torch.Tensor] = []
    model.layers[1].weight.register_post_accumulate_grad_hook(told.append)
    for rank in range(dist.get_world_size()):
        (plain(rows(0, rank)) / dist.get_world_size()).backward()
    with engine_of(model).micro_batch(last=False):
        model(rows(0)).backward()
    model.plan = (0,)
    with engine_of(model).micro_batch(last=True):
        model(rows(1).requires_grad_()).backward()
    return worst(plain, model), len(told)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_last_micro_batch_that_trains_nothing_completes_what_earlier_ones_left(replicas: int) -> None:
    for difference, times in run_ranks(end_with_a_micro_batch_that_trains_nothing, 2, replicas):
        assert difference < 1e-5
        assert times == 1


def catch_what_the_last_micro_batch_raised() -> str:
    _, model = models()
    with engine_of(model).micro_batch(last=False):
        model(rows(0)).backward()
    with engine_of(model).micro_batch(last=True):
        break_a_backward(model)
    try:
        clip_grad_norm(model, 1.0)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_last_micro_batch_that_raised_completes_nothing() -> None:
    told = run_ranks(catch_what_the_last_micro_batch_raised, 2)
    assert all("the backward that was to make it raised" in each for each in told), told


def set_gradients_by_hand() -> float:
    """Exchange gradients for others, as those who combine gradients of several losses do."""
    plain, model = models()
    backward(plain, model, 0)
    for side in (plain, model):
        kept = [parameter.grad for parameter in side.parameters()]
        side.zero_grad()
        for parameter, gradient in zip(side.parameters(), kept, strict=True):
            assert gradient is not None
            parameter.grad = gradient * 0.5
    backward(plain, model, 1)
    return worst(plain, model)


def test_backward_adds_to_gradients_that_were_set_by_hand() -> None:
    assert max(run_ranks(set_gradients_by_hand, 2)) < 1e-5


def change_through_data() -> float:
    plain, model = models()
    for seed in range(3):
        backward(plain, model, seed)
        for side in (plain, model):
            for parameter in side.parameters():
                parameter.grad.data = parameter.grad.data * 0.5  # type: ignore[union-attr]
    found = worst(plain, model)
    model.zero_grad()
    plain.zero_grad()
    backward(plain, model, 3)
    return max(found, worst(plain, model))


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_changed_through_data_are_the_gradients(world_size: int) -> None:
    assert max(run_ranks(change_through_data, world_size)) < 1e-5


def zero_one_before_it_is_complete(then_set: bool) -> float:
    """In place, between two micro-batches; then perhaps another gradient in its place."""
    plain, model = models()
    for micro in range(3):
        for rank in range(dist.get_world_size()):
            (plain(rows(micro, rank)) / dist.get_world_size()).backward()
        with engine_of(model).micro_batch(last=micro == 2):
            model(rows(micro)).backward()
        if micro == 0:
            for side in (plain, model):
                chosen = list(side.parameters()) if then_set else [next(side.parameters())]
                for parameter in chosen:
                    torch.optim.SGD([parameter]).zero_grad(set_to_none=False)
                    if then_set:
                        parameter.grad = torch.ones_like(parameter)
    return worst(plain, model)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("then_set", [False, True])
def test_a_gradient_zeroed_before_it_is_complete_goes_on_from_zero(then_set: bool, world_size: int) -> None:
    assert max(run_ranks(zero_one_before_it_is_complete, world_size, then_set)) < 1e-5


def set_again_what_was_dropped() -> float:
    plain, model = models()
    backward(plain, model, 0)
    for side in (plain, model):
        next(side.parameters()).grad = None
    engine_of(model).require_complete_gradients()  # as a step and clipping do
    for side in (plain, model):
        parameter = next(side.parameters())
        parameter.grad = torch.ones_like(parameter)
    backward(plain, model, 1)
    return worst(plain, model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_backward_adds_to_a_gradient_set_in_place_of_a_dropped_one(world_size: int) -> None:
    assert max(run_ranks(set_again_what_was_dropped, world_size)) < 1e-5


def set_before_backward() -> float:
    """The head's gradient lies in its buffer when forward is over."""
    torch.manual_seed(0)
    plain, labels = LMHead(16, 32), torch.arange(6).view(1, 6)
    nn.init.normal_(plain.weight)
    model = fully_shard(copy.deepcopy(plain), build_meshes(), FSDPPolicy(precision=FP32))
    hidden = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(1))
    for side in (plain, model):
        loss = side(hidden, labels)
        side.weight.grad = torch.ones_like(side.weight)
        loss.backward()
    return worst(plain, model)


def test_a_gradient_set_between_forward_and_backward_is_added_to() -> None:
    assert max(run_ranks(set_before_backward, 1)) < 1e-5


def read_what_was_dropped_half_done() -> list[str]:
    _, model = models()
    with engine_of(model).micro_batch(last=False):
        model(rows(0)).backward()
    kept, found = next(model.parameters()).grad, []
    engine_of(model).zero_grad()
    for seed in (1, 2):
        try:
            kept.full_tensor()  # type: ignore[union-attr]
            found.append("no error")
        except RuntimeError as error:
            found.append(str(error))
        model(rows(seed)).backward()
    return found


def test_a_gradient_dropped_half_done_stays_unreadable() -> None:
    for found in run_ranks(read_what_was_dropped_half_done, 1):
        assert all("is not complete" in each for each in found)


def step_before_the_second_backward(optimizer: str) -> str:
    _, model = models()
    make = {"fsdmoe": AdamW, "torch": lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr)}[optimizer]
    first, second = model(rows(0)), model(rows(1))
    first.backward()
    make(model, lr=0.1).step()
    try:
        second.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("optimizer", ["fsdmoe", "torch"])
def test_backward_through_weights_that_have_changed_is_refused(optimizer: str) -> None:
    for found in run_ranks(step_before_the_second_backward, 2, optimizer):
        assert "written after the forward" in found


class Late:
    """A collective that was started and has not written anything yet."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self.is_over = False

    def wait(self) -> None:
        self._run()
        self.is_over = True


def zero_what_is_under_way() -> list[bool]:
    """Whether sums over replicas had landed when the gradients that a failure left were zeroed in place."""
    policy = FSDPPolicy(precision=FP32)
    model = fully_shard(Model(), build_meshes(dp_outer=2), policy)
    started: list[Late] = []

    def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> Late:
        started.append(Late(functools.partial(dist.all_reduce, tensor, group=group)))
        return started[-1]

    with mock.patch.object(exchange, "all_reduce", all_reduce):
        break_a_backward(model)
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=False)
    return [each.is_over for each in started]


def test_gradients_that_are_zeroed_in_place_are_not_overtaken_by_their_reduction() -> None:
    for landed in run_ranks(zero_what_is_under_way, 2):
        assert landed
        assert all(landed)
