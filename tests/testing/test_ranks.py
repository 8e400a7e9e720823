"""The harness itself: results by rank, failures named, hangs ended, later cases unharmed."""

import locale
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdmoe.kernels import backend
from fsdmoe.testing import RankFailure, ranks, run_ranks

reads_proc = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")


def _sum_of_ranks(scale: int) -> tuple[int, float, int]:
    total = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def _hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def _die() -> None:
    if dist.get_rank() == 0:
        os._exit(17)
    dist.barrier()


def _redistribute(shape: tuple[int, ...]) -> None:
    """Fill what DTensors remember: moves between layouts and what those cost."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    rows = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Replicate()])
    columns = rows.redistribute(mesh, [Replicate(), Shard(1)])
    assert columns.full_tensor().sum() == 8 * 8


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _num_threads_of_a_group() -> int:
    before = _num_threads()
    dist.new_group()
    return _num_threads() - before


def _return_what_cannot_travel() -> object:
    return lambda: "a lambda has no name to travel by"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_answers_in_order(world_size: int) -> None:
    results = run_ranks(_sum_of_ranks, world_size, 10)
    expected = 10.0 * sum(range(world_size))
    assert [rank for rank, _, _ in results] == list(range(world_size))
    assert {total for _, total, _ in results} == {expected}


def test_ranks_are_reused_between_cases() -> None:
    first = {pid for _, _, pid in run_ranks(_sum_of_ranks, 2, 1)}
    second = {pid for _, _, pid in run_ranks(_sum_of_ranks, 2, 1)}
    assert first == second
    assert first.isdisjoint(pid for _, _, pid in run_ranks(_sum_of_ranks, 2, 1, fresh=True))


def test_a_failure_names_the_rank_and_the_next_case_runs() -> None:
    with pytest.raises(RankFailure, match=r"^rank 1 of 2 failed: (.|\n)*broken on purpose"):
        run_ranks(_fail_on_rank_one, 2)
    assert len(run_ranks(_sum_of_ranks, 2, 1)) == 2


def test_a_hang_is_ended_and_named() -> None:
    with pytest.raises(RankFailure, match=r"no answer from rank\(s\) \[0"):
        run_ranks(_hang_on_rank_zero, 2, timeout=1.0)


def test_a_dead_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankFailure, match="rank 0 of 2 failed: it died with exit code 17"):
        run_ranks(_die, 2)


@reads_proc
def test_a_case_leaves_no_group_and_no_thread_of_one_behind() -> None:
    """Beside what the first case starts for good, which differs by machine. Meshes of another shape are no
    hits in what is remembered of the first."""
    ranks.close_pool()
    run_ranks(_redistribute, 4, (2, 2))
    after_one = run_ranks(_num_threads, 4)
    for shape in ((4, 1), (1, 4)):
        run_ranks(_redistribute, 4, shape)
    assert run_ranks(_num_threads, 4) == after_one


@reads_proc
def test_groups_have_two_threads_that_work_and_share_the_one_that_polls() -> None:
    assert run_ranks(_num_threads_of_a_group, 2) == [2, 2]


@reads_proc
def test_ranks_that_gathered_too_many_threads_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MAX_THREADS", 0)
    first = {pid for _, _, pid in run_ranks(_sum_of_ranks, 2, 1)}
    assert first.isdisjoint(pid for _, _, pid in run_ranks(_sum_of_ranks, 2, 1))


def test_a_result_that_cannot_be_sent_back_is_reported_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0 of 1 failed: its result cannot be sent back.*pickle"):
        run_ranks(_return_what_cannot_travel, 1)
    assert len(run_ranks(_sum_of_ranks, 1, 1)) == 1


def test_a_function_that_the_rank_cannot_import_is_reported() -> None:
    with pytest.raises(RankFailure, match=r"(?s)failed: Traceback.*_gone_when_the_rank_looks"):
        run_ranks(_only_here(), 1)


def _only_here() -> object:
    """A function that pickles by a name which the rank's copy of this module does not have."""

    def found() -> None:
        pass

    found.__qualname__ = found.__name__ = "_gone_when_the_rank_looks"
    globals()["_gone_when_the_rank_looks"] = found
    return found


def _visible_gpus() -> tuple[str | None, bool]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_available()


def test_ranks_see_no_gpu_of_the_machine() -> None:
    assert run_ranks(_visible_gpus, 2) == [("", False)] * 2


def _settings() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "time zone": time.strftime("%Z", time.localtime(0)),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "gradients": torch.is_grad_enabled(),
        "products": torch.get_float32_matmul_precision(),
        "kernels": backend._choice,
        "random": (random.random(), np.random.rand(), torch.rand((), device="cpu").item()),
    }


def _change_settings() -> None:
    os.environ.update(LOCAL_WORLD_SIZE="2", TZ="XYZ+5")
    os.environ.pop("OMP_NUM_THREADS")
    time.tzset()
    os.chdir("/")
    locale.setlocale(locale.LC_ALL, "C")
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("medium")
    backend.choose_kernels("torch")


def test_a_case_finds_the_environment_and_settings_of_a_new_process() -> None:
    before = run_ranks(_settings, 2)
    run_ranks(_change_settings, 2)
    for rank, (found, wanted) in enumerate(zip(run_ranks(_settings, 2), before, strict=True)):
        changed = {name: value for name, value in found.items() if value != wanted[name]}
        assert not changed, f"left on rank {rank} by the case before"
