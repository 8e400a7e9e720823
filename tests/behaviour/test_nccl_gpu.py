"""Real NCCL ranks on one GPU: each claims a host of its own, so collectives go over loopback sockets.

Right for streams, hooks and numbers; meaningless for bandwidth.
"""

from pathlib import Path

import pytest

from fsdmoe.config import to_toml
from fsdmoe.observe.metrics import read_metrics
from fsdmoe.testing import requires_nccl
from tests.support.one_gpu import ROOT, run_ranks_on_one_gpu
from tests.support.tiny_run import tiny_config

pytestmark = requires_nccl
BF16 = {
    "precision__param_dtype": "bfloat16", "train__steps": 10, "data__seq_len": 128, "model__hidden_size": 128,
    "model__head_dim": 32, "model__moe_intermediate_size": 64,
}  # fmt: skip


def losses(folder: Path, world_size: int, **overrides: object) -> list[float]:
    folder.mkdir()
    config = folder / "run.toml"
    config.write_text(to_toml(tiny_config(str(folder / "run"), world_size, **(BF16 | overrides))))
    run_ranks_on_one_gpu(world_size, str(ROOT / "train.py"), "--config", str(config))
    return [row["loss"] for row in read_metrics(folder / "run/metrics.jsonl") if "loss" in row]


def test_four_ranks_give_the_losses_of_one_under_every_expert_layout(tmp_path: Path) -> None:
    one = losses(tmp_path / "one", 1)
    assert len(one) == 10
    assert one[-1] < one[0] - 0.05
    layouts = {"ep 4": (4, 1), "ep 2, edp 2": (2, 1), "etp 2, ep 2": (2, 2)}
    for name, (ep, etp) in layouts.items():
        four = losses(tmp_path / name.replace(" ", ""), 4, mesh__ep=ep, mesh__etp=etp)
        worst = max(abs(a - b) / a for a, b in zip(one, four, strict=True))
        print(f"{name}: worst relative difference to one rank over 10 steps {worst:.1e}")
        assert four == pytest.approx(one, rel=2e-2), name


LONG = {
    "data__seq_len": 16384, "train__steps": 4, "train__global_batch_size": 1, "train__eval_interval": -1,
    "model__vocab_size": 264, "data__max_bytes": 4_000_000,
}  # fmt: skip


def test_sequences_of_16k_tokens_split_over_four_ranks_give_the_losses_of_one(tmp_path: Path) -> None:
    layouts: dict[str, dict[str, object]] = {
        "cp 4 ring, ep 4": {"mesh__cp": 4, "mesh__ep": 4},
        "cp 4 all_to_all, ep 4": {"mesh__cp": 4, "mesh__ep": 4, "context_parallel__mode": "all_to_all"},
        "tp 2, cp 2, ep 4": {"mesh__tp": 2, "mesh__cp": 2, "mesh__ep": 4},
    }
    # Every mode needs heads that four ranks can divide, and widths that the flash kernels take.
    shape: dict[str, object] = {"model__num_attention_heads": 8, "model__num_key_value_heads": 4}
    one = losses(tmp_path / "one", 1, **LONG, **shape)
    assert len(one) == 4
    for name, layout in layouts.items():
        four = losses(tmp_path / name.replace(" ", ""), 4, **LONG, **shape, **layout)
        worst = max(abs(a - b) / a for a, b in zip(one, four, strict=True))
        print(f"{name}: worst relative difference to one rank over 4 steps {worst:.1e}")
        assert four == pytest.approx(one, rel=2e-2), name
