"""Layers of wrapped models through our kernels: the same outputs and gradients, and what stays as it is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdmoe.fsdp.param_grad import ParamGrad
from fsdmoe.huggingface.fused_layers import FusedLayers
from fsdmoe.memory.config import MemoryConfig, Part
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import FAMILIES, batch, tiny_hf
from tests.support.vision_case import rows_with, tiny_vision_model

pytestmark = requires_transformers
EVERY = (*FAMILIES, "granite_shared", "llama", "llama dynamic", "vision")
WIDE = PrecisionConfig(param_dtype="float32", reduce_dtype="float32", main_dtype="float32")
Found = tuple[Tensor, float, dict[str, Tensor]]


def tiny(family: str) -> Any:
    model: Any = tiny_vision_model() if family == "vision" else tiny_hf(family)
    if family != "gpt_oss":  # has no sdpa
        model.set_attn_implementation("sdpa")
    return model


def inputs_of(family: str) -> dict[str, Any]:
    if family == "vision":
        return rows_with([[1, 2], [1]], 1, seed=0)
    tokens = batch(0, 0, rows=2, length=12)
    return {"input_ids": tokens, "labels": tokens}


def outcome(model: Any, family: str) -> Found:
    """Logits in evaluation, and the loss and gradients of training."""
    inputs = inputs_of(family)
    with torch.no_grad():
        logits = model.eval()(**{k: v for k, v in inputs.items() if k != "labels"}).logits
    loss = model.train()(**inputs, use_cache=False).loss  # a recomputed layer would fill a cache twice
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return logits, loss.item(), {n: getattr(g, "full_tensor", g.clone)() for n, g in gradients.items()}


def assert_same(found: Found, expected: Found) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    for name, gradient in expected[2].items():
        difference = (found[2][name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3)
        assert difference <= 1e-5, f"{name}: {difference}"


def wrapped(family: str, kind: str = "") -> Found:
    model = tiny(family)
    if kind == "gradient checkpointing":
        model.gradient_checkpointing_enable()
    parts: dict[str, tuple[Part, ...]] = {"layer": ("layer",), "norms": ("norms",)}
    memory = MemoryConfig(recompute=parts.get(kind, ()))
    policy = ParallelPolicy(precision=WIDE, memory=memory, grad_divisor=1.0) if kind else None
    return outcome(parallelize(model, build_meshes(), policy), family)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_wrapped_model_computes_what_transformers_does(family: str) -> None:
    assert_same(run_ranks(wrapped, 1, family)[0], outcome(tiny(family), family))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["", "gradient checkpointing", "layer", "norms"])
@pytest.mark.parametrize("family", EVERY)
def test_every_wrapped_model_computes_what_transformers_does(family: str, kind: str) -> None:
    assert_same(run_ranks(wrapped, 1, family, kind)[0], outcome(tiny(family), family))


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def said_at_the_start(family: str, recompute: tuple[Part, ...] = ()) -> list[str]:
    heard, logger = Heard(), logging.getLogger("fsdmoe")
    before = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        parallelize(tiny(family), build_meshes(), ParallelPolicy(memory=MemoryConfig(recompute=recompute)))
    finally:
        logger.removeHandler(heard)
        logger.setLevel(before)
    return [line for line in heard.lines if line.startswith("fused layers")]


def test_what_is_recomputed_is_replaced_too() -> None:
    parts: tuple[Part, ...] = ("norms", "router", "shared_experts")
    (recomputed,) = run_ranks(said_at_the_start, 1, "deepseek_v2", parts)[0]
    assert "9 norms, 16 projections, 1 embeddings, 1 routers, 2 attentions" in recomputed


def test_one_line_says_what_was_replaced_and_what_was_left() -> None:
    (line,) = run_ranks(said_at_the_start, 1, "deepseek_v2")[0]
    assert line == (
        "fused layers: 9 norms, 16 projections, 1 embeddings, 1 routers, 2 attentions; left as they are: "
        "1 projections left to the loss, 2 rotary positions of another form"
    )


def changed_modules(how: str) -> tuple[list[str], list[str], list[str]]:
    """Names of modules with a forward of their own, and of all parameters, before and after."""
    model = tiny("qwen3_moe")
    names = [name for name, _ in model.named_parameters()]
    argument, policy = how != "argument", ParallelPolicy(fused_layers=how != "policy")
    model = parallelize(model, build_meshes(), policy, fused_layers=argument)
    changed = [name for name, module in model.named_modules() if "forward" in vars(module)]
    return changed, names, list(model.state_dict())


@pytest.mark.parametrize("how", ["argument", "policy"])
def test_turned_off_the_model_is_left_alone(how: str) -> None:
    changed, before, after = run_ranks(changed_modules, 1, how)[0]
    assert set(changed) == {"", "lm_head", "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert after == before


def test_turned_on_names_stay_as_they_are() -> None:
    changed, before, after = run_ranks(changed_modules, 1, "not at all")[0]
    assert {"model.norm", "model.layers.1.self_attn", "model.layers.0.mlp.gate"} <= set(changed)
    assert after == before


def names_left_to_autograd() -> list[str]:
    taken: list[str] = []
    original = ParamGrad._take_gradient

    def take(self: ParamGrad, parameter: Tensor) -> None:
        if parameter.grad is not None:
            taken.append(self.name)
        original(self, parameter)

    ParamGrad._take_gradient = take  # type: ignore[method-assign]
    try:
        outcome(parallelize(tiny("qwen3_moe"), build_meshes()), "qwen3_moe")
    finally:
        ParamGrad._take_gradient = original  # type: ignore[method-assign]
    return taken


def test_gradients_of_projections_and_embedding_are_written_where_they_are_reduced() -> None:
    taken = run_ranks(names_left_to_autograd, 1)[0]
    assert taken
    assert not [name for name in taken if name.endswith(("_proj.weight", "embed_tokens.weight"))]


# What is not understood


class PlainNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class RoundingNorm(PlainNorm):
    """Gives fp32 whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).float()


class OwnLinear(nn.Linear):
    pass


class OwnEmbedding(nn.Embedding):
    pass


def hooked() -> nn.Linear:
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda *_: None)
    return module


def given_a_forward() -> nn.Linear:
    module = nn.Linear(4, 4)
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (RoundingNorm(4), "1 norms of another form"),
        (nn.LayerNorm(4), "1 norms of another form"),
        (OwnLinear(4, 4), "1 projections of a class of their own"),
        (OwnEmbedding(4, 4), "1 embeddings of a class of their own"),
        (hooked(), "1 projections with hooks"),
        (given_a_forward(), "1 projections left to a forward of others"),
    ],
)
def test_what_is_not_understood_is_left(module: nn.Module, said: str) -> None:
    before = dict(vars(module))
    assert FusedLayers(nn.Sequential(module)).apply() == f"none; left as they are: {said}"
    assert vars(module) == before


def test_a_model_that_was_split_before_is_left_whole() -> None:
    module = nn.Sequential(nn.Linear(4, 4), PlainNorm(4))
    line = FusedLayers(module, split_before=True).apply()
    assert line == "none; left as they are: all of it, because its modules compute on DTensors"
    assert not any("forward" in vars(each) for each in module.modules())
