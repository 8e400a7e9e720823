"""``generate()`` on several ranks: greedy tokens are plain transformers', whatever the ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe.core.errors import ConfigError
from fsdmoe.data import Batch
from fsdmoe.feed import Feed
from fsdmoe.mesh import Axis, Meshes, build_meshes
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import batch, tiny_hf

transformers = pytest.importorskip("transformers")
pytestmark = requires_transformers
POLICY = ParallelPolicy(precision=PrecisionConfig(param_dtype="float32"), grad_divisor=1.0)


def prompts_of(number: int) -> dict[str, Any]:
    """Two prompts of different lengths, padded on the left, and how far to go on; all differ by number."""
    tokens = batch(number, 7, rows=2, length=4 + number)
    mask = torch.ones_like(tokens)
    mask[0, : 2 + number % 2] = 0
    return {
        "input_ids": tokens, "attention_mask": mask, "max_new_tokens": 3 + 2 * number, "do_sample": False,
    }  # fmt: skip


def loss_of(model: torch.nn.Module, meshes: Meshes) -> float:
    """Of a training step's rows, which ranks of cp and tp share."""
    lm, feed = as_causal_lm(model), Feed(meshes, own_attention=True)
    tokens = batch(0, 0)
    rows = Batch(tokens, tokens, torch.arange(8)[None], torch.zeros_like(tokens), tokens >= 0)
    inputs = feed.inputs(feed.prepare([rows]))
    return lm(**inputs[0], counts=feed.count(lm, inputs)).loss.item()


def generate(family: str, degrees: dict[str, int]) -> tuple[int, torch.Tensor, bool]:
    meshes = build_meshes(**degrees)
    model = parallelize(tiny_hf(family), meshes, POLICY)
    shares_rows = meshes.size(Axis.CP) * meshes.size(Axis.TP) > 1
    before = loss_of(model, meshes) if shares_rows else 0.0
    number = dist.get_rank() // meshes.size(Axis.TP)
    generated = model.generate(**prompts_of(number))  # type: ignore[operator]
    return number, generated, not shares_rows or loss_of(model, meshes) == before


def _ends(folder: str) -> list[tuple[Any, Any]]:
    """And the most new tokens: of a model built on the meta device, of one whose user has set another
    config, and of one whose user has set what it has."""
    AutoConfig, AutoModel = (getattr(transformers, name) for name in ("AutoConfig", "AutoModelForCausalLM"))
    found = []
    for sets in ("", "another", "a part"):
        with torch.device("meta"):
            model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
        if sets == "another":
            model.generation_config = transformers.GenerationConfig(eos_token_id=7)
        if sets == "a part":
            model.generation_config.max_new_tokens = 3
        parallelize(model, build_meshes(), POLICY, load=folder)
        config = model.generation_config
        found.append((config.eos_token_id, config.max_new_tokens))
    return found


def test_a_loaded_folder_says_where_its_model_ends(tmp_path: Path) -> None:
    model = tiny_hf("qwen3_moe")
    model.save_pretrained(tmp_path)
    transformers.GenerationConfig(eos_token_id=[5, 6]).save_pretrained(tmp_path)
    assert run_ranks(_ends, 1, str(tmp_path)) == [[([5, 6], None), (7, None), ([5, 6], 3)]]


LAYOUTS = [
    pytest.param("qwen3_moe", 2, {"ep": 2}, id="ep"),
    pytest.param("qwen3_moe", 2, {"tp": 2}, id="tp"),
    pytest.param("mixtral", 2, {"cp": 2}, id="cp"),
    *(
        pytest.param(family, 4, degrees, id=f"{family} {degrees}", marks=pytest.mark.full)
        for family in ("qwen3_moe", "deepseek_v3", "glm4_moe", "llama")
        for degrees in ({"tp": 2, "ep": 4}, {"tp": 2, "cp": 2, "ep": 2}, {"cp": 2, "ep": 4})
        if not (family == "llama" and "ep" in degrees)
    ),
    pytest.param("llama", 4, {"tp": 2}, id="llama", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("family", "ranks", "degrees"), LAYOUTS)
def test_greedy_tokens_are_those_of_plain_transformers(
    family: str, ranks: int, degrees: dict[str, int]
) -> None:
    plain = tiny_hf(family)
    plain.config.output_router_logits = False  # type: ignore[union-attr]
    for number, generated, trains_as_before in run_ranks(generate, ranks, family, degrees):
        assert torch.equal(generated, plain.generate(**prompts_of(number)))  # type: ignore[operator]
        assert trains_as_before


def sample_and_mistakes() -> tuple[torch.Tensor, list[str]]:
    model = parallelize(tiny_hf("llama"), build_meshes(tp=2), POLICY)
    torch.manual_seed(dist.get_rank())
    settings: dict[str, Any] = prompts_of(0) | {"do_sample": True, "max_new_tokens": 8}
    sampled = model.generate(**settings)  # type: ignore[operator]
    rank, messages = dist.get_rank(), []
    alike = prompts_of(0)["input_ids"]
    swapped = alike.clone()
    swapped[0, 0], swapped[0, 1] = (
        alike[0, 0] + 4 * rank,
        alike[0, 1] - 2 * rank,
    )  # sums of place x token agree
    embedded = torch.full((1, 3, 16), float(rank))
    for given in (
        prompts_of(rank), {"input_ids": swapped}, {"inputs_embeds": embedded},
        {"input_ids": alike, "attention_mask": torch.full_like(alike, 1 - rank)},
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            model.generate(**(given | {"max_new_tokens": 2}))  # type: ignore[operator]
        messages.append(str(caught.value))
    return sampled, messages


def test_ranks_of_tp_draw_alike_and_refuse_different_prompts() -> None:
    (one, messages), (other, _) = run_ranks(sample_and_mistakes, 2)
    assert torch.equal(one, other)
    assert all("expected the same prompts on the 2 ranks of mesh.tp" in message for message in messages)
