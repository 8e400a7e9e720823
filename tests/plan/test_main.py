"""The command: answers, files that the dry run takes, and refusals that name the key."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from fsdmoe.config import build_config
from fsdmoe.plan import GPUS
from fsdmoe.plan.__main__ import main, parser
from fsdmoe.plan.dry_run import dry_run
from fsdmoe.plan.source import Request, read_request

CONFIGS = Path(__file__).parent.parent / "support/model_configs"


def planned(capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, gpus: int, *more: str) -> dict:  # type: ignore[type-arg]
    """The command's JSON, once the dry run has taken the file that it wrote."""
    file = tmp_path / "best.toml"
    assert main([model, "--gpus", str(gpus), "--json", "--toml", str(file), *more]) == 0
    found = json.loads(capsys.readouterr().out)
    problems: list[str] = []
    config = build_config(tomllib.loads(file.read_text()), {}, gpus, problems, needs_data=False)
    assert config is not None, problems
    (gpu,) = re.findall(r"--dry-run .*--gpu (\S+)", file.read_text())
    assert dry_run(config, gpus, gpu=gpu) == 0
    assert "fits; about" in capsys.readouterr().out
    assert found["best"]["fits"]
    assert found["best"]["memory_total"] == sum(found["best"]["memory"].values())
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "gpus", "billions"),
    [("qwen3-30b-a3b", 8, 30.5), ("mixtral-8x22b", 64, 140.6), ("deepseek-v3", 256, 682.6)],
)
@pytest.mark.full
def test_large_models_are_planned_and_their_files_pass_the_dry_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, gpus: int, billions: float
) -> None:
    found = planned(capsys, tmp_path, model, gpus, "--gpu", "h100", "--seq", "4096")
    assert found["parameters"] / 1e9 == pytest.approx(billions, rel=2e-3)
    assert found["num_settings"] > 1000


def test_a_file_keeps_its_own_keys_and_its_plan_passes_the_dry_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = tmp_path / "given.toml"
    given.write_text(
        '[model]\npreset = "tiny-qwen3"\n[data]\nseq_len = 64\n[optim]\nlr = 1e-5\n'
        '[train]\nglobal_batch_size = 12\n[memory]\nkeep = "rows"\n'
    )
    found = planned(capsys, tmp_path, str(given), 4)
    assert found["config"]["memory"]["keep"] == "rows"
    assert found["config"]["optim"]["lr"] == 1e-5
    assert found["global_batch_size"] == 12
    assert found["config"]["data"]["seq_len"] == 64


def test_a_packaged_configuration_is_planned_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reading = read_request(Request("clusters/qwen3-235b-a22b-256xh100-bf16", 256))
    assert reading.config.model.preset == "qwen3-235b-a22b"


def test_meshes_that_are_as_fast_share_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = tmp_path / "given.toml"
    given.write_text(
        '[model]\npreset = "tiny-qwen3"\n[data]\nseq_len = 4096\n[train]\nglobal_batch_size = 8\n'
    )
    assert main([str(given), "--gpus", "4", "--top", "50"]) == 0
    printed = capsys.readouterr().out
    times = re.findall(r"^│ +\d+ +│[^│]*│ ([\d.e-]+) +│", printed, re.M)
    assert len(times) == len(set(times)) > 1, printed


@pytest.mark.full
def test_a_simpler_setting_that_is_nearly_as_fast_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    found = re.search(r"Simpler, at 1\.0\d x the time: number [2-9]\d*, ([^.]*)\.", printed)
    assert found
    assert "micro-batch" in found[1]
    assert "recompute" not in found[1]


@pytest.mark.full
def test_a_wrapped_model_is_planned_by_its_own_parameters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """gpt-oss-120b: 116.8 billion parameters; its attention has sinks, so its rows are not split."""
    pytest.importorskip("transformers")
    path = CONFIGS / "gpt-oss-120b/config.json"
    found = planned(capsys, tmp_path, str(path), 32, "--gpu", "h100", "--seq", "8192")
    assert found["parameters"] / 1e9 == pytest.approx(116.8, rel=1e-3)
    assert found["best"]["degrees"]["tp"] == found["best"]["degrees"]["cp"] == 1
    assert found["config"]["model"] == {"hf": str(path.parent)}


def test_uneven_routing_gets_clones_where_they_pay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fixed = ("--ep", "8", "--tp", "1", "--cp", "1")
    found = planned(capsys, tmp_path, "qwen3-30b-a3b", 8, *fixed, "--skew", "1.8")
    assert found["config"]["experts"]["clones"] == 2
    assert found["skew"]["time"] < 1.05
    assert "clones 2" in found["best"]["setting"]
    assert "clones" not in planned(capsys, tmp_path, "qwen3-30b-a3b", 8, *fixed)["config"]["experts"]
    # Somebody said how many; and what goes with no clones gets none.
    file = tmp_path / "one.toml"
    file.write_text('[model]\npreset = "qwen3-30b-a3b"\n[experts]\ndispatcher = "flex"\nflex.rows = 1.1\n')
    assert main([str(file), "--gpus", "64", "--gpu", "h100", *fixed[2:], "--ep", "64", "--skew", "1.8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "are too small for that: steps are run a second time" in printed
    assert "clones" not in printed, "ranks of several NVLink domains reach no slots of each other"
    file.write_text(file.read_text() + "clones = 1\n")
    assert main([str(file), "--gpus", "64", "--gpu", "h100", *fixed[2:], "--ep", "64", "--skew", "1.8"]) == 2
    assert "--ep: no mesh of 64 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["qwen3-30b-a3", "--gpus", "8"],
            "model: expected a .toml file or the name of a packaged one, .*did you mean",
        ),
        (["qwen3-30b-a3b", "--gpus", "0"], "--gpus: expected a number from 1"),
        (
            ["qwen3-30b-a3b", "--gpus", "8", "--gpu", "RTX4090"],
            "--gpu: expected one of rtx-4090.*did you mean rtx-4090",
        ),
        (
            ["qwen3-30b-a3b", "--gpus", "8", "--gpu", "v100"],  # another GPU, not a slip
            "--gpu: expected one of rtx-4090.*got 'v100'; choose one of them",
        ),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "H100-SXM5"], "; did you mean h100"),
        (["qwen3-30b-a3b", "--gpus", "8", "--seq", "-4"], "--seq: expected a number from 1"),
        (["qwen3-30b-a3b", "--gpus", "8", "--host-memory", "0"], "--host-memory: expected a number from 1"),
        (["qwen3-30b-a3b", "--gpus", "8", "--fabric", "x"], "--fabric: expected one of"),
        (["nowhere.toml", "--gpus", "8"], "--config: no file at 'nowhere.toml'"),
        (["qwen3-30b-a3b"], "fsdmoe: --gpus: expected, got none"),
        (["--gpus", "8"], "fsdmoe: model: expected, got none"),
        (["qwen3-30b-a3b", "--gpus", "8", "--gpu", "80"], "fits so many GB says train.py --dry-run --gpu 80"),
        (
            ["qwen3-30b-a3b", "--config", "quickstart", "--gpus", "8"],
            "--config: expected a model or --config",
        ),
        (["--config", "nowhere.toml", "--gpus", "8"], "--config: no file at 'nowhere.toml'"),
        ([f"{CONFIGS}s", "--gpus", "8"], f"did you mean {CONFIGS}"),
    ],
)
def test_what_is_wrong_is_named_with_its_fix(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)


def test_what_cannot_be_read_or_fitted_ends_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[model]\npreset = "tiny-qwen3"\nnum_expert = 4\n')
    assert main([str(wrong), "--gpus", "2"]) == 2
    assert "model.num_expert" in capsys.readouterr().err
    assert main(["mixtral-8x22b", "--gpus", "2"]) == 1
    assert "--gpus: nothing fits" in capsys.readouterr().err
    assert main(["tiny-qwen3", "--gpus", "1", "--toml", str(tmp_path / "no/folder.toml")]) == 2
    assert "--toml: cannot write" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_an_emulated_run_is_not_sold_at_the_price_of_bf16(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    text = '[model]\npreset = "tiny-qwen3"\n[data]\nseq_len = 64\n'
    file.write_text(f'{text}[precision]\nrecipe = "{recipe}"\nemulate = true\nbackend = "own"\n')
    command = [str(file), "--gpus", "2", "--gpu", "gb200", "--ep", "2"]
    assert main([*command, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["tokens_per_second"] is None, "bf16's rate"
    assert f"{recipe} of attention" in best["why_no_price"] or f"{recipe} of experts" in best["why_no_price"]
    assert "no time (precision.emulate" in best["toml"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "no price" in printed
    assert "The order is that of the same run in bf16" in printed
    assert "fsdmoe never ran on such a card" in printed


def test_the_guide_names_every_gpu_and_every_option() -> None:
    guide = (Path(__file__).parents[2] / "docs/planning.md").read_text()
    options = {option for action in parser()._actions for option in action.option_strings} - {"-h", "--help"}
    assert {
        name for name in {*GPUS, *options} if f"`{name}`" not in guide and f"`{name} " not in guide
    } == set()
