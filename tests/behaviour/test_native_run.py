"""``train.py`` on our own decoder, from a Hugging Face folder to another one: converted or as it is, with one
rank or experts over two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdmoe import checkpoint
from fsdmoe.checkpoint.hf_export import to_hf
from fsdmoe.checkpoint.hf_import import from_hf
from fsdmoe.mesh import build_meshes
from fsdmoe.models import Decoder
from fsdmoe.models.rope_config import RopeConfig
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.testing import requires_transformers, run_ranks
from fsdmoe.train import Run
from tests.support.hf_pairs import hf_model, tiny
from tests.support.tiny_run import tiny_config

pytestmark = requires_transformers
STEPS = 4
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of the model, and keys of the run
    "glm4_moe": ({}, {"model__preset": "tiny-glm-4.5"}),
    "gpt_oss": ({}, {"model__preset": "tiny-gpt-oss"}),
    "deepseek_v3": (
        {"rope": RopeConfig(type="yarn", factor=4.0, mscale_all_dim=1.0, original_max_position_embeddings=8)},
        {"model__preset": "tiny-deepseek-v3", "model__rope__type": "yarn", "model__rope__factor": 4.0,
         "model__rope__mscale_all_dim": 1.0, "model__rope__original_max_position_embeddings": 8},
    ),
}  # fmt: skip


def go(folder: str, start: str, overrides: dict[str, Any]) -> None:
    config = tiny_config(
        folder, dist.get_world_size(), train__steps=STEPS, train__eval_interval=-1, model__vocab_size=264,
        model__num_nextn_predict_layers=0, checkpoint__load=start, checkpoint__load_only_model=True,
        checkpoint__interval=STEPS, checkpoint__asynchronous=False, **overrides,
    )  # fmt: skip
    run = Run(config, build_meshes(config.mesh))
    run.close(run.loop([]))
    run.checkpoints.close()


def losses(folder: Path) -> list[tuple[float, float]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_trains_alike_under_any_layout_and_transformers_loads_what_comes_out(
    tmp_path: Path, family: str
) -> None:
    import transformers

    fields, keys = FAMILIES[family]
    model = tiny(family, vocab_size=264, **fields)
    hf_model(model, std=0.1).save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    from_hf(tmp_path / "hf", tmp_path / "converted")
    run_ranks(go, 1, str(tmp_path / "one"), str(tmp_path / "converted"), keys)
    as_it_is = "converted" if family == "gpt_oss" else "hf"  # whose experts are in another order there
    run_ranks(go, 2, str(tmp_path / "two"), str(tmp_path / as_it_is), keys | {"mesh__ep": 2})
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == len(two) == STEPS
    assert one[-1][0] < one[0][0] - 0.05, "the run learns, so the comparison means something"
    for mine, theirs in zip(two, one, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    for axis in ("tp", "cp") if family == "gpt_oss" else ():  # sinks and windows under each
        run_ranks(go, 2, str(tmp_path / axis), str(tmp_path / as_it_is), keys | {f"mesh__{axis}": 2})
        for mine, theirs in zip(losses(tmp_path / axis), one, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
    to_hf(tmp_path / "two", tmp_path / "out")
    ours = Decoder(model)
    checkpoint.load(tmp_path / "two", ours)
    tokens = torch.randint(0, 264, (2, 48), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = ours.eval()(tokens).logits_BSV
        wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
