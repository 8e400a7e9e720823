"""``fsdmoe launch`` checks a job and writes its files; Kubernetes objects follow their published schemas."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from fsdmoe.launch.__main__ import main
from fsdmoe.launch.job import ClusterJob
from fsdmoe.launch.kubernetes import CONFIG_FILE
from tests.support.elastic_kills import differences, environment, losses, uninterrupted, write_config
from tests.support.scripts import ROOT

SCHEMA = json.loads(Path(__file__).with_name("kubernetes_schema.json").read_text())
"""Of the objects and parts that are written, all fields: from kubeflow-trainer-api 2.3.0 on PyPI, which has
those of Kubernetes too, with the types but without the texts."""
TYPES = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}

Launch = Callable[..., Path]


@pytest.fixture
def launch(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Writes the job of a tiny run in an empty working directory; the folder of its files."""
    monkeypatch.chdir(tmp_path)

    def write(*words: str, nodes: str = "2", gpus: str = "1", config: str = "") -> Path:
        config = config or str(write_config(tmp_path, 20))
        given = ["--nodes", nodes, "--gpus-per-node", gpus, "--config", config]
        code = main([*words, *given])
        said = capsys.readouterr()
        assert code == 0, said.err
        sys.stderr.write(said.err)  # for tests of warnings
        return Path(said.out.splitlines()[0].removeprefix("written: ")).parent

    return write


@pytest.mark.parametrize("engine", [("kubernetes", "--image", "fsdmoe:1"), ("skypilot",)])
def test_a_job_whose_output_is_a_mount_of_the_nodes_is_written_here(
    launch: Launch, tmp_path: Path, engine: tuple[str, ...]
) -> None:
    assert launch("--on", *engine, "--shared", "disk:/shared") == tmp_path / "launch" / "run"
    assert launch("--on", *engine, "--write", "jobs") == tmp_path / "jobs"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("saves_to", "warned"),
    [
        ("--train.output_dir=runs/x", "train.output_dir: expected a folder in /shared"),
        ("--train.output_dir=/shared/../x", "write --train.output_dir /shared/x"),
        ("--checkpoint.folder=/sharedx", "checkpoint.folder: expected a folder in /shared"),
        ("--train.output_dir=/shared/x", ""),
        ("--checkpoint.folder=s3://bucket/x", ""),
    ],
)
def test_a_run_that_saves_outside_of_the_shared_mount_is_warned_of(
    launch: Launch, capsys: pytest.CaptureFixture[str], saves_to: str, warned: str
) -> None:
    launch("--on", "skypilot", "--cpu", "--shared", "disk:/shared", *saves_to.split("="))
    said = capsys.readouterr().err
    assert warned in said
    assert bool(said) == bool(warned)


@pytest.mark.parametrize(
    "given",
    [
        ("data.path", "corpus/**/*.jsonl"),
        ("data.tokenizer", "bpe/tokenizer.json"),
        ("checkpoint.load", "runs/x"),
    ],
)
def test_a_relative_path_is_warned_of_where_containers_have_disks_of_their_own(
    launch: Launch, capsys: pytest.CaptureFixture[str], given: tuple[str, str]
) -> None:
    key, path = given
    words = ["--on", "kubernetes", "--image", "registry/fsdmoe:1", "--cpu", "--shared", "disk:/shared"]
    words += ["--train.output_dir", "/shared/x"]
    words += ["--data.kind", "text"] if key == "data.path" else []
    launch(*words, f"--{key}", path)
    told = capsys.readouterr().err
    assert f"{key}: expected the path in the job's containers, got {path!r}" in told
    assert f"write /FOLDER/{path}," in told
    launch(*words, f"--{key}", f"/shared/{path}")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("engine", ["slurm", "ray"])
def test_a_job_whose_nodes_share_this_disk_is_written_into_its_run(
    launch: Launch, tmp_path: Path, engine: str
) -> None:
    assert launch("--on", engine) == tmp_path / "run" / "launch"
    assert launch("--on", engine, "--write", "jobs") == tmp_path / "jobs"


def test_a_folder_that_cannot_be_made_is_refused_by_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, 20)
    given = ["--nodes", "2", "--gpus-per-node", "1", "--config", str(config)]
    assert main(["--on", "skypilot", *given, "--write", str(config / "jobs")]) == 2
    assert "--write: cannot write" in capsys.readouterr().err


def check(value: Any, schema: dict[str, Any], path: str) -> None:
    """``value`` has the fields that its schema knows, of the types that it names."""
    if "ref" in schema:
        known = SCHEMA[schema["ref"]]
        assert value.keys() <= known["properties"].keys(), path
        assert value.keys() >= set(known["required"]), path
        for name, each in value.items():
            check(each, known["properties"][name], f"{path}.{name}")
        return
    if "type" in schema:
        assert isinstance(value, TYPES[schema["type"]]), path
    for number, each in enumerate(value if "items" in schema else ()):
        check(each, schema["items"], f"{path}[{number}]")
    for name, each in value.items() if "values" in schema else ():
        check(each, schema["values"], f"{path}.{name}")


@pytest.mark.parametrize("gpus", [(), ("--cpu",)])
@pytest.mark.parametrize("shared", [(), ("--shared", "disk:/shared")])
@pytest.mark.parametrize("plain", [(), ("--plain",)])
def test_kubernetes_objects_are_as_the_published_schemas_say(
    launch: Launch, gpus: tuple[str, ...], shared: tuple[str, ...], plain: tuple[str, ...]
) -> None:
    folder = launch("--on", "kubernetes", "--image", "fsdmoe:1", *gpus, *shared, *plain)
    whole = json.loads((folder / "job.json").read_text())
    objects = whole["items"] if whole["kind"] == "List" else [whole]
    assert [each["kind"] for each in objects] == (["Service", "Job"] if plain else ["TrainJob"])
    for each in objects:
        check(each, {"ref": each["kind"]}, each["kind"])
    text = json.dumps(objects)
    assert '"mountPath": "/dev/shm"' in text
    assert '"terminationGracePeriodSeconds": 300' in text


def test_a_packaged_configuration_goes_into_the_job(launch: Launch) -> None:
    folder = launch("--on", "kubernetes", "--image", "fsdmoe:1", config="quickstart")
    assert 'preset = \\"quickstart\\"' in (folder / "job.json").read_text()


def test_a_field_that_the_schema_does_not_know_is_found(launch: Launch) -> None:
    folder = launch("--on", "kubernetes", "--image", "fsdmoe:1")
    made = json.loads((folder / "job.json").read_text())
    made["spec"]["trainer"]["nodes"] = 2
    with pytest.raises(AssertionError, match=r"TrainJob\.spec\.trainer"):
        check(made, {"ref": "TrainJob"}, "TrainJob")


def container_of(folder: Path) -> dict[str, Any]:
    made = json.loads((folder / "job.json").read_text())
    if made["kind"] == "TrainJob":
        found: dict[str, Any] = made["spec"]["trainer"]
    else:
        found = made["items"][1]["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.full
@pytest.mark.parametrize("plain", [False, True])
def test_the_containers_command_trains_as_it_is_written(launch: Launch, tmp_path: Path, plain: bool) -> None:
    """In two processes that see what two pods would; the pods' names mean this machine."""
    folder = launch("--on", "kubernetes", "--image", "none", "--cpu", *(["--plain"] if plain else []))
    container = container_of(folder)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python").chmod(0o755)
    own = {each["name"]: each["value"] for each in container["env"]}
    own["PATH"] = f"{programs}:{environment()['PATH']}"
    # What the runtime torch-distributed sets, and what an Indexed Job does.
    pet = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": "29431",
    }
    own |= pet | {"MEETING_HOST": "localhost"}
    pods = [
        subprocess.Popen(
            container["command"],
            cwd=ROOT,
            env=environment(**own, PET_NODE_RANK=number, JOB_COMPLETION_INDEX=number),
            start_new_session=True,
        )
        for number in ("0", "1")
    ]
    try:
        assert [pod.wait(300) for pod in pods] == [0, 0]
    finally:
        for pod in pods:  # with the store, which ends with the first one
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()
        Path(CONFIG_FILE.format("run")).unlink()
    assert differences(losses(tmp_path / "run"), uninterrupted(tmp_path, 20)) < 1e-5


def test_a_slurm_job_saves_before_its_limit_and_goes_on_with_fewer_nodes(launch: Launch) -> None:
    folder = launch("--on", "slurm", "--sbatch=--partition=fast", "--lead", "90", nodes="1:2")
    text = (folder / "job.sbatch").read_text()
    for line in ("--nodes=1-2", "--gpus-per-node=1", "--signal=TERM@90", "--no-kill", "--partition=fast"):
        assert f"#SBATCH {line}\n" in text
    assert '--nnodes "1:$SLURM_JOB_NUM_NODES"' in text
    assert subprocess.run(["bash", "-n", str(folder / "job.sbatch")], check=False).returncode == 0


def test_a_skypilot_task_recovers_and_keeps_what_it_saved(launch: Launch) -> None:
    text = (launch("--on", "skypilot", "--gpu", "h200", "--shared", "runs:/runs") / "task.yaml").read_text()
    assert "accelerators: H200:1\n  use_spot: true\n" in text
    assert 'file_mounts:\n  "/runs":\n    name: "runs"\n' in text
    assert '--node-rank "$SKYPILOT_NODE_RANK"' in text


def test_a_skypilot_task_writes_the_configuration_that_it_reads(launch: Launch, tmp_path: Path) -> None:
    """git may ignore the file, and then SkyPilot does not send it."""
    text = (launch("--on", "skypilot", "--shared", "runs:/runs") / "task.yaml").read_text()
    script = dedent(text.partition("run: |\n")[2])
    written, _, train = script.partition("END_OF_CONFIGURATION'\n")[2].partition("END_OF_CONFIGURATION\n")
    (config,) = tmp_path.glob("*.toml")
    assert written == config.read_text()
    assert f"--config /tmp/{config.name}" in train
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_path_that_git_ignores_is_warned_of_where_the_folder_travels(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("corpus/\n")
    words = ["--on", "skypilot", "--shared", "disk:/shared", "--train.output_dir", "/shared/x"]
    for folder, warned in (("corpus/", True), ("texts/", False)):
        (tmp_path / folder).mkdir()
        launch(*words, "--data.kind", "text", "--data.path", folder)
        assert (f"data.path: {folder!r} is ignored by git" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("corpus", "is not in this folder, which travels with the job; put it here, or name one in /shared"),
        ("../corpus", "is outside of this folder"),
        ("/data/corpus", "is outside of this folder"),
        ("~/corpus", "is outside of this folder"),
        ("/shared/corpus", ""),
        ("texts", ""),
        ("texts/*.txt", ""),
    ],
)
def test_data_that_does_not_travel_with_the_folder_is_warned_of(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, said: str
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    words = ["--on", "skypilot", "--shared", "disk:/shared", "--train.output_dir", "/shared/x", "--cpu"]
    launch(*words, "--data.kind", "text", "--data.path", path)
    told = capsys.readouterr().err
    assert f"data.path: {path!r} {said}" in told if said else told == ""


@pytest.mark.parametrize("engine", [("kubernetes", "--image", "fsdmoe:1"), ("skypilot",)])
def test_the_folder_of_a_packaged_configuration_is_looked_for_as_its_text_names_it(
    launch: Launch, capsys: pytest.CaptureFixture[str], engine: tuple[str, ...]
) -> None:
    shared = ["--shared", "disk:/shared", "--train.output_dir", "/shared/x", "--checkpoint.interval", "5"]
    launch("--on", *engine, *shared, gpus="4", config="qwen3-30b-a3b-lora")
    told = capsys.readouterr().err
    assert "model.hf: " in told
    assert "'configs/qwen3-30b-a3b'" in told


@pytest.mark.parametrize(
    ("gpu", "accelerator"), [("a100", "A100-80GB"), ("rtx-4090", "RTX4090"), ("H100", "H100")]
)
def test_a_skypilot_task_has_skypilots_name_of_the_gpu(launch: Launch, gpu: str, accelerator: str) -> None:
    text = (launch("--on", "skypilot", "--gpu", gpu) / "task.yaml").read_text()
    assert f"  accelerators: {accelerator}:1\n" in text


@pytest.mark.parametrize(
    ("config_name", "name"),
    [("Qwen3_30B", "qwen3-30b"), ("7b", "run-7b"), ("___", "run"), ("a" * 39 + "-bcd", "a" * 39)],
)
def test_a_jobs_name_is_one_for_all_engines(config_name: str, name: str, tmp_path: Path) -> None:
    job = ClusterJob(
        config_name=config_name,
        min_nodes=1,
        nodes=1,
        ranks_per_node=1,
        has_gpus=True,
        arguments=(),
        folder=tmp_path,
    )
    assert job.name == name


def test_a_run_that_goes_on_gives_its_job_the_name_of_its_folder(launch: Launch, tmp_path: Path) -> None:
    kept = tmp_path / "my run" / "config.toml"
    kept.parent.mkdir()
    write_config(tmp_path, 20).rename(kept)
    text = (launch("--on", "skypilot", config=str(kept)) / "task.yaml").read_text()
    assert 'name: "my-run"\n' in text
    assert "cat > '/tmp/my run.toml' <<" in text


def test_data_that_is_not_here_is_warned_of_where_nodes_share_this_disk(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch("--on", "slurm", "--data.kind", "text", "--data.path", "mem")  # no option of sbatch
    assert "fsdmoe: warning: here, data.path: " in capsys.readouterr().err


def test_a_ray_job_is_a_program(launch: Launch) -> None:
    text = (launch("--on", "ray", nodes="1:2") / "ray_job.py").read_text()
    compile(text, "ray_job.py", "exec")
    assert "nodes=(1, 2)" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--partition", "fast"), "--partition: an option of sbatch; write --sbatch=--partition=VALUE"),
        (("--nodes", "2:4"), "--nnodes (--nodes): with 3 hosts of 1 ranks"),
        # for three nodes and for four, of which the job may have either
        (
            ("--nodes", "3:4", "--mesh.ep", "1", "--train.global_batch_size", "8"),
            "; 24 is one for each number of hosts",
        ),
        (("--checkpoint.load", "none"), "checkpoint.load: expected"),
        (("--checkpoint.interval", "-1"), "checkpoint.interval: expected saves"),
    ],
)
def test_a_job_that_could_not_go_on_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, 20)
    given = ["--on", "slurm", "--nodes", "1", "--gpus-per-node", "1", "--config", str(config), *words]
    assert main(given) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_clones_by_flex_beyond_a_node_are_refused(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path, 20))
    words = ("--on", "slurm", "--config", config, "--experts.dispatcher", "flex", "--experts.clones", "2")
    for fewest in ("2", "1:2"):
        assert main([*words, "--nodes", fewest, "--gpus-per-node", "1"]) == 2
        told = capsys.readouterr().err
        assert "got ep 2 over several, of 1 each (--gpus-per-node); set experts.dispatcher" in told
        assert "set experts.flex.domain where NVLink joins several nodes" in told
    fixed = ("--mesh.elastic", "false", "--experts.flex.domain", "1")
    with pytest.raises(SystemExit):  # by the configuration, which knows the domain
        main([*words, "--nodes", "2", "--gpus-per-node", "1", *fixed])
    assert "got ep 2 over several, of 1 each (experts.flex.domain)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    launch(*words[:2], *words[4:], nodes="2", gpus="2")
    launch(*words[:2], *words[4:], "--experts.flex.domain", "2", nodes="2", gpus="1")


def test_experts_beyond_a_node_come_with_their_predicted_price(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch("--on", "slurm", nodes="2", gpus="1")
    told = capsys.readouterr().err
    assert "mesh.ep: 2 ranks exchange activations in every layer, and NVLink joins 1" in told
    assert "name another GPU with --gpu" in told
    launch("--on", "slurm", "--gpu", "h200", nodes="2", gpus="1")
    told = capsys.readouterr().err
    assert "NVLink joins 1" in told
    assert "--gpu" not in told
    launch("--on", "slurm", "--mesh.ep", "1", nodes="2", gpus="1")
    assert "warning" not in capsys.readouterr().err
