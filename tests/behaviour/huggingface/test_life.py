"""The ordinary life of wrapped Hugging Face models: built on meta, loaded, saved, generating, failing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter

from fsdmoe import checkpoint
from fsdmoe.checkpoint.hf_export import to_hf
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import ShardedTensor, engine_of
from fsdmoe.huggingface.refit import iterate_weights
from fsdmoe.mesh import build_meshes
from fsdmoe.optim import AdamW, clip_grad_norm
from fsdmoe.parallel.build import parallelize
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import FAMILIES, batch, tiny_hf, train

pytestmark = requires_transformers


def on_meta(family: str, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        return tiny_hf(family, randomized=False, **changes)


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, ShardedTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def logits_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    with torch.no_grad():
        return model(batch(step, 0)).logits


# From scratch


def scratch(family: str, ep: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    model = parallelize(on_meta(family), build_meshes(ep=ep))
    return full_state(model), logits_of(model.eval())


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("gpt_oss", 2),
        *(
            pytest.param(f, 4, marks=pytest.mark.full)
            for f in ("deepseek_v3", "gpt_oss", "qwen3_moe", "llama")
        ),
    ],
)
def test_initial_weights_are_the_models_own_and_do_not_depend_on_the_ranks(family: str, ranks: int) -> None:
    ep = 1 if family == "llama" else ranks
    (one, logits), (several, logits_of_several) = (
        run_ranks(scratch, 1, family, 1)[0],
        run_ranks(scratch, ranks, family, ep)[0],
    )
    reference = tiny_hf(family, randomized=False)
    assert one.keys() == several.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        assert torch.equal(one[name], several[name]), name
        assert torch.isfinite(one[name]).all(), name
        if value.numel() >= 64:
            spread = value.std(correction=0).item()
            assert one[name].std(correction=0).item() == pytest.approx(spread, rel=0.35, abs=1e-6), name
    gate_ups = [v for n, v in one.items() if n.endswith("experts.gate_up_proj")]
    assert all(not torch.equal(v[0], v[1]) for v in gate_ups)
    torch.testing.assert_close(logits, logits_of_several, rtol=1e-5, atol=1e-6)
    reference.load_state_dict(one)  # rotary frequencies are not in there: they were rebuilt
    torch.testing.assert_close(logits, logits_of(reference.eval()), rtol=1e-4, atol=1e-6)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def refuse_odd() -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Odd())
    with pytest.raises(ConfigError) as caught:
        parallelize(model, build_meshes())
    return str(caught.value)


def test_a_parameter_that_nobody_initialises_is_refused_by_name() -> None:
    assert "1.scale" in run_ranks(refuse_odd, 1)[0]


# Loading, saving, exporting


def loaded(family: str, folder: str, ep: int) -> tuple[torch.Tensor, bool]:
    model = parallelize(on_meta(family), build_meshes(ep=ep), load=folder)
    expected = tiny_hf(family).state_dict()
    same = all(torch.equal(value, expected[name]) for name, value in full_state(model).items())
    return logits_of(model.eval()), same


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("gpt_oss", 2), *(pytest.param(f, 4, marks=pytest.mark.full) for f in (*FAMILIES, "llama"))],
)
def test_weights_load_from_safetensors_that_transformers_wrote(
    family: str, ranks: int, tmp_path: Path
) -> None:
    model = tiny_hf(family)
    model.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    ep = 1 if family == "llama" else ranks
    logits, same = run_ranks(loaded, ranks, family, str(tmp_path / "hf"), ep)[0]
    assert same
    torch.testing.assert_close(logits, logits_of(model.eval()), rtol=1e-5, atol=1e-5)


def save_early(family: str, folder: str, ep: int) -> list[float]:
    model = parallelize(tiny_hf(family), build_meshes(ep=ep))
    optimizer = AdamW(model, lr=1e-2)
    train(model, optimizer, range(3))
    checkpoint.save(f"{folder}/ckpt", model, optimizer)
    return train(model, optimizer, range(3, 6))


def resume(family: str, folder: str, ep: int) -> tuple[list[float], torch.Tensor]:
    model = parallelize(on_meta(family), build_meshes(ep=ep))
    optimizer = AdamW(model, lr=1e-2)
    checkpoint.load(f"{folder}/ckpt", model, optimizer)
    losses = train(model, optimizer, range(3, 6))
    checkpoint.save(f"{folder}/end", model)
    to_hf(f"{folder}/end", f"{folder}/hf")
    weights = {}
    for bucket in iterate_weights(model, bucket_bytes=4096):
        assert sum(t.nbytes for t in bucket.values()) <= 4096 or len(bucket) == 1
        weights |= bucket
    if dist.get_rank() == 0:
        from safetensors.torch import save_file

        Path(folder, "refit").mkdir()
        save_file(weights, f"{folder}/refit/model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(f"{folder}/refit")
    return losses, logits_of(model.eval())


@pytest.mark.parametrize(
    ("family", "ranks", "ep", "then"),
    [("gpt_oss", 2, 1, 2), *(pytest.param(f, 4, 2, 4, marks=pytest.mark.full) for f in FAMILIES)],
)
def test_a_checkpoint_resumes_under_another_ep_and_exports_to_plain_transformers(
    family: str, ranks: int, ep: int, then: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    expected = run_ranks(save_early, ranks, family, str(tmp_path), ep)
    got = run_ranks(resume, ranks, family, str(tmp_path), then)
    for rank in range(ranks):
        assert got[rank][0] == pytest.approx(expected[rank], rel=1e-5)
    for folder in ("hf", "refit"):
        plain = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, attn_implementation="eager", dtype=torch.float32
        )
        torch.testing.assert_close(logits_of(plain.eval()), got[0][1], rtol=1e-5, atol=1e-5)


def my_part() -> dict[str, torch.Tensor]:
    model = parallelize(tiny_hf("qwen3_moe"), build_meshes(ep=2))
    return {n: t for bucket in iterate_weights(model, experts="mine") for n, t in bucket.items()}


def test_an_ep_part_holds_its_own_experts_only() -> None:
    parts = run_ranks(my_part, 4)
    whole = tiny_hf("qwen3_moe").state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    for rank, part in enumerate(parts):
        numbers = {int(n.split(".experts.")[1].split(".")[0]) for n in part if ".experts." in n}
        assert numbers == ({0, 1, 2, 3} if rank % 2 == 0 else {4, 5, 6, 7})
        assert "lm_head.weight" in part
    assert torch.equal(parts[1]["model.layers.1.mlp.experts.5.up_proj.weight"], whole[5, 12:])


# Evaluation, generation, recompute, accumulation, exceptions


def live(family: str) -> dict[str, Any]:
    model = parallelize(tiny_hf(family), build_meshes(ep=dist.get_world_size()))
    kind, rank = type(model).__name__, dist.get_rank()
    prompt = batch(0, 0)[:, : 3 + rank]
    found: dict[str, Any] = {"class": kind, "eval": logits_of(model.eval())}
    found["generated"] = model.generate(prompt, max_new_tokens=2 + rank, do_sample=False)
    tokens = batch(0, rank)
    model.train()

    def gradients() -> dict[str, torch.Tensor]:
        grads = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}
        model.zero_grad()
        return grads

    model(tokens, labels=tokens).loss.backward()
    found["plain"] = gradients()
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens).loss.backward()
    found["recomputed"] = gradients()
    model.gradient_checkpointing_disable()
    for last in (False, True):
        with engine_of(model).micro_batch(last=last):
            (model(tokens, labels=tokens).loss / 2).backward()
    found["accumulated"] = gradients()

    handle = model.model.layers[1].register_forward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        model(tokens, labels=tokens)
    handle.remove()
    model(tokens, labels=tokens).loss.backward()
    found["norm"] = clip_grad_norm(model, 1e9).total.item()
    found["after"] = gradients()
    return found


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("qwen3_moe", 2), *(pytest.param(f, 4, marks=pytest.mark.full) for f in ("qwen3_moe", "gpt_oss"))],
)
def test_evaluation_generation_recompute_accumulation_and_exceptions(family: str, ranks: int) -> None:
    got = run_ranks(live, ranks, family)
    plain = tiny_hf(family)
    expected = logits_of(plain.eval())
    for rank, found in enumerate(got):
        assert found["class"] == type(plain).__name__
        torch.testing.assert_close(found["eval"], expected, rtol=1e-5, atol=1e-5)
        alone = plain.generate(batch(0, 0)[:, : 3 + rank], max_new_tokens=2 + rank, do_sample=False)  # type: ignore[operator]
        assert torch.equal(found["generated"], alone)
        for name, gradient in found["plain"].items():
            for other in ("recomputed", "accumulated", "after"):
                torch.testing.assert_close(found[other][name], gradient, rtol=1e-5, atol=1e-6)
    norm = sum(float(g.double().pow(2).sum()) for g in got[0]["plain"].values()) ** 0.5
    assert got[0]["norm"] == pytest.approx(norm, rel=1e-5)


# Compiling


def count_compiled(num_layers: int) -> list[int]:
    """Graphs compiled so far after a first and a second step."""
    torch._dynamo.reset()
    meshes = build_meshes(ep=dist.get_world_size())
    model = parallelize(tiny_hf("qwen3_moe", num_hidden_layers=num_layers), meshes)
    counter = CompileCounter()
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=counter)
    found = []
    for step in range(2):
        tokens = batch(step, 0)
        model(tokens, labels=tokens, use_cache=False).loss.backward()  # the cache is compiled by layer
        model.zero_grad()
        found.append(counter.frame_count)
    return found


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_layers_with_split_experts_share_what_is_compiled(num_ranks: int) -> None:
    one, four = (run_ranks(count_compiled, num_ranks, layers)[0] for layers in (1, 4))
    assert one[0] > 0
    assert one[1] == one[0], "what travels between ranks was compiled, and again for other counts"
    assert four == one, "layers were compiled each for itself"
