"""Models of transformers that transformers itself splits over ``tp`` are taken as they are."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdmoe import checkpoint
from fsdmoe.mesh import Axis, build_meshes
from fsdmoe.parallel.build import parallelize
from fsdmoe.testing import requires_transformers, run_ranks
from fsdmoe.testing.ranks import RankFailure
from tests.support.dtensor_models import relative, train_beside
from tests.support.hf_tiny import batch, tiny_hf

pytestmark = requires_transformers

TOLERANCE = 1e-5


def is_old() -> bool:
    return tuple(int(part) for part in version("transformers").split(".")[:2]) < (5, 22)


def check_is_refused(*case: object) -> None:
    with pytest.raises(RankFailure, match=r"does not sum the gradients of norms over heads"):
        run_ranks(trains, *case)


def tiny(family: str) -> nn.Module:
    """Half of an expert must be wide enough for torch's grouped product."""
    return tiny_hf(family, **({"moe_intermediate_size": 16} if family == "qwen3_moe" else {}))


def loss_of(model: nn.Module, step: int, part: int) -> torch.Tensor:
    tokens = batch(step, part)
    return model(input_ids=tokens, labels=tokens).loss


def load_split(folder: str) -> nn.Module:
    """As a user does: every rank of the world is one of tp."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, tp_plan="auto", attn_implementation="eager", dtype=torch.float32
    )


def split_here(model: nn.Module, meshes: Any) -> nn.Module:
    """The same on a part of the world, for which transformers has no argument beside its own FSDP."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, meshes[Axis.TP])
    model.tie_weights()  # type: ignore[operator]
    return model


def trains(family: str, optimizer: str, folder: str) -> tuple[set[str], dict[str, float]]:
    meshes = build_meshes(tp=2)
    model = load_split(folder) if folder else split_here(tiny(family), meshes)
    split = {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    parallelize(model, meshes)
    num_steps = 2 if optimizer == "sgd" else 3  # a third shows AdamW's moments
    return split, train_beside(model, tiny(family), meshes, optimizer, loss_of=loss_of, num_steps=num_steps)


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [
        pytest.param("llama", "sgd", marks=pytest.mark.full),  # the same plan without experts
        ("qwen3_moe", "sgd"),
        # SGD sees the scale of gradients, which is what a plan could get wrong.
        pytest.param("qwen3_moe", "adamw", marks=pytest.mark.full),
        pytest.param("llama", "adamw", marks=pytest.mark.full),
    ],
)
def test_a_model_split_by_its_tp_plan_trains_as_one_process_does(family: str, optimizer: str) -> None:
    """llama: tied. qwen3_moe: experts, and norms of heads whose gradients transformers sums in hooks."""
    if is_old():
        check_is_refused(4, family, optimizer, "")
        return
    for split, worst in run_ranks(trains, 4, family, optimizer, ""):
        assert any("q_proj" in name for name in split)
        assert any("experts.gate_up_proj" in name for name in split) == (family == "qwen3_moe")
        assert max(worst.values()) < TOLERANCE, worst


def test_so_does_one_loaded_with_tp_plan_auto(tmp_path: Path) -> None:
    tiny("qwen3_moe").save_pretrained(tmp_path)
    if is_old():
        check_is_refused(2, "qwen3_moe", "sgd", str(tmp_path))
        return
    for split, worst in run_ranks(trains, 2, "qwen3_moe", "sgd", str(tmp_path)):
        assert any("q_proj" in name for name in split)
        assert max(worst.values()) < TOLERANCE, worst


def saves(folder: str) -> None:
    meshes = build_meshes(tp=2)
    model = parallelize(split_here(tiny("qwen3_moe"), meshes), meshes)
    checkpoint.save(Path(folder) / "ckpt", model)


def loads(folder: str) -> float:
    """Under ep, by fsdmoe's own split over tp; the worst difference from what was saved."""
    model = parallelize(tiny("qwen3_moe"), build_meshes(tp=2, ep=2))
    for parameter in model.parameters():
        parameter.data.zero_()
    checkpoint.load(Path(folder) / "ckpt", model)
    wanted = dict(tiny("qwen3_moe").named_parameters())
    return max(relative(p.full_tensor(), wanted[name]) for name, p in model.named_parameters())


@pytest.mark.skipif("is_old()", reason="it is refused, see above")
def test_its_checkpoint_fits_fsdmoes_own_split_over_tp_and_ep(tmp_path: Path) -> None:
    run_ranks(saves, 4, str(tmp_path))
    assert max(run_ranks(loads, 2, str(tmp_path))) == 0.0
