"""Estimates of the configurations for clusters, and what an estimate says of walls."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fsdmoe.config import Config, build_config
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.plan import GPUS, Job, Setting, estimate

CLUSTERS = Path(__file__).parents[2] / "configs/clusters"

# Table 20 of the Megatron Core report: GPUs, their kind, precision, tokens of a row, rows of a step.
ROWS = {
    "deepseek-v3-256xgb300-mxfp8": (256, "gb300", "mxfp8", 4096, 8192),
    "deepseek-v3-256xgb200-mxfp8": (256, "gb200", "mxfp8", 4096, 8192),
    "deepseek-v3-256xgb200-bf16": (256, "gb200", "bf16", 4096, 4096),
    "deepseek-v3-1024xh100-fp8": (1024, "h100", "fp8_blockwise", 4096, 8192),
    "qwen3-235b-a22b-256xgb300-mxfp8": (256, "gb300", "mxfp8", 4096, 3072),
    "qwen3-235b-a22b-256xgb200-mxfp8": (256, "gb200", "mxfp8", 4096, 3072),
    "qwen3-235b-a22b-256xgb200-bf16": (256, "gb200", "bf16", 4096, 8192),
    "qwen3-235b-a22b-256xh100-bf16": (256, "h100", "bf16", 4096, 2048),
    "qwen3-235b-a22b-128xgb300-mxfp8-128k": (128, "gb300", "mxfp8", 131_072, 1024),
}


def configured(name: str, num_gpus: int) -> Config:
    problems: list[str] = []
    tables = tomllib.loads((CLUSTERS / f"{name}.toml").read_text())
    config = build_config(tables, {}, num_gpus, problems, needs_data=False)
    assert config is not None, problems
    return config


def test_every_row_of_the_table_has_a_file() -> None:
    assert {path.stem for path in CLUSTERS.glob("*.toml")} == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_table_fits_without_a_pipeline(name: str) -> None:
    num_gpus, gpu, recipe, seq_len, batch = ROWS[name]
    config = configured(name, num_gpus)
    assert name.startswith(config.model.preset)
    found = config.precision.recipe, config.data.seq_len, config.train.global_batch_size
    assert found == (recipe, seq_len, batch)
    assert estimate(Job.of(config), Setting.of(config, num_gpus), GPUS[gpu]).fits


def test_a_plan_of_adapters_counts_no_gradients_of_frozen_weights() -> None:
    config = configured("qwen3-235b-a22b-256xh100-bf16", 256)
    setting, trained = Setting.of(config, 256), Job.of(config)
    known = estimate(trained, setting, GPUS["h100"])
    plans = {
        freezes: estimate(
            replace(trained, has_adapters=True, adapter=AdapterConfig(rank=8, freeze_base=freezes)),
            setting,
            GPUS["h100"],
            memory=known.memory,
        ).flops_per_token
        for freezes in (False, True)
    }
    assert plans[False] == known.flops_per_token
    assert 0.66 < plans[True] / plans[False] < 0.75


def test_the_wall_follows_what_is_short() -> None:
    config = configured("qwen3-235b-a22b-256xh100-bf16", 256)
    job, setting = Job.of(config), Setting.of(config, 256)
    gpu = GPUS["h100"]
    small = estimate(job, setting, replace(gpu, memory=gpu.memory // 2))
    assert (small.wall, small.fits) == ("memory", False)
    slow = estimate(job, setting, replace(gpu, nvlink=gpu.nvlink / 20, network=gpu.network / 20))
    assert slow.wall == "communication"
    kept = replace(setting, memory=MemoryConfig())
    large = estimate(job, kept, replace(gpu, memory=gpu.memory * 100, nvlink=1e15, network=1e15))
    assert large.wall == "compute"
