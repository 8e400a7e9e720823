"""The dry run: real planner, any number of ranks, nothing built."""

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import train
from fsdmoe.config import build_config
from fsdmoe.config.schema import Config
from fsdmoe.plan.dry_run import dry_run, plan_run
from fsdmoe.plan.job import Job, Setting
from fsdmoe.plan.traffic import estimate_traffic
from fsdmoe.testing import requires_peft, requires_transformers
from tests.support.hf_tiny import tiny_config


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
    assert "\n  fsdp.units: " in capsys.readouterr().err


def test_every_group_that_matches_nothing_is_refused_with_its_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    groups = [{"params": ["embedding.*"], "lr": 1e-4}, {"params": ["layers.0.*"], "frozen": True}]
    config = build_config({"optim": {"groups": groups}}, {}, 1, [])
    assert config is not None
    assert dry_run(config, 1) == 2
    said = capsys.readouterr().err
    assert "optim.groups[0].params: expected names of parameters, got 'embedding.*'" in said
    assert "optim.groups[1].params: expected names of parameters, got 'layers.0.*'" in said
    assert "did you mean '*layers.0.*'?" in said


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
    printed = capsys.readouterr().out
    assert "optimizer moments" in printed
    assert "mesh.tp" not in printed, "rows of which there is nothing are left out"


@pytest.mark.parametrize(
    ("gpu", "row"),
    [("l40s", r"on l40s, 44 GiB +│ fits; about"), ("48", r"on a GPU of 48 GB, 44 GiB +│ fits; no time: name"),
     ("0.5GB", r"on a GPU of 0\.5 GB, 0 GiB +│ does not fit")],
)  # fmt: skip
def test_a_gpu_is_asked_for_by_name_or_by_memory(
    gpu: str, row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(plan(1, {})[0], 1, gpu=gpu) == 0
    printed = capsys.readouterr().out
    assert re.search(row, printed), printed
    assert "h100" not in printed


def test_an_unknown_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(plan(1, {})[0], 1, gpu="l40") == 2
    assert capsys.readouterr().err.startswith(
        "fsdmoe: --gpu: expected memory in GB (48), or one of rtx-4090,"
    )


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


def expert_bytes(config: Config, world_size: int) -> float:
    return estimate_traffic(Job.of(config), Setting.of(config, world_size)).experts


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
    assert found["on h100, 79 GiB"].startswith("does not fit: ")
    assert found["on h200, 140 GiB"].startswith("fits; about ")
    assert found["micro-batches per step"] == "4"
    assert float(found["slots for gathered weights"].split()[0]) > 0
    assert "rows to and from experts sent per step" not in found, "ep 1"
    copied = float(found["main weights"].split()[0]) + float(found["optimizer moments"].split()[0])
    assert float(found["host memory (offload, copy for saves)"].split()[0]) == pytest.approx(copied, abs=2e-2)
    offloaded = table(capsys, 16, {**large, "fsdp": {"cpu_offload": True}, "checkpoint": {"interval": 0}})  # type: ignore[arg-type]
    assert offloaded["on h100, 79 GiB"].startswith("fits; ")
    assert float(offloaded["host memory (offload, copy for saves)"].split()[0]) > copied


Ended = Callable[..., tuple[object, str]]


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ended:
    """``train.py --dry-run`` with these arguments: its exit code, and what it said."""

    def run(*arguments: object) -> tuple[object, str]:
        own = ["--train.output_dir", tmp_path / "run", "--data.cache_dir", tmp_path / "cache"]
        monkeypatch.setattr(sys, "argv", [str(word) for word in ("train.py", "--dry-run", *own, *arguments)])
        code: object = 0
        with contextlib.suppress(SystemExit):
            code = 2  # where a refusal leaves before it returns
            code = train.main()
        return code, re.sub("^fsdmoe: a plan for .*; loading torch\\n", "", capsys.readouterr().err)

    return run


def write_tokenizer(path: Path, num_tokens: int) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<|endoftext|>": 0, "?": 1} | {f"w{i}": i for i in range(2, num_tokens)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?")).save(str(path))


def test_what_training_would_refuse_is_refused_by_the_dry_run_all_at_once(
    tmp_path: Path, ended: Ended
) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 300)
    (tmp_path / "file").touch()
    wrong = [
        "--data.tokenizer", tmp_path, "--data.kind", "text", "--data.path", tmp_path / "nowhere",
        "--checkpoint.load", tmp_path / "no_checkpoint", "--checkpoint.folder", tmp_path / "file/saved",
        "--experts.replay", tmp_path / "no_tape", "--data.cache_dir", tmp_path / "file/cache",
    ]  # fmt: skip
    code, said = ended("--model.vocab_size", 264, *wrong)
    assert code == 2, "training refuses all of it"
    for line in (
        "model.vocab_size: the tokenizer has 300 tokens, the model 264; raise it to at least 300",
        f"data.path: expected a file, directory or glob, got '{tmp_path}/nowhere'",
        f"checkpoint.load: {tmp_path}/no_checkpoint: no checkpoint here",
        "checkpoint.folder: expected a folder to write to",
        "experts.replay: ",
        "data.cache_dir: expected a folder to write to",
    ):
        assert f"\n  {line}" in said
    assert "6 problems" in said
    # A wrong key does not hide what is wrong on the disk.
    code, said = ended("--model.vocab_size", 264, *wrong, "--mesh.ep", 3)
    assert code == 2
    assert "mesh.ep" in said
    assert "data.path: expected a file" in said
    # For a laptop that plans for a cluster.
    assert ended("--model.vocab_size", 264, *wrong, "--files-elsewhere") == (0, "")


def test_a_dry_run_that_finds_nothing_leaves_no_trace(tmp_path: Path, ended: Ended) -> None:
    assert ended() == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "content", "problem"),
    [
        ("text", b"\x89PNG\xff\xfe", "is not UTF-8 text"),
        ("text", b"", "are empty"),
        ("jsonl", b"plain text\n", "not JSON"),
        ("jsonl", b'{"content": "a"}\n', "no 'text' in the record, which has content"),
        ("jsonl", b"\n\n", "has no documents"),
        ("chat", b'{"text": "a"}\n', "no 'messages' in the record"),
        ("chat", b'{"messages": [{"role": "user"}]}\n', "message 0 needs a `role`"),
        ("tokens", b"12345", "no multiple of 2 bytes"),
        ("tokens", b"\x00\x10", "model.vocab_size to 4097 or more"),
    ],
)
def test_files_that_are_not_of_their_kind_are_refused(
    tmp_path: Path, ended: Ended, kind: str, content: bytes, problem: str
) -> None:
    file = tmp_path / ("data.bin" if kind == "tokens" else "data")
    file.write_bytes(content)
    code, said = ended("--data.kind", kind, "--data.path", file)
    assert code == 2, "training refuses it"
    assert problem in said


@requires_transformers
def test_a_folder_without_weights_and_parts_that_its_model_has_not_are_refused(
    tmp_path: Path, ended: Ended
) -> None:
    hf = tmp_path / "hf"
    tiny_config("qwen3_moe", vocab_size=264).save_pretrained(hf)
    run = ["--model.hf", hf, "--data.kind", "python-stdlib", "--data.tokenizer", "bytes"]
    code, said = ended(*run, "--memory.recompute", "mla_up")
    assert code == 2, "training refuses it"
    assert "model.hf: expected weights (*.safetensors) next to the config.json, got none" in said
    assert "memory.recompute: expected parts that the model has, got mla_up" in said
    assert ended(*run, "--model.random_weights") == (0, "")
    code, said = ended(*run, "--model.random_weights", "--fsdp.units", "NoSuchLayer")
    assert code == 2, "training refuses it"
    assert "fsdp.units: expected modules" in said


@requires_peft
def test_adapters_that_match_nothing_are_refused_with_the_rest(tmp_path: Path, ended: Ended) -> None:
    hf = tmp_path / "hf"
    tiny_config("qwen3_moe", vocab_size=264).save_pretrained(hf)
    run = ["--model.hf", hf, "--model.random_weights", "--data.tokenizer", "bytes", "--data.kind", "text"]
    adapter = ["--adapter.rank", 4, "--adapter.target_modules", "q_proj,v_projj"]
    code, said = ended(*run, "--data.path", tmp_path / "nowhere", *adapter)
    assert code == 2
    assert (
        "adapter.target_modules: expected the end of a name in the model of model.hf, got 'v_projj'" in said
    )
    assert "data.path: expected a file" in said, "with the rest"


def test_a_checkpoint_of_weights_alone_is_refused_for_more(tmp_path: Path, ended: Ended) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "hf").mkdir()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "hf/model.safetensors").write_bytes(content)
    (tmp_path / "hf/config.json").write_text("{}")
    code, said = ended("--checkpoint.load", tmp_path / "hf")
    assert code == 2, "training refuses it"
    assert "is a Hugging Face model, which has weights only" in said
    assert ended("--checkpoint.load", tmp_path / "hf", "--checkpoint.load_only_model") == (0, "")
    (tmp_path / "hf/model.safetensors").write_bytes(content[:-1])
    code, said = ended("--checkpoint.load", tmp_path / "hf", "--checkpoint.load_only_model")
    assert code == 2, "of a file that was cut off"
    assert "checkpoint.load: damaged checkpoint: hf/model.safetensors: " in said
