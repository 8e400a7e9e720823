"""A dense model becomes a mixture that computes the same, where that is exact; everything else is refused."""

from pathlib import Path

import pytest
import torch

from fsdmoe import checkpoint
from fsdmoe.checkpoint import CheckpointError
from fsdmoe.checkpoint.hf_config import model_fields
from fsdmoe.checkpoint.hf_export import to_hf
from fsdmoe.checkpoint.local_storage import LocalStorage
from fsdmoe.checkpoint.session import open_verified
from fsdmoe.checkpoint.upcycling import UpcyclePolicy, upcycle
from fsdmoe.core.errors import ConfigError
from fsdmoe.models import Decoder, preset_config
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_dense import dense

pytestmark = requires_transformers


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("kind", "groups", "granularity", "top_k"),
    [
        ("qwen3", 3, 2, 4),
        ("llama", 8, 1, 2),
        pytest.param("qwen3", 4, 1, 2, marks=pytest.mark.full),
        pytest.param("llama", 2, 4, 4, marks=pytest.mark.full),
        pytest.param("mistral", 2, 3, 6, marks=pytest.mark.full),
    ],
)
def test_logits_equal_the_dense_models(
    tmp_path: Path, kind: str, groups: int, granularity: int, top_k: int
) -> None:
    import transformers

    model = dense(kind, tmp_path / "dense")
    upcycle(
        tmp_path / "dense",
        tmp_path / "ckpt",
        UpcyclePolicy(groups=groups, granularity=granularity, top_k=top_k),
    )
    to_hf(tmp_path / "ckpt", tmp_path / "moe")
    mixture = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    assert "Moe" in type(mixture).__name__ or "Mixtral" in type(mixture).__name__
    with torch.no_grad():
        want, got = model(tokens()).logits, mixture(tokens()).logits
    assert want.abs().max() > 0.5
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_our_decoder_computes_the_same_too(tmp_path: Path) -> None:
    model = dense("qwen3", tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "ckpt", UpcyclePolicy(groups=3, granularity=2, top_k=2))
    about = open_verified(LocalStorage(tmp_path), "ckpt", "full").about
    ours = Decoder(preset_config("tiny-qwen3", **model_fields(about["hf_config"])))
    checkpoint.load(tmp_path / "ckpt", ours)
    with torch.no_grad():
        torch.testing.assert_close(
            ours.eval()(tokens()).logits_BSV, model(tokens()).logits, rtol=1e-5, atol=1e-5
        )


def test_groups_have_equal_rows_and_layers_different_ones(tmp_path: Path) -> None:
    dense("qwen3", tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "ckpt", UpcyclePolicy(groups=3, granularity=2, top_k=2))
    rows = {f"model.layers.{layer}.mlp.gate.weight": torch.zeros(6, 32) for layer in range(2)}
    checkpoint.load(tmp_path / "ckpt", policy=checkpoint.LoadPolicy(strict=False), model=rows)
    first, second = rows.values()
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert not torch.equal(first, second)


def upcycle_on_ranks(folder: str) -> None:
    upcycle(
        Path(folder) / "dense", Path(folder) / "parallel", UpcyclePolicy(groups=2, granularity=2, top_k=2)
    )


def test_ranks_share_the_work_and_write_the_same(tmp_path: Path) -> None:
    dense("llama", tmp_path / "dense")
    run_ranks(upcycle_on_ranks, 3, str(tmp_path))
    upcycle(tmp_path / "dense", tmp_path / "alone", UpcyclePolicy(groups=2, granularity=2, top_k=2))
    for name in ("parallel", "alone"):
        to_hf(tmp_path / name, tmp_path / f"hf-{name}")
    one, other = ((tmp_path / f"hf-{n}/model.safetensors").read_bytes() for n in ("parallel", "alone"))
    assert one == other


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"groups": 2, "granularity": 4, "top_k": 2}, r"upcycle\.top_k: 2 is not a multiple"),
        ({"groups": 2, "granularity": 1, "top_k": 3}, r"upcycle\.top_k: expected at most"),
        ({"groups": 0, "top_k": 1}, r"upcycle\.groups"),
    ],
)
def test_shapes_that_would_not_compute_the_same_are_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        UpcyclePolicy(**settings)  # type: ignore[arg-type]


def test_an_inexact_shape_is_made_on_request(tmp_path: Path) -> None:
    dense("qwen3", tmp_path / "dense")
    upcycle(
        tmp_path / "dense", tmp_path / "ckpt", UpcyclePolicy(groups=2, granularity=4, top_k=2, exact=False)
    )
    assert open_verified(LocalStorage(tmp_path), "ckpt", "full").tensors


def test_models_that_cannot_be_upcycled_are_refused(tmp_path: Path) -> None:
    dense("qwen3", tmp_path / "dense")
    with pytest.raises(
        ConfigError, match=r"upcycle\.granularity: expected a divisor of the intermediate size 48"
    ):
        upcycle(tmp_path / "dense", tmp_path / "a", UpcyclePolicy(groups=2, granularity=5, top_k=5))
    dense("llama", tmp_path / "biased", attention_bias=True)
    with pytest.raises(ConfigError, match="biases"):
        upcycle(tmp_path / "biased", tmp_path / "b", UpcyclePolicy(groups=2, top_k=1))
    upcycle(tmp_path / "dense", tmp_path / "moe", UpcyclePolicy(groups=2, top_k=1))
    to_hf(tmp_path / "moe", tmp_path / "moe-hf")
    with pytest.raises(ConfigError, match="expected a dense model"):
        upcycle(tmp_path / "moe-hf", tmp_path / "c", UpcyclePolicy(groups=2, top_k=1))
    with pytest.raises(CheckpointError, match="not a Hugging Face folder"):
        upcycle(tmp_path / "moe", tmp_path / "d", UpcyclePolicy(groups=2, top_k=1))
