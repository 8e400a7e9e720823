"""Adapters merged into a Hugging Face folder, against ``merge_and_unload`` of plain peft."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError, merge_adapter, to_adapter
from fsdmoe.checkpoint.__main__ import main
from fsdmoe.checkpoint.adapter_merge import MergePolicy, _refuse_lost_updates
from fsdmoe.checkpoint.quantised import dequantise
from fsdmoe.checkpoint.reader import RegionReader
from fsdmoe.mesh import build_meshes
from fsdmoe.parallel.build import parallelize
from fsdmoe.testing import requires_peft, run_ranks
from tests.support.hf_tiny import batch, tiny_hf
from tests.support.lora_case import EXPERTS
from tests.support.peft_table import ATTENTION, Target
from tests.support.peft_targets import TARGETS

pytestmark = requires_peft

_REST = {"target_parameters": list(EXPERTS), "use_rslora": True, "modules_to_save": ["lm_head", "norm"]}
QWEN = Target({"target_modules": [*ATTENTION, "embed_tokens"], **_REST})
RS_LORA = Target({**QWEN.settings, "modules_to_save": None})
MIXTRAL = Target({"target_modules": [*ATTENTION, "lm_head"], "target_parameters": list(EXPERTS)}, "mixtral")
REFUSED = {
    "embedding, tied": "tie_word_embeddings",
    "head, tied": "tie_word_embeddings",
    "PiSSA": "init_lora_weights: expected one that leaves the base as it is, got 'pissa'",
    "MiCA": "init_lora_weights: expected one that leaves the base as it is, got 'mica'",
    "a bias of B": "lora_bias: expected none, got True",
    "a bias of B without one of the layer": "lora_bias: expected none, got True",
    "embedding to save, tied by peft": "ensure_weight_tying: expected none, got True",
    "embedding, tied by peft": "ensure_weight_tying: expected none, got True",
    "layers used twice": "layer_replication: expected none",
    "aLoRA": "alora_invocation_tokens: expected none",
    "some tokens": "trainable_token_indices: expected none",
}


def saved(target: Target, folder: Path) -> Any:
    """The base and the adapter as folders; the model with adapters."""
    target.base().save_pretrained(folder / "base")  # type: ignore[operator]
    model = target.build().eval()
    model.save_pretrained(folder / "adapter")
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(batch(0, 0, rows=2)).logits


def loaded(folder: Path) -> torch.Tensor:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return logits(model)


def test_an_adapter_of_other_weights_than_its_base_is_not_merged_into_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after ``checkpoint.load`` of a fine-tuned model: the folder that the run names has other weights."""
    model = saved(RS_LORA, tmp_path)
    for config in model.peft_config.values():
        config.base_model_name_or_path = str(tmp_path / "base")
    checkpoint.save(tmp_path / "same", model)
    merge_adapter(tmp_path / "base", tmp_path / "same", tmp_path / "merged")
    to_adapter(tmp_path / "same", tmp_path / "of_same")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.add_(0.01)
    checkpoint.save(tmp_path / "other", model)
    with pytest.raises(CheckpointError, match=r"trained on others .* differs"):
        merge_adapter(tmp_path / "base", tmp_path / "other", tmp_path / "wrong")
    merge_adapter(tmp_path / "base", tmp_path / "other", tmp_path / "asked", MergePolicy(any_base=True))
    to_adapter(tmp_path / "other", tmp_path / "of_other")
    assert "was not trained on the weights in" in caplog.text
    names = [
        json.loads((tmp_path / folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        for folder in ("of_same", "of_other")
    ]
    assert names == [str(tmp_path / "base"), ""]


def check(target: Target, folder: Path, adapter: str = "adapter") -> None:
    model = saved(target, folder)
    if adapter == "per_expert":
        checkpoint.save(folder / "checkpoint", model)
        to_adapter(folder / "checkpoint", folder / adapter, layout="per_expert")
    before = logits(target.base())
    merge_adapter(folder / "base", folder / adapter, folder / "merged")
    expected = logits(model.merge_and_unload())
    assert (expected - before).abs().max() > 1e-2, "the adapter changes something"
    torch.testing.assert_close(loaded(folder / "merged"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "target",
    [pytest.param(QWEN, id="qwen3_moe"), pytest.param(MIXTRAL, id="mixtral", marks=pytest.mark.full)],
)
def test_a_merged_folder_computes_what_merge_and_unload_does(tmp_path: Path, target: Target) -> None:
    check(target, tmp_path)


@pytest.mark.parametrize(
    "target",
    [pytest.param(RS_LORA, id="qwen3_moe", marks=pytest.mark.full), pytest.param(MIXTRAL, id="mixtral")],
)
def test_factors_of_single_experts_are_merged_as_the_stacked_ones(tmp_path: Path, target: Target) -> None:
    check(target, tmp_path, "per_expert")


def save_and_merge(folder: str) -> None:
    checkpoint.save(f"{folder}/checkpoint", parallelize(QWEN.build(), build_meshes(ep=2)))
    paths = [f"{folder}/{name}" for name in ("base", "checkpoint", "merged")]
    assert main(["merge-adapter", *paths, "--shard-size", "2e-5"]) == 0


def test_a_checkpoint_is_merged_by_several_ranks_into_weights_that_are_rounded_once(tmp_path: Path) -> None:
    import transformers

    QWEN.base().bfloat16().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    (tmp_path / "base/tokenizer.json").write_text("{}")
    (tmp_path / "base/generation_config.json").write_text('{"max_length": 7}')
    run_ranks(save_and_merge, 2, str(tmp_path))
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"tokenizer.json", "generation_config.json"} <= names
    assert any(name.startswith("model-00002-of-") for name in names), "each rank wrote a file"
    got = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")

    exact = QWEN.build()  # with the rounded weights of the base, in float32
    for parameter in exact.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16().float()
    for name, parameter in exact.merge_and_unload().named_parameters():
        ours = got.get_parameter(name)
        assert ours.dtype == torch.bfloat16, name
        # peft multiplies in another order, so a sum at the border of two numbers may fall to the other side
        assert (ours != parameter.bfloat16()).float().mean() < 1e-3, name


def test_weights_have_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    saved(QWEN, tmp_path)
    paths = [str(tmp_path / name) for name in ("base", "adapter", "merged")]
    assert main(["merge-adapter", *paths, "--dtype", "bfloat16"]) == 0
    assert {t.dtype for t in load_file(tmp_path / "merged/model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "bfloat16"


def test_each_tensor_of_the_base_is_read_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(QWEN, tmp_path)
    read = RegionReader.read_tensor
    events = []

    def counted(self: RegionReader, name: str, *region: Any) -> torch.Tensor:
        events.append("adapter" if name.startswith("base_model.") else "base")
        return read(self, name, *region)

    monkeypatch.setattr(RegionReader, "read_tensor", counted)
    merge_adapter(
        tmp_path / "base",
        tmp_path / "adapter",
        tmp_path / "merged",
        progress=lambda _: events.append("written"),
    )
    assert [event for event in events if event != "adapter"] == ["base", "written"] * events.count("base")


def exchange_in_and_out(folder: Path) -> None:
    """The factors of experts as peft 0.18 has them."""
    path = folder / "adapter/adapter_model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if ".experts." in n and ".lora_A." in n]:
        other = name.replace("lora_A", "lora_B")
        first = tensors[name].unflatten(0, (8, -1))  # [experts, rank, in]
        second = tensors[other].unflatten(1, (-1, 8))  # [out, rank, experts]
        tensors[name] = second.permute(2, 1, 0).flatten(0, 1).contiguous()
        tensors[other] = first.permute(2, 1, 0).flatten(1).contiguous()
    save_file(tensors, path)


def test_experts_of_an_older_peft_are_transposed(tmp_path: Path) -> None:
    saved(QWEN, tmp_path)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "expected")
    exchange_in_and_out(tmp_path)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    expected, got = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "merged"))
    torch.testing.assert_close(got, expected)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def quantise_base(folder: Path) -> None:
    checkpoint.from_hf(folder / "base", folder / "hf")
    (folder / "base").rename(folder / "plain")
    checkpoint.to_hf(folder / "hf", folder / "base", checkpoint.ExportPolicy(fp8=True))


def change_base(folder: Path) -> None:
    (folder / "base").rename(folder / "plain")
    tiny_hf("qwen3_moe", num_key_value_heads=1).save_pretrained(folder / "base")  # type: ignore[operator]


def leave_out_a_factor(folder: Path) -> None:
    path = folder / "adapter/adapter_model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if "0.self_attn.q_proj.lora_B" not in n}, path)


def make_unfrozen_run(folder: Path) -> None:
    (folder / "adapter").rename(folder / "plain")
    about = {"adapter": {"freeze_base": False}}
    one = checkpoint.Checkpointer(
        checkpoint.CheckpointConfig(asynchronous=False), folder / "adapter", about=about
    )
    one.save(1, {"model": {"w": torch.ones(2)}})


def swap_folders(folder: Path) -> None:
    (folder / "base").rename(folder / "plain")
    (folder / "adapter").rename(folder / "base")
    (folder / "plain").rename(folder / "adapter")


def name_base(folder: Path, name: str) -> None:
    edit(folder / "adapter/adapter_config.json", base_model_name_or_path=name)


def name_folder_with_equal_shapes(folder: Path) -> None:
    shutil.copytree(folder / "base", folder / "trained")
    name_base(folder, str(folder / "trained"))


PROBLEMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a base in fp8": (quantise_base, r"base: expected weights that are not quantised, got FP8"),
    "another base": (
        change_base,
        r"layers\.0\.self_attn\.k_proj: expected factors of one weight of the base",
    ),
    "another folder": (
        name_folder_with_equal_shapes,
        r"base_model_name_or_path: expected .*/base, got .*/trained, another folder that is here",
    ),
    "another name": (
        lambda folder: name_base(folder, "Qwen/Qwen3-30B-A3B"),
        r"expected .*/base, got Qwen/Qwen3-30B-A3B, a model of another name; .*--any-base",
    ),
    "folders in the wrong order": (
        swap_folders,
        "base: expected the folder of a model, got that of an adapter; name the model first",
    ),
    "another kind": (
        lambda folder: edit(folder / "adapter/adapter_config.json", peft_type="IA3"),
        "peft_type: expected LORA, got IA3",
    ),
    "what is not known": (
        lambda folder: edit(folder / "adapter/adapter_config.json", use_future=True),
        "use_future: expected none, got True",
    ),
    "another rank": (
        lambda folder: edit(folder / "adapter/adapter_config.json", r=4),
        "expected rank 4 as its configuration says, got 3",
    ),
    "a factor alone": (leave_out_a_factor, r"q_proj\.lora_A\.weight: the base has no such weight"),
    "a trained base": (make_unfrozen_run, r"adapter\.freeze_base: expected true, got false"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and an adapter of it."""
    folder = tmp_path_factory.mktemp("good")
    saved(QWEN, folder)
    return folder


@pytest.mark.parametrize(("change", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_what_cannot_be_merged_is_refused_before_anything_is_written(
    good: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out/merged")
    assert not (tmp_path / "out").exists()


def test_factors_of_a_base_that_was_trained_too_are_not_exported(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    make_unfrozen_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"adapter\.freeze_base: expected true, got false"):
        to_adapter(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("experts", "key"),
    [
        ({"balance": {"bias_rate": 1e-3}}, r"experts\.balance\.bias_rate: expected 0"),
        ({"selection": "expert_choice"}, r"experts\.selection: .* each token chooses its experts"),
        ({"selection": "forced_balance"}, "expected an adapter named"),  # the routing is no reason
    ],
)
def test_an_adapter_of_a_run_that_routed_otherwise_is_not_exported(
    tmp_path: Path, experts: dict[str, Any], key: str
) -> None:
    about = {"adapter": {"freeze_base": True}, "experts": experts}
    settings = checkpoint.CheckpointConfig(asynchronous=False)
    checkpoint.Checkpointer(settings, tmp_path, about=about).save(1, {"model": {"w": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=key):
        to_adapter(tmp_path, tmp_path / "out")


def test_an_update_that_fp8_rounds_away_is_found_in_every_projection() -> None:
    def merged(size: float) -> Any:
        base = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
        update = torch.randn(128, 128, generator=torch.Generator().manual_seed(1)) * size
        return SimpleNamespace(base=lambda: base, merged=lambda: base + update)

    kinds = ("attn.q", "mlp.experts.0.w1", "mlp.experts.0.w2", "mlp.experts.0.w3")
    for lost in kinds:
        changed = {
            f"layers.{layer}.{kind}.weight": merged(1e-4 if kind == lost else 1.0)
            for layer in range(4)
            for kind in kinds
        }
        with pytest.raises(CheckpointError, match=rf"layers\.0\.{re.escape(lost)}\.weight: rounding to FP8"):
            _refuse_lost_updates(changed)


def test_a_base_in_fp8_is_merged_as_numbers_or_in_fp8_again_where_the_update_survives(tmp_path: Path) -> None:
    saved(QWEN, tmp_path)
    quantise_base(tmp_path)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    merge_adapter(base, adapter, tmp_path / "numbers", MergePolicy(dtype=torch.float32))
    merge_adapter(base, adapter, tmp_path / "fp8", MergePolicy(requantise=True))
    assert "quantization_config" not in json.loads((tmp_path / "numbers/config.json").read_text())
    numbers, again = (load_file(tmp_path / name / "model.safetensors") for name in ("numbers", "fp8"))
    checkpoint.from_hf(base, tmp_path / "plain checkpoint", dtype=torch.float32)
    checkpoint.to_hf(tmp_path / "plain checkpoint", tmp_path / "plain base")
    merge_adapter(tmp_path / "plain base", adapter, tmp_path / "expected", MergePolicy(any_base=True))
    torch.testing.assert_close(numbers, load_file(tmp_path / "expected/model.safetensors"))
    for name, values in numbers.items():
        scale = again.get(f"{name}_scale_inv")
        got = again[name] if scale is None else dequantise(again[name], scale, (128, 128), torch.float32)
        assert (got - values).norm() <= 0.04 * values.norm(), name
    edit(adapter / "adapter_config.json", lora_alpha=1e-3)
    with pytest.raises(CheckpointError, match=r"rounding to FP8 changes it .* times as much as the adapter"):
        merge_adapter(base, adapter, tmp_path / "lost", MergePolicy(requantise=True))
    assert not (tmp_path / "lost").exists()


def test_a_base_is_known_by_its_folder_or_its_last_name_or_may_be_any(tmp_path: Path) -> None:
    saved(QWEN, tmp_path)
    cached = tmp_path / "models--Qwen--Qwen3-30B-A3B/snapshots/0a1b"
    shutil.copytree(tmp_path / "base", cached)
    (tmp_path / "link").symlink_to(tmp_path / "base")
    cases = [
        ("link", tmp_path / "base"),
        ("/elsewhere/base/", tmp_path / "base"),
        ("Qwen/Qwen3-30B-A3B", cached),
    ]
    for number, (name, base) in enumerate(cases):
        name_base(tmp_path, name if number else str(tmp_path / name))
        merge_adapter(base, tmp_path / "adapter", tmp_path / f"merged{number}")
    name_base(tmp_path, "Qwen/another")
    paths = [str(tmp_path / name) for name in ("base", "adapter", "merged")]
    assert main(["merge-adapter", *paths, "--any-base"]) == 0


def test_factors_of_a_square_weight_of_experts_alone_are_refused(tmp_path: Path) -> None:
    square = {"target_modules": [], "target_parameters": [EXPERTS[1]]}
    saved(Target(square, changes={"moe_intermediate_size": 16}), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"experts: expected factors of one weight .*down_proj \[8, 16, 16\]"
    ):
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n, target in TARGETS.items() if not target.further])
def test_every_target_of_peft_is_merged_or_refused_by_name(tmp_path: Path, name: str) -> None:
    if name not in REFUSED:
        check(TARGETS[name], tmp_path)
        return
    saved(TARGETS[name], tmp_path)
    with pytest.raises(CheckpointError) as caught:
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert REFUSED[name] in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
