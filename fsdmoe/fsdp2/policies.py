"""From FSDP2's arguments to ours: torch's policy classes and a DeviceMesh in, policy and meshes out.

FSDP2 takes them call by call. One engine runs the whole model, so all calls must agree on what it decides by;
``reshard_after_forward`` and the dtypes of inputs and outputs are each module's own."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import FSDPConfig, FSDPPolicy
from fsdmoe.mesh import Meshes, build_meshes
from fsdmoe.precision.config import PrecisionConfig

_NAMES: dict[torch.dtype, Any] = {
    torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Settings:
    """What one call of ``fully_shard`` said."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy

    def problem(self, root: Settings) -> str | None:
        """What is otherwise in the root's call and must not be."""
        for key in ("mesh", "offload_policy", "mp_policy.param_dtype", "mp_policy.reduce_dtype"):
            mine, theirs = attrgetter(key)(self), attrgetter(key)(root)
            if mine != theirs:
                return f"{key} is {mine} here and {theirs} in the root's call"
        return None


def policy_for(root: nn.Module, settings: Settings, units: dict[nn.Module, Settings]) -> FSDPPolicy:
    """The policy of a model of which ``units`` were wrapped before ``root``."""
    precision = settings.mp_policy
    return FSDPPolicy(
        fsdp=FSDPConfig(cpu_offload=isinstance(settings.offload_policy, CPUOffloadPolicy)),
        precision=_precision(root, precision),
        units=(lambda _, module: module in units) if units else (),
        keeps=lambda _, module: units[module].reshard_after_forward is False,
        dtype_of=None if precision.param_dtype is not None else (lambda _, parameter: parameter.dtype),
    )


def meshes_for(mesh: DeviceMesh | None) -> Meshes:
    """Meshes over all ranks: FSDP over a mesh of one dim, HSDP over one of two."""
    if mesh is None:
        return build_meshes()
    if mesh.ndim > 2:
        raise ConfigError(
            f"fsdp2.mesh: expected 1 dim (FSDP) or 2 (HSDP: replicate, shard), got {mesh.ndim}: {mesh}; "
            "fsdmoe.parallelize splits over tp, cp and ep itself, with meshes from fsdmoe.build_meshes"
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(dist.get_world_size())):
        raise ConfigError(
            f"fsdp2.mesh: expected all {dist.get_world_size()} ranks in order, got {ranks}: parameters are "
            "sharded over every rank that does not split them; for tp, cp or ep use fsdmoe.parallelize with "
            "meshes from fsdmoe.build_meshes"
        )
    meshes = build_meshes(dp_outer=mesh.size(0) if mesh.ndim == 2 else 1)
    if meshes.device_type != mesh.device_type:
        raise ConfigError(
            f"fsdp2.mesh: it is of {mesh.device_type}, but the process group computes on "
            f"{meshes.device_type}; make both of one kind"
        )
    return meshes


def _precision(root: nn.Module, policy: MixedPrecisionPolicy) -> PrecisionConfig:
    trained = {p.dtype for p in root.parameters() if p.requires_grad}
    if len(trained) > 1:
        raise ConfigError(
            f"fsdp2: trained parameters are of {', '.join(sorted(map(str, trained)))}; convert the model to "
            "one dtype first (they are what the optimizer steps on)"
        )
    main = trained.pop() if trained else torch.float32
    param = policy.param_dtype or main
    chosen = {"main_dtype": main, "param_dtype": param, "reduce_dtype": policy.reduce_dtype or param}
    for key, dtype in chosen.items():
        if dtype not in _NAMES:
            source = "the parameters" if key == "main_dtype" else f"mp_policy.{key}"
            raise ConfigError(
                f"fsdp2: {dtype} of {source} cannot be trained with; choose float32, bfloat16 or float16"
            )
    if main == torch.float16:
        raise ConfigError(
            "fsdp2: float16 parameters cannot be stepped on; keep them in float32 and set "
            "mp_policy.param_dtype=torch.float16"
        )
    return PrecisionConfig(**{key: _NAMES[dtype] for key, dtype in chosen.items()})
