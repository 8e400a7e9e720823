"""Hugging Face models behind a decoder's interface: packed rows, counts, auxiliary losses, loads, shapes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdmoe import checkpoint
from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import split_rows
from fsdmoe.core.errors import ConfigError
from fsdmoe.data import Batch
from fsdmoe.data.origin import NO_DOCUMENT, Origin
from fsdmoe.feed import Feed
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.huggingface.folder import hf_fields
from fsdmoe.huggingface.transformers_api import build_hf_model
from fsdmoe.mesh import MeshConfig, build_meshes
from fsdmoe.models import ModelConfig, StepCounts
from fsdmoe.models.attention import SplitRows
from fsdmoe.models.flops import forward_flops_per_token
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import FAMILIES, batch, tiny_hf

pytestmark = requires_transformers
LENGTHS = (3, 5, 8)


def packed() -> dict[str, Any]:
    """One row of three documents."""
    tokens_BS = batch(0, 0, length=sum(LENGTHS))
    documents = [torch.full((n,), i) for i, n in enumerate(LENGTHS)]
    positions = [torch.arange(n) for n in LENGTHS]
    mask = [torch.arange(n) < n - 1 for n in LENGTHS]
    return {
        "tokens_BS": tokens_BS,
        "positions_BS": torch.cat(positions)[None],
        "document_ids_BS": torch.cat(documents)[None],
        "labels_BS": tokens_BS.roll(-1, 1),
        "loss_mask_BS": torch.cat(mask)[None],
    }


def test_packed_rows_by_a_plan_have_the_loss_of_the_models_masks() -> None:
    model = WrappedCausalLM(tiny_hf("qwen3_moe"))
    inputs = packed()
    by_masks = model(**inputs).loss
    assert model.follow_plans(sum(LENGTHS))
    plan = AttentionPlan(split_rows(inputs["document_ids_BS"], 1))
    by_plan = model(**inputs, split=SplitRows(plan, ContextAttention())).loss
    assert by_plan.item() == pytest.approx(by_masks.item(), rel=1e-6)


def test_a_model_that_cannot_follow_plans_keeps_its_own_attention() -> None:
    model = WrappedCausalLM(tiny_hf("gpt_oss"))
    before = model(**packed()).loss
    assert not model.follow_plans(sum(LENGTHS))
    assert torch.equal(model(**packed()).loss, before)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param(family, attention, marks=() if family == "qwen3_moe" else pytest.mark.full)
        for family, attention in itertools.product(FAMILIES, ("eager", "sdpa"))
        if (family, attention) != ("gpt_oss", "sdpa")  # its attention has sinks
    ],
)
def test_documents_of_a_packed_row_do_not_see_each_other(family: str, attention: str) -> None:
    model = tiny_hf(family)
    model.set_attn_implementation(attention)  # type: ignore[operator]
    inputs = packed()
    out = WrappedCausalLM(model)(**inputs)
    assert out.cross_entropy is not None
    total, seen = 0.0, 0
    for document_S in inputs["tokens_BS"][0].split(LENGTHS):
        logits_SV = model(document_S[None]).logits[0]
        total += F.cross_entropy(logits_SV[:-1].float(), document_S[1:], reduction="sum").item()
        seen += len(document_S) - 1
    assert out.cross_entropy.item() == pytest.approx(total / seen, rel=1e-5)


def test_the_loss_is_a_share_of_the_global_mean_and_the_auxiliary_term_weighs_its_tokens() -> None:
    model = tiny_hf("qwen3_moe")
    inputs = packed()
    alone = WrappedCausalLM(model)(**inputs)
    counts = StepCounts(torch.tensor(64.0), torch.tensor(26.0))  # four times as many tokens, twice the losses
    share = WrappedCausalLM(model)(**inputs, counts=counts)
    assert share.cross_entropy.item() == pytest.approx(alone.cross_entropy.item() / 2)  # type: ignore[union-attr]
    aux = model(inputs["tokens_BS"], position_ids=inputs["positions_BS"], use_cache=False).aux_loss.item()
    assert share.balance_loss.item() == pytest.approx(0.05 * aux / 4)  # type: ignore[union-attr]


def test_a_term_that_a_model_adds_with_labels_is_refused() -> None:
    model = tiny_hf("llama")
    model.config.z_loss_coefficient = 0.0  # type: ignore[union-attr]
    WrappedCausalLM(model)
    model.config.z_loss_coefficient = 0.1  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match=r"^model\.hf: expected z_loss_coefficient = 0 .* LlamaFor.* got 0\.1"
    ):
        WrappedCausalLM(model)


def test_a_loss_of_the_users_own_is_refused_where_it_computes_something_else() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    model = tiny_hf("llama")
    model.loss_function = lambda **given: ForCausalLMLoss(**given)  # type: ignore[assignment]
    WrappedCausalLM(model)
    model.loss_function = lambda **given: 2 * ForCausalLMLoss(**given)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"expected ForCausalLMLoss .* the loss_function of LlamaFor"):
        WrappedCausalLM(model)


def loads_of(hf: str, ep: int) -> torch.Tensor:
    decoder = as_causal_lm(parallelize(build_hf_model(hf), build_meshes(ep=ep), load=hf))
    out = decoder(**packed())
    before = out.loads_LE.clone()
    out.loss.backward()
    return before


def test_a_model_built_from_a_folder_loads_and_counts_its_experts_loads(tmp_path: Path) -> None:
    plain = tiny_hf("qwen3_moe")
    plain.save_pretrained(tmp_path)  # type: ignore[operator]
    inputs = packed()
    out = plain(inputs["tokens_BS"], position_ids=inputs["positions_BS"], use_cache=False)
    expected = torch.stack(
        [logits.topk(2).indices.flatten().bincount(minlength=8) for logits in out.router_logits]
    )
    for got in run_ranks(loads_of, 2, str(tmp_path), 2):
        assert torch.equal(got, expected.float())


def padded_loads(hf: str, mesh: MeshConfig) -> tuple[torch.Tensor, float]:
    """Of two rows of a document and padding, as a run has them, over all ranks; and the step's tokens."""
    meshes = build_meshes(mesh)
    model = parallelize(
        build_hf_model(hf), meshes, ParallelPolicy(precision=PrecisionConfig(param_dtype="float32")), load=hf
    )
    feed = Feed(meshes, own_attention=True, dtype=torch.float32)
    tokens_BS = batch(0, 0, length=16)[:1].repeat(2, 1)
    is_token_BS = torch.arange(16) < torch.tensor([[6], [12]])
    number_BS = torch.where(is_token_BS, torch.arange(2)[:, None], NO_DOCUMENT)
    rows = Batch(
        tokens_BS.where(is_token_BS, 0), tokens_BS.roll(-1, 1), torch.arange(16).expand(2, 16),
        (~is_token_BS).long(), is_token_BS, Origin(("a/0", "a/1"), number_BS, torch.arange(16).expand(2, 16)),
    )  # fmt: skip
    lm = as_causal_lm(model)
    given = feed.inputs(feed.prepare([rows]))
    counts = feed.count(lm, given)
    loads_LE = lm(**given[0], counts=counts, routing=feed.routing(given[0])).loads_LE
    dist.all_reduce(loads_LE)
    return loads_LE, counts.tokens.item()


def test_loads_count_no_padding_on_any_layout(tmp_path: Path) -> None:
    tiny_hf("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    alone, num_tokens = run_ranks(padded_loads, 1, str(tmp_path), MeshConfig())[0]
    assert num_tokens == 18
    assert alone.sum(1).tolist() == [2 * 18, 2 * 18]
    for mesh in (MeshConfig(cp=2), MeshConfig(tp=2, ep=2)):
        torch.testing.assert_close(run_ranks(padded_loads, 2, str(tmp_path), mesh)[0][0], alone)


def run_then_load(hf: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    policy = ParallelPolicy(precision=PrecisionConfig(param_dtype=dtype))  # type: ignore[arg-type]
    model = parallelize(build_hf_model(hf), build_meshes(ep=2), policy)
    fresh = parallelize(build_hf_model(hf), build_meshes(ep=2), policy, load=hf)
    with torch.no_grad():
        model(batch(0, 0))
        checkpoint.load(hf, model)
        return model(batch(0, 0)).logits, fresh(batch(0, 0)).logits


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
def test_a_model_that_has_run_computes_with_what_is_loaded_later(tmp_path: Path, dtype: str) -> None:
    tiny_hf("qwen3_moe").save_pretrained(tmp_path)  # type: ignore[operator]
    for got, expected in run_ranks(run_then_load, 2, str(tmp_path), dtype):
        assert torch.equal(got, expected)


def test_a_folder_is_built_without_memory_in_its_own_dtype_or_another(tmp_path: Path) -> None:
    plain = tiny_hf("mixtral").to(torch.bfloat16)
    plain.save_pretrained(tmp_path)  # type: ignore[operator]
    model = build_hf_model(tmp_path)
    assert type(model) is type(plain)
    assert model.training
    shapes = {name: tuple(p.shape) for name, p in plain.named_parameters()}
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(p.dtype == torch.float32 for p in build_hf_model(tmp_path, dtype=torch.float32).parameters())


def test_a_folder_without_a_readable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.hf: expected a folder"):
        build_hf_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nobody-knows-this"}')
    with pytest.raises(ConfigError, match=r"model\.hf: .* cannot read"):
        build_hf_model(tmp_path)


@pytest.mark.parametrize("family", [*FAMILIES, "llama"])
def test_the_shape_of_a_folder_counts_the_parameters_that_a_token_meets(family: str, tmp_path: Path) -> None:
    model = tiny_hf(family)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    fields = hf_fields(tmp_path)
    flops = forward_flops_per_token(ModelConfig(**fields), seq_len=8)
    expected = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            expected += parameter.numel() * fields["num_experts_per_tok"] // fields["num_experts"]
        elif (
            parameter.ndim == 2
            and "embed" not in name
            and "bias" not in name
            and "shared_expert_gate" not in name
        ):
            expected += parameter.numel()
    if model.config.tie_word_embeddings:  # type: ignore[union-attr]
        expected += fields["vocab_size"] * fields["hidden_size"]
    assert flops.total - flops.attention == 2 * expected
