"""Dense or MoE: the same FLOPs, parts of a step by kernel, curves compared and drawn; a run in small."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from tests.support.scripts import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_both_models_have_the_same_active_flops_but_for_the_router(tmp_path: Path) -> None:
    import dense_or_moe

    from fsdmoe.models.config import preset_config
    from fsdmoe.models.flops import forward_flops_per_token

    args = Namespace(tiny=False, corpus=tmp_path, rows=None, curves=None, others={}, dense=[], moe=[])
    found = {}
    for model in dense_or_moe.MODELS:
        given = dense_or_moe.options(model, dense_or_moe.Size(65_536), tmp_path, args)
        keys = dict(option.removeprefix("--").split("=", 1) for option in given[2:])
        assert int(keys["train.micro_batch_size"]) * int(keys["data.seq_len"]) == 65_536
        fields = {k.removeprefix("model."): int(v) for k, v in keys.items() if k.startswith("model.")}
        found[model] = forward_flops_per_token(preset_config("quickstart", **fields), 2048)
        own = Namespace(**{**vars(args), "moe": ["optim.lr=4e-4"]})
        given = dense_or_moe.options(model, dense_or_moe.Size(65_536), tmp_path, own)
        assert ("--optim.lr=4e-4" in given) == (model == "MoE")
    dense, moe = found["dense"], found["MoE"]
    assert dense.dense_mlp == moe.experts == 18 * 6 * 1152 * 3072
    assert moe.total - dense.total == moe.router == 18 * 2 * 1152 * 64


@pytest.mark.parametrize(
    ("kernel", "operation", "shapes", "part"),
    [
        ("_project_kernel", "_Experts", [], "experts: forward"),
        ("_project_kernel", "_ExpertsBackward", [], "experts: dgrad"),
        ("_weight_grad_kernel", "_ExpertsBackward", [], "experts: wgrad"),
        ("nvjet_tst_128x256", "aten::mm", [[65536, 1152], [1152, 32768]], "head"),
        ("nvjet_tst_128x256", "aten::mm", [[65536, 1152], [1152, 64]], "router"),
        ("nvjet_tst_128x256", "aten::addmm", [[1152, 1152], [1152, 65536]], "attention projections"),
        ("void at::native::indexing_backward_kernel<float>", "aten::index_put_", [], "embedding"),
        ("void cub::DeviceRadixSortOnesweepKernel", "aten::index_put_", [], "embedding"),
        ("_adamw_kernel", "", [], "optimizer"),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop", "", [], "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "", [], "attention"),
        ("void at::native::elementwise_kernel", "aten::add", [[65536, 1152]], "other"),
    ],
)
def test_a_kernel_belongs_to_the_part_that_launched_it(
    kernel: str, operation: str, shapes: list[list[int]], part: str
) -> None:
    from step_parts import Work, by_part

    from fsdmoe.models.config import preset_config

    model = preset_config("quickstart", vocab_size=32_768, num_experts=64, num_experts_per_tok=8)
    found = by_part([Work(kernel, operation, shapes, 2.0)], model)
    assert found[part] == 2.0
    assert sum(found.values()) == 2.0


def test_the_moe_must_be_lower_at_half_time_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dense_or_moe_curves import Curve, draw, report

    dense = Curve("dense", "adamw", 0, 4.0, [(1.0, 5.0), (2.0, 4.0), (4.0, 3.5)], tokens=8_000_000)
    moe = Curve("MoE", "adamw", 0, 4.0, [(1.0, 5.1), (2.0, 3.9), (4.0, 3.4)], tokens=7_000_000)
    assert report([dense, moe])
    assert "| adamw | 0 | 2 | 4.0000 | 3.9000 | -0.1000 | 4.0 M | 3.5 M |" in capsys.readouterr().out
    later = Curve("MoE", "adamw", 0, 4.0, [(1.0, 5.1), (2.0, 4.1), (4.0, 3.4)], tokens=7_000_000)
    assert not report([dense, later])
    assert not report([dense]), "nothing to compare with is no win"
    draw([dense, moe], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"dense_or_moe_light.svg", "dense_or_moe_dark.svg"}


@pytest.mark.full
def test_both_are_timed_and_trained_in_small(tmp_path: Path) -> None:
    out = tmp_path / "curves.json"
    common = ["--tiny", "--curves", "0.001", "--points", "2", "--json", str(out)]
    done = run_program("benchmarks/dense_or_moe.py", *common)
    done.wait()
    assert "the MoE's loss is lower everywhere" in done.stdout, done.stdout + done.stderr
    curves = json.loads(out.read_text())
    assert [curve["model"] for curve in curves] == ["dense", "MoE"]
    assert all(len(curve["points"]) == 2 and curve["steps"] >= 8 for curve in curves)
