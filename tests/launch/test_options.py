"""Options of ``fsdmoe launch`` that no engine would take, or that it would take for something else."""

from pathlib import Path

import pytest

from fsdmoe.launch import slurm
from fsdmoe.launch.__main__ import main
from tests.support.elastic_kills import write_config

KUBERNETES = ("--on", "kubernetes", "--image", "fsdmoe:1")
SKYPILOT = ("--on", "skypilot")


def refusals(
    words: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The lines of a launch that is refused; no file may be left by it."""
    monkeypatch.chdir(folder)
    given = ["--on", "slurm", "--nodes", "1", "--gpus-per-node", "2"]
    given += [] if "--resume" in words else ["--config", str(write_config(folder, 20))]
    before = sorted(folder.rglob("*"))
    try:
        code = main([*given, *words])
    except SystemExit as ended:  # by the configuration
        code = int(str(ended.code))
    assert code == 2
    assert sorted(folder.rglob("*")) == before
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--on", "slrum"),
            "--on: expected one of kubernetes, ray, skypilot, slurm, got 'slrum'; did you mean slurm?",
        ),
        (("--nodes", "none"), "--nodes: expected a number above 0 or MIN:MAX, got 'none'; write 2, or 1:2"),
        (("--nodes", "4:2"), "--nodes: expected a number above 0 or MIN:MAX, got '4:2'; write 2:4"),
        (("--gpus-per-node", "0"), "--gpus-per-node: expected a number above 0, got '0'"),
        (
            (*SKYPILOT, "--nodes", "1:2"),
            "--nodes: expected one number with --on skypilot, whose tasks have a fixed",
        ),
        (("--gpu", "v100"), "--gpu: expected one of rtx-4090, "),
        (
            ("--time", "banana"),
            "--time: expected a limit as sbatch takes it, got 'banana'; write minutes (90)",
        ),
        (("--lead", "five"), "--lead: expected seconds from 1 to 65535, got 'five'"),
        (("--lead", "0"), "--lead: expected seconds from 1 to 65535, got '0'"),
        (("--lead", "70000"), "--lead: expected seconds from 1 to 65535, got '70000'"),
        (
            ("--time", "00:10:00", "--lead", "3600"),
            "--lead: expected more than 60 seconds of --time 00:10:00",
        ),
        (
            ("--time", "5"),
            "got 300 of the 300: every attempt would stop as it begins; lower it, or raise --time",
        ),
        (("--time", "6"), "--lead: expected more than 60 seconds of --time 6"),
        (("--sbatch", "partition=fast"), "got 'partition=fast'; write --sbatch=--partition=fast"),
        (("--sbatch=--time=10",), "got '--time=10'; write --time"),
        (("--sbatch=-N 3",), "got '-N 3'; write --nodes"),
        (("--sbatch=--signal=TERM@9",), "write --lead"),
        (("--sbatch=-t10",), "got '-t10'; write --time"),
        (("--sbatch=-N4",), "got '-N4'; write --nodes"),
        (("--sbatch=-n8",), "got '-n8'; drop it: each node has one task, its launcher"),
        (("--sbatch=-p fast --time=10",), "got '-p fast --time=10'; write --time"),
        (("--sbatch=--no-requeue",), "got '--no-requeue'; drop it: the job is requeued"),
        (("--sbatch=--output=/x",), "got '--output=/x'; write --write FOLDER"),
        (("--sbatch=-Jmine",), "got '-Jmine'; rename the file of the configuration"),
        (("--sbatch=-k",), "got '-k'; write --nodes MIN:MAX"),
        (("--on", "kubernetes"), "--image: expected the container image of the job, got none; name one"),
        (
            (*KUBERNETES, "--image", "https://ghcr.io/me/x"),
            "--image: expected a name such as ghcr.io/me/fsdmoe:1",
        ),
        ((*KUBERNETES, "--image", "My Image"), "--image: expected a name such as"),
        ((*KUBERNETES, "--shared", "claim"), "got 'claim'; write claim:/shared"),
        ((*KUBERNETES, "--shared", "claim:shared"), "got 'claim:shared'; write claim:/shared"),
        ((*KUBERNETES, "--shared", "claim:/"), "got 'claim:/'; write claim:/shared"),
        ((*KUBERNETES, "--shared", "My_Claim:/shared"), "got 'My_Claim:/shared'; write my-claim:/shared"),
        ((*SKYPILOT, "--shared", "Runs:/shared"), "--shared: expected NAME:/FOLDER, a bucket (3 to 63"),
        ((*SKYPILOT, "--shared", "s3://runs:/shared"), "write its name alone before the colon"),
        (
            (*SKYPILOT, "--shared", "https://my-bucket"),
            "got 'https://my-bucket'; write its name alone before the colon, without https://, as in",
        ),
        ((*KUBERNETES, "--shared", "nfs://server"), "without nfs://, as in data:/shared"),
        ((*KUBERNETES, "--time", "10"), "--time: expected --on slurm with it, got kubernetes; drop it"),
        (
            ("--on", "ray", "--shared", "a:/b"),
            "--shared: expected --on kubernetes or skypilot with it, got ray",
        ),
        (("--on", "ray", "--lead", ""), "--lead: expected --on slurm with it, got ray; drop it"),
        (("--plain",), "--plain: expected --on kubernetes with it, got slurm; drop it"),
        (("--dry-run",), "--dry-run: expected options of a run, got one that starts none; drop it"),
        (
            ("--check-only",),
            "--check-only: expected options of a run, got one that starts none; drop it: a job",
        ),
        (("--evaluate-only",), "drop it: a job is resumed until its run has ended; run fsdmoe train with it"),
        (("-p", "gpu"), "-p: an option of sbatch; write --sbatch=--partition=VALUE"),
        (("--world", "4"), "--world: expected options of a run"),
        (("--tme", "10"), "--tme: not an option; did you mean --time?"),
        (("--gpus", "8"), "--gpus: not an option; did you mean --gpus-per-node?"),
        (("--resume", "runs/a/"), "--resume: expected --config, since jobs always resume the run in"),
        (("--resume=runs/a/",), "write --config runs/a/config.toml"),
    ],
)
def test_an_option_that_no_engine_would_take_is_refused(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = refusals(words, tmp_path, capsys, monkeypatch)
    assert any(said in line for line in lines), lines
    assert all(line.startswith("fsdmoe: -") for line in lines), lines


def test_all_problems_of_a_command_come_together_and_without_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_options = ("--on", "kubernetes", "--shared", "claim", "--train.output_dir", "/x")
    lines = refusals((*of_options, "--optim.lrr", "1"), tmp_path, capsys, monkeypatch)
    assert [line.split(":")[1] for line in lines] == [" --image", " --shared", " optim.lrr"]
    lines = refusals((*of_options, "--checkpoint.interval", "-1"), tmp_path, capsys, monkeypatch)
    assert [line.split(":")[1] for line in lines] == [" --image", " --shared", " checkpoint.interval"]
    lines = refusals(("--config", "nothere", "--mesh.ep", "3"), tmp_path, capsys, monkeypatch)
    assert [line.split(":")[1] for line in lines] == [" --config"]
    assert main([]) == 2
    told = [line.split(":")[1] for line in capsys.readouterr().err.splitlines()]
    assert told == [" --on", " --nodes", " --gpus-per-node", " --config"]


@pytest.mark.parametrize(
    "words",
    [
        ("--time", "UNLIMITED", "--lead", "600"),
        ("--time", "7", "--sbatch=--gres=gpu:8", "--sbatch=-p fast"),
        (*KUBERNETES, "--image", "registry.local:5000/team/fsdmoe@sha256:" + "a" * 64),
        (*KUBERNETES, "--shared", "team.claim-1:/mnt/a_b"),
        (*SKYPILOT, "--shared", "my_bucket.2:/runs", "--nodes", "2:2"),
        ("--nodes", "1:2"),
        ("--sbatch=-A me", "--sbatch=-qhigh", "--sbatch=--constraint=a100", "--sbatch=--comment='-t 1"),
        ("--cpu", "--sbatch=--exclusive"),
    ],
)
def test_options_that_engines_take_are_taken(
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [
        "--on",
        "slurm",
        "--nodes",
        "1",
        "--gpus-per-node",
        "2",
        "--config",
        str(write_config(tmp_path, 20)),
    ]
    assert main([*given, *words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("gpus", [(), ("--cpu",)])
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_each_option_of_the_slurm_script_is_refused_a_second_time(
    nodes: str,
    gpus: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--on", "slurm", "--nodes", nodes, "--gpus-per-node", "2", "--write", "job", *gpus]
    given += ["--config", str(write_config(tmp_path, 20))]
    assert main(given) == 0
    lines = Path("job/job.sbatch").read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert "--requeue" in options
    capsys.readouterr()
    for option in options:
        assert main([*given, f"--sbatch={option}"]) == 2, option
        assert f"does not have, got {option!r}; " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("01:00:30", 3630),
        ("2-12", 60 * 3600),
        ("1-0:30", 86400 + 1800),
        ("1-00:00:01", 86401),
        ("0", float("inf")),
        ("infinite", float("inf")),
        ("24h", None),
        ("1:2:3:4", None),
        ("", None),
        ("-5", None),
    ],
)
def test_a_limit_is_read_as_slurm_does(limit: str, seconds: float | None) -> None:
    assert slurm.seconds(limit) == seconds
