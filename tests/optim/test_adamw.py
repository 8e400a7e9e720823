"""AdamW over flat shards against torch's on the plain model; the global norm against one process."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import FSDPPolicy, engine_of, fully_shard
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW, OptimConfig, clip_grad_norm, grad_norm
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import Case, relative, run_plain, run_sharded, shard_tiny
from tests.support.tiny_modules import reference

SETTINGS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-6}


def plain_adamw(model: nn.Module, weight_decay: float = 0.2) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **SETTINGS)


def sharded(case: Case) -> nn.Module:
    return shard_tiny(case, build_meshes(**case.degrees))


def train_both(case: Case, kind: str, steps: int, max_norm: float | None) -> dict[str, float]:
    """Losses, norms and final weights of the sharded model against the plain one on rank 0."""
    model = sharded(case)
    plain = reference(**case.model) if dist.get_rank() == 0 else None
    if kind == "torch":
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, **SETTINGS)
    else:
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        optimizer = AdamW(model, weight_decay=0.2, moment_dtype=dtype, **SETTINGS)
    theirs = plain_adamw(plain) if plain is not None else None
    worst = {"loss": 0.0, "norm": 0.0, "weight": 0.0}
    for step in range(steps):
        loss, _ = run_sharded(model, case, step)
        norm = clip_grad_norm(model, max_norm).total if max_norm is not None else torch.zeros(())
        optimizer.step()
        optimizer.zero_grad()
        if plain is None or theirs is None:
            continue
        wanted, _ = run_plain(plain, case, step)
        worst["loss"] = max(worst["loss"], relative(loss, wanted))
        if max_norm is not None:
            wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
            worst["norm"] = max(worst["norm"], relative(norm, wanted))
        theirs.step()
    targets = dict(plain.named_parameters()) if plain is not None else {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor()
        if targets:
            worst["weight"] = max(worst["weight"], relative(whole, targets[name].detach()))
    return worst


@pytest.mark.parametrize(
    ("world", "degrees", "kind"),
    [
        (1, {}, "flat"),
        pytest.param(2, {}, "flat", marks=pytest.mark.full),
        pytest.param(4, {"ep": 2}, "flat", marks=pytest.mark.full),
        (4, {"dp_outer": 2, "ep": 2}, "flat"),
        pytest.param(
            2, {}, "torch", marks=pytest.mark.full
        ),  # which tests/fsdp/test_torch_tools.py compares too
    ],
)
def test_losses_follow_torch_adamw_on_one_process(world: int, degrees: dict[str, int], kind: str) -> None:
    steps = 20 if world == 1 else 4  # a bias that is corrected for needs many, a mesh does not
    worst = run_ranks(train_both, world, Case(degrees=degrees), kind, steps, None)[0]
    assert worst["weight"] < 1e-3  # AdamW's first updates are the sign of even the tiniest gradient
    assert worst["loss"] < 1e-5


def test_clipping_by_the_global_norm_follows_one_process_across_both_meshes() -> None:
    case = Case(degrees={"tp": 2, "ep": 2, "dp_outer": 1})
    worst = run_ranks(train_both, 4, case, "flat", 3, 0.01)[0]
    assert worst["norm"] < 1e-5
    assert worst["loss"] < 1e-5


def test_bf16_moments_stay_close() -> None:
    worst = run_ranks(train_both, 1, Case(), "bf16", 10, None)[0]
    assert worst["loss"] < 1e-3
    assert worst["weight"] < 0.1


def norms(case: Case) -> tuple[float, float, float, float, float]:
    model, plain = sharded(case), reference()
    run_sharded(model, case, 0)
    run_plain(plain, case, 0)
    ours = grad_norm(model)
    theirs = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    worst = 0.0
    targets = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        worst = max(worst, relative(parameter.grad.full_tensor(), targets[name].grad))
    parts = math.hypot(ours.dense.item(), ours.expert.item())
    return ours.total.item(), theirs.item(), wanted.item(), parts, worst


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        pytest.param(2, {}, marks=pytest.mark.full),
        (4, {"dp_outer": 2, "ep": 2}),
        pytest.param(4, {"tp": 2, "ep": 4}, marks=pytest.mark.full),
    ],
)
def test_the_norm_counts_every_element_once_and_torchs_clipping_is_right_too(
    world: int, degrees: dict[str, int]
) -> None:
    for ours, theirs, wanted, parts, worst in run_ranks(norms, world, Case(degrees=degrees)):
        assert ours == pytest.approx(wanted, rel=1e-5)
        assert theirs == pytest.approx(wanted, rel=1e-5)
        assert parts == pytest.approx(wanted, rel=1e-5)
        assert worst < 1e-5


def skip_and_resume() -> dict[str, bool]:
    case = Case()
    model = sharded(case)
    optimizer = AdamW(model, weight_decay=0.2, **SETTINGS)
    found = {}

    def weights() -> list[torch.Tensor]:
        return [p.piece.clone() for p in model.parameters()]

    def step(index: int) -> None:
        run_sharded(model, case, index)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    before = weights()
    run_sharded(model, case, 1)
    next(p for p in model.parameters() if p.piece.numel()).grad.piece[0] = float("nan")
    norm = grad_norm(model)
    found["detected"] = not norm.is_finite()
    optimizer.step(found_inf=norm.found_inf)
    optimizer.zero_grad()
    found["skipped"] = all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
    saved = optimizer.state_dict()
    kept = {n: {k: v.detach().clone() for k, v in s.items()} for n, s in saved["state"].items()}
    step(2)
    after = weights()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.piece.copy_(value)
    optimizer.load_state_dict({"state": kept, "param_groups": saved["param_groups"]})
    step(2)
    found["resumed"] = all(torch.equal(a, b) for a, b in zip(after, weights(), strict=True))
    found["named"] = optimizer.checkpoint_state()["state"].keys() == dict(model.named_parameters()).keys()
    return found


def test_a_non_finite_gradient_skips_the_step_and_state_can_be_put_back() -> None:
    for found in run_ranks(skip_and_resume, 2):
        assert all(found.values()), found


def with_two_optimizers(make: type[torch.optim.Optimizer], model: nn.Module, run: Any) -> None:
    vectors = make([p for p in model.parameters() if p.dim() < 2], lr=3e-3)  # type: ignore[call-arg]
    matrices = make([p for p in model.parameters() if p.dim() >= 2], lr=1e-3)  # type: ignore[call-arg]
    for step in range(3):
        run(model, Case(), step)
        for optimizer in (vectors, matrices):
            optimizer.step()
            optimizer.zero_grad()


def two_optimizers() -> float:
    model, plain = sharded(Case()), reference()
    with_two_optimizers(AdamW, model, run_sharded)
    with_two_optimizers(torch.optim.AdamW, plain, run_plain)
    targets = dict(plain.named_parameters())
    return max(relative(p.full_tensor(), targets[n].detach()) for n, p in model.named_parameters())  # type: ignore[attr-defined]


def test_an_optimizer_leaves_the_gradients_of_another_alone() -> None:
    for worst in run_ranks(two_optimizers, 2):
        assert worst < 1e-5


def zeroed_in_place() -> bool:
    model = sharded(Case())
    optimizer = AdamW(model, **SETTINGS)
    run_sharded(model, Case(), 0)
    optimizer.zero_grad(set_to_none=False)
    return all(p.grad is not None and not p.grad.piece.any() for p in model.parameters())


def test_gradients_are_zeros_and_not_none_where_that_is_asked_for() -> None:
    assert all(run_ranks(zeroed_in_place, 2))


def take_over(**switches: bool) -> bool:
    """A step of torch's AdamW, whose state ours takes; whether the next one is the same."""
    ours, theirs = sharded(Case()), sharded(Case())
    optimizers = [torch.optim.AdamW(each.parameters(), **SETTINGS, **switches) for each in (ours, theirs)]
    for model, optimizer in zip((ours, theirs), optimizers, strict=True):
        run_sharded(model, Case(), 0)
        optimizer.step()
        optimizer.zero_grad()
    taken = AdamW(ours.parameters(), lr=1.0)
    taken.load_state_dict(optimizers[0].state_dict())
    for model, next_one in ((ours, taken), (theirs, optimizers[1])):
        run_sharded(model, Case(), 1)
        next_one.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(relative(a.full_tensor(), b.full_tensor()) < 1e-6 for a, b in pairs)  # type: ignore[attr-defined]


def test_the_state_of_torchs_adamw_is_taken() -> None:
    assert all(run_ranks(take_over, 2))


def take_back() -> bool:
    """The state of an optimizer that was given frozen parameters too, as one of an adapter's often is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].weight.requires_grad_(False)
    fully_shard(model, build_meshes())
    optimizer = AdamW(model.parameters(), **SETTINGS)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    kept = optimizer.state_dict()
    AdamW(model.parameters(), lr=1.0).load_state_dict(kept)
    return len(kept["state"]) == len(list(model.parameters())) - 1


def test_the_state_of_parameters_of_which_some_are_frozen_is_taken_back() -> None:
    assert all(run_ranks(take_back, 2))


def test_a_state_with_what_there_is_not_is_refused() -> None:
    with pytest.raises(AssertionError, match="expected amsgrad = False, got True"):
        run_ranks(functools.partial(take_over, amsgrad=True), 1)


def load_stock() -> tuple[bool, float, str]:
    """Whether moments are torch's, the rate, and how groups of other sizes are refused."""
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    stock = torch.optim.AdamW(plain.parameters(), lr=0.25)
    plain(torch.ones(2, 4)).sum().backward()
    stock.step()
    model = fully_shard(plain, build_meshes(), FSDPPolicy(precision=PrecisionConfig(param_dtype="float32")))
    optimizer = AdamW(list(model.parameters()), lr=1.0)
    optimizer.load_state_dict(stock.state_dict())
    taken = [optimizer.state[parameter]["exp_avg"].full_tensor() for parameter in model.parameters()]
    saved = [state["exp_avg"] for state in stock.state.values()]
    alike = all(torch.equal(ours, theirs) for ours, theirs in zip(taken, saved, strict=True))
    with pytest.raises(ConfigError) as refused:
        AdamW(model).load_state_dict(stock.state_dict())
    return alike, optimizer.param_groups[0]["lr"], str(refused.value)


def test_the_state_of_a_stock_optimizer_is_taken_by_its_order() -> None:
    ((alike, lr, message),) = run_ranks(load_stock, 1)
    assert alike
    assert lr == 0.25
    assert "expected groups of [2, 2] parameters, got [4]" in message


def schedule() -> list[float]:
    model = sharded(Case())
    optimizer = AdamW(model, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    rates = []
    for step in range(3):
        run_sharded(model, Case(), step)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_torch_schedulers_move_the_rate() -> None:
    assert run_ranks(schedule, 1)[0] == [0.5, 0.25, 0.125]


def step_too_early(reduce: str) -> str:
    case = Case(fsdp={"reduce": reduce})
    model = sharded(case)
    optimizer = AdamW(model)
    with engine_of(model).micro_batch(last=False):
        run = model(*(torch.zeros(1, 4, dtype=torch.long),) * 2, 4)
        run.backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("reduce", ["each", "last"])
def test_stepping_before_the_last_micro_batch_is_refused(reduce: str) -> None:
    for message in run_ranks(step_too_early, 2, reduce):
        assert "not complete" in message


def unit_left_out() -> dict[str, bool]:
    """A unit that took no part keeps its weights: no decay, no momentum."""
    case = Case(model={"plan": (0, 2)})
    model = sharded(case)
    optimizer = AdamW(model, weight_decay=0.5, **SETTINGS)
    before = {n: p.piece.clone() for n, p in model.named_parameters()}
    run_sharded(model, case, 0)
    optimizer.step()
    return {n: torch.equal(before[n], p.piece) for n, p in model.named_parameters() if p.piece.numel()}


def test_a_unit_that_was_not_run_is_left_alone() -> None:
    for unchanged in run_ranks(unit_left_out, 2):
        assert {n for n, same in unchanged.items() if same} == {
            n for n in unchanged if n.startswith("layers.1.")
        }


def test_bf16_second_moments_refuse_a_beta_they_cannot_hold() -> None:
    with pytest.raises(ConfigError, match=r"optim\.beta2"):
        AdamW(nn.Linear(1, 1), betas=(0.9, 0.999), moment_dtype=torch.bfloat16)


def test_the_section_refuses_such_a_beta_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match=r"^optim\.beta2: 0\.999 .*moment_dtype = float32"):
        OptimConfig(beta2=0.999, moment_dtype="bfloat16")
    OptimConfig(beta2=0.999)
    OptimConfig(beta2=0.995, moment_dtype="bfloat16")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("beta1", 0.8),
        ("beta2", 0.999),
        ("eps", 1e-6),
        ("weight_decay", 0.05),
        ("moment_dtype", "bfloat16"),
        ("first_moment_dtype", "bfloat16"),
        ("second_moment_dtype", "float8"),
        ("state_offload", 0.5),
    ],
)
def test_sgd_refuses_what_it_would_ignore(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"optim\.{key}: .* got \"sgd\"; drop the line"):
        OptimConfig(name="sgd", **{key: value})
    OptimConfig(name="sgd", weight_decay=0.0)  # that is what it does
