"""Documents that share a row, and pieces of a row: which families keep them apart, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdmoe.context_parallel.attention import ContextAttention
from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.context_parallel.plan import AttentionPlan
from fsdmoe.context_parallel.split import split_rows
from fsdmoe.core.errors import ConfigError
from fsdmoe.data import Batch
from fsdmoe.feed import Feed
from fsdmoe.huggingface.causal_lm import WrappedCausalLM
from fsdmoe.huggingface.limits import attention_limits
from fsdmoe.mesh import build_meshes
from fsdmoe.models import Decoder
from fsdmoe.models.attention import SplitRows
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_pairs import randomize, tiny
from tests.support.moe_families import MODEL_TYPES, installed, is_installed, tiny_config, tiny_model
from tests.support.packed_rows import WATCHED, largest_change, losses, neighbourhoods

pytestmark = requires_transformers

# The module that passes something from a document to the next, for families that cannot be packed.
REFUSED = {
    "bailing_hybrid": "BailingHybridDeltaAttention",
    "deepseek_v4": "DeepseekV4Attention",
    "doge": "DogeCDMoE",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "inkling_text": "InklingShortConvolution",
    "jamba": "JambaMambaMixer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lfm2_moe": "Lfm2MoeShortConv",
    "llama4_text": "Llama4TextAttention",
    "minimax": "MiniMaxLightningAttention",
    "minimax_m3_vl_text": "MiniMaxM3VLAttention",
    "nemotron_h": "NemotronHMamba2Mixer",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen4_exp_text": "Qwen4ExpTextGatedDeltaNet",
    "zaya": "ZayaCCAProjection",
}
QUICK = ("gpt_oss", "jamba", "lfm2_moe", "llama4_text", "qwen3_moe", "qwen3_next")
# Families whose layers, as they are in the table, ask nothing of attention that a plan cannot give.
SPLIT = (
    "aria_text", "axk1", "dbrx", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo",
    "glm4_moe", "glm4_moe_lite", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jetmoe",
    "longcat_flash", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open",
)  # fmt: skip


@pytest.mark.full
def test_every_moe_family_of_transformers_is_in_the_table() -> None:
    assert set(installed()) <= set(MODEL_TYPES)
    assert set(REFUSED) <= set(MODEL_TYPES)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in MODEL_TYPES]
)
def test_a_neighbour_changes_no_documents_loss_or_packing_is_refused_by_name(family: str) -> None:
    if not is_installed(family):
        pytest.skip(f"this transformers has no {family}")
    refusal, change = "", 0.0
    try:
        change = largest_change(losses(WrappedCausalLM(tiny_model(family))))
    except ConfigError as error:
        refusal = str(error)
    print(f"{family}: {refusal or 'packs'}")
    assert change <= 1e-5
    assert (f"({REFUSED[family]})" in refusal) if family in REFUSED else not refusal


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss"])
def test_a_neighbour_changes_no_documents_loss_in_a_native_model(architecture: str) -> None:
    model = Decoder(tiny(architecture))
    randomize(model, 0.3)
    assert largest_change(losses(model)) <= 1e-5


def split_losses(families: list[str], native: list[str]) -> dict[str, float]:
    """On two ranks that share the rows: the largest change of the loss, by family."""
    meshes = build_meshes(cp=2)
    precision = PrecisionConfig(param_dtype="float32", reduce_dtype="float32")
    found = {}
    for name in (*families, *(f"native {name}" for name in native)):
        is_native = name.startswith("native ")
        model = Decoder(tiny(name.removeprefix("native "))) if is_native else tiny_model(name)
        if is_native:
            randomize(model, 0.3)
        decoder = as_causal_lm(parallelize(model, meshes, ParallelPolicy(precision=precision)))
        feed = Feed(meshes, ContextParallelConfig(mode="ring"), own_attention=not is_native)
        values = {where: feed.held_out_loss(decoder, [row]) for where, row in neighbourhoods().items()}
        found[name] = largest_change(values)
    return found


@pytest.mark.full
def test_a_neighbour_changes_no_documents_loss_where_ranks_share_the_rows() -> None:
    families = [name for name in SPLIT if is_installed(name)]
    for changes in run_ranks(split_losses, 2, families, ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"]):
        assert {name: change for name, change in changes.items() if change > 1e-5} == {}


@pytest.mark.parametrize("family", ["jamba", pytest.param("qwen3_next", marks=pytest.mark.full)])
def test_a_family_that_cannot_be_packed_takes_one_document_a_row(family: str) -> None:
    decoder = WrappedCausalLM(tiny_model(family))
    row = neighbourhoods()["before one"]  # what is behind the document carries no loss, as padding
    document = {name: column[:, :WATCHED] for name, column in row.columns.items()}
    alone = decoder(**document).cross_entropy
    assert decoder(**row.columns).cross_entropy.item() == pytest.approx(alone.item(), rel=1e-5)  # type: ignore[union-attr]


class LooksBack(nn.Module):
    """Adds what is made of the token before; ``scale`` of it at the end."""

    def __init__(self, inner: nn.Module, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Linear(width, width, bias=False)
        nn.init.eye_(self.out.weight).mul_(scale)

    def forward(self, x_BSD: Tensor, *args: Any, **kwargs: Any) -> Any:
        before_BSD = nn.functional.pad(x_BSD[:, :-1], (0, 0, 1, 0))
        return self.inner(x_BSD, *args, **kwargs) + self.out(before_BSD)


def looking_back(scale: float = 1.0) -> Any:
    model: Any = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.model.layers[1].mlp = LooksBack(model.model.layers[1].mlp, 32, scale)
    return model


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_module_that_looks_back_is_named_even_where_its_weights_are_zeros(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp \(LooksBack\) .* set data\.pack = false"):
        WrappedCausalLM(looking_back(scale), packed_rows=16)


def split_call(model: nn.Module) -> Tensor:
    """With a plan for rows that ranks could share."""
    row: Batch = neighbourhoods()["before one"]
    plan = AttentionPlan(split_rows(row.document_ids_BS, 1), None, row.tokens_BS.device)
    out = WrappedCausalLM(model)(**row.columns, split=SplitRows(plan, ContextAttention(), None))
    return out.loss


def test_rows_are_not_split_where_a_module_beside_attention_looks_at_other_tokens() -> None:
    assert split_call(tiny_model("qwen3_moe")).isfinite()
    with pytest.raises(ConfigError, match=r"mesh\.cp: .* model\.layers\.1\.mlp \(LooksBack\)"):
        split_call(looking_back())


def test_rows_are_not_split_where_attention_computes_something_else() -> None:
    model: Any = tiny_model("qwen3_moe")
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        out, _ = own(*args, **kwargs)
        return out if "attention_plan" in kwargs else 2 * out, None  # a plan knows nothing of it

    attention.forward = forward
    with pytest.raises(ConfigError, match=r"mesh\.cp: expected causal attention .* model\.layers\.1"):
        split_call(model)


def test_chunks_that_count_from_the_rows_start_limit_packed_rows_only() -> None:
    model = tiny_model("llama4_text", attention_chunk_size=512)
    assert WrappedCausalLM(model, packed_rows=512)
    with pytest.raises(ConfigError, match="of more than attention_chunk_size = 512 tokens"):
        WrappedCausalLM(model, packed_rows=513)


def test_trying_a_model_leaves_it_as_it_was() -> None:
    model = tiny_model("jamba")
    model.eval()
    model.get_submodule("model.layers.0").train()
    before = [module.training for module in model.modules()]
    WrappedCausalLM(model)
    assert [module.training for module in model.modules()] == before
    hooks = [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert hooks == []


def test_the_limits_of_a_language_model_inside_another_configuration_are_seen() -> None:
    import transformers

    text = tiny_config("qwen3_moe", layer_types=None).to_dict()
    config = transformers.Qwen3VLMoeConfig(text_config=text | {"attention_dropout": 0.1})
    assert "expected attention_dropout = 0" in "".join(attention_limits(config, 16))
