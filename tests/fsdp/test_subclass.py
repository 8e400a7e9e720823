"""Frozen parameters that are tensor subclasses: sharded by what is inside of them, kept whole, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import fsdmoe
from fsdmoe import checkpoint
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy, ShardedTensor, engine_of, fully_shard
from fsdmoe.mesh import Axis, build_meshes
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks

FP32 = PrecisionConfig(param_dtype="float32", reduce_dtype="float32")


class Opaque(torch.Tensor):
    """Integers and a scale for each row; it does not say what it is made of."""

    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Opaque:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)
        made.values, made.scale = values, scale
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def of(cls, weight: torch.Tensor) -> Opaque:
        scale = weight.detach().abs().amax(1, keepdim=True) / 100
        return cls((weight.detach() / scale).round().to(torch.int8), scale, weight.dtype)

    def whole(self) -> torch.Tensor:
        return self.values.to(self.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.whole(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values.detach(), args[0].scale.detach(), args[0].dtype)
        raise NotImplementedError(func)


class Scaled(Opaque):
    """The same, in plain sight."""

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["values", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], dtype: Any, *_: Any) -> Scaled:
        return cls(inner["values"], inner["scale"], dtype)


class Doubled(Scaled):
    """The same, one level deeper."""

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["half"], self.dtype

    @property
    def half(self) -> Scaled:
        return Scaled(self.values, self.scale, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], dtype: Any, *_: Any) -> Doubled:
        return cls(inner["half"].values, inner["half"].scale, dtype)


class Layer(nn.Module):
    """A frozen, quantised weight with a trained adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.down, self.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x).tanh() + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def build(kind: str) -> Model:
    torch.manual_seed(0)
    model = Model()
    if kind.startswith("torchao"):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        config = Float8WeightOnlyConfig() if kind.endswith("float8") else Int8WeightOnlyConfig()
        quantize_(model, config, lambda module, name: name.endswith("base"))
    for layer in model.layers:
        if kind in ("Scaled", "Doubled", "Opaque"):
            wrapped = globals()[kind].of(layer.base.weight)
            layer.base.weight = nn.Parameter(wrapped, requires_grad=False)
        layer.base.requires_grad_(False)
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def trains(kind: str, fsdp: dict[str, Any]) -> tuple[float, int, int]:
    """The worst relative difference of gradients from one process, bytes of this rank's shards, and elements
    of frozen parameters."""
    meshes = build_meshes()
    model, plain = build(kind), build(kind)
    fully_shard(model, meshes, FSDPPolicy(fsdp=FSDPConfig(**fsdp), precision=FP32))
    worst = 0.0
    for step in range(2):
        model(batch(step, meshes.rank(Axis.WORLD))).backward()
        for rank in range(2):
            (plain(batch(step, rank)) / 2).backward()
        with torch.no_grad():
            wanted = dict(plain.named_parameters())
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    target = wanted[name]
                    error = (parameter.grad.full_tensor() - target.grad).abs().max() / target.grad.abs().max()
                    worst = max(worst, error.item())
                    parameter.sub_(parameter.grad, alpha=0.1)
                    target.sub_(target.grad, alpha=0.1)
        engine_of(model).zero_grad()
        plain.zero_grad()
    held = sum(group.weights.main.nbytes for group in engine_of(model).groups)
    whole = sum(p.numel() for p in plain.parameters() if not p.requires_grad)
    return worst, held, whole


KINDS = ["Doubled", "torchao int8"]
IN_FULL = ["Scaled", "torchao float8"]  # the same inside, and less of it


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.full) for kind in IN_FULL)])
def test_a_model_with_quantised_weights_trains_as_one_process_does(kind: str) -> None:
    for worst, _, _ in run_ranks(trains, 2, kind, {"debug": True}):
        assert worst < 1e-5
    (_, sharded, _), _ = run_ranks(trains, 2, kind, {})
    (worst, left, whole), _ = run_ranks(trains, 2, kind, {"frozen_subclasses": "whole"})
    assert worst < 1e-5
    quantised = 3 * 16 * 16  # bytes of all integers (or float8), half of them on each rank
    assert quantised // 2 <= sharded - left < 1.5 * quantised  # scales come on top
    assert whole > quantised


def sees() -> None:
    model = build("Scaled")
    original, seen = model.layers[0].base.weight.whole(), []
    fully_shard(model, build_meshes(), FSDPPolicy(precision=FP32))
    base = model.layers[0].base
    base.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    for step in range(2):
        model(batch(step, 0)).backward()
    assert seen[0] is seen[1]
    assert isinstance(seen[0], Scaled)
    assert isinstance(base.weight, Scaled)
    assert isinstance(base.weight.values, ShardedTensor)
    assert base.weight.values.dtype == torch.int8
    assert base.weight.shape == (16, 16)
    whole = Scaled(base.weight.values.full_tensor(), base.weight.scale.full_tensor(), torch.float32).whole()
    assert torch.equal(whole, original)
    assert "base" in fsdmoe.explain(model)
    base.weight = nn.Parameter(torch.zeros(16, 16), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"layers\.0\.base\.weight of layers\.0 was exchanged"):
        model(batch(0, 0))


def test_modules_see_the_subclass_around_gathered_parts_and_users_around_sharded_ones() -> None:
    run_ranks(sees, 2)


def saves(folder: str, kind: str, fsdp: dict[str, Any], phase: str) -> None:
    model = build(kind)
    wanted = [layer.base.weight.whole() for layer in model.layers]
    if phase == "load":
        for layer in model.layers:
            layer.base.weight.values.zero_()
            layer.base.weight.scale.zero_()
    fully_shard(model, build_meshes(), FSDPPolicy(fsdp=FSDPConfig(**fsdp), precision=FP32))
    if phase == "save":
        checkpoint.save(Path(folder) / "ckpt", model)
        return
    checkpoint.load(Path(folder) / "ckpt", model)
    seen: list[torch.Tensor] = []
    for layer in model.layers:
        layer.base.register_forward_pre_hook(lambda module, args: seen.append(module.weight.whole()))
    model(batch(0, 0))
    assert all(torch.equal(*pair) for pair in zip(seen, wanted, strict=True))


def test_what_is_inside_is_saved_and_loads_under_any_layout(tmp_path: Path) -> None:
    run_ranks(saves, 3, str(tmp_path), "Scaled", {}, "save")
    run_ranks(saves, 2, str(tmp_path), "Scaled", {}, "load")
    run_ranks(saves, 1, str(tmp_path), "Scaled", {"frozen_subclasses": "whole"}, "load")


def refused() -> None:
    meshes = build_meshes()
    model = build("Scaled")
    model.layers[1].base.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"layers\.1\.base\.weight is a Scaled and trained"):
        fully_shard(model, meshes)
    model = build("Opaque")
    with pytest.raises(ConfigError, match=r"base\.weight is a Opaque, which does not say .*; write whole"):
        fully_shard(model, meshes)
    fully_shard(model, meshes, FSDPPolicy(fsdp=FSDPConfig(frozen_subclasses="whole")))
    model = build("Scaled")
    weight = model.layers[0].base.weight.data
    wrapped = DTensor.from_local(weight.values, meshes[Axis.TP], [Replicate()])
    object.__setattr__(wrapped, "_local_tensor", weight)
    model.layers[0].base.weight = nn.Parameter(wrapped, requires_grad=False)
    with pytest.raises(ConfigError, match=r"layers\.0\.base\.weight is a DTensor of a Scaled"):
        fully_shard(model, meshes)


def test_what_is_trained_or_opaque_is_refused_by_name() -> None:
    run_ranks(refused, 1)
