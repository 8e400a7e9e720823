"""Files and overrides compose, and everything wrong is said at once, with the fix."""

import re
import tomllib
from pathlib import Path

import pytest

from fsdmoe.models.config import PRESETS, preset_config
from tests.support.config_building import build

ROOT = Path(__file__).parents[2]


def test_overrides_win_over_the_file_and_the_file_over_the_defaults() -> None:
    config, problems = build({"train": {"steps": 7, "seed": 3}, "optim": {"lr": 1}}, train__steps="9")
    assert not problems
    assert (config.train.steps, config.train.seed, config.optim.lr) == (9, 3, 1.0)


def test_fields_of_a_preset_can_be_changed_one_by_one() -> None:
    config, _ = build({"model": {"preset": "qwen3-30b-a3b", "num_hidden_layers": 4}})
    assert (config.model.num_hidden_layers, config.model.num_experts) == (4, 128)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid(preset: str) -> None:
    assert build({"model": {"preset": preset}})[1] == []
    assert preset_config(preset).preset == preset


BAD = {
    "unknown key": ({"mesh": {"epp": 2}}, {}, 1, r"mesh\.epp: unknown key; did you mean mesh\.ep\?"),
    "unknown section": ({"meshs": {}}, {}, 1, r"meshs: unknown section; did you mean \[mesh\]\?"),
    "unknown option": (
        {},
        {"trian__steps": "5"},
        1,
        r"--trian\.steps: unknown option; did you mean train\.steps\?",
    ),
    "unknown nested option": (
        {},
        {"train__stepz": "5"},
        1,
        r"train\.stepz: unknown key; did you mean train\.steps\?",
    ),
    "coefficient for a table": (
        {"experts": {"balance": 0.01}},
        {},
        1,
        r"experts\.balance: .*; write experts\.balance\.sequence = 0\.01 \(or another key .*global_batch",
    ),
    "factor for a table that may be none": (
        {"experts": {"capacity": 1.5}},
        {},
        1,
        r"experts\.capacity: .*; write experts\.capacity\.factor = 1\.5",
    ),
    "true for a table": (
        {"optim": {"muon": True}},
        {},
        1,
        r"optim\.muon: .*; write optim\.muon\.momentum = VALUE",
    ),
    "true for a list of parts": (
        {"memory": {"recompute": True}},
        {},
        1,
        r'memory\.recompute: .*; write \["layer"\], or a list of others of norms, ',
    ),
    "true in a list of parts": ({"memory": {"recompute": [True]}}, {}, 1, r"got True; choose one of them"),
    "a text for a list of texts": (
        {"train": {"sample_prompts": "Once"}},
        {},
        1,
        r'train\.sample_prompts: .*; write \["Once"\]',
    ),
    "a time for a number of steps": (
        {"checkpoint": {"interval": "30min"}},
        {},
        1,
        r"checkpoint\.interval: .*\(steps between saves\)",
    ),
    "minutes for seconds": (
        {"health": {"hang_seconds": "10m"}},
        {},
        1,
        r"health\.hang_seconds: .*; write a number \(seconds\)",
    ),
    "an optimizer in eight bits": (
        {"optim": {"name": "paged_adamw_8bit"}},
        {},
        1,
        r'write "adamw" with optim\.moment_dtype = "torchao_8bit"',
    ),
    "section that is a word of another tool": (
        {"adapter": "lora"},
        {},
        1,
        r"adapter: .*; did you mean adapter\.kind .*\? Write \[adapter\] and its keys",
    ),
    "section that is no table": ({"train": 5}, {}, 1, r"train: expected a table, got 5"),
    "string for a number": (
        {"train": {"steps": "many"}},
        {},
        1,
        r"train\.steps: expected a whole number, got 'many'",
    ),
    "number for a string": (
        {"train": {"output_dir": 3}},
        {},
        1,
        r"train\.output_dir: expected a string, got 3",
    ),
    "fraction for a count": ({"mesh": {"ep": 1.5}}, {}, 1, r"mesh\.ep: expected a whole number, got 1\.5"),
    "bool for a count": ({"mesh": {"ep": True}}, {}, 1, r"mesh\.ep: expected a whole number, got True"),
    "word for a bool": (
        {"fsdp": {"lean": "yes"}},
        {},
        1,
        r"fsdp\.lean: expected true or false, got 'yes'",
    ),
    "a word for a list of parts": (
        {"memory": {"recompute": "layer"}},
        {},
        1,
        r"memory\.recompute: expected a list, got 'layer'",
    ),
    "a part that no layer has": (
        {"memory": {"recompute": ["norms", "mla_up"]}},
        {},
        1,
        r"memory\.recompute: expected parts that the model has, got mla_up",
    ),
    "layers beyond the last": (
        {"memory": {"recompute": ["norms"], "layers": "0-99"}},
        {},
        1,
        r"memory\.layers: expected layers from 0 to \d, got 99",
    ),
    "no range of layers": (
        {"memory": {"layers": "first"}},
        {},
        1,
        r"memory\.layers: expected all, or ranges",
    ),
    "attention over several ranks": (
        {"memory": {"recompute": ["attention"]}, "mesh": {"cp": 2}},
        {},
        2,
        r"memory\.recompute: keys and values .* got mesh\.cp = 2; set memory\.recompute = .*layer",
    ),
    "text on the command line": (
        {},
        {"mesh__ep": "four"},
        1,
        r"mesh\.ep: expected a whole number, got 'four'",
    ),
    "choice": (
        {"optim": {"schedule": "cosin"}},
        {},
        1,
        r"optim\.schedule: expected one of .*; did you mean cosine\?",
    ),
    "preset": (
        {"model": {"preset": "qwen3-30b"}},
        {},
        1,
        r"model\.preset: unknown preset .* did you mean qwen3-30b-a3b",
    ),
    "key without its section": ({"steps": 5}, {}, 1, r"steps: unknown section; write it below \[train\]"),
    "size beyond all": (
        {"model": {"hidden_size": 10**12}},
        {},
        1,
        r"model\.hidden_size: expected .* below 2\*\*31, got 1000000000000; lower it",
    ),
    "zero axis": ({"mesh": {"ep": 0}}, {}, 1, r"mesh\.ep: expected a positive number, got 0"),
    "world not divisible": ({"mesh": {"dp_outer": 3}}, {}, 8, r"mesh\.dp_shard: 8 ranks cannot be divided"),
    "degrees that miss the world": (
        {"mesh": {"dp_shard": 2}},
        {},
        8,
        r"mesh: dp_outer\*dp_shard\*cp\*tp = 2, but",
    ),
    "expert mesh that does not fold": ({"mesh": {"ep": 8}}, {}, 4, r"mesh\.ep: ep\*etp = 8 must divide"),
    "experts not divisible": (
        {"mesh": {"ep": 3}},
        {},
        3,
        r"mesh\.ep: expected a divisor of the 8 experts, got 3",
    ),
    "width not divisible": (
        {"mesh": {"etp": 5}},
        {},
        5,
        r"mesh\.etp: expected a divisor of the \d+ columns of an expert's width, got 5",
    ),
    "batch not divisible": (
        {"train": {"global_batch_size": 10}},
        {},
        4,
        r"train\.global_batch_size: 10 .* micro-batches of 4; choose 16$",
    ),
    "micro-batch not divisible": (
        {"train": {"global_batch_size": 12, "micro_batch_size": 8}},
        {},
        2,
        r"train\.global_batch_size: 12 .* of 8; choose 16, or a divisor of 6 for train\.micro_batch_size$",
    ),
    "top-k above experts": (
        {"model": {"num_experts_per_tok": 9}},
        {},
        1,
        r"model\.num_experts_per_tok: expected 1 to",
    ),
    "heads": (
        {"model": {"num_key_value_heads": 3}},
        {},
        1,
        r"model\.num_key_value_heads: expected a divisor of",
    ),
    "groups": ({"model": {"n_group": 3}}, {}, 1, r"model\.n_group: expected a divisor of num_experts"),
    "odd head": ({"model": {"head_dim": 7}}, {}, 1, r"model\.head_dim: expected an even number"),
    "negative rate": ({"optim": {"lr": -1.0}}, {}, 1, r"optim\.lr: expected a number above 0, got -1\.0"),
    "no steps": ({"train": {"steps": 0}}, {}, 1, r"train\.steps: expected 1 or more, got 0"),
    "key of an optional table": (
        {"experts": {"capacity": {"facto": 1.5}}},
        {},
        1,
        r"experts\.capacity\.facto: unknown key; did you mean experts\.capacity\.factor\?",
    ),
    "value in an optional table": (
        {"experts": {"capacity": {"factor": -1.0}}},
        {},
        1,
        r"experts\.capacity\.factor: expected a number above 0",
    ),
    "number for a table": (
        {"experts": {"balance": 3}},
        {"experts__balance__z_loss": "1"},
        1,
        r"experts\.balance: expected a table, got 3",
    ),
    "key below a number": (
        {},
        {"train__steps__x": "1"},
        1,
        r"train\.steps\.x: unknown key; train\.steps has no",
    ),
    "list for a preset": (
        {"model": {"preset": ["a"]}},
        {},
        1,
        r"model\.preset: expected a string, got \['a'\]",
    ),
    "no width": (
        {"model": {"moe_intermediate_size": 0}},
        {},
        1,
        r"model\.moe_intermediate_size: expected a pos",
    ),
    "negative depth": (
        {"model": {"num_nextn_predict_layers": -1}},
        {},
        1,
        r"model\.num_nextn_predict_layers: ",
    ),
    "odd rotary width": (
        {"model": {"preset": "deepseek-v3", "qk_rope_head_dim": 7}},
        {},
        1,
        r"model\.qk_rope_head_dim: expected an even number",
    ),
    "groups too small": (
        {"model": {"n_group": 8}},
        {},
        1,
        r"model\.topk_group: 1 of 8 groups hold 1 experts",
    ),
    "local dispatch over ranks": (
        {"experts": {"dispatcher": "local"}, "mesh": {"ep": 2}},
        {},
        2,
        r"experts\.dispatcher: tokens have to reach .* got mesh\.ep = 2; set mesh\.ep = 1, or experts",
    ),
    "formats that do not go together": (
        {"fsdp": {"grad_exchange": "bf16_all_to_all"}, "precision": {"reduce_dtype": "bfloat16"}},
        {},
        1,
        r"fsdp\.grad_exchange: ",
    ),
    "evaluation on nothing": (
        {"data": {"holdout": 0.0}},
        {},
        1,
        r"data\.holdout: expected a fraction above 0",
    ),
    "infinite rate": (
        {"optim": {"lr": float("inf")}},
        {},
        1,
        r"optim\.lr: expected a number above 0, got inf",
    ),
    "heads that tp does not divide": (
        {"mesh": {"tp": 3}},
        {},
        3,
        r"mesh\.tp: expected a divisor of 4 and 2 heads, 264 tokens .* got 3; choose 1$",
    ),
    "a sequence that cp and tp do not divide": (
        {"mesh": {"tp": 2, "cp": 2}, "data": {"seq_len": 254}},
        {},
        4,
        r"data\.seq_len: expected a multiple of mesh\.cp \* mesh\.tp = 4, got 254; choose 252 or 256",
    ),
    "heads that all_to_all does not divide": (
        {"mesh": {"cp": 8}, "context_parallel": {"mode": "all_to_all"}},
        {},
        8,
        r"mesh\.cp: .* splits 4 heads .* over 8 ranks, .*; choose cp 4, or",
    ),
    "replicas that plan apart and count together": (
        {
            "mesh": {"dp_outer": 2},
            "context_parallel": {"dynamic": True},
            "experts": {"balance": {"global_batch": 0.01}},
        },
        {},
        4,
        r"experts\.balance\.global_batch: replicas plan their micro-batches apart .* mesh\.dp_outer = 2; set",
    ),
    "a context that no rank can hold": (
        {"context_parallel": {"dynamic": True, "max_tokens": 64}},
        {},
        2,
        r"context_parallel\.max_tokens: a document of \d+ tokens does not fit 2 ranks of 64; choose",
    ),
    "a degree that hides nothing": (
        {"mesh": {"tp": 3, "cp": 3}, "data": {"seq_len": 256}},
        {},
        9,
        r"data\.seq_len: expected a multiple of mesh\.cp \* mesh\.tp = 3, got 256; choose 255 or 258",
    ),
    "an unknown mode": (
        {"context_parallel": {"mode": "rings"}},
        {},
        1,
        r"context_parallel\.mode: .*ring",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_configuration_is_refused_with_the_key_and_the_fix(case: str) -> None:
    mapping, overrides, world, message = BAD[case]
    config, problems = build(mapping, world, **overrides)
    assert config is None
    assert any(re.search(message, line) for line in problems), problems
    assert all(";" in line for line in problems), "every line ends with the fix"


def test_all_findings_are_reported_together() -> None:
    _, problems = build({"mesh": {"epp": 1}, "train": {"steps": "x"}, "optim": {"lr": -1.0}}, data__nope="1")
    assert {line.split(":")[0] for line in problems} == {"mesh.epp", "train.steps", "optim.lr", "data.nope"}


def test_findings_of_one_section_do_not_hide_those_between_sections() -> None:
    _, problems = build(
        {"mesh": {"epp": 1, "ep": 3}, "train": {"steps": "x", "global_batch_size": 7}, "optim": {"lr": 0.0}},
        world=2,
    )
    assert [line.split(":")[0] for line in problems] == [
        "mesh.epp",
        "optim.lr",
        "train.steps",
        "mesh.ep",
        "train.global_batch_size",
    ]


def test_nothing_is_concluded_from_the_default_of_a_wrong_value() -> None:
    _, problems = build({"model": {"num_experts": "many", "num_experts_per_tok": 9}, "mesh": {"ep": 16}}, 16)
    assert {line.split(":")[0] for line in problems} == {"model.num_experts", "train.global_batch_size"}


def test_an_optional_table_is_reached_from_the_command_line() -> None:
    config, problems = build({}, experts__capacity__factor="1.5")
    assert (problems, config.experts.capacity.factor) == ([], 1.5)
    config, _ = build({"experts": {"capacity": {"factor": 2.0}}}, experts__capacity__policy="position")
    assert (config.experts.capacity.factor, config.experts.capacity.policy) == (2.0, "position")
    assert build({"experts": {"capacity": {}}}, experts__capacity="none")[0].experts.capacity is None


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path: Path) -> None:
    mapping = tomllib.loads(path.read_text())
    mesh = mapping.get("mesh", {})
    world = mesh.get("ep", 1) * mesh.get("etp", 1) * mesh.get("dp_outer", 1)
    world *= min(2, mapping["train"].get("global_batch_size", 2))
    assert build(mapping, world)[1] == []
