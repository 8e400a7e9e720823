"""The dry run: real planner, any number of ranks, nothing built."""

import pytest

from fsdmoe.config import build_config
from fsdmoe.dry_run import dry_run, expert_bytes, plan_run


def plan(world: int, mapping: dict[str, dict[str, object]]):  # type: ignore[no-untyped-def]
    problems: list[str] = []
    config = build_config(mapping, {}, world, problems)
    assert config is not None, problems
    return config, *plan_run(config, world)


@pytest.mark.parametrize(
    ("preset", "billions", "mesh"),
    [
        ("qwen3-30b-a3b", 30.5, {"ep": 8}),
        ("qwen3-235b-a22b", 235.1, {"ep": 32, "dp_outer": 2}),
        ("mixtral-8x7b", 46.7, {"ep": 8, "etp": 2}),
        ("mixtral-8x22b", 140.6, {"ep": 8}),
        ("deepseek-v3", 682.5, {"ep": 64}),
    ],
)
def test_every_large_preset_has_its_published_size_and_is_planned_for_1024_ranks(
    preset: str, billions: float, mesh: dict[str, int]
) -> None:
    model = {"preset": preset}
    train = {"global_batch_size": 1024, "micro_batch_size": 1}
    _, memory, activations = plan(1024, {"model": model, "mesh": mesh, "train": train})  # type: ignore[dict-item]
    assert memory.num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    shards = 1024 // mesh.get("dp_outer", 1)
    assert memory.main_weights == pytest.approx(4 * memory.num_parameters / shards, rel=0.02)
    assert memory.moments == 2 * memory.main_weights
    assert activations > 0


def test_a_plan_that_cannot_be_made_is_refused_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    config = build_config({"fsdp": {"units": ["NoSuchClass"]}}, {}, 1, [])
    assert config is not None
    assert dry_run(config, 1) == 2
    assert capsys.readouterr().err.startswith("fsdmoe: fsdp.units: ")


def test_only_the_first_rank_prints_the_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config({}, {}, 1, [])
    assert config is not None
    monkeypatch.setenv("RANK", "1")
    assert dry_run(config, 1) == 0
    assert capsys.readouterr().out == ""


def test_recompute_keeps_less_and_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    config, _, kept = plan(4, {"mesh": {"ep": 2}})
    _, _, recomputed = plan(4, {"mesh": {"ep": 2}, "memory": {"recompute": ["layer"]}})
    assert 0 < recomputed < kept / 2
    assert dry_run(config, 4) == 0
    assert "optimizer moments" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_of_any_width_are_planned_in_the_precision_of_the_run(dtype: str) -> None:
    """A width of 12 is no whole number of 16 bytes, so no grouped product takes it: a loop over rows does,
    which needs values that a plan has not."""
    kept = [
        plan(1, {"model": {"preset": "tiny-qwen3", "moe_intermediate_size": width},
                 "precision": {"param_dtype": dtype}})[2]
        for width in (8, 12, 16)
    ]  # fmt: skip
    assert kept[1] - kept[0] == pytest.approx(kept[2] - kept[1], rel=0.05)
    assert kept[0] < kept[1]


def table(
    capsys: pytest.CaptureFixture[str], world: int, mapping: dict[str, dict[str, object]]
) -> dict[str, str]:
    config, *_ = plan(world, mapping)
    assert dry_run(config, world) == 0
    rows = [line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    return {row[0].strip(): row[1].strip() for row in rows}


def test_rows_that_experts_exchange_are_counted() -> None:
    """Qwen3-30B-A3B on 64 ranks, by hand: a token needs a given rank of 8 with probability
    1 - C(112, 8) / C(128, 8) = 0.667, so 7 times 0.667 rows of 2,048 bf16 values leave for it, and as many
    come back, in forward and in backward, in 48 layers."""
    sizes = {}
    for ep in (1, 8, 64):
        given = {"model": {"preset": "qwen3-30b-a3b"}, "mesh": {"ep": ep}, "data": {"seq_len": 4096}}
        config = build_config({**given, "train": {"global_batch_size": 256}}, {}, 64, [])
        assert config is not None
        sizes[ep] = expert_bytes(config, 64)
    tokens = 256 * 4096 / 64
    assert sizes[1] == 0
    assert sizes[8] == pytest.approx(48 * 4 * tokens * 7 * 0.667 * 2048 * 2, rel=2e-3)
    half = build_config(
        {**given, "mesh": {"ep": 8}, "train": {"global_batch_size": 256},
         "experts": {"dispatch_dtype": "float8", "dispatch_grad_dtype": "float8"}}, {}, 64, []
    )  # fmt: skip
    assert half is not None
    assert expert_bytes(half, 64) == pytest.approx(sizes[8] * (1 + (1 + 1 / 128) / 2) / 2, rel=1e-6)
    assert sizes[64] > sizes[8], "the table no longer recommends the largest ep"


def test_the_table_says_what_fits_and_what_the_host_needs(capsys: pytest.CaptureFixture[str]) -> None:
    large = {"model": {"preset": "mixtral-8x7b"}, "train": {"global_batch_size": 256}}
    found = table(capsys, 16, large)  # type: ignore[arg-type]
    assert (found["fits 80 GB, a tenth spared"], found["fits 141 GB, a tenth spared"]) == ("no", "yes")
    assert found["micro-batches per step"] == "4"
    assert found["rows to and from experts sent per step"] == "0.000 GiB", "ep 1"
    copied = float(found["main weights"].split()[0]) + float(found["optimizer moments"].split()[0])
    assert float(found["host memory (offload, copy for saves)"].split()[0]) == pytest.approx(copied, abs=2e-3)
    offloaded = table(capsys, 16, {**large, "fsdp": {"cpu_offload": True}, "checkpoint": {"interval": 0}})  # type: ignore[arg-type]
    assert offloaded["fits 80 GB, a tenth spared"] == "yes"
    assert float(offloaded["host memory (offload, copy for saves)"].split()[0]) > copied
