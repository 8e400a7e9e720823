"""All checks of a run's machines in order, and one table of what they found.

==============  ==========================================================================================
check           what would be wrong
==============  ==========================================================================================
versions        another Python, torch, CUDA, NCCL or kind of GPU on some ranks
clocks          more than a second apart
folder, disk    ``train.output_dir`` is not shared by all hosts, or has no space for a checkpoint
GEMM, copy      a GPU (or a core) below 70 % of the median, in the best of three takes
groups, links   a group of an axis that does not answer, or ranks whose exchange is below 70 % of the median
experts         one is owned twice, or not at all, under this mesh
gradients       those of a small MoE layer under this mesh are not those of one process
checkpoint      what was saved to the folder cannot be verified, or other values are loaded
==============  ==========================================================================================
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch.distributed as dist

from fsdmoe.check import judge, measure
from fsdmoe.check.judge import CheckResult, Verdict
from fsdmoe.check.layer import CheckedLayer, seen_files
from fsdmoe.config import Config
from fsdmoe.core.all_ranks import from_all_ranks
from fsdmoe.core.errors import ConfigError
from fsdmoe.mesh import Axis, Meshes
from fsdmoe.models.flops import num_parameters
from fsdmoe.observe import print_table

_BYTES_A_PARAMETER = 12
"""Of a checkpoint: the weight and two moments, in float32."""
_MORE_TAKES = 2


def wants_self_check(config: Config, meshes: Meshes) -> bool:
    """``train.self_check``: "auto" checks where ranks are on several nodes, which may differ."""
    if config.train.self_check == "auto":
        return meshes.node_of(dist.get_world_size() - 1) != meshes.node_of(0)
    return config.train.self_check == "on"


def self_check(config: Config, meshes: Meshes) -> list[CheckResult]:
    """What every check found, the same on all ranks. Collective."""
    hosts = from_all_ranks(measure.host())
    found = [judge.judge_versions(from_all_ranks(measure.versions(meshes.device_type)))]
    found.append(judge.judge_clocks(from_all_ranks(measure.time_of_day()), hosts))
    folder = Path(config.train.output_dir).expanduser()
    found.append(judge.judge_folder(from_all_ranks(seen_files(folder)), str(folder), hosts))
    needed = 0 if config.model.hf is not None else num_parameters(config.model) * _BYTES_A_PARAMETER
    free = min(from_all_ranks(shutil.disk_usage(folder).free))
    found.append(judge.judge_disk(free, needed, str(folder)))
    gemms = settled(lambda: _by_place(from_all_ranks(measure.gemm_rate(meshes.device)), hosts))
    found.append(judge.judge_rates("GEMM", "TFLOP/s", gemms))
    copies = settled(lambda: _by_place(from_all_ranks(measure.copy_rate(meshes.device)), hosts))
    found.append(judge.judge_rates("copy", "GB/s", copies))
    found += _groups(meshes, hosts)
    logging.disable(logging.INFO)  # how the small model is sharded says nothing of the run
    try:
        layer = CheckedLayer(config, meshes)
    finally:
        logging.disable(logging.NOTSET)
    found += [layer.check_owners(hosts), layer.check_gradients()]
    if found[2].verdict is Verdict.OK:  # a save needs a folder that all ranks see
        found.append(layer.check_round_trip(config.checkpoint.folder or str(folder)))
    return found


def _groups(meshes: Meshes, hosts: Sequence[str]) -> Iterable[CheckResult]:
    """Every group's collectives, and links between neighbours on different machines. Collective."""
    if dist.get_world_size() == 1:
        return
    for axis in [axis for axis in Axis if meshes.size(axis) > 1]:
        rates = settled(partial(_group_rates, meshes, axis, hosts))
        finding = judge.judge_rates(f"group {axis}", "GB/s", rates)
        latency = median(from_all_ranks(measure.group_latency(meshes, axis)))
        yield CheckResult(
            finding.check, finding.verdict, f"{finding.text}; a small all-reduce {latency:.0f} us"
        )
    links = settled(lambda: _by_place(from_all_ranks(measure.link_rate(meshes)), hosts))
    yield judge.judge_rates("links", "GB/s", links)


def settled(take: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Rates by place, all ranks' alike. Where one seems slow, all are taken again, twice at most, and the
    best of each counts: a host that is busy for a moment is not slow."""
    rates = take()
    for _ in range(_MORE_TAKES):
        if not judge.slow_of(rates):
            break
        again = take()
        rates = {where: max(rate, again[where]) for where, rate in rates.items()}
    return rates


def _group_rates(meshes: Meshes, axis: Axis, hosts: Sequence[str]) -> dict[str, float]:
    """Of an axis, by the ranks of each group."""
    own = (dist.get_process_group_ranks(meshes.group(axis)), measure.group_rate(meshes, axis))
    return {
        f"ranks {_ranks(ranks)} ({', '.join(dict.fromkeys(hosts[r] for r in ranks))})": rate
        for ranks, rate in from_all_ranks(own)
    }


def _ranks(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, ..., {ranks[-1]}"


def _by_place(values: Sequence[float], hosts: Sequence[str]) -> dict[str, float]:
    return {judge.place(rank, hosts): value for rank, value in enumerate(values)}


def run_self_check(config: Config, meshes: Meshes, *, only: bool) -> int:
    """Check and print one table on the first rank; returns the exit code of a program that does this only
    (1 where something failed or is slow).

    Raises:
        ConfigError: Not ``only``, and something failed. A run that is merely slow goes on.
    """
    began = time.perf_counter()
    found = self_check(config, meshes)
    failed = [each for each in found if each.verdict is Verdict.FAILED]
    slow = [each for each in found if each.verdict is Verdict.SLOW]
    if dist.get_rank() == 0:
        if only or failed or slow:
            rows = [(each.check, str(each.verdict), each.text) for each in found]
            print_table("Self-check", ["check", "verdict", "found"], rows)
        seconds = time.perf_counter() - began
        count = f"{len(failed)} of {len(found)} checks failed, {len(slow)} found something slow"
        print(f"fsdmoe: self-check: {count}, in {seconds:.1f} s", file=sys.stderr, flush=True)
    if failed and not only:
        named = [f"{each.check}: {each.text}" for each in failed]
        raise ConfigError(
            f"train.self_check: expected machines that are well, found {'; '.join(named)}; leave those out, "
            'or set train.self_check = "off"'
        )
    return int(bool(failed or slow))
