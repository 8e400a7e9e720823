"""What cannot be done is refused in words: which key, what was expected, what to do."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import Placement, placed_parameter
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, fully_shard
from fsdmoe.mesh import Axis, MeshConfig, build_meshes, resolve_degrees
from fsdmoe.parallel.build import parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.fsdp_parity import FP32, Case, shard_tiny
from tests.support.tiny_modules import TinyDecoder, batch_of, reference

Change = Callable[[nn.Module], object]


def exchange_parameter(model: nn.Module) -> None:
    model.norm.weight = nn.Parameter(torch.ones(16))


def rebind_data(model: nn.Module) -> None:
    model.head.weight.data = model.head.weight.with_piece(model.head.weight.piece.clone())


def freeze(model: nn.Module) -> None:
    model.layers[0].requires_grad_(False)


CHANGES: dict[str, Change] = {f.__name__: f for f in (exchange_parameter, rebind_data, freeze)}


def change_behind_the_back(name: str) -> str:
    model = shard_tiny(Case(), build_meshes())
    model(*batch_of(0, 0, 0), 12)
    try:
        CHANGES[name](model)
        model(*batch_of(0, 0, 0), 12)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_changed_behind_the_engines_back_is_noticed(name: str) -> None:
    assert "after fully_shard" in run_ranks(change_behind_the_back, 1, name)[0]


class Clamps(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=0.1)
        return super().forward(x)


def what_a_forward_writes(model: nn.Module, x: torch.Tensor) -> str:
    sharded = fully_shard(model, build_meshes(), FSDPPolicy(precision=FP32))
    sharded(x)
    try:
        sharded(x)
    except RuntimeError as error:
        return str(error)
    return "no error"


def write_in_forward() -> list[str]:
    tokens = torch.arange(8)
    clamped = what_a_forward_writes(Clamps(8, 8), torch.randn(2, 8))
    return [clamped, what_a_forward_writes(nn.Sequential(nn.Embedding(8, 64, max_norm=0.1)), tokens)]


def test_what_a_forward_writes_into_gathered_weights_is_not_dropped_silently() -> None:
    for found in run_ranks(write_in_forward, 2):
        assert all("weight of" in error and "change the model's parameter" in error for error in found)


def step_with_an_optimizer_from_before() -> list[str]:
    found = []
    for wrap in (lambda model: fully_shard(model, build_meshes()), lambda m: parallelize(m, build_meshes())):
        model = nn.Sequential(nn.Linear(8, 8)).bfloat16()
        optimizer = torch.optim.SGD(model.parameters())
        wrapped = wrap(model)
        try:
            wrapped(torch.randn(2, 8, dtype=torch.bfloat16))
        except ConfigError as error:
            found.append(str(error))
        optimizer = torch.optim.SGD(wrapped.parameters())
        wrapped(torch.randn(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    return found


def test_an_optimizer_from_before_is_refused_until_it_is_given_up() -> None:
    found = run_ranks(step_with_an_optimizer_from_before, 1)[0]
    assert len(found) == 2
    assert all("make it after" in error for error in found)


def shard_badly(name: str) -> str:
    try:
        BAD[name]()
    except (ConfigError, TypeError, NotImplementedError) as error:
        return str(error)
    return "no error"


def mesh_of_other_size() -> None:
    meshes = build_meshes()
    meshes.degrees = resolve_degrees(MeshConfig(), 8)
    fully_shard(reference(), meshes)


def nested_units() -> None:
    policy = FSDPPolicy(fsdp=FSDPConfig(units=("Block", "MoE")), precision=FP32)
    fully_shard(reference(), build_meshes(), policy)


def unknown_unit() -> None:
    fully_shard(reference(), build_meshes(), FSDPPolicy(fsdp=FSDPConfig(units=("DecoderLayer",))))


def never_called_unit() -> None:
    fully_shard(reference(), build_meshes(), FSDPPolicy(fsdp=FSDPConfig(units=("ModuleList",))))


def sharded_twice() -> None:
    model = fully_shard(reference(), build_meshes())
    fully_shard(model, build_meshes())


def float8_parameter() -> None:
    policy = FSDPPolicy(dtype_of=lambda name, parameter: torch.float8_e4m3fn)
    fully_shard(reference(), build_meshes(), policy)


def meta_without_init() -> None:
    with torch.device("meta"):
        model = TinyDecoder()
    fully_shard(model, build_meshes())


def meta_buffer() -> None:
    model = reference()
    model.register_buffer("inv_freq", torch.empty(4, device="meta"))
    fully_shard(model, build_meshes())


def placement_of_another_mesh() -> None:
    model = reference()
    placement, meshes = Placement((16, 16, 8), ((Axis.EP, Shard(0)),)), build_meshes()
    model.layers[0].moe.down = placed_parameter(model.layers[0].moe.down.data, placement, meshes)
    fully_shard(model, meshes)


def split_over_a_wrong_axis() -> None:
    model, meshes = reference(), build_meshes(cp=2)
    model.head.weight = nn.Parameter(distribute_tensor(torch.zeros(40, 16), meshes[Axis.CP], [Shard(0)]))
    fully_shard(model, meshes)


def gradient_hook() -> None:
    next(fully_shard(reference(), build_meshes()).parameters()).register_hook(print)


def early_hook() -> None:
    model = reference()
    model.head.weight.register_post_accumulate_grad_hook(print)
    fully_shard(model, build_meshes())


def copied() -> None:
    copy.deepcopy(fully_shard(reference(), build_meshes()))


BAD: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        mesh_of_other_size, nested_units, unknown_unit, never_called_unit, sharded_twice, float8_parameter,
        meta_without_init, meta_buffer, placement_of_another_mesh, split_over_a_wrong_axis, gradient_hook,
        early_hook, copied,
    )
}  # fmt: skip

MESSAGES = {
    "mesh_of_other_size": "mesh: the meshes were built for 8 ranks",
    "nested_units": "fsdp.units: layers.0.moe is a unit inside the unit layers.0",
    "unknown_unit": "fsdp.units: expected modules to gather one by one",
    "never_called_unit": "fsdp.units: expected modules that are called, got layers (ModuleList)",
    "sharded_twice": "is parallel already; call parallelize (or fully_shard) once",
    "float8_parameter": "precision: ",
    "meta_without_init": "is on the meta device and has no value; pass init_fn",
    "meta_buffer": "buffers on the meta device have no value: inv_freq",
    "placement_of_another_mesh": "whose placements mean (16, 16, 8) on this rank, but it holds (8, 16, 8)",
    "split_over_a_wrong_axis": "fsdp: head.weight is a DTensor: dim 'cp' of its DeviceMesh",
    "gradient_hook": "would never be called",
    "early_hook": "expected parameters without hooks, but head.weight has one, which would never be called",
    "copied": "cannot be copied",
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sharded_is_refused_with_the_fix(name: str) -> None:
    assert MESSAGES[name] in run_ranks(shard_badly, 2 if name == "split_over_a_wrong_axis" else 1, name)[0]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (functools.partial(PrecisionConfig, reduce_dtype="float8_e4m3fn"), "precision.reduce_dtype"),
        (functools.partial(PrecisionConfig, param_dtype="int8"), "precision.param_dtype"),
        (functools.partial(FSDPConfig, shard="all"), "fsdp.shard"),
        (functools.partial(FSDPConfig, granule_size=0), "fsdp.granule_size"),
        (functools.partial(FSDPPolicy, grad_divisor=0.0), "fsdp.grad_divisor"),
        (
            functools.partial(
                FSDPPolicy,
                fsdp=FSDPConfig(grad_exchange="bf16_all_to_all"),
                precision=PrecisionConfig(reduce_dtype="bfloat16"),
            ),
            "fsdp.grad_exchange",
        ),
    ],
)
def test_a_bad_setting_is_named(make: Callable[[], object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(key)


def use_outside_forward() -> str:
    model = shard_tiny(Case(), build_meshes())
    try:
        nn.functional.linear(torch.randn(2, 16), model.head.weight)
    except NotImplementedError as error:
        return str(error)
    return "no error"


def test_computing_with_a_sharded_parameter_outside_of_forward_is_loud() -> None:
    assert "only inside its module's forward" in run_ranks(use_outside_forward, 1)[0]
