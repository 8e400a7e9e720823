"""The order of the packages: imports go down only and never in a circle, every class has its own name, and
files and signatures stay small."""

import ast
import functools
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import fsdmoe

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fsdmoe"

FLOORS = {
    0: {"core", "mesh", "precision"},
    1: {"kernels", "context_parallel", "tensor_parallel", "data", "observe", "memory"},
    2: {"experts", "fsdp"},
    3: {"models", "huggingface", "feed", "optim", "checkpoint", "fsdp2"},
    4: {"parallel", "config", "graphs", "health"},
    5: {"check", "launch", "plan", "run", "train"},
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}
# The harness is for tests; the package's own __init__ imports all that it exports.
WITHOUT_A_FLOOR = {"testing", "__init__", "__main__"}
BY_NAME = {"importlib.import_module", "import_module", "__import__"}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


LOOKED_AT = (ast.Import, ast.ImportFrom, ast.Call, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Those of a kind that any test here looks at: walking through all others takes seconds."""
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, LOOKED_AT)]


def is_import_by_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return False
    last = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
    return last in ("import_module", "__import__") and ast.unparse(node.func) in BY_NAME


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_packages(path: Path) -> set[str]:
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fsdmoe":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: expected absolute imports")
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("fsdmoe.")}
        elif isinstance(node, ast.Call) and is_import_by_name(node):
            names = {ast.literal_eval(arg) for arg in node.args if isinstance(arg, ast.Constant)}
            found |= {name.split(".")[1] for name in names if name.startswith("fsdmoe.")}
    return found


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if package_of(path) not in WITHOUT_A_FLOOR]


def test_every_package_has_a_floor() -> None:
    assert {package_of(path) for path in sources()} <= set(FLOOR_OF)


def test_imports_go_down_only_and_lower_floors_hold_independent_packages() -> None:
    wrong = []
    for path in sources():
        package = package_of(path)
        # A command stands above all floors: nothing imports it.
        floor = max(FLOORS) if path.name == "__main__.py" else FLOOR_OF[package]
        for other in imported_packages(path) - {package}:
            side_by_side = FLOOR_OF[other] == floor and floor in (1, 2)
            if other == "testing" or FLOOR_OF[other] > floor or side_by_side:
                wrong.append(f"{path.relative_to(ROOT)} (floor {floor}) imports {other}")
    assert not wrong, "\n".join(wrong)


def imported_modules(name: str, path: Path, modules: Collection[str]) -> set[str]:
    """The modules of fsdmoe that a module imports anywhere in it, for types, inside functions or by
    ``importlib`` too. A module of another package comes with the ``__init__``s above it."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {module if module in modules else node.module for module in whole}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and is_import_by_name(node):
            found |= {ast.literal_eval(arg) for arg in node.args if isinstance(arg, ast.Constant)}
    found &= set(modules)
    inits = {module.rpartition(".")[0] for module in found}
    inits |= {init.rpartition(".")[0] for init in inits}
    return found | {init for init in inits & set(modules) if not f"{name}.".startswith(f"{init}.")}


def find_circle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """The nodes of one circle, its first node again at the end; empty where there is none."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        circle: list[str] = []
        for other in sorted(graph[node]) if node not in done else ():
            circle = circle or visit(other, [*path, node])
        done.add(node)
        return circle

    return next((circle for node in sorted(graph) if (circle := visit(node, []))), [])


def test_no_module_imports_itself_through_others() -> None:
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: imported_modules(name, path, modules) for name, path in modules.items()}
    assert graph["fsdmoe.experts.parallel"] >= {"fsdmoe.experts.moe", "fsdmoe.mesh"}
    circle = find_circle(graph)
    assert not circle, " -> ".join(circle)


def test_what_is_imported_by_name_is_a_literal_that_the_search_for_circles_sees() -> None:
    unseen = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and is_import_by_name(node)
        and not isinstance(node.args[0], ast.Constant)
        and path != PACKAGE / "core/lazy.py"  # whose names stand as imports in each package's __init__
    ]
    assert not unseen, "\n".join(unseen)
    path = PACKAGE / "kernels/backend.py"
    packages = {f"fsdmoe.kernels.{name}" for name in ("triton", "gluon")}
    assert imported_modules("fsdmoe.kernels.backend", path, packages) == packages


def test_a_circle_is_found() -> None:
    assert find_circle({"a": ["b", "c"], "b": ["c"], "c": []}) == []
    assert find_circle({"a": ["b"], "b": ["c"], "c": ["d", "b"], "d": []}) == ["b", "c", "b"]


def test_no_two_classes_share_a_name() -> None:
    owners: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in owners.items() if len(paths) > 1} == {}


def test_the_tree_has_the_packages_of_the_design() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {
        "__init__.py",
        "__main__.py",
        "mesh.py",
        "train.py",
    }
    assert set(FLOOR_OF) - {"mesh", "train"} <= {path.name for path in PACKAGE.iterdir()}
    assert {"train.py", "configs", "tests", "pyproject.toml"} <= {path.name for path in ROOT.iterdir()}


def test_tests_of_a_package_mirror_its_modules() -> None:
    """What tests more than one module is in tests/behaviour; what holds no tests is in tests/support."""
    wrong = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        *folders, name = path.relative_to(ROOT / "tests").parts
        if name in ("__init__.py", "conftest.py") or folders[:1] == ["support"]:
            continue
        module = name.removeprefix("test_").replace("main.py", "__main__.py")
        is_free = not folders or folders[0] in ("behaviour", "benchmarks")
        if module == name or not (is_free or PACKAGE.joinpath(*folders, module).exists()):
            wrong.append(str(path.relative_to(ROOT)))
    assert not wrong, "\n".join(wrong)


def test_tests_that_need_a_gpu_are_in_files_of_their_own() -> None:
    """Named test_*_gpu.py: a call that asks for anything else sees no GPU, and would skip them everywhere."""
    needs = re.compile(
        r"^(@|pytestmark = )\[?requires_(gpu|nccl)|device=\"cuda\"|skipif\(.*GPU", re.MULTILINE
    )
    others = [path for path in (ROOT / "tests").rglob("test_*.py") if not path.name.endswith("_gpu.py")]
    assert not [str(path) for path in others if path != Path(__file__) and needs.search(path.read_text())]


def test_no_file_outgrows_one_idea() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in PACKAGE.rglob("*.py")
        if (n := len(p.read_text().splitlines())) > 600
    }
    assert not long


def test_hardly_a_function_takes_more_than_eight_parameters() -> None:
    """Kernels and operators aside, whose signatures are what a compiler reads."""
    many = []
    for path in (ROOT / "train.py", *sorted(PACKAGE.rglob("*.py"))):
        for node in nodes_of(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [arg.arg for arg in given if arg.arg not in ("self", "cls", "ctx")]
            if len(names) <= 8:
                continue
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if not any(word in decorators for word in ("triton.", "gluon.", "_op")):
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
        if path.read_text().strip() and ast.get_docstring(tree_of(path)) is None
    ]
    assert not silent


def test_the_picture_of_the_floors_names_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    picture = text.partition("## The floors")[2].split("```")[1]
    rows = re.split(r"^(\d) ", picture, flags=re.MULTILINE)[1:]
    drawn = {int(floor): set(re.findall(r"\w+", names)) for floor, names in zip(rows[::2], rows[1::2])}
    assert not [name for name, floor in FLOOR_OF.items() if name not in drawn[floor]]
