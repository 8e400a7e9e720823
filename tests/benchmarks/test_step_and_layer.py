"""The benchmarks of the step and of the layer: who takes part, what they conclude, and a run in small."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import types
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.support.scripts import run_program

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_the_best_peer_is_what_ratios_refer_to(capsys: pytest.CaptureFixture[str]) -> None:
    import train_step
    from train_step_contenders import Problem

    from fsdmoe.models import preset_config

    problem = Problem(preset_config("tiny-qwen3"), 4, 4096, "bfloat16", torch.device("cpu"), "eager")
    losses = [12.0, 11.9, 11.8]
    found = {
        "fsdmoe": [train_step.Outcome("fsdmoe", losses, ms=ms, peak_gib=60.0) for ms in (180.0, 220.0)],
        "torchtitan compiled": [train_step.Outcome("torchtitan compiled", losses, ms=300.0, peak_gib=50.0)],
        "torchtitan blocks": [train_step.Outcome("torchtitan blocks", losses, ms=260.0, peak_gib=80.0)],
        "transformers": [train_step.Outcome("transformers", [12.0, 11.9, 13.0], ms=400.0, peak_gib=70.0)],
        "transformers compiled": [train_step.Outcome("transformers compiled", error="out of memory")],
    }
    rows = train_step.summarise(found, problem)
    names = ["fsdmoe", "torchtitan compiled", "torchtitan blocks", "transformers"]
    assert [row.contender for row in rows] == names
    assert rows[0].tokens_per_s == pytest.approx(4 * 4096 / 0.2)
    assert not train_step.report(rows, problem), "losses that differ must be seen"
    printed = capsys.readouterr().out
    assert "fsdmoe: 1.300 x the tokens/s of torchtitan blocks" in printed
    assert "at 0.750 of its peak memory" in printed
    assert "NO: transformers" in printed


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_without_a_peer_ratios_refer_to_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    import train_step
    from train_step_contenders import Problem

    from fsdmoe.models import preset_config

    problem = Problem(preset_config("tiny-qwen3"), 4, 4096, "bfloat16", torch.device("cpu"), "eager")
    times = {"fsdmoe, fp32 main": 220.0, "fsdmoe fp8, fp32 main": 200.0}
    found = {name: [train_step.Outcome(name, [12.0, 11.9, 11.8], ms=ms)] for name, ms in times.items()}
    assert train_step.report(train_step.summarise(found, problem), problem)
    head, first, second = capsys.readouterr().out.strip().splitlines()[:3]
    assert "x the first" in head
    assert " 1.000 " in first
    assert " 1.100 " in second


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_both_forms_of_torchtitan_are_measured_unless_told_otherwise() -> None:
    import train_step

    assert {"fsdmoe", "torchtitan blocks", "torchtitan compiled"} <= set(train_step.DEFAULT)


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_a_step_peer_that_is_not_installed_is_left_out_or_refused_when_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from train_step_contenders import choose

    monkeypatch.setitem(sys.modules, "torchtitan", None)
    assert choose(None, ("fsdmoe", "torchtitan blocks", "transformers")) == ["fsdmoe", "transformers"]
    assert (
        "'torchtitan blocks' needs torchtitan==0.2.2, which is not installed; left out"
        in capsys.readouterr().out
    )
    with pytest.raises(
        SystemExit, match=r"'torchtitan blocks' needs torchtitan==0\.2\.2, which is not installed"
    ):
        choose(["fsdmoe", "torchtitan blocks"], ("fsdmoe",))


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_another_trees_layer_has_a_name_of_its_own(tmp_path: Path) -> None:
    import moe_layer_before

    (tmp_path / "tree" / "fsdmoe" / "kernels").mkdir(parents=True)
    source = 'from fsdmoe.kernels import ops\nregister("fsdmoe::project")\nfsdmoe_extra = 1\n'
    (tmp_path / "tree" / "fsdmoe" / "kernels" / "ops.py").write_text(source)
    moe_layer_before.copy_renamed(tmp_path / "tree", tmp_path)
    assert (tmp_path / moe_layer_before.NAME / "kernels" / "ops.py").read_text() == (
        'from fsdmoe_before.kernels import ops\nregister("fsdmoe_before::project")\nfsdmoe_extra = 1\n'
    )
    with pytest.raises(SystemExit, match="expected a folder that holds fsdmoe/"):
        moe_layer_before.load(tmp_path / "nothing")


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_a_layer_peer_that_is_unknown_or_not_installed_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moe_layer_contenders import choose

    monkeypatch.setitem(sys.modules, "sonicmoe", None)
    found = choose(None)
    assert "fsdmoe" in found
    assert "SonicMoE" not in found
    assert "SonicMoE is not installed: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"SonicMoE is not installed: .* it needs sonic-moe=="):
        choose(["SonicMoE"])
    with pytest.raises(SystemExit, match=r"expected some of fsdmoe, .*SonicMoE, got 'sonic'"):
        choose(["sonic"])


def _sonic_reference(x_TD, router_ED, w1, b1, w2, b2, top_k, *_):  # type: ignore[no-untyped-def]
    """As SonicMoE documents it: w1 (2I, H, E) with gate and up rows in turn, w2 (H, I, E)."""
    logits_TE = x_TD @ router_ED.T
    top, ids_TK = logits_TE.topk(top_k)
    y_TD = torch.zeros_like(x_TD)
    for k in range(top_k):
        projected = torch.einsum("td,ndt->tn", x_TD, w1[:, :, ids_TK[:, k]])
        hidden = torch.nn.functional.silu(projected[:, ::2]) * projected[:, 1::2]
        y_TD = y_TD + top.softmax(-1)[:, k, None] * torch.einsum("tn,dnt->td", hidden, w2[:, :, ids_TK[:, k]])
    return y_TD, logits_TE, None


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_sonic_moe_gets_the_weights_of_the_others_in_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_layer_contenders import Shape, SonicLayer, transformers_layer

    shape = Shape(d=8, n=4, num_experts=4, top_k=2, num_tokens=6)
    data = types.SimpleNamespace(
        shape=shape, router=torch.randn(4, 8), gate_up=torch.randn(4, 8, 8), down=torch.randn(4, 8, 4)
    )
    enums = types.SimpleNamespace(ActivationType=types.SimpleNamespace(SWIGLU="swiglu"))
    functional = types.SimpleNamespace(moe_TC_softmax_topk_layer=_sonic_reference)
    for name, module in (("", types.ModuleType("sonicmoe")), (".enums", enums), (".functional", functional)):
        monkeypatch.setitem(sys.modules, f"sonicmoe{name}", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    x_BSD = torch.randn(1, shape.num_tokens, shape.d)
    expected = transformers_layer(data)(x_BSD)
    torch.testing.assert_close(SonicLayer(data)(x_BSD), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_benchmarks_on_path")
@pytest.mark.parametrize("differs", [{"error": 0.5}, {"grad_error": float("nan")}, {}])
def test_a_layer_that_computes_something_else_is_seen(
    differs: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    import moe_layer
    from moe_layer_contenders import SHAPES

    results = [moe_layer.Result("fsdmoe", ms=1.0), moe_layer.Result("SonicMoE", ms=0.5, **differs)]
    case = {
        "skewed": False,
        "load": 1.0,
        "base": "best peer",
        "results": [asdict(result) for result in results],
    }
    assert moe_layer.report(case, SHAPES[0]) is not bool(differs)
    assert ("OTHER RESULTS" in capsys.readouterr().out) is bool(differs)


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_kernels_are_judged_by_what_rounding_does_to_the_curve() -> None:
    import loss_curve

    plain, wide = [2.0, 1.0], [2.02, 1.01]
    near = {"fused": [2.01, 1.005], "plain": plain, "wide": wide}
    far = {"fused": [2.2, 1.1], "plain": plain, "wide": wide}
    assert loss_curve.report(near)
    assert not loss_curve.report(far)


@pytest.mark.usefixtures("_benchmarks_on_path")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train_step", "train_step.py: needs a GPU; try --tiny"),
        ("moe_layer", "moe_layer.py: needs a GPU"),
        ("memory", "memory.py: needs a GPU; try --tiny"),
        ("emulated_run", "emulated_run.py: needs a GPU; try --tiny"),
        ("fabric_check", "fabric_check.py: needs a GPU"),
        ("loss_curve", "loss_curve.py: needs a GPU; try --tiny"),
        ("planned_memory", "planned_memory.py: needs a GPU; try --tiny"),
    ],
)
def test_a_benchmark_that_needs_a_gpu_says_so_in_a_line(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [f"benchmarks/{name}.py"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    assert end.value.code == said


@pytest.mark.usefixtures("_benchmarks_on_path")
def test_the_time_of_a_call_is_that_of_one_of_its_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    import timing

    calls: list[float] = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 7.0 + sum(calls))
    found = timing.milliseconds(lambda: calls.append(0.02), 4, torch.device("cpu"))
    assert len(calls) == 4
    assert found == pytest.approx(20)


@pytest.mark.full
@pytest.mark.parametrize("together", [False, True])
def test_a_small_step_runs_and_kernels_forbidden_or_not_give_the_same_losses(
    tmp_path: Path, together: bool
) -> None:
    out = tmp_path / "step.json"
    arguments = ["--tiny", "--rounds", "1", "--contenders", "fsdmoe", "fsdmoe torch", "--json", str(out)]
    arguments += ["--together"] if together else []
    done = run_program("benchmarks/train_step.py", *arguments)
    assert done.wait() == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["fsdmoe", "fsdmoe torch"]
    assert all(row["tokens_per_s"] > 0 and row["loss_gap"] == 0 for row in rows)


@pytest.mark.usefixtures("_benchmarks_on_path")
@pytest.mark.parametrize(("num_contenders", "rounds", "times"), [(2, 2, 1), (4, 4, 1), (6, 6, 1), (5, 10, 2)])
def test_every_contender_follows_every_other_as_often(num_contenders: int, rounds: int, times: int) -> None:
    from timing import changing_orders

    names = [f"contender {i}" for i in range(num_contenders)]
    orders = changing_orders(names, rounds)
    assert all(sorted(order) == names for order in orders)
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert pairs == dict.fromkeys(itertools.permutations(names, 2), times)
