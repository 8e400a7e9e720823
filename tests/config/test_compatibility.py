"""The table of what goes with what: each pair stands in it once, and nothing about two features is said
anywhere else."""

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fsdmoe
from fsdmoe.config.compatibility import TABLE, check_compatibility, refuse_incompatible
from fsdmoe.config.compatibility_page import page
from fsdmoe.config.schema import SECTIONS
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.features import CANNOT, NOT_BUILT, RIGHT, Row
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.fsdp.config import FSDPConfig, FSDPPolicy
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.parallel.build import ParallelPolicy
from fsdmoe.precision.config import PrecisionConfig
from tests.support.config_building import build

ROOT = Path(fsdmoe.__file__).parent.parent
KEY = re.compile(rf"(?<![\w./])({'|'.join(SECTIONS)})\.(?!py\b)[a-z_{{]")
# In a source that does not begin two keys, no message names two.
BEGUN = re.compile(rf"(?<![\w./])({'|'.join(SECTIONS)})\.")
# Messages that name keys of several sections, and are no pair of features.
NO_PAIRS = {
    "optim/moments.py: float8 (and precision.main_rounding": "formats that keep blocks",
    "health/checksums.py: values that must be the same": "what a run found, and where to go on from",
    "health/duties.py: the loss jumped again": "what a run found, and what to change",
    "mesh.py: by_node expected each group": "a size that does not suit the nodes",
    "checkpoint/__main__.py: load it with --checkpoint.load": "a command to type",
    "checkpoint/checkpointer.py: train.output_dir": "where checkpoints are looked for",
    "config/first_start.py: checkpoint.load: expected": "what a folder holds already, and a command to type",
    "config/help.py: override one field": "help",
    "config/compatibility_page.py: ": "the page of the table",
    "config/names_elsewhere.py: ": "what names of other tools are here",
    "config/hf.py: expected data to train": "a key that is missing",
    "config/hf.py: expected the tokenizer of the model": "a key that is missing",
    "config/warnings.py: ": "warnings refuse nothing",
    "context_parallel/config.py: expected a multiple of mesh.cp": "a size that does not divide another",
    "context_parallel/config.py: splits": "a size that does not divide another",
    "context_parallel/planner.py: does not fit": "a size that is too small",
    "data/config.py: expected a fraction above 0": "a key that is missing",
    "data/pretokenised.py: or set data.vocab_size": "a size that is too small",
    "core/failures.py: ": "advice after a failure",
    "feed/feed.py: expected held-out rows": "files that hold nothing to evaluate on",
    "parallel/frozen_layers.py: expected frozen projections": "found out of the model: nothing is frozen",
    "graphs/expert_shapes.py: ": "found out of each weight of the model",
    "graphs/static_inputs.py: ": "found out of the kernels of the device",
    "huggingface/peft_api.py: ": "found out of the model",
    "core/lifecycle.py: ": "found out in training",
    "memory/pinned.py: ": "a limit of the machine",
    "observe/dead_experts.py: ": "a warning",
    "plan/fake_step.py: ": "what a fake step cannot follow, not a run",
    "precision/loss_scale.py: ": "a warning",
    "parallel/quantized_layers.py: computes on DTensors": "found out of the model",
    "train.py: nothing left to train": "advice",
}

TWO: dict[str, Any] = {
    "mesh": {"ep": 2},
    "experts": {"sub_batches": 2},
    "train": {"micro_batch_size": 2, "global_batch_size": 4},
}
REFUSED: dict[str, dict[str, dict[str, Any]]] = {
    "train.micro_batch_size": {"train": {"micro_batch_size": 1}},
    "train.graphs": {"train": {"graphs": "layer"}},
    "experts.chunks": {"experts": {"chunks": 2}},
    "experts.dispatcher": {"experts": {"dispatcher": "flex"}},
    "experts.record": {"experts": {"record": "somewhere"}},
    "experts.balance.global_batch": {"experts": {"balance": {"global_batch": 0.01}}},
    "experts.balance.device_scope": {
        "experts": {"balance": {"device": 0.01, "device_scope": "global_batch"}}
    },
    "memory.recompute": {"memory": {"recompute": ["layer"]}},
    "memory.offload": {"memory": {"offload": ["qkv"]}},
    "context_parallel.dynamic": {"context_parallel": {"dynamic": True}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_sub_batches_do_not_go_with_is_refused_by_its_key(key: str) -> None:
    mapping = {name: TWO.get(name, {}) | REFUSED[key].get(name, {}) for name in TWO | REFUSED[key]}
    config, problems = build(mapping, 2)
    assert config is None
    (found,) = [line for line in problems if line.startswith("experts.sub_batches: ")]
    assert f"got {key} = " in found
    assert f"set {key} = " in found


def test_parts_that_are_recomputed_and_split_rows_go_with_them() -> None:
    for changed in ({"memory": {"recompute": ["norms", "experts"]}}, {"mesh": {"ep": 2, "cp": 2}}):
        config, problems = build(TWO | changed, 2)
        assert config is not None, problems


def test_there_is_at_least_one() -> None:
    _, problems = build({"experts": {"sub_batches": 0}})
    assert any(line.startswith("experts.sub_batches: expected 1 or more, got 0") for line in problems)


def test_wrapped_models_are_refused() -> None:
    config, problems = build(TWO, 2)
    assert config is not None, problems
    with pytest.raises(ConfigError, match=r"layers of a wrapped model .* got model\.hf = \"somewhere\""):
        refuse_incompatible(replace(config, model=replace(config.model, hf="somewhere")))


@pytest.mark.parametrize(
    ("experts", "is_refused"),
    [
        ({"selection": "expert_choice"}, True),
        ({"selection": "forced_balance"}, False),
        ({"capacity": {"factor": 1.25}}, False),
    ],
)
def test_adapters_are_refused_where_experts_choose_and_not_in_benchmarks(
    experts: dict[str, Any], is_refused: bool
) -> None:
    config, problems = build({"experts": experts})
    assert config is not None, problems
    adapted = replace(config, model=replace(config.model, hf="somewhere"), adapter=AdapterConfig(rank=4))
    found = [line for _, line in check_compatibility(adapted)]
    assert bool(found) == is_refused, found
    assert all("an adapter has no place for how tokens are routed" in line for line in found)


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string that is not a docstring, its parts joined; what is filled in as {}."""
    described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            continue
        if id(node) in described or id(node) in inner:
            continue
        inner |= {id(each) for each in ast.walk(node)}
        yield joined(node)


def joined(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(joined(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return joined(node.left) + joined(node.right) if isinstance(node, ast.BinOp) else ""


def named_pairs() -> dict[str, str]:
    """Messages outside of the table that name keys of two sections, by file."""
    table = {ROOT / "fsdmoe/config/compatibility.py", ROOT / "fsdmoe/config/features.py"}
    found = {}
    for path in sorted((ROOT / "fsdmoe").rglob("*.py")):
        source = path.read_text()
        if path not in table and len(set(BEGUN.findall(source))) > 1:
            for text in texts(ast.parse(source)):
                if len(set(KEY.findall(text))) > 1:
                    found[f"{path.relative_to(ROOT / 'fsdmoe')}: {text}"] = text
    return found


def test_nothing_about_two_features_is_said_outside_of_the_table() -> None:
    used = set()
    wrong = []
    for place in named_pairs():
        path, _, text = place.partition(": ")
        excuses = [key for key in NO_PAIRS if key.startswith(f"{path}: ") and key.partition(": ")[2] in text]
        used.update(excuses)
        wrong += [] if excuses else [place]
    assert not wrong, "\n".join(["make these rows of fsdmoe/config/compatibility.py:", *wrong])
    assert used == set(NO_PAIRS), f"said nowhere: {set(NO_PAIRS) - used}"


def test_a_pair_stands_in_the_table_once_and_its_verdict_is_one_of_three() -> None:
    pairs = Counter(frozenset((row.feature, row.other)) for row in TABLE)
    assert [sorted(feature.name for feature in pair) for pair, count in pairs.items() if count > 1] == []
    assert {row.verdict for row in TABLE} == {RIGHT, CANNOT, NOT_BUILT}


def test_each_refusal_has_a_reason_and_each_other_pair_a_test() -> None:
    for row in TABLE:
        if row.verdict == RIGHT:
            assert (ROOT / row.reason).is_file(), row.reason
        else:
            assert row.reason
            assert "measured" not in row.reason


def test_keys_of_features_are_keys_of_the_configuration() -> None:
    config, _ = build()
    assert config is not None
    for feature in {feature for row in TABLE for feature in (row.feature, row.other)}:
        section, key, *_ = feature.key.split(".")
        assert hasattr(getattr(config, section), key), feature.key


def test_the_page_of_the_documentation_is_up_to_date() -> None:
    assert (ROOT / "docs/compatibility.md").read_text() == page(), (
        "python -m fsdmoe.config.compatibility_page docs/compatibility.md"
    )


def test_whoever_builds_by_hand_meets_the_same_words() -> None:
    precision = PrecisionConfig(recipe="fp8_blockwise", emulate=True, quantized_weights=True)
    given = {"fsdp": FSDPConfig(lean=True), "precision": precision}
    for made in (ParallelPolicy, FSDPPolicy):
        with pytest.raises(
            ConfigError, match=r"fsdp\.lean: .*, got precision\.quantized_weights = true; set"
        ):
            made(**given)
    with pytest.raises(
        ConfigError, match=r"precision\.recipe: .*, got experts\.compute = \"sequential\"; set"
    ):
        ParallelPolicy(precision=precision, experts=ExpertsConfig(compute="sequential"))


def test_rows_that_stand_next_to_a_part_are_in_the_table() -> None:
    for path in sorted((ROOT / "fsdmoe").rglob("*.py")):
        if re.search(r"from fsdmoe\.features import .*\bRow\b", path.read_text()):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for value in vars(importlib.import_module(name)).values():
                rows = value if isinstance(value, tuple) else (value,)
                assert [row for row in rows if isinstance(row, Row) and row not in TABLE] == []
