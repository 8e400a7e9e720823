"""Adapters of a sharded model saved, loaded and merged by peft's own methods, against peft in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdmoe import checkpoint
from fsdmoe.core.errors import ConfigError
from fsdmoe.huggingface.refit import iterate_weights
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import parallelize
from fsdmoe.testing import requires_peft, run_ranks
from tests.support.hf_tiny import batch, tiny_hf
from tests.support.lora_case import adapted, move

pytestmark = requires_peft
CASES = [
    pytest.param("qwen3_moe", "lora", {"ep": 2}),
    pytest.param("gpt_oss", "lora", {"etp": 2}, marks=pytest.mark.full),
    pytest.param("qwen3_moe", "lora", {"ep": 2, "etp": 2}, marks=pytest.mark.full),
    pytest.param("deepseek_v3", "dora", {"ep": 2}, marks=pytest.mark.full),
]


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model.eval()(batch(0, 0)).logits


def life(family: str, kind: str, mesh: dict[str, int], folder: str) -> dict[str, Any]:
    """Everything that can be done after training, in one go; results of this rank."""
    import peft

    found: dict[str, Any] = {}
    model = parallelize(adapted(family, kind), build_meshes(**mesh))
    found["logits"] = logits_of(model)
    with model.disable_adapter():
        found["base logits"] = logits_of(model)
    model.save_pretrained(f"{folder}/saved")
    sharded = peft.get_peft_model_state_dict(model)
    found["state"] = {name: value.full_tensor() for name, value in sharded.items()}
    model.load_adapter(f"{folder}/other", "default")
    found["loaded logits"] = logits_of(model)
    with pytest.raises(ConfigError, match=r"expected adapters that were there .* \(second\)"):
        model.load_adapter(f"{folder}/other", "second")
    with pytest.raises(ConfigError, match=r"iterate_weights: expected adapters that are merged"):
        next(iterate_weights(model))
    model.merge_adapter()
    found["merged logits"] = logits_of(model)
    with pytest.raises(checkpoint.CheckpointError, match=r"got default merged into them; call unmerge"):
        checkpoint.save(f"{folder}/twice", model)
    found["refit"] = {n: t for bucket in iterate_weights(model, names="memory") for n, t in bucket.items()}
    model.unmerge_adapter()
    found["unmerged logits"] = logits_of(model)
    merged = model.merge_and_unload(safe_merge=True)
    found["unloaded logits"] = logits_of(merged)
    found["merged"] = {name: p.full_tensor().detach() for name, p in merged.named_parameters()}
    checkpoint.save(f"{folder}/checkpoint", merged)
    checkpoint.to_hf(f"{folder}/checkpoint", f"{folder}/hf")
    return found


@pytest.mark.parametrize(("family", "kind", "mesh"), CASES)
def test_peft_methods_on_all_ranks_do_what_they_do_alone(
    tmp_path: Path, family: str, kind: str, mesh: dict[str, int]
) -> None:
    import peft
    import transformers

    plain, other = adapted(family, kind), adapted(family, kind)
    move(other, 4)
    other.save_pretrained(tmp_path / "other")
    world = 4 if len(mesh) > 1 else 2
    ranks = run_ranks(life, world, family, kind, mesh, str(tmp_path))
    expected = logits_of(plain)
    with plain.disable_adapter():
        base = logits_of(plain)
    changed = logits_of(other)
    assert (changed - expected).abs().max() > 1e-2, "so the comparisons mean something"
    for got in ranks:
        for key, wanted in {
            "logits": expected, "base logits": base, "loaded logits": changed, "merged logits": changed,
            "unmerged logits": changed, "unloaded logits": changed,
        }.items():  # fmt: skip
            torch.testing.assert_close(
                got[key], wanted, rtol=1e-4, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
            )
        torch.testing.assert_close(got["state"], peft.get_peft_model_state_dict(plain))
    again = peft.PeftModel.from_pretrained(tiny_hf(family, output_router_logits=False), tmp_path / "saved")
    torch.testing.assert_close(logits_of(again), expected, rtol=1e-4, atol=1e-5)
    merged = other.merge_and_unload()
    wanted = {name: p.detach() for name, p in merged.named_parameters()}
    torch.testing.assert_close(ranks[0]["merged"], wanted, rtol=1e-5, atol=1e-6)
    refit = {name: ranks[0]["refit"][name] for name in wanted}
    torch.testing.assert_close(refit, wanted, rtol=1e-5, atol=1e-6)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    torch.testing.assert_close(logits_of(exported), changed, rtol=1e-4, atol=1e-5)


def switch_late() -> tuple[str, bool]:
    """What is said when an adapter that was frozen is to be trained; whether it computes."""
    import peft

    def adapted_twice() -> Any:
        model = adapted("llama", target_parameters=None)
        model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        return model

    torch.manual_seed(0)
    plain = adapted_twice()
    torch.manual_seed(0)
    model: Any = parallelize(adapted_twice(), build_meshes())
    for each in (plain, model):
        each.set_adapter("second")
    same = torch.allclose(logits_of(model), logits_of(plain), rtol=1e-4, atol=1e-5)
    model.train()
    with pytest.raises(ConfigError) as caught:
        model(batch(0, 0))
    model.set_adapter("default")
    model(batch(0, 0), labels=batch(0, 0)).loss.backward()
    return str(caught.value), same


def test_an_adapter_that_was_frozen_when_it_was_sharded_computes_and_is_not_trained() -> None:
    message, same = run_ranks(switch_late, 1)[0]
    assert same
    assert "set_adapter: expected adapters that were trained when fsdmoe.parallelize was called" in message
    assert "lora_A.second.weight, which was frozen" in message


def merge_what_peft_cannot(**settings: Any) -> tuple[str, bool]:
    """Why merging is refused; whether weights stayed as they were."""
    import peft

    model: Any = adapted("llama", target_modules=["q_proj"], target_parameters=None, **settings)
    if settings.get("use_dora"):
        model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
        model.base_model.set_adapter(["default", "second"])
    model = parallelize(model, build_meshes())
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        model.merge_adapter()
    same = all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())
    return str(caught.value), same


def merge_several() -> list[tuple[str, bool]]:
    return [merge_what_peft_cannot(lora_bias=True), merge_what_peft_cannot(use_dora=True)]


def test_a_merge_that_is_refused_changes_nothing() -> None:
    (bias, bias_same), (dora, dora_same) = run_ranks(merge_several, 1)[0]
    assert bias_same
    assert dora_same
    assert "merge: expected layers with a bias for the adapter default" in bias
    assert "merge: expected one adapter, for DoRA changes the whole weight, got default and second" in dora


def add_late() -> str:
    import peft

    model: Any = parallelize(tiny_hf("llama"), build_meshes())
    late = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError) as caught:
        late(batch(0, 0))
    return str(caught.value)


@pytest.mark.full
def test_adapters_that_are_added_after_parallelize_are_refused() -> None:
    assert "add them before" in run_ranks(add_late, 1)[0]
