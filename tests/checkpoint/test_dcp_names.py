"""Names in stock folders: torchtitan's of several ages, rules of the user, and what nobody knows."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, DCPImportPolicy, from_dcp
from fsdmoe.checkpoint.dcp_names import NameRules, parse_rule
from fsdmoe.checkpoint.hf_config import config_json
from fsdmoe.checkpoint.parts import model_state
from fsdmoe.core.errors import ConfigError
from fsdmoe.models import Decoder
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.dcp_titan import Age, Tensors, titan_names, titan_state
from tests.support.hf_pairs import randomize, tiny

KINDS = ("exp_avg", "exp_avg_sq")
AGES: tuple[Age, ...] = ("2025", "0.5", "physical")


def moments_of(model: nn.Module) -> dict[str, Tensors]:
    """Moments of every parameter, other values for each."""
    generator = torch.Generator().manual_seed(5)
    return {
        kind: {name: torch.rand(p.shape, generator=generator) for name, p in model.named_parameters()}
        for kind in KINDS
    }


def decoder(architecture: str) -> Decoder:
    model = Decoder(tiny(architecture, num_nextn_predict_layers=0))
    randomize(model, 0.3)
    return model


def save_titan(folder: str, architecture: str, age: Age) -> None:
    """On all ranks: weights and moments split along their first dims, experts along theirs."""
    model = decoder(architecture)
    heads = (model.config.num_attention_heads, model.config.num_key_value_heads)
    weights = titan_names(model_state(model), age, heads)
    moments = {kind: titan_names(tensors, age, heads) for kind, tensors in moments_of(model).items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def split(tensors: Tensors) -> Tensors:
        return {
            name: distribute_tensor(t, mesh, [Shard(1 if t.shape[0] == 1 and t.dim() > 1 else 0)])
            for name, t in tensors.items()
        }

    state = titan_state(split(weights), {kind: split(tensors) for kind, tensors in moments.items()}, 7)
    dcp.save(state, checkpoint_id=folder)


def assert_imported(path: Path, model: nn.Module) -> None:
    """The weights, moments and steps of ``model`` are those in the checkpoint."""
    want, moments = model_state(model), moments_of(model)
    blank = {name: torch.zeros_like(value) for name, value in want.items()}
    state = {name: {k: torch.zeros_like(moments[k][name]) for k in KINDS} for name in moments["exp_avg"]}
    for name in state:
        state[name]["step"] = torch.zeros(())
    values = checkpoint.load(path, blank, {"state": state}, step=0, progress={})  # type: ignore[arg-type]
    assert values["progress"] == {"step": 7, "tokens": 7 * 4096}
    for name, value in want.items():
        assert torch.equal(blank[name], value), name
    for name, held in state.items():
        assert held["step"] == 7
        for kind in KINDS:
            assert torch.equal(held[kind], moments[kind][name]), (name, kind)


@pytest.mark.parametrize(
    ("architecture", "age", "ranks"),
    [
        # Each family has one age that is quick, and Llama 4 below the third.
        ("qwen3_moe", "physical", 2),
        ("deepseek_v3", "0.5", 2),
        *(
            pytest.param(architecture, age, 4, marks=pytest.mark.full)
            for architecture in ("qwen3_moe", "deepseek_v3")
            for age in AGES
        ),
    ],
)
def test_a_torchtitan_folder_of_several_ranks_is_imported_bitwise(
    tmp_path: Path, architecture: str, age: Age, ranks: int
) -> None:
    run_ranks(save_titan, ranks, str(tmp_path / "titan"), architecture, age)
    model = decoder(architecture)
    config = config_json(dataclasses.asdict(model.config)) if age == "physical" else None
    from_dcp(tmp_path / "titan", tmp_path / "ours", DCPImportPolicy(config=config))
    assert_imported(tmp_path / "ours", model)


@requires_transformers
@pytest.mark.parametrize("age", [AGES[0], *(pytest.param(age, marks=pytest.mark.full) for age in AGES[1:])])
def test_llama4_is_imported_into_transformers_names(tmp_path: Path, age: Age) -> None:
    import transformers

    config = transformers.Llama4TextConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=24, intermediate_size_mlp=40, num_local_experts=4,
        interleave_moe_layer_step=2, num_experts_per_tok=1, pad_token_id=None,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config)
    randomize(model, 0.3)
    weights = titan_names(model_state(model), age, (4, 2))
    moments = {kind: titan_names(tensors, age, (4, 2)) for kind, tensors in moments_of(model).items()}
    dcp.save(titan_state(weights, moments, 7), checkpoint_id=tmp_path / "titan", no_dist=True)
    with pytest.raises(ConfigError, match="--family"):
        from_dcp(tmp_path / "titan", tmp_path / "ours")
    policy = DCPImportPolicy(family="llama4", config=config.to_dict())
    from_dcp(tmp_path / "titan", tmp_path / "ours", policy)
    assert_imported(tmp_path / "ours", model)


def test_experts_of_torchtitans_first_layout_are_refused(tmp_path: Path) -> None:
    names = {
        "tok_embeddings.weight": (9, 4),
        "layers.0.attention.k_norm.weight": (4,),
        "layers.0.moe.experts.w1": (2, 4, 6),
    }
    folder = save(tmp_path / "stock", **{name: torch.ones(shape) for name, shape in names.items()})
    with pytest.raises(CheckpointError, match=r"experts\.w1: expected .* with D = 4, got \(2, 4, 6\)"):
        from_dcp(folder, tmp_path / "out")


def save(folder: Path, **weights: torch.Tensor) -> Path:
    dcp.save({"model": weights}, checkpoint_id=folder, no_dist=True)
    return folder


def imported(folder: Path, *rules: str) -> set[str]:
    """The names in the checkpoint that a folder becomes."""
    out = folder.parent / "out"
    from_dcp(folder, out, DCPImportPolicy(rules=[parse_rule(rule) for rule in rules]))
    return set(json.loads((out / "metadata.json").read_text())["tensors"])


def test_unknown_names_are_listed_and_nothing_is_written(tmp_path: Path) -> None:
    folder = save(tmp_path / "stock", **{f"decoder.h.{i}.w": torch.ones(2) for i in range(25)})
    with pytest.raises(CheckpointError) as caught:
        from_dcp(folder, tmp_path / "out")
    text = str(caught.value)
    assert "decoder.h.0.w" in text
    assert "… and 5 more" in text
    assert "--map" in text
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]


def test_rules_of_the_user_come_first_and_may_leave_tensors_out(tmp_path: Path) -> None:
    names = {"decoder.h.0.w": torch.ones(2), "rotary": torch.ones(1), "lm_head.weight": torch.ones(2, 2)}
    folder = save(tmp_path / "stock", **names)
    found = imported(folder, r"decoder\.h\.(\d+)\.w=model.layers.\1.mlp.w", "rotary=", r"lm_(.*)=\1")
    assert found == {"model/model.layers.0.mlp.w", "model/head.weight"}


def test_all_names_can_be_taken_as_they_are(tmp_path: Path) -> None:
    folder = save(tmp_path / "stock", **{"a.b": torch.ones(2), "c": torch.ones(2)})
    assert imported(folder, r"(.*)=\1") == {"model/a.b", "model/c"}


@pytest.mark.parametrize("rule", ["no equals sign", "=x", "(=x"])
def test_rules_that_cannot_be_read_are_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match="--map"):
        parse_rule(rule)


def test_a_name_that_would_divide_the_tree_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "stock", **{"a/b": torch.ones(2)})
    with pytest.raises(CheckpointError, match="a/b: a name cannot have '/'"):
        imported(folder, r"(.*)=\1")


def test_a_replacement_with_a_group_that_is_not_there_names_the_rule() -> None:
    with pytest.raises(ConfigError, match=re.escape(r"--map a=\2")):
        NameRules([parse_rule(r"a=\2")]).regions("a", (1,))


def test_wrappers_leave_names_and_experts_of_their_own_are_fused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"_orig_mod.model.norm.weight": torch.ones(3)}
    for expert in range(2):
        for part, shape in (("gate", (4, 3)), ("up", (4, 3)), ("down", (3, 4))):
            name = f"model.layers.0._checkpoint_wrapped_module.mlp.experts.{expert}.{part}_proj.weight"
            state[name] = torch.full(shape, float(expert))
    found = imported(save(tmp_path / "stock", **state))
    assert found == {
        "model/model.norm.weight",
        "model/model.layers.0.mlp.experts.gate_up_proj",
        "model/model.layers.0.mlp.experts.down_proj",
    }


def test_a_missing_expert_is_said(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    folder = save(tmp_path / "stock", **{name.format(e): torch.ones(2, 3) for e in (0, 2)})
    with pytest.raises(CheckpointError, match="are parts of it missing"):
        from_dcp(folder, tmp_path / "out")


def test_a_tied_head_is_kept_once(tmp_path: Path) -> None:
    table = torch.randn(4, 3)
    folder = save(tmp_path / "stock", **{"model.embed_tokens.weight": table, "lm_head.weight": table})
    from_dcp(folder, tmp_path / "out", DCPImportPolicy(config={"tie_word_embeddings": True}))
    blank = {"model.embed_tokens.weight": torch.zeros(4, 3)}
    checkpoint.load(tmp_path / "out", blank)  # type: ignore[arg-type]
    assert torch.equal(blank["model.embed_tokens.weight"], table)
    head = {**blank, "lm_head.weight": torch.zeros(4, 3)}
    checkpoint.load(tmp_path / "out", head)  # type: ignore[arg-type]
    assert torch.equal(head["lm_head.weight"], table)
