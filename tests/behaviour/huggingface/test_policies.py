"""Routing policies of wrapped models: each equals the native decoder with the same policy and weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdmoe
from fsdmoe.checkpoint import to_hf
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.core.errors import ConfigError
from fsdmoe.data import Batch
from fsdmoe.experts.bias import update_biases
from fsdmoe.experts.config import BalanceConfig, CapacityConfig, ExpertsConfig
from fsdmoe.experts.replay import RoutingTape
from fsdmoe.feed import Feed
from fsdmoe.fsdp import engine_of
from fsdmoe.huggingface.folder import build_folder_model
from fsdmoe.huggingface.routing import policies_of, refuse_passed_over
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Axis, MeshConfig, Meshes, build_meshes
from fsdmoe.models import Decoder, build_model
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, end_step, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_transformers, run_ranks
from tests.behaviour.test_hf_run import STOP, config_for, folder_of, go, losses
from tests.support.hf_pairs import hf_model, tiny
from tests.support.hf_tiny import tiny_hf
from tests.support.trainer_case import Rows, arguments, forget_accelerate

pytestmark = requires_transformers
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")
STEPS, RATE, LENGTH = 2, 0.1, 12
BOUND = 1e-5


@pytest.fixture(autouse=True)
def leaves_no_process_group() -> Iterator[None]:
    """Some cases need one rank and run in this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def balanced(**terms: Any) -> ExpertsConfig:
    return ExpertsConfig(balance=BalanceConfig(**terms))


def limited(**capacity: Any) -> ExpertsConfig:
    return ExpertsConfig(capacity=CapacityConfig(**capacity), balance=BalanceConfig(sequence=0.02))


POLICIES: dict[str, ExpertsConfig] = {
    "sequence": balanced(sequence=0.05),
    "micro_batch": balanced(micro_batch=0.05),
    "global_batch": balanced(global_batch=0.05),
    "device": balanced(device=0.05),
    "device by sequence": balanced(device=0.05, device_scope="sequence"),
    "transformers": balanced(transformers=0.05),
    "z_loss": balanced(z_loss=0.01),
    "bias_rate": balanced(bias_rate=0.05, z_loss=0.001),
    "capacity": limited(factor=0.75),
    "capacity by position": limited(factor=0.75, policy="position"),
    "capacity of sequences": limited(factor=0.75, scope="sequence"),
    "capacity of devices": limited(factor=0.75, per="device"),
    "padded capacity": limited(factor=1.0, pad_to_max=True),
    "forced balance": ExpertsConfig(selection="forced_balance", balance=BalanceConfig(z_loss=0.01)),
    "expert choice": ExpertsConfig(selection="expert_choice"),
    "weight after": ExpertsConfig(weight_after=True, balance=BalanceConfig(sequence=0.05)),
    "replay": balanced(sequence=0.05),
    "replayed weights": ExpertsConfig(replay="a tape", replay_weights=True),
    "replayed capacity": limited(factor=0.75),
}


class Course:
    """A few steps of one model: losses, gradients by step and parameter, loads, biases."""

    def __init__(
        self, model: nn.Module, meshes: Meshes, experts: ExpertsConfig, memory: MemoryConfig
    ) -> None:
        policy = ParallelPolicy(
            experts=experts,
            precision=PrecisionConfig(param_dtype="float32", reduce_dtype="float32"),
            memory=memory,
            grad_divisor=1.0,
        )
        self._meshes, self._rate = meshes, experts.balance.bias_rate
        self.model = parallelize(model, meshes, policy)
        self.lm = as_causal_lm(self.model)
        self.found: dict[str, Tensor] = {}

    def run(self, tape: RoutingTape | None) -> Course:
        feed = Feed(self._meshes, own_attention=True)
        optim = torch.optim.SGD(self.model.parameters(), lr=RATE)
        for step in range(STEPS):
            inputs = feed.inputs(feed.prepare([rows_of(step, index) for index in range(2)]))
            counts, loads_LE = feed.count(self.lm, inputs), None
            for index, each in enumerate(inputs):
                routing = feed.routing(micro_batch=2 * step + index, prior_load_LE=loads_LE)
                with engine_of(self.model).micro_batch(last=index == 1):
                    out = self.lm(**each, counts=counts, routing=replace(routing, replay=tape))
                    out.loss.backward()
                loads_LE = out.loads_LE if loads_LE is None else loads_LE + out.loads_LE
                self.found[f"loss {step} {index}"] = out.cross_entropy
                self.found[f"balance {step} {index}"] = out.balance_loss
            assert loads_LE is not None
            self.found[f"loads {step}"] = loads_LE
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    self.found[f"gradient {step} {name}"] = parameter.grad.full_tensor().clone()  # type: ignore[attr-defined]
            optim.step()
            optim.zero_grad()
            pairs = zip(self.lm.routers(), loads_LE, strict=True)
            update_biases(pairs, rate=self._rate, group=self._meshes.group(Axis.WORLD))
        if self._rate:
            for index, router in enumerate(self.lm.routers()):
                assert router.e_score_correction_bias is not None
                self.found[f"bias {index}"] = router.e_score_correction_bias
        return self


def rows_of(step: int, index: int) -> Batch:
    """Two rows of this rank, the last tokens of one without a loss."""
    random = torch.Generator().manual_seed(100 * step + 10 * index + dist.get_rank())
    tokens_BS = torch.randint(4, 60, (2, LENGTH + 1), generator=random)
    mask_BS = torch.ones(2, LENGTH, dtype=torch.bool)
    mask_BS[1, LENGTH - dist.get_rank() - 1 :] = False
    document_ids_BS = torch.zeros(2, LENGTH, dtype=torch.int64)
    positions_BS = torch.arange(LENGTH).expand(2, -1).clone()
    return Batch(tokens_BS[:, :-1], tokens_BS[:, 1:], positions_BS, document_ids_BS, mask_BS)


def tape_of(name: str, family: str, meshes: Meshes) -> RoutingTape | None:
    """What a model with other weights chose, and gave up for capacity."""
    if not name.startswith("replay"):
        return None
    tape = RoutingTape()
    experts = POLICIES[name] if POLICIES[name].capacity else ExpertsConfig()
    Course(native(family, experts, seed=7), meshes, experts, MemoryConfig()).run(tape)
    return tape.replaying("ids_and_weights" if POLICIES[name].replay_weights else "ids")


def native(family: str, experts: ExpertsConfig, seed: int = 0) -> Decoder:
    """With the weights of the model of transformers, moved by noise where there is a seed."""
    config = tiny(family)
    model = Decoder(config, experts)
    missing = model.load_state_dict(hf_model(config).state_dict(), strict=False).missing_keys
    assert all(name.endswith("e_score_correction_bias") for name in missing)
    if seed:
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=random)
    return model.train()


def differences(family: str, ep: int, names: list[str], recompute: str | None = None) -> dict[str, str]:
    """By policy, what a wrapped model has otherwise than the native one."""
    meshes = build_meshes(MeshConfig(ep=ep))
    memory = MemoryConfig(recompute=(recompute,) if recompute else ())  # type: ignore[arg-type]
    problems = {}
    for name in names:
        experts, tape = POLICIES[name], tape_of(name, family, meshes)
        wrapped = Course(hf_model(tiny(family)), meshes, experts, memory).run(tape).found
        wanted = Course(native(family, experts), meshes, experts, memory).run(tape).found
        assert wrapped.keys() == wanted.keys(), wrapped.keys() ^ wanted.keys()
        if experts.balance.has_terms:
            assert wanted["balance 0 0"] > 0
        for key, value in wanted.items():
            difference = (wrapped[key] - value).abs().max() / value.abs().max().clamp(min=1e-6)
            if not difference <= BOUND:
                problems[f"{name}, {key}"] = f"{difference:.2e}"
    return problems


@pytest.mark.parametrize(
    ("family", "name", "ep", "recompute"),
    [
        ("qwen3_moe", "bias_rate", 2, "layer"),
        ("mixtral", "capacity", 2, "router"),
    ],
)
def test_a_policy_of_a_wrapped_model_equals_the_native_one(
    family: str, name: str, ep: int, recompute: str | None
) -> None:
    assert run_ranks(differences, ep, family, ep, [name], recompute) == [{}] * ep


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["layer", "router"])
@pytest.mark.parametrize("name", ["global_batch", "capacity of sequences", "transformers"])
def test_recomputed_layers_follow_policies(name: str, recompute: str) -> None:
    assert run_ranks(differences, 2, "qwen3_moe", 2, [name], recompute) == [{}] * 2


@pytest.mark.full
@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_of_a_wrapped_model_equals_the_native_one(family: str, name: str, ep: int) -> None:
    assert run_ranks(differences, ep, family, ep, [name]) == [{}] * ep


# A loop of one's own, that calls the model

MIXED = ExpertsConfig(
    balance=BalanceConfig(sequence=0.05, global_batch=0.05, transformers=0.02, z_loss=0.01, bias_rate=0.05),
    capacity=CapacityConfig(factor=0.75, scope="sequence"),
)
FLOAT32 = PrecisionConfig(param_dtype="float32", reduce_dtype="float32")
PLAIN = ParallelPolicy(experts=MIXED, precision=FLOAT32)


def own_loop(family: str) -> dict[str, float]:
    """Steps of ``model(tokens, labels=...)``, and how far the native decoder, called by a loop that knows the
    step, is from them."""
    meshes = build_meshes(MeshConfig(ep=2))
    model = parallelize(hf_model(tiny(family)), meshes, PLAIN)
    optim, found = torch.optim.SGD(model.parameters(), lr=RATE), {}
    given = ParallelPolicy(experts=MIXED, precision=FLOAT32, grad_divisor=1.0)
    decoder = parallelize(native(family, MIXED), meshes, given)
    native_optim, feed = torch.optim.SGD(decoder.parameters(), lr=RATE), Feed(meshes)
    for step in range(STEPS):
        tokens_BS = rows_of(step, 0).tokens_BS
        loss = model(tokens_BS, labels=tokens_BS).loss
        loss.backward()
        mask_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
        mask_BS[:, -1] = False
        rows = {"tokens_BS": tokens_BS, "labels_BS": tokens_BS.roll(-1, 1), "loss_mask_BS": mask_BS}
        counts = feed.count(decoder, [rows | {"document_ids_BS": None}])
        out = decoder(**rows, counts=counts, routing=feed.routing())
        out.loss.backward()
        found[f"loss {step}"] = abs(2 * out.loss.item() / loss.item() - 1)  # a share of the ranks' mean
        wanted = dict(decoder.named_parameters())
        for name, ours in model.named_parameters():
            gradient = wanted[name].grad.full_tensor()  # type: ignore[union-attr]
            difference = (ours.grad.full_tensor() - gradient).abs().max() / gradient.abs().max()  # type: ignore[union-attr]
            found[f"{name} {step}"] = difference.item()
        optim.step()
        native_optim.step()
        optim.zero_grad()
        native_optim.zero_grad()
        end_step(model)
        update_biases(
            zip(decoder.routers(), out.loads_LE, strict=True), rate=0.05, group=meshes.group(Axis.WORLD)
        )
    wrapped = [m.e_score_correction_bias for m in model.modules() if hasattr(m, "policy_router")]
    for ours, router in zip(wrapped, decoder.routers(), strict=True):
        assert ours.abs().max() > 0.01
        assert torch.equal(ours, router.e_score_correction_bias)
    return {name: value for name, value in found.items() if not value <= BOUND}


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(f, marks=pytest.mark.full) for f in FAMILIES[1:])]
)
def test_the_loss_of_a_model_that_is_called_itself_has_the_terms_of_the_native_one(family: str) -> None:
    assert run_ranks(own_loop, 2, family) == [{}] * 2


def two_forwards(recompute: bool, has_labels: bool) -> dict[str, Tensor]:
    memory = MemoryConfig(recompute=("layer",) if recompute else ())
    experts = MIXED if has_labels else ExpertsConfig(capacity=CapacityConfig(factor=0.5))
    policy = ParallelPolicy(experts=experts, precision=FLOAT32, memory=memory)
    model = parallelize(hf_model(tiny("qwen3_moe")), build_meshes(), policy)
    masks = torch.ones(2, 2, LENGTH, dtype=torch.int64)
    masks[0, :, 4:] = 0
    rows = [rows_of(step, 0).tokens_BS for step in range(2)]
    outputs = [
        model(input_ids=each, attention_mask=mask, labels=each if has_labels else None)
        for each, mask in zip(rows, masks, strict=True)
    ]
    losses = [out.loss if has_labels else out.logits.square().mean() for out in outputs]
    (losses[0] + losses[1]).backward()
    return {n: p.grad.full_tensor().clone() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_labels", [True, False])
def test_a_layer_that_is_recomputed_routes_by_the_rows_of_its_own_forward(has_labels: bool) -> None:
    """The padding of the first call is not that of the second."""
    kept, again = (run_ranks(two_forwards, 1, recompute, has_labels)[0] for recompute in (False, True))
    for name, gradient in kept.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_padding_is_not_counted() -> None:
    model = parallelize(hf_model(tiny("qwen3_moe")), build_meshes(), PLAIN)
    tokens_BS = torch.randint(4, 60, (2, LENGTH))
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[0, 5:] = 0
    model(tokens_BS, mask_BS, labels=tokens_BS)
    policies = policies_of(model)
    assert policies is not None
    assert policies._loads_LE is not None
    assert policies._loads_LE.sum(1).tolist() == [2.0 * (LENGTH + 5)] * len(policies.by_experts)
    model(tokens_BS[:0], labels=tokens_BS[:0])
    assert policies._loads_LE.sum(1).tolist() == [2.0 * (LENGTH + 5)] * len(policies.by_experts)


def losses_with(family_term: bool, asked: bool) -> float:
    experts = ExpertsConfig(balance=BalanceConfig(z_loss=0.01, family=family_term))
    changes = {"output_router_logits": asked, "router_aux_loss_coef": 0.5}
    policy = ParallelPolicy(experts=experts, precision=FLOAT32)
    model = parallelize(hf_model(tiny("qwen3_moe"), **changes), build_meshes(), policy)
    tokens_BS = torch.arange(2 * LENGTH).view(2, -1)
    return model(tokens_BS, labels=tokens_BS).loss.item()


def test_a_key_keeps_the_familys_own_loss_or_leaves_it_out() -> None:
    kept, left_out, not_asked = losses_with(True, True), losses_with(False, True), losses_with(True, False)
    assert left_out == pytest.approx(not_asked, rel=1e-6)
    assert kept > left_out + 0.5


# What cannot be


def choose_with_noise(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(x, self.weight)
    weights, ids = (logits + torch.randn_like(logits)).softmax(-1).topk(2)
    return logits, weights, ids


def refusal(model: nn.Module, experts: ExpertsConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        parallelize(model, build_meshes(), ParallelPolicy(experts=experts))
    return str(caught.value)


def test_a_router_that_is_not_known_is_refused_by_name() -> None:
    model = hf_model(tiny("qwen3_moe"))
    gate = type(model.get_submodule("model.layers.0.mlp.gate"))
    noisy = type("NoisyRouter", (gate,), {"forward": choose_with_noise})
    model.get_submodule("model.layers.1.mlp.gate").__class__ = noisy
    said = refusal(model, POLICIES["z_loss"])
    assert said.startswith("experts.balance.z_loss: expected one router that chooses by softmax or sigmoid")
    assert "next to model.layers.1.mlp.experts, got 0 in Qwen3MoeSparseMoeBlock" in said


def test_a_model_without_experts_is_refused() -> None:
    said = refusal(tiny_hf("llama"), POLICIES["expert choice"])
    assert "experts.selection: expected experts that are known, got none in LlamaForCausalLM" in said


def test_a_training_call_whose_loss_could_not_have_the_terms_is_refused() -> None:
    model = parallelize(hf_model(tiny("qwen3_moe")), build_meshes(), PLAIN)
    tokens_BS = torch.arange(LENGTH).view(1, -1)
    with pytest.raises(ConfigError, match=r"experts\.balance: expected labels in a training call"):
        model(tokens_BS)
    model.eval()
    assert model(tokens_BS).logits.shape[:2] == (1, LENGTH)


# train.py

KEYS = {
    "experts__balance__bias_rate": 0.01,
    "experts__balance__sequence": 0.02,
    "experts__balance__z_loss": 0.001,
}


@pytest.mark.full
def test_a_run_on_a_folder_follows_the_keys_and_goes_on_with_its_biases(tmp_path: Path) -> None:
    hf = folder_of(tmp_path, "qwen3_moe", output_router_logits=False)
    run_ranks(go, 1, str(hf), str(tmp_path / "one"), STOP + 1, KEYS)
    run_ranks(go, 2, str(hf), str(tmp_path / "split"), STOP, KEYS | {"mesh__ep": 2})
    run_ranks(go, 2, str(hf), str(tmp_path / "split"), STOP + 1, KEYS | {"mesh__ep": 2})
    got, expected = losses(tmp_path / "split"), losses(tmp_path / "one")
    assert len(got) == STOP + 1
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)
    with pytest.raises(CheckpointError, match=r"e_score_correction_bias"):
        to_hf(tmp_path / "split" / "checkpoints", tmp_path / "exported")


def test_keys_of_routing_are_taken_with_a_folder(tmp_path: Path) -> None:
    config = config_for(str(folder_of(tmp_path)), 4, **KEYS, experts__capacity__factor=1.0)
    assert config.experts.routing_keys[-1] == "experts.capacity"


@pytest.mark.parametrize("is_native", [True, False])
def test_biases_that_a_folder_does_not_have_begin_at_zero(tmp_path: Path, is_native: bool) -> None:
    config = tiny("qwen3_moe")
    hf_model(config).save_pretrained(tmp_path)  # type: ignore[operator]
    model = build_model(config, MIXED) if is_native else build_folder_model(str(tmp_path))
    model = parallelize(model, build_meshes(), PLAIN, load=tmp_path)
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == config.num_hidden_layers
    assert all(bias.dtype == torch.float32 and not bias.any() for bias in biases)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="pip install trl")
@pytest.mark.parametrize(
    ("experts", "asked", "key"),
    [
        (balanced(z_loss=0.01), False, "experts.balance.z_loss"),
        (ExpertsConfig(selection="forced_balance"), False, "experts.selection"),
        (limited(factor=0.75), False, "experts.balance.sequence"),
        (balanced(family=False), True, "experts.balance.family"),
        (balanced(family=False), False, None),
        (ExpertsConfig(), True, None),
    ],
)
def test_trainers_of_trl_are_refused_policies_that_they_would_pass_over(
    experts: ExpertsConfig, asked: bool, key: str | None
) -> None:
    from trl.trainer.utils import add_fused_lm_head

    model: Any = tiny_hf("qwen3_moe", output_router_logits=asked)
    model = parallelize(model, build_meshes(), ParallelPolicy(experts=experts, precision=FLOAT32))
    refuse_passed_over(model, "Trainer")  # whose forward is the model's own
    add_fused_lm_head(model)
    if key is None:
        refuse_passed_over(model, "SFTTrainer")
        return
    with pytest.raises(ConfigError, match=f"^{key}: expected no such policy with SFTTrainer"):
        refuse_passed_over(model, "SFTTrainer")


RATE_OF_TRAINER = 2**-10


def in_trainer(folder: str) -> list[list[float]]:
    from transformers import Trainer

    forget_accelerate()
    policy = ParallelPolicy(experts=balanced(bias_rate=RATE_OF_TRAINER, z_loss=0.01), precision=FLOAT32)
    model = parallelize(tiny_hf("qwen3_moe"), build_meshes(ep=2), policy)
    trainer = fsdmoe.prepare_trainer(Trainer(model, arguments(folder, max_steps=2), train_dataset=Rows(16)))
    trainer.train()
    policies = policies_of(model)
    assert policies is not None
    biases = [router.e_score_correction_bias for router in policies.by_experts.values()]
    return [bias.tolist() for bias in biases if bias is not None]


@pytest.mark.full
def test_a_trainer_moves_the_biases_once_a_step(tmp_path: Path) -> None:
    ours, others = run_ranks(in_trainer, 2, str(tmp_path))
    assert ours == others
    moved = {abs(value) for layer in ours for value in layer}
    assert moved <= {0.0, RATE_OF_TRAINER, 2 * RATE_OF_TRAINER}, "two steps, each of two micro-batches"
    assert max(moved) == 2 * RATE_OF_TRAINER
