"""The same training under torch's own FSDP2, and a Hugging Face model wrapped as it is."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, engine_of, fully_shard
from fsdmoe.mesh import Axis, build_meshes
from fsdmoe.optim import AdamW
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.fsdp_parity import FP32, check_gradients, relative
from tests.support.tiny_modules import batch_of, reference


def beside_fsdp2(optimizer: str, steps: int) -> dict[str, float]:
    """Both from the same weights on the same batches; gradients at the first and the last step."""
    meshes = build_meshes()
    world, rank = dist.get_world_size(), dist.get_rank()
    ours, theirs = reference(num_layers=3), reference(num_layers=3)
    fully_shard(ours, meshes, FSDPPolicy(precision=FP32))
    for layer in theirs.layers:
        fsdp2(layer, mesh=meshes[Axis.FSDP_TP])
    fsdp2(theirs, mesh=meshes[Axis.FSDP_TP])
    if optimizer == "sgd":
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (ours, theirs)]
    else:
        settings = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
        optimizers = [AdamW(ours, decays=lambda *_: True, **settings)]
        optimizers += [torch.optim.AdamW(theirs.parameters(), **settings)]
    worst = {"loss": 0.0, "gradient": 0.0}
    for step in range(steps):
        losses = [model(*batch_of(step, 0, rank), 12 * world) for model in (ours, theirs)]
        for loss in losses:
            loss.backward()
        worst["loss"] = max(worst["loss"], relative(losses[0].detach(), losses[1].detach()))
        if step == 0 or (step == steps - 1 and optimizer == "sgd"):
            peers = dict(theirs.named_parameters())
            for name, parameter in ours.named_parameters():
                found = relative(parameter.grad.full_tensor(), peers[name].grad.full_tensor())
                worst["gradient"] = max(worst["gradient"], found)
        for each in optimizers:
            each.step()
            each.zero_grad()
    return worst


@pytest.mark.parametrize(
    ("world", "optimizer"),
    [
        (2, "sgd"),
        pytest.param(2, "adamw", marks=pytest.mark.full),  # which tests/optim compares with torch's
        pytest.param(4, "sgd", marks=pytest.mark.full),
        pytest.param(8, "sgd", marks=pytest.mark.full),
    ],
)
def test_training_follows_fsdp2(world: int, optimizer: str) -> None:
    for worst in run_ranks(beside_fsdp2, world, optimizer, 20 if world > 2 else 4, timeout=300):
        assert worst["loss"] < 1e-5
        assert worst["gradient"] < 1e-5


def hugging_face() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).float()


def wrap_hugging_face(recompute: bool) -> dict[str, float]:
    plain = hugging_face()
    model = copy.deepcopy(plain)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    fully_shard(model, build_meshes(), FSDPPolicy(fsdp=FSDPConfig(debug=True), precision=FP32))
    optimizer, theirs = (
        AdamW(model, lr=1e-3, weight_decay=0.0),
        torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0),
    )
    worst = {"dense": 0.0, "expert": 0.0, "loss": 0.0}
    tokens_of = [torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for step in range(3):
        tokens = tokens_of[dist.get_rank()]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses = [plain(input_ids=t, labels=t).loss for t in tokens_of]
        (sum(losses) / 2).backward()
        worst["loss"] = max(worst["loss"], relative(loss.detach(), losses[dist.get_rank()].detach()))
        if step == 0:
            check_gradients(model, plain, worst)
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
        model.eval()
        plain.eval()
        ours = model.generate(tokens[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
        wanted = plain.generate(tokens[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(ours, wanted)
        model.train()
        plain.train()
    assert engine_of(model).root.params[0].name == "model.embed_tokens.weight"
    return worst


@requires_transformers
@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_hugging_face_model_trains_and_generates_between_steps(recompute: bool) -> None:
    for worst in run_ranks(wrap_hugging_face, 2, recompute, timeout=240):
        assert worst["dense"] < 1e-5
        assert worst["loss"] < 1e-5
