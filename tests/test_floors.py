"""The house: imports go down only, leaves do not import each other, and importing never acts."""

import ast
from pathlib import Path

import fsdmoe

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fsdmoe"

BASEMENT = {"compat", "errors", "labels", "lifecycle", "mesh", "ring_send_recv", "placement"}
FLOORS = {
    1: {"kernels", "context_parallel", "tensor_parallel", "data", "observe", "memory", "precision"},
    2: {"experts", "fsdp"},
    3: {"models", "huggingface", "feed", "optim", "checkpoint"},
    4: {
        "auto_model",
        "parallel",
        "config",
        "config_attention",
        "config_disk",
        "config_hf",
        "config_reader",
        "dry_run",
    },
}
FLOOR_OF = dict.fromkeys(BASEMENT, 0) | {room: floor for floor, rooms in FLOORS.items() for room in rooms}
# The harness is for tests; the package's face imports all that it shows.
NOT_IN_THE_HOUSE = {"testing", "__init__"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fsdmoe":
            parts = node.module.split(".")
            rooms |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: expected absolute imports")
        elif isinstance(node, ast.Import):
            rooms |= {a.name.split(".")[1] for a in node.names if a.name.startswith("fsdmoe.")}
    return rooms


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if room_of(path) not in NOT_IN_THE_HOUSE]


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in sources()} <= set(FLOOR_OF)


def test_imports_go_down_only_and_rooms_of_a_wing_never_meet() -> None:
    wrong = []
    for path in sources():
        room = room_of(path)
        for other in imported_rooms(path) - {room}:
            side_by_side = FLOOR_OF[other] == FLOOR_OF[room] and FLOOR_OF[room] in (1, 2)
            if other == "testing" or FLOOR_OF[other] > FLOOR_OF[room] or side_by_side:
                wrong.append(f"{path.relative_to(ROOT)} (floor {FLOOR_OF[room]}) imports {other}")
    assert not wrong, "\n".join(wrong)


def test_the_tree_has_the_rooms_of_the_design() -> None:
    rooms = {
        "config.py",
        "mesh.py",
        "parallel.py",
        "experts",
        "fsdp",
        "kernels",
        "models",
        "huggingface",
        "feed",
        "checkpoint",
        "optim",
    }
    rooms |= {"data", "precision", "observe", "testing"}
    assert rooms <= {path.name for path in PACKAGE.iterdir()}
    assert {"train.py", "configs", "tests", "pyproject.toml"} <= {path.name for path in ROOT.iterdir()}


def test_train_stays_readable() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) < 200


def test_no_file_outgrows_one_idea() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in PACKAGE.rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 400
    }
    assert not long


def test_hardly_a_function_takes_more_than_eight_parameters() -> None:
    """Triton kernels and operators aside, whose signatures are what a compiler reads."""
    many = []
    for path in (ROOT / "train.py", *sorted(PACKAGE.rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [arg.arg for arg in given if arg.arg not in ("self", "cls", "ctx")]
            is_schema = any(
                word in ast.unparse(d) for d in node.decorator_list for word in ("triton.", "_op")
            )
            if len(names) > 8 and not is_schema:
                many.append(f"{path.relative_to(ROOT)}: {node.name} takes {len(names)}")
    assert len(many) <= 3, "\n".join(many)


def test_fsdmoe_parallelize_is_the_function_whatever_was_imported_before() -> None:
    names = {path.stem for path in PACKAGE.iterdir()}
    shown = set(fsdmoe.__all__) - {"checkpoint"}
    assert not names & shown, f"a module and a function of one name: {names & shown}"


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert not silent
