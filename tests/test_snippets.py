"""Every code block of README.md and the guides works: Python runs as it was pasted, configurations and
``train.py`` commands are read by ``train.py``, and other commands name programs and options that exist.
``make test-full`` runs the commands too; ``test_journeys.py`` follows six readers over several pages."""

import contextlib
import re
import shutil
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from fsdmoe.checkpoint.__main__ import _parser as checkpoint_parser
from fsdmoe.checkpoint.__main__ import main
from fsdmoe.config import build_config, load_config
from fsdmoe.data.__main__ import parser as data_parser
from fsdmoe.launch.options import option_problems, word_problems
from fsdmoe.launch.options import parser as launch_parser
from fsdmoe.observe.__main__ import parser as observe_parser
from fsdmoe.plan.__main__ import parser as plan_parser
from fsdmoe.plan.dry_run import plan_run
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.pasted import run_pasted
from tests.support.scripts import run_program, started_ranks
from tests.support.snippet_names import NAMES
from tests.support.snippets import LANGUAGES, PAGES, ROOT, Block, Command, blocks, commands

pytestmark = requires_transformers
BLOCKS = [block for page in PAGES for block in blocks(page)]
# What a reader may have beside Python: commands that are not looked into.
SHELL = {
    "[",
    "cat",
    "curl",
    "do",
    "done",
    "export",
    "head",
    "kill",
    "sed",
    "source",
    "tensorboard",
    "true",
    "wait",
    "while",
}
MY_TOML = '[data]\nkind = "text"\npath = "corpus"\n[train]\nglobal_batch_size = 64\n'
FINETUNE = [block for block in BLOCKS if block.page.name == "finetune.md" and block.language == "bash"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as a reader has it, with the files that the pages call the reader's own."""
    folder = tmp_path_factory.mktemp("reader")
    for name in (
        "train.py",
        "benchmarks",
        "configs",
        "examples",
        "fsdmoe",
        "tests",
        "docs",
        "README.md",
        "Makefile",
    ):
        (folder / name).symlink_to(ROOT / name)
    made = run_program("examples/make_tiny_model.py", str(folder / "tutorial/model"))
    assert made.wait() == 0, made.stderr
    (folder / "Qwen3-30B-A3B").symlink_to(folder / "tutorial/model")
    (folder / "tokenizer.json").symlink_to(folder / "tutorial/model/tokenizer.json")
    (folder / "runs").mkdir()
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()  # of the environment that runs this test, which is active
    with contextlib.chdir(folder):  # what the tutorial, the first page with files, has the reader write
        write_files(folder, ROOT / "docs/finetune.md")
        exec(written_rows(), {})
    (folder / "corpus").mkdir()
    for number in range(4):
        (folder / f"corpus/{number}.txt").write_text(f"Text {number} to train on. " * 200)
    return folder


# What a block is


def test_every_block_says_what_it_is() -> None:
    assert {block.language for block in BLOCKS} <= set(LANGUAGES)
    for page in PAGES:
        fences = sum(line.startswith("```") for line in page.read_text().splitlines())
        assert fences == 2 * len(blocks(page)), f"{page.name}: a fence that no block has"


# Python


def requirements(block: Block) -> tuple[int, str]:
    """Ranks, and what else it needs."""
    found = re.match(r"(\d+) ranks(?:; )?", block.needs)
    return (int(found[1]), block.needs[found.end() :]) if found else (1, block.needs)


def is_taken(block: Block) -> bool:
    """Models that transformers has split are refused where it is older."""
    is_split = re.search("tp_plan|apply_tensor_parallelism", block.text)
    return not is_split or tuple(map(int, version("transformers").split(".")[:2])) >= (5, 22)


def is_run(block: Block) -> bool:
    # The loop of observe.md is a sketch of a training loop, without one.
    is_python = block.language == "python" and block.page.name != "observe.md"
    return is_python and is_taken(block) and requirements(block)[1] in NAMES


def run_blocks(folder: str, world_size: int) -> list[str]:
    """All Python blocks for that many ranks; those of a page share their names, in order."""
    names: dict[str, dict[str, Any]] = {}
    done = []
    for block in filter(is_run, BLOCKS):
        ranks, needs = requirements(block)
        if ranks != world_size:
            continue
        work = Path(folder, block.page.stem)
        work.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (work / "tutorial").symlink_to(Path(folder, "tutorial"))
        scope = names.setdefault(block.page.name, {"__name__": "__main__"})
        scope |= NAMES[needs]()
        with contextlib.chdir(work):
            exec(compile(block.text, block.name, "exec"), scope)
        done.append(block.name)
    return done


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_python_runs_as_pasted(folder: Path, world_size: int) -> None:
    done = run_ranks(run_blocks, world_size, str(folder), world_size, fresh=True)[0]
    assert done == [block.name for block in BLOCKS if is_run(block) and requirements(block)[0] == world_size]


def test_python_that_needs_more_can_be_read() -> None:
    rest = [block for block in BLOCKS if block.language == "python" and not is_run(block)]
    assert all(block.needs or block.page.name == "observe.md" for block in rest)
    for block in rest:
        compile(block.text, block.name, "exec")


# Configurations


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=lambda block: block.name)
def test_configurations_are_understood(folder: Path, block: Block) -> None:
    problems: list[str] = []
    written = tomllib.loads(block.text)
    with contextlib.chdir(folder):
        build_config(written, {}, written.get("mesh", {}).get("ep", 2), problems)
    assert not problems


# Commands


def write_files(folder: Path, page: Path) -> None:
    """What the page has the reader write: its first configuration as my.toml, and files in commands."""
    configurations = [block.text for block in blocks(page) if block.language == "toml"]
    (folder / "my.toml").write_text(configurations[0] if configurations else MY_TOML)
    for name, text in re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", page.read_text(), re.M | re.S):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def written_rows() -> str:
    """The Python that writes the tutorial's chats."""
    written = re.search(r"^python - <<'END'\n(.*?)^END$", FINETUNE[1].text, re.M | re.S)
    assert written
    return written[1]


def check_train(command: Command) -> None:
    words = [word for word in command.program[1:] if word not in ("--dry-run", "--files-elsewhere")]
    if words[:1] == ["--help"]:
        return
    if "--resume" in words:  # there is no such run yet: its other options go with any configuration
        place = words.index("--resume")
        words[place : place + 2] = ["--config", "configs/quickstart.toml"]
    if "--model.hf" in words and not Path(words[words.index("--model.hf") + 1]).exists():
        words[words.index("--model.hf") + 1] = "tutorial/model"  # the page has made another
    if "--world" not in words:
        words += ["--world", str(command.world_size)]
    with pytest.raises(SystemExit) as ended:
        load_config([*words, "--print-config"])
    assert ended.value.code == 0, f"{command.block.name}: {' '.join(command.words)}"
    if "--dry-run" in command.program and any(word.startswith("configs/") for word in words):
        assert load_config(command.program[1:]).problems == (), f"{command.block.name}: no such files here"


def check_script(command: Command) -> None:
    script, *words = command.program
    if script.startswith("runs/"):
        return  # the page has made it
    source = (ROOT / script).read_text()
    unknown = [word for word in words if word.startswith("--") and f'"{word}"' not in source]
    assert not unknown, f"{command.block.name}: {script} does not know {unknown}"


def check_module(command: Command) -> None:
    _, module, *words = command.program
    if module == "fsdmoe.checkpoint":
        checkpoint_parser("fsdmoe checkpoint")[0].parse_args(words)
    elif module == "fsdmoe.plan":
        plan_parser().parse_args(words)
    elif module in ("fsdmoe.plan.fake_step", "fsdmoe.train"):
        check_train(Command(command.block, ("train.py", *words)))
    elif module == "fsdmoe.observe":
        observe_parser().parse_args(words)
    elif module == "fsdmoe.data":
        assert not data_parser().parse_known_args(words)[1], command
    elif module == "fsdmoe.config.compatibility_page":
        assert words == ["docs/compatibility.md"], command
    else:
        assert module in ("venv", "fsdmoe.launch.store", "tests.support.random_programs.run"), command


def check(command: Command) -> None:
    """That the command's program exists and takes its options."""
    program = command.program
    if not program or program[0] in SHELL or program[0] in ("-", "-c"):
        return
    if program[0] == "train.py":
        check_train(command)
    elif program[0].endswith(".py"):
        check_script(command)
    elif program[0] == "-m":
        check_module(command)
    elif program[0] == "make":
        assert re.search(rf"^{program[1]}:", (ROOT / "Makefile").read_text(), re.M), command
    elif program[0] == "pytest":
        assert all((ROOT / word).exists() for word in program if word.startswith("tests/")), command
    elif program[:2] == ("fsdmoe", "launch"):
        options, others = launch_parser().parse_known_args(program[2:])
        assert not option_problems(options) + word_problems(others, options.on), command
        check_train(Command(command.block, ("train.py", *others, "--world", str(command.world_size))))
    else:
        assert program[:2] == ("pip", "install"), f"{command.block.name}: {' '.join(command.words)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(
    folder: Path, page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(folder, page)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for block in blocks(page):
        if block.language == "bash":
            for command in commands(block):
                check(command)


def trains(command: Command) -> bool:
    """Whether it starts train.py on the quick start's configuration, and not only to look at it."""
    looks = {"--check-only", "--dry-run", "--print-config", "--help", "--evaluate-only"} & set(command.words)
    return command.program[:1] == ("train.py",) and "configs/quickstart.toml" in command.words and not looks


def test_runs_of_the_guides_are_short_and_each_page_has_folders_of_its_own() -> None:
    """In the folder of another page's run, a run would have nothing left to train, or another model."""
    owners: dict[str, str] = {}
    for block in BLOCKS:
        for command in filter(
            trains, commands(block) if block.language == "bash" and not block.needs else []
        ):
            words = command.words
            assert {"--train.steps", "--train.output_dir"} <= set(words), f"{block.name}: {' '.join(words)}"
            folder = words[words.index("--train.output_dir") + 1]
            assert int(words[words.index("--train.steps") + 1]) <= 30, block.name
            assert owners.setdefault(folder, block.page.name) == block.page.name, f"{block.name}: {folder}"


# The tutorial, and what else would take long


def start(command: Command, folder: Path, *more: str) -> str:
    """What the command prints, with its files in the reader's folder; ranks are forked, not launched."""
    script, *words = (re.sub(r"^tutorial/", f"{folder}/tutorial/", word) for word in command.program)
    if command.words[0] != "torchrun":
        program = run_program(script, *words)
        assert program.wait() == 0, program.stdout + program.stderr
        return program.stdout
    with started_ranks(command.world_size, script, *words, *more) as ranks:
        for rank in ranks:
            assert rank.wait() == 0, rank.stdout + rank.stderr
        return ranks[0].stdout + ranks[0].stderr


def test_the_tutorial_trains_resumes_under_another_mesh_exports_and_answers(folder: Path) -> None:
    """With few steps and no interruption: what it answers is nonsense."""
    write_files(folder, ROOT / "docs/finetune.md")
    config = folder / "tutorial/finetune.toml"
    config.write_text(config.read_text().replace('"tutorial/', f'"{folder}/tutorial/'))
    found = [command for block in FINETUNE if not block.needs for command in commands(block)]
    first, then = (command for command in found if command.words[0] == "torchrun")
    (to_hf,) = (command for command in found if "to-hf" in command.words)
    (ask,) = (command for command in found if "examples/generate.py" in command.words)
    short = ["--train.eval_interval", "-1", "--observe.tensorboard", "false", "--train.steps"]
    with contextlib.chdir(folder):
        start(first, folder, *short, "2")
        assert "ep 1 -> 2" in start(then, folder, *short, "4")
        assert main(to_hf.program[2:]) == 0
    assert start(ask, folder)


def takes_part(block: Block) -> bool:
    """Whether a block is run by the long suite: all that trains, plans or looks at something."""
    programs = {command.program[0] for command in commands(block) if command.program}
    others = {"make", "pytest", "pip", "tensorboard"} | {p for p in programs if p.startswith("benchmarks/")}
    is_own = block.page.name in ("finetune.md", "many_machines.md")
    ends = not any("--serve" in command.words for command in commands(block))
    return block.language == "bash" and not block.needs and not is_own and ends and not programs & others


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_in_bash(folder: Path, page: Path) -> None:
    write_files(folder, page)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    script = "".join(block.text for block in blocks(page) if takes_part(block))
    (folder / "runs").mkdir()
    if "import datasets" in script:
        pytest.importorskip("datasets")
    # A fifth of the steps: what they come to is checked by the journeys.
    run_pasted(
        folder, re.sub(r"(?<=steps )(= )?(\d+)", lambda m: f"{m[1] or ''}{-(-int(m[2]) // 5)}", script)
    )


PLANS = re.findall(
    r"^\| .*? \| (\d+) × (\d+) GB \| `python train.py (.*?)` \|$",
    (ROOT / "docs/choosing.md").read_text(),
    re.M,
)


@pytest.mark.full
@pytest.mark.parametrize(("gpus", "gigabytes", "options"), PLANS)
def test_plans_to_start_from_fit(folder: Path, gpus: str, gigabytes: str, options: str) -> None:
    with contextlib.chdir(folder):
        command = load_config(options.split())
    assert command.world_size == int(gpus)
    plan, activations = plan_run(command.config, command.world_size)
    assert plan.peak(activations) < int(gigabytes) * 1e9 * 11 / 12
