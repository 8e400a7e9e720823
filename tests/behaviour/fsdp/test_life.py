"""Ordinary life, with the detectors of debug mode on: gradients stay those of the plain model."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, ShardedTensor, engine_of, fully_shard
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import (
    FP32,
    Case,
    check_gradients,
    relative,
    run_plain,
    run_sharded,
    sgd,
    shard_tiny,
    train_case,
)
from tests.support.tiny_modules import H, batch_of, reference

DEBUG = {"debug": True}
FOUR: dict[str, Any] = {"num_layers": 4}

CASES = {
    "tied embedding and head": Case(model={"tied": True}, fsdp=DEBUG),
    "tied, accumulated": Case(model={"tied": True}, fsdp=DEBUG, micro_batches=2),
    "frozen units and vectors": Case(before="freeze_some", fsdp=DEBUG, model=FOUR),
    "frozen, recomputed": Case(before="freeze_some", fsdp=DEBUG, model={**FOUR, "recompute": "pairs"}),
    "a layer called twice": Case(model={**FOUR, "plan": (0, 1, 2, 1, 3)}, fsdp=DEBUG),
    "a layer called twice, its slot taken in between": Case(
        model={**FOUR, "plan": (0, 2, 1, 0, 3)}, fsdp=DEBUG
    ),
    "a layer called twice in a row": Case(model={**FOUR, "plan": (0, 1, 1, 2, 3)}, fsdp=DEBUG),
    "a layer called twice, recomputed": Case(
        model={**FOUR, "plan": (0, 2, 1, 0, 3), "recompute": "layer"}, fsdp=DEBUG
    ),
    "a layer not called": Case(model={**FOUR, "plan": (0, 1, 3)}, fsdp=DEBUG),
    "layers recomputed one by one": Case(model={"recompute": "layer"}, fsdp=DEBUG),
    "layers recomputed in pairs": Case(model={**FOUR, "recompute": "pairs"}, fsdp=DEBUG, micro_batches=2),
    "layers recomputed in threes": Case(model={"recompute": "triples", "num_layers": 6}, fsdp=DEBUG),
    "layers that recompute themselves": Case(before="recompute_inside", fsdp=DEBUG),
    "layers return dataclasses": Case(model={"kind": "dataclass"}, fsdp=DEBUG),
    "layers return mappings": Case(model={"kind": "mapping"}, fsdp=DEBUG),
    "no prefetch": Case(fsdp={"prefetch": False, **DEBUG}),
    "rows are never cut": Case(fsdp={"granule": "rows", **DEBUG}),
    "tensors are never cut": Case(fsdp={"granule": "tensor", **DEBUG}),
    "slices in host memory": Case(fsdp={"cpu_offload": True, **DEBUG}, micro_batches=2),
    "experts in host memory": Case(fsdp={"cpu_offload": True, **DEBUG}, degrees={"ep": 2}),
    "lean": Case(fsdp={"lean": True, **DEBUG}),
    "lean, accumulated": Case(fsdp={"lean": True, **DEBUG}, micro_batches=2),
    "lean, experts of one rank, recomputed": Case(
        fsdp={"lean": True, **DEBUG}, degrees={"ep": 2}, model={**FOUR, "recompute": "pairs"}
    ),
    "lean, a layer not called": Case(fsdp={"lean": True, **DEBUG}, model={**FOUR, "plan": (0, 1, 3)}),
}


# Others do the same, and more.
IN_FULL = ("tied embedding and head", "frozen units and vectors", "a layer called twice",
           "a layer called twice in a row", "layers recomputed one by one", "layers recomputed in pairs",
           "layers recomputed in threes", "layers return mappings", "rows are never cut",
           "experts in host memory", "lean", "lean, accumulated")  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in IN_FULL else name for name in CASES]
)
def test_gradients_are_those_of_one_process(name: str) -> None:
    case = CASES[name]
    # The second step is in the recorded order, and over what the first one left.
    worst = run_ranks(train_case, 2, Case(**{**vars(case), "steps": 2}))[0]
    assert max(worst.values()) < 1e-5


def sharded(case: Case) -> nn.Module:
    return shard_tiny(case, build_meshes(**case.degrees))


def compare(model: nn.Module, plain: nn.Module, case: Case, step: int) -> float:
    """One step of both; the worst relative difference of a gradient."""
    worst = {"dense": 0.0, "expert": 0.0}
    run_sharded(model, case, step)
    run_plain(plain, case, step)
    check_gradients(model, plain, worst)
    sgd(model, plain, 0.05)
    engine_of(model).zero_grad()
    return max(worst.values())


def fail_and_go_on(where: str) -> float:
    case = Case(fsdp=DEBUG)
    model, plain = sharded(case), reference()
    worst = compare(model, plain, case, 0)
    model.layers[2].fails = where == "forward"
    if where == "backward":
        break_backward(model)
    try:
        loss = model(*batch_of(1, 0, dist.get_rank()), 12)
        loss.backward()
    except ValueError:
        pass
    else:
        raise AssertionError("expected a failure")
    model.layers[2].fails = False
    if where == "forward":
        assert all(isinstance(p, ShardedTensor) for p in model.parameters())
    engine_of(model).zero_grad()
    return max(worst, compare(model, plain, case, 1), compare(model, plain, case, 2))


def break_backward(model: nn.Module) -> None:
    """Make the next backward raise in the middle of a layer, once."""

    def boom(*_: object) -> None:
        handle.remove()
        raise ValueError("boom")

    handle = model.layers[1].moe.register_full_backward_hook(boom)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_does_not_spoil_the_next_step(where: str) -> None:
    assert max(run_ranks(fail_and_go_on, 2, where)) < 1e-5


def evaluate_between() -> float:
    case = Case(fsdp=DEBUG)
    model, plain = sharded(case), reference()
    worst, batch = 0.0, batch_of(9, 0, 0)
    for step in range(3):
        worst = max(worst, compare(model, plain, case, step))
        with torch.inference_mode() if step else torch.no_grad():
            worst = max(worst, relative(model(*batch, 12), plain(*batch, 12)))
        loss = model(*batch_of(step + 5, 0, dist.get_rank()), 24)
        with torch.no_grad():
            model(*batch, 12)  # between a forward and its backward
        for layer in (*model.layers, *plain.layers):
            layer.moe.ids.clear()
        loss.backward()
        engine_of(model).zero_grad()
    return worst


def test_evaluation_between_steps_and_before_backward_changes_nothing() -> None:
    assert max(run_ranks(evaluate_between, 2)) < 1e-5


def look_at_threads() -> list[bool]:
    """Whether autograd may use threads of its own: before, inside of and after micro-batches that fail."""
    engine, may_use = engine_of(sharded(Case())), torch._C._is_multithreading_enabled
    seen = [may_use()]
    with contextlib.suppress(ValueError), engine.micro_batch(last=False):
        with engine.micro_batch(last=True):
            seen.append(may_use())
        seen.append(may_use())
        raise ValueError("boom")
    return [*seen, may_use()]


def test_backward_of_a_micro_batch_stays_on_the_calling_thread() -> None:
    assert run_ranks(look_at_threads, 1) == [[True, False, False, True]]


def two_forwards_then_two_backwards() -> float:
    case = Case(fsdp=DEBUG, micro_batches=2)
    model, plain = sharded(case), reference()
    worst = {"dense": 0.0, "expert": 0.0}
    for step in range(2):
        losses = [model(*batch_of(step, micro, dist.get_rank()), 48) for micro in range(2)]
        for loss in losses:
            loss.backward()
        run_plain(plain, case, step)
        check_gradients(model, plain, worst)
        sgd(model, plain, 0.05)
        engine_of(model).zero_grad()
    return max(worst.values())


def test_two_forwards_may_come_before_their_backwards() -> None:
    assert max(run_ranks(two_forwards_then_two_backwards, 2)) < 1e-5


class OneSided(nn.Module):
    """A layer with a parameter that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(H, H), nn.Linear(H, H)
        self.used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.always(x)
        return x + self.sometimes(x) if self.used else x


class OneSidedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OneSided() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def use_on_rank_zero_only() -> float:
    torch.manual_seed(0)
    plain = OneSidedModel()
    model = OneSidedModel()
    model.load_state_dict(plain.state_dict())
    policy = FSDPPolicy(fsdp=FSDPConfig(debug=True), precision=FP32, grad_divisor=1.0)
    fully_shard(model, build_meshes(), policy)
    inputs = [torch.randn(4, H, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    model.layers[1].used = dist.get_rank() == 0
    model(inputs[dist.get_rank()]).backward()
    for rank in range(2):
        plain.layers[1].used = rank == 0
        plain(inputs[rank]).backward()
    worst = {"dense": 0.0, "expert": 0.0}
    check_gradients(model, plain, worst)
    return worst["dense"]


def test_a_parameter_used_on_one_rank_only_does_not_hang() -> None:
    assert max(run_ranks(use_on_rank_zero_only, 2, timeout=60)) < 1e-5


def change_the_order() -> float:
    case = Case(fsdp=DEBUG, model=FOUR)
    model, plain = sharded(case), reference(**FOUR)
    worst = 0.0
    for step, plan in enumerate([(0, 1, 2, 3), (0, 1, 2, 3), (3, 1, 0, 2), (0, 2), (0, 1, 2, 3)]):
        model.plan = plain.plan = plan
        worst = max(worst, compare(model, plain, case, step))
    return worst


def test_a_change_of_order_is_handled() -> None:
    for worst in run_ranks(change_the_order, 2):
        assert worst < 1e-5


def compiled() -> tuple[float, list[int]]:
    torch._dynamo.reset()
    from torch._dynamo.utils import counters

    counters.clear()
    case = Case(degrees={}, model={"num_layers": 3})
    model, plain = sharded(case), reference(num_layers=3)
    for layer in model.layers:
        layer.attention.forward = torch.compile(layer.attention.forward, backend="aot_eager")
        layer.mlp.forward = torch.compile(layer.mlp.forward, backend="aot_eager")
    worst, graphs = 0.0, []
    for step in range(4):
        worst = max(worst, compare(model, plain, case, step))
        graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    return worst, graphs


@pytest.mark.full
def test_compiled_blocks_are_not_compiled_again() -> None:
    for worst, graphs in run_ranks(compiled, 2, timeout=240):
        assert worst < 1e-5
        assert graphs[0] == graphs[-1] > 0


def without_early_stop() -> float:
    with set_checkpoint_early_stop(False):
        return max(
            train_case(Case(model={"recompute": "triples", "num_layers": 3}, fsdp=DEBUG, steps=2)).values()
        )


def test_recomputation_to_the_end_works_as_well() -> None:
    assert max(run_ranks(without_early_stop, 2)) < 1e-5


def load_and_look() -> dict[str, bool]:
    """State dicts, whole tensors and in-place changes between steps."""
    case = Case(degrees={"ep": 2})
    model, plain = sharded(case), reference()
    found = {}
    optimizer = AdamW(model, lr=1e-2)
    run_sharded(model, case, 0)
    optimizer.step()
    optimizer.zero_grad()
    state = model.state_dict()
    found["global shapes"] = all(state[n].shape == p.shape for n, p in plain.named_parameters())
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    plain.load_state_dict(whole)
    with torch.no_grad():
        batch = batch_of(3, 0, 0)
        found["whole tensors after training"] = relative(model(*batch, 12), plain(*batch, 12)) < 1e-5
        other = reference()
        for parameter in other.parameters():
            parameter.mul_(0.9)
        model.load_state_dict(other.state_dict())
        found["load_state_dict of whole tensors"] = relative(model(*batch, 12), other(*batch, 12)) < 1e-5
        for parameter in (*model.parameters(), *other.parameters()):
            parameter.mul_(1.1)
        found["in-place change"] = relative(model(*batch, 12), other(*batch, 12)) < 1e-5
    return found


def test_values_can_be_read_and_changed_between_steps() -> None:
    for found in run_ranks(load_and_look, 2):
        assert all(found.values()), found


def mean_loss() -> float:
    """A user's own loop: a mean loss on every rank, averaged as under data parallelism."""
    plain, model = reference(), reference()
    fully_shard(model, build_meshes(), FSDPPolicy(precision=FP32))
    model(*batch_of(0, 0, dist.get_rank()), 12).backward()
    sum(plain(*batch_of(0, 0, rank), 12) for rank in range(2)).div(2).backward()
    worst = {"dense": 0.0, "expert": 0.0}
    check_gradients(model, plain, worst)
    model(*batch_of(0, 0, dist.get_rank()), 12).backward()  # adds up without being told
    for parameter in plain.parameters():
        parameter.grad *= 2
    check_gradients(model, plain, worst)
    return max(worst.values())


def test_a_per_rank_mean_loss_is_averaged_over_ranks_by_default() -> None:
    assert max(run_ranks(mean_loss, 2)) < 1e-5


def dropped() -> list[str]:
    """What is still there of a model that trained and was let go."""
    case = Case(model={"recompute": "layer"})
    model = sharded(case)
    optimizer = AdamW(model)
    run_sharded(model, case, 0)
    optimizer.step()
    engine = engine_of(model)
    watched = {
        "model": model,
        "engine": engine,
        "main": engine.groups[0].weights.main,
        "full": engine.groups[0].weights.full,
    }
    alive = {name: weakref.ref(value) for name, value in watched.items()}
    del model, optimizer, engine, watched
    gc.collect()
    return [name for name, reference in alive.items() if reference() is not None]


def test_a_model_that_is_let_go_frees_its_buffers() -> None:
    assert run_ranks(dropped, 2) == [[], []]


def drop_a_gradient() -> bool:
    """A torch optimizer's ``zero_grad``, then a step that does not run one of the layers."""
    model = sharded(Case(model=FOUR))
    run_sharded(model, Case(), 0)
    for parameter in model.parameters():
        parameter.grad = None
    model.plan = (0, 1, 3)  # type: ignore[assignment]
    run_sharded(model, Case(), 1)
    return all(parameter.grad is None for parameter in model.layers[2].parameters())


def test_a_dropped_gradient_does_not_come_back() -> None:
    assert all(run_ranks(drop_a_gradient, 2))
