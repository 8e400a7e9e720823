"""Record and replay of wrapped models: the recorded experts, weighed by the current router, which learns."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.data.origin import Origin
from fsdmoe.experts.config import BalanceConfig, CapacityConfig, ExpertsConfig
from fsdmoe.experts.replay import RoutingTape
from fsdmoe.experts.routing_file import save_routed_experts
from fsdmoe.huggingface.replay import _is_compiled
from fsdmoe.huggingface.routing import routing_tape
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_peft, requires_transformers, run_ranks
from tests.support.hf_tiny import FAMILIES, batch, tiny_hf

pytestmark = requires_transformers
K, LENGTH = 2, 8
FLOAT32 = PrecisionConfig(param_dtype="float32")


def other_experts(num_experts: int, num_layers: int, rank: int) -> Tensor:
    """Choices ``[tokens, layers, K]`` that no router made."""
    generator = torch.Generator().manual_seed(5 + rank)
    return torch.rand(LENGTH, num_layers, num_experts, generator=generator).topk(K).indices


def layers_of(family: str) -> tuple[int, int]:
    """Experts, and MoE layers of the two."""
    return (4 if family in ("mixtral", "gpt_oss") else 8), (1 if family in GROUPED else 2)


GROUPED = ("deepseek_v2", "deepseek_v3", "glm4_moe")


def weigh(family: str, logits_TE: Tensor, ids_TK: Tensor, norm: bool) -> Tensor:
    """The chosen experts' weights by each family's own formula."""
    if family == "gpt_oss":
        return logits_TE.gather(1, ids_TK).softmax(-1)
    if family in ("deepseek_v3", "glm4_moe"):
        scores = logits_TE.sigmoid().gather(1, ids_TK)
        return 1.5 * scores / (scores.sum(-1, keepdim=True) + 1e-20)
    scores = logits_TE.softmax(-1).gather(1, ids_TK)
    return scores / scores.sum(-1, keepdim=True) if norm else scores


def plain_with(family: str, ids_TLK: Tensor) -> nn.Module:
    """transformers' model whose routers are written anew: given experts, weights of their own logits."""
    model = tiny_hf(family, output_router_logits=False)
    norm = bool(getattr(model.config, "norm_topk_prob", True)) or family == "mixtral"
    names = [n for n, m in model.named_modules() if n.endswith((".gate", ".router"))]
    for layer, name in enumerate(names):
        gate: Any = model.get_submodule(name)

        def forward(self: Any, x: Tensor, *_: Any, layer: int = layer, **__: Any) -> tuple[Tensor, ...]:
            logits = nn.functional.linear(
                x.reshape(-1, x.shape[-1]), self.weight, getattr(self, "bias", None)
            )
            return logits, weigh(family, logits, ids_TLK[:, layer], norm), ids_TLK[:, layer]

        gate.forward = types.MethodType(forward, gate)
    assert len(names) == ids_TLK.shape[1]
    return model


def replay(family: str, folder: str, ep: int, recompute: bool) -> tuple[float, dict[str, Tensor], Tensor]:
    """A step that follows the recording, and what it chose, recorded again."""
    rank, (num_experts, _) = dist.get_rank(), layers_of(family)
    model = parallelize(tiny_hf(family, output_router_logits=False), build_meshes(ep=ep))
    if recompute:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    tokens = batch(0, rank)
    origin = Origin.of_rows([f"request-{rank}"], [LENGTH], LENGTH)
    tape = RoutingTape.load(f"{folder}/routing.safetensors")
    with routing_tape(model, tape, origin):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    gradients = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    free = RoutingTape()
    with torch.no_grad(), routing_tape(model, free, origin):
        model(tokens)
    assert free.num_experts == num_experts
    own = free.replaying()._columns(origin.map(lambda column: column.flatten()))["ids"]
    return loss.item(), gradients, own


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=() if f in ("qwen3_moe", "deepseek_v3") else pytest.mark.full)
        for f in FAMILIES
        if f != "deepseek_v2"
    ],
)
def test_a_replay_equals_plain_transformers_with_those_experts(family: str, tmp_path: Any) -> None:
    num_experts, num_layers = layers_of(family)
    ids = [other_experts(num_experts, num_layers, rank) for rank in range(2)]
    requests = {f"request-{rank}": ids[rank] for rank in range(2)}
    save_routed_experts(tmp_path / "routing.safetensors", requests, num_experts=num_experts)
    got = run_ranks(replay, 2, family, str(tmp_path), 2, family == "qwen3_moe")
    wanted: dict[str, Tensor] = {}
    for rank in range(2):
        plain = plain_with(family, ids[rank])
        tokens = batch(0, rank)
        loss = plain(tokens, labels=tokens).loss
        loss.backward()
        assert got[rank][0] == pytest.approx(loss.item(), rel=1e-5)
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                wanted[name] = wanted.get(name, 0) + parameter.grad / 2
        assert not torch.equal(got[rank][2], ids[rank]), "left alone, the router chooses otherwise"
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[0][1][name], gradient, rtol=1e-4, atol=1e-6)


def squares(model: Any, tokens: Tensor) -> Tensor:
    return cast(Tensor, model(tokens, use_cache=False).logits.square().mean())


def replay_twice(experts: ExpertsConfig | None, backward: str) -> dict[str, Tensor]:
    """Gradients of two calls that follow two recordings."""
    policy = None if experts is None else ParallelPolicy(experts=experts, precision=FLOAT32)
    model: Any = parallelize(tiny_hf("qwen3_moe", output_router_logits=False), build_meshes(), policy)
    model.gradient_checkpointing_enable()
    calls = [(batch(step, 0), Origin.of_rows([f"request-{step}"], [LENGTH], LENGTH)) for step in range(2)]
    free = RoutingTape()
    with torch.no_grad():
        for number, (tokens, origin) in enumerate(calls):
            with routing_tape(model, free, origin, micro_batch=number):
                model(tokens)
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.copy_(-parameter)  # left alone, routers now choose otherwise
    tape, losses = free.replaying(), []
    for tokens, origin in calls:
        with routing_tape(model, tape, origin):
            losses.append(squares(model, tokens))
            if backward == "inside":
                losses.pop().backward()
    if losses:
        (losses[0] + losses[1]).backward()
    squares(model, calls[0][0])  # follows nothing any more
    return {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("experts", [None, ExpertsConfig(balance=BalanceConfig(bias_rate=1e-3))])
def test_a_layer_that_is_recomputed_follows_the_tape_of_its_own_forward(
    experts: ExpertsConfig | None,
) -> None:
    inside, behind = (run_ranks(replay_twice, 1, experts, backward)[0] for backward in ("inside", "behind"))
    for name, gradient in inside.items():
        torch.testing.assert_close(behind[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def record_in_one_backward(order: str) -> Tensor:
    """What a call recorded whose backward also runs the layers of one that follows nothing."""
    model: Any = parallelize(tiny_hf("qwen3_moe", output_router_logits=False), build_meshes())
    model.gradient_checkpointing_enable()
    origin, tape, losses = Origin.of_rows(["request"], [LENGTH], LENGTH), RoutingTape(), []
    for which in order.split():
        if which == "plain":
            losses.append(squares(model, batch(1, 0)))
            continue
        with routing_tape(model, tape, origin):
            losses.append(squares(model, batch(0, 0)))
    torch.stack(losses).sum().backward()
    return tape.replaying()._columns(origin.map(lambda column: column.flatten()))["ids"]


def test_a_call_that_follows_nothing_may_share_a_backward_with_one_that_records() -> None:
    alone = run_ranks(record_in_one_backward, 1, "recorded")[0]
    for order in ("plain recorded", "recorded plain"):
        assert torch.equal(run_ranks(record_in_one_backward, 1, order)[0], alone)


def raise_in_backward(gradient: Tensor) -> None:
    raise RuntimeError("out of memory, say")


def gradients_after_one_that_raised() -> tuple[Tensor, Tensor]:
    """Of a call that follows nothing, before and after a backward of a replay that raised."""
    model: Any = parallelize(tiny_hf("qwen3_moe", output_router_logits=False), build_meshes())
    model.gradient_checkpointing_enable()
    (tokens, other), found = (batch(0, 0), batch(1, 0)), []
    origin, tape = Origin.of_rows(["request"], [LENGTH], LENGTH), RoutingTape()
    with torch.no_grad(), routing_tape(model, tape, origin):
        model(other)
    for raises in (False, True):
        if raises:
            embedded = model.get_input_embeddings().register_forward_hook(
                lambda module, args, out: out.register_hook(raise_in_backward) and None
            )
            with routing_tape(model, tape.replaying(), origin):
                loss = squares(model, other)
            embedded.remove()
            with pytest.raises(RuntimeError, match="out of memory"):
                loss.backward()
            model.zero_grad()
        squares(model, tokens).backward()
        found.append(model.model.layers[0].mlp.experts.down_proj.grad.full_tensor().clone())
        model.zero_grad()
    return found[0], found[1]


def test_a_replay_whose_backward_raised_is_not_followed_any_more() -> None:
    before, after = run_ranks(gradients_after_one_that_raised, 1)[0]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)


def with_adapters(experts: ExpertsConfig) -> tuple[list[Tensor], set[str]]:
    """Logits as recorded, of routers that choose otherwise, and of their replay; and what was recorded."""
    import peft

    both = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=both)
    model: Any = peft.get_peft_model(tiny_hf("qwen3_moe", output_router_logits=False), adapters)  # type: ignore[arg-type]
    parallelize(model, build_meshes(), ParallelPolicy(experts=experts, precision=FLOAT32))
    tokens, origin = batch(0, 0), Origin.of_rows(["request"], [LENGTH], LENGTH)
    weights = [p for name, p in model.named_parameters() if name.endswith("gate.weight")]
    tape = RoutingTape()
    with torch.no_grad():
        with routing_tape(model, tape, origin):
            logits = [model(tokens).logits]
        for weight in weights:
            weight.neg_()
        logits.append(model(tokens).logits)
        with routing_tape(model, tape.replaying(), origin):
            logits.append(model(tokens).logits)
    columns = tape.replaying()._columns(origin.map(lambda column: column.flatten()))
    return logits, set(columns)


@requires_peft
@pytest.mark.parametrize("capacity", [None, CapacityConfig(factor=1.0)])
def test_a_model_with_adapters_on_experts_follows_a_recording(capacity: CapacityConfig | None) -> None:
    [(logits, columns)] = run_ranks(with_adapters, 1, ExpertsConfig(capacity=capacity))
    recorded, own, replayed = logits
    assert columns == {"ids", "weights"} | ({"kept"} if capacity else set())
    assert not torch.allclose(replayed, own, rtol=1e-2)
    assert not torch.allclose(replayed, recorded, rtol=1e-2), "weights are those of the router"


@pytest.mark.full
def test_experts_that_a_router_masks_are_refused(tmp_path: Any) -> None:
    """DeepSeek-V2 takes weights from scores that are zero outside of the best groups."""
    ids = other_experts(8, 1, 0)
    save_routed_experts(tmp_path / "routing.safetensors", {"request-0": ids}, num_experts=8)
    with pytest.raises(AssertionError, match="masks experts outside of its best groups"):
        run_ranks(replay, 1, "deepseek_v2", str(tmp_path), 1, False)


def refused(replace: Callable[[nn.Module], None] | None, num_experts: int, documents: list[str]) -> str:
    model = tiny_hf("qwen3_moe")
    if replace is not None:
        replace(model)
    model = parallelize(model, build_meshes())
    tape = RoutingTape(num_experts)
    ids = torch.tensor([[0, 1]] * LENGTH)
    from fsdmoe.experts.replay import Decision, DecisionPlace

    origin = Origin.of_rows(documents[:1], [LENGTH], LENGTH)
    for layer in range(2):
        place = DecisionPlace(0, layer, origin.map(lambda column: column.flatten()))
        tape.record(place, Decision(ids, torch.ones(LENGTH, K), None), num_experts)
    asked = Origin.of_rows(documents[-1:], [LENGTH], LENGTH)
    with pytest.raises(ConfigError) as caught, routing_tape(model, tape.replaying(), asked):
        model(batch(0, 0))
    return str(caught.value)


def choose_by_sorting(model: nn.Module) -> None:
    for layer in model.model.layers:  # type: ignore[union-attr]
        gate = layer.mlp.gate

        def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
            logits = x.reshape(-1, x.shape[-1]) @ self.weight.t()
            ids = logits.argsort(-1, descending=True)[:, :K]
            return logits, logits.softmax(-1).gather(1, ids), ids

        gate.forward = types.MethodType(forward, gate)


@pytest.mark.parametrize(
    ("replace", "num_experts", "documents", "message"),
    [
        (choose_by_sorting, 8, ["a"], "by a top-k over all of them"),
        (None, 4, ["a"], "expected 8 experts, as Qwen3MoeForCausalLM has, got a tape of 4"),
        (None, 8, ["a", "b"], "nothing was recorded for document 'b', position 0"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    replace: Callable[[nn.Module], None] | None, num_experts: int, documents: list[str], message: str
) -> None:
    assert message in run_ranks(refused, 1, replace, num_experts, documents)[0]


def test_a_compiled_layer_is_told_from_one_that_stays_outside_of_graphs() -> None:
    compiled, outside = nn.Linear(2, 2), nn.Linear(2, 2)
    compiled.forward = torch.compile(compiled.forward)  # type: ignore[method-assign]
    outside.forward = torch.compiler.disable(outside.forward)  # type: ignore[method-assign]
    assert _is_compiled(compiled)
    assert not _is_compiled(outside)
    assert not _is_compiled(nn.Linear(2, 2))
