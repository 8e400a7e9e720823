"""Wrapped Hugging Face models against the same models unwrapped in one process."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import FAMILIES, batch, tiny_hf
from tests.support.moe_families import is_installed

pytestmark = requires_transformers

WORLD, STEPS, FEW = 4, 10, 3
Losses = list[float]
Gradients = dict[str, torch.Tensor]


def make_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    if hasattr(model, "_fsdmoe_engine"):
        return AdamW(model, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    # Biases of experts have two dims, and are biases all the same.
    is_decayed = {name: p.dim() >= 2 and not name.endswith("bias") for name, p in model.named_parameters()}
    decayed = [p for name, p in model.named_parameters() if is_decayed[name]]
    kept = [p for name, p in model.named_parameters() if not is_decayed[name]]
    groups = [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))


def alone(family: str, kind: str, steps: int = STEPS, world: int = WORLD) -> tuple[list[Losses], Gradients]:
    """The unwrapped model; a step's gradient is the mean over the ranks' batches, as under DDP."""
    model = tiny_hf(family)
    optimizer = make_optimizer(kind, model)
    losses, gradients = [], {}
    for step in range(steps):
        losses.append([])
        for rank in range(world):
            tokens = batch(step, rank)
            loss = model(tokens, labels=tokens).loss
            (loss / world).backward()
            losses[-1].append(loss.item())
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def wrapped(family: str, kind: str, ep: int, steps: int = STEPS) -> tuple[Losses, Gradients]:
    """The gradients on rank 0 only."""
    model = parallelize(tiny_hf(family), build_meshes(ep=ep))
    optimizer = make_optimizer(kind, model)
    losses, gradients = [], {}
    for step in range(steps):
        tokens = batch(step, dist.get_rank())
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients if dist.get_rank() == 0 else {}


def assert_equal_runs(expected: tuple[list[Losses], Gradients], got: list[tuple[Losses, Gradients]]) -> None:
    losses, gradients = expected
    assert got[0][1].keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().clamp(min=1e-3)
        difference = (got[0][1][name] - gradient).abs().max() / scale
        assert difference <= 1e-5, f"{name}: {difference}"
    for rank in range(len(got)):
        for step, theirs in enumerate(losses):
            assert got[rank][0][step] == pytest.approx(theirs[rank], rel=1e-5), f"step {step}, rank {rank}"


# Families differ in their experts, which two ranks split as four do; the others have experts like these.
QUICK = ("qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss")
CASES = [(f, "sgd", 2, 2) for f in QUICK]
CASES += [("qwen3_moe", "adamw", 2, 4), ("gpt_oss", "adamw", 2, 2)]
REST = [(f, k, e) for f in FAMILIES for k in ("sgd", "adamw") for e in (1, 2, 4)]


@pytest.mark.parametrize(("family", "kind", "ep", "world"), CASES)
def test_a_wrapped_model_trains_as_the_same_model_alone(family: str, kind: str, ep: int, world: int) -> None:
    """A second loss shows what the first gradients did, a third one AdamW's moments."""
    steps = FEW if kind == "adamw" else 2
    assert_equal_runs(alone(family, kind, steps, world), run_ranks(wrapped, world, family, kind, ep, steps))


@pytest.mark.full
@pytest.mark.parametrize(("family", "kind", "ep"), REST)
def test_every_wrapped_model_trains_as_the_same_model_alone(family: str, kind: str, ep: int) -> None:
    assert_equal_runs(alone(family, kind), run_ranks(wrapped, WORLD, family, kind, ep))


def _in_sub_batches() -> str:
    policy, meshes = ParallelPolicy(experts=ExpertsConfig(sub_batches=2)), build_meshes(ep=2)
    with pytest.raises(ConfigError) as error:
        parallelize(tiny_hf("qwen3_moe"), meshes, policy)
    return str(error.value)


def test_sub_batches_are_refused() -> None:
    words = "experts.sub_batches: layers of a wrapped model cannot be called in halves"
    assert words in run_ranks(_in_sub_batches, 2)[0]


class Routed(torch.nn.Module):
    """Experts of a family that is part of a larger model, behind a router."""

    def __init__(self, family: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        kind, changes = OTHERS[family]
        sizes = {"num_local_experts": 4, "hidden_size": 8, "moe_hidden_size": 8, "moe_intermediate_size": 8}
        config = SimpleNamespace(
            **sizes, hidden_act="silu", post_norm_eps=1e-5, swiglu_limit=0.5, _experts_implementation="eager"
        )
        self.router = torch.nn.Linear(8, 4, bias=False)
        self.experts = getattr(module, kind)(config, **changes)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        return self.experts(x, ids, weights)


OTHERS: dict[str, tuple[str, dict[str, float]]] = {
    "glm5_next": ("Glm5NextTextExperts", {}),
    "muse_spark": ("MuseSparkExperts", {}),
    "step3p7": ("Step3p7Experts", {"swiglu_limit": 0.5}),
}


def rows_of_rank(rank: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))


def routed_gradients(family: str) -> Gradients:
    model = parallelize(Routed(family), build_meshes(ep=2))
    assert parallel_forward_of(model.experts) is not None  # type: ignore[arg-type]
    model(rows_of_rank(dist.get_rank())).square().sum().backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("family", OTHERS)
def test_experts_of_families_with_images_are_split_and_equal_one_process(family: str) -> None:
    if not is_installed(family):
        pytest.skip(f"this transformers has no {family}")
    model = Routed(family)
    for rank in range(2):
        (model(rows_of_rank(rank)).square().sum() / 2).backward()
    found = run_ranks(routed_gradients, 2, family)[0]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-5 * largest)
