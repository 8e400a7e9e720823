"""What the parameters of an experts module mean: the interface between wrapped models and EP."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdmoe.core.errors import refuse
from fsdmoe.core.placement import Cut, Placement, halves
from fsdmoe.experts.split import expert_placement, whole_down_bias
from fsdmoe.kernels.activations import GPT_OSS_LIMIT, activation_of
from fsdmoe.kernels.expert_operands import ExpertWeights
from fsdmoe.mesh import Axis

FOUR = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """What the parameters of an experts module mean, and how it is called."""

    num_experts: int
    """E."""
    hidden_size: int
    """H, the width of rows."""
    intermediate_size: int
    """I, the width of one expert."""
    activation: str = "swiglu"
    """A name in ``fsdmoe.kernels.activations``."""
    limit: float = GPT_OSS_LIMIT
    """Of an activation that clamps."""
    gate_up: str = "gate_up_proj"
    """Name of the parameter ``[E, 2I, H]``; ``[E, I, H]`` where the activation has no gate."""
    down: str = "down_proj"
    """Name of the parameter ``[E, H, I]``."""
    up: str | None = None
    """Where gates and ups are apart: name of the ups. All three are then ``[E*I, H]``, expert by expert."""
    gate_up_bias: str | None = None
    """Name of the parameter ``[E, 2I]``."""
    down_bias: str | None = None
    """Name of the parameter ``[E, H]``."""
    transposed: bool = False
    """``[E, H, 2I]`` and ``[E, I, H]`` instead."""
    interleaved: bool = False
    """Gates and ups take turns along 2I, instead of all gates before all ups."""
    num_identity: int = 0
    """Expert ids from E on that return their rows. ``gate_up`` has as many more experts, which are unused."""
    output_norm: str | None = None
    """Name of the module that an expert's output passes before it is weighted."""
    weights_inputs: bool = False
    """The module is a block with ``router``, ``experts`` and ``shared_expert`` that multiplies inputs of
    experts by their weights (Llama-4)."""
    arguments: tuple[str, ...] = ("hidden_states", "top_k_index", "top_k_weights")
    """Names of the forward's arguments, in order: rows, expert ids, weights."""

    @property
    def is_copied(self) -> bool:
        """Whether the kernels read a re-ordered copy of the weights."""
        return self.interleaved or self.up is not None

    @property
    def is_reordered(self) -> bool:
        """Whether the kernels read the weights otherwise than they lie in memory."""
        return self.is_copied or self.transposed or self.num_identity > 0

    def parameters(self) -> dict[str, str]:
        """Role to the module's own name of it."""
        named = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return {role: name for role, name in zip(FOUR, named, strict=True) if name is not None}

    def placements(self) -> dict[str, Placement]:
        """How ``ep`` and ``etp`` cut each parameter, by its own name. ETP splits the width of gates and ups
        alike; ``down_bias`` has no width, so ETP splits its H."""
        hidden, width = self.hidden_size, self.intermediate_size
        if self.up is not None:
            shape = (self.num_experts * width, hidden)
            return dict.fromkeys((self.gate_up, self.up, self.down), Placement(shape, ((Axis.EP, Shard(0)),)))
        is_gated = activation_of(self.activation).is_gated
        first = 2 * width if is_gated else width
        cut = functools.partial(expert_placement, self.num_experts)
        if self.transposed:
            gate_up = cut((hidden, first), self._halves(2))
            down = cut((width, hidden), Shard(1))
        else:
            gate_up = cut((first, hidden), self._halves(1))
            down = cut((hidden, width), Shard(2))
        by_role = {
            "gate_up_proj": self._with_identities(gate_up, self.num_experts + self.num_identity),
            "down_proj": self._with_identities(down, self.num_experts),
            "gate_up_proj_bias": cut((first,), self._halves(1)),
            "down_proj_bias": cut((hidden,), Shard(1)),
        }
        return {name: by_role[role] for role, name in self.parameters().items()}

    def _halves(self, dim: int) -> Cut:
        """The cut of a dim of gates and ups: interleaved pairs stay together."""
        is_gated = activation_of(self.activation).is_gated
        return Shard(dim) if self.interleaved or not is_gated else halves(dim)

    @property
    def ep_unit(self) -> int:
        """What ``ep`` must divide."""
        return math.gcd(self.num_experts, self.num_identity)

    def _with_identities(self, placement: Placement, num_experts: int) -> Placement:
        """EP's cut of both weights in units of the same length, so that a rank has both weights of each of
        its experts though one of them has unused ones."""
        if not self.num_identity:
            return placement
        along_ep = _StridedShard(0, split_factor=num_experts // self.ep_unit)
        shape = (num_experts, *placement.global_shape[1:])
        return Placement(shape, ((Axis.EP, along_ep), *placement.cuts[1:]))

    def kernel_weights(self, module: nn.Module, down_bias_start: int = 0) -> ExpertWeights:
        """The module's (or this rank's) parameters as the kernels want them: views, or copies where it keeps
        gates and ups interleaved or apart."""
        roles = {role: get_parameter(module, name) for role, name in self.parameters().items()}
        gate_up, down = roles["gate_up_proj"], roles["down_proj"]
        bias, down_bias = roles.get("gate_up_proj_bias"), roles.get("down_proj_bias")
        if self.up is not None:
            each = (gate_up, get_parameter(module, self.up), down)
            gate_EIH, up_EIH, down_EIH = (w.unflatten(0, (-1, self.intermediate_size)) for w in each)
            return ExpertWeights(torch.cat((gate_EIH, up_EIH), dim=1), down_EIH.transpose(1, 2))
        if self.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        if self.num_identity:
            gate_up = gate_up[: len(down)]
        bias = None if bias is None else self.gates_before_ups(bias)
        down_bias = whole_down_bias(down_bias, self.hidden_size, down_bias_start)
        return ExpertWeights(self.gates_before_ups(gate_up), down, bias, down_bias)

    def gates_before_ups(self, gate_up_EN: Tensor) -> Tensor:
        """A tensor with the module's gates and ups along dim 1, in the kernels' order."""
        return _parted(gate_up_EN) if self.interleaved else gate_up_EN

    def check(self, name: str, module: nn.Module) -> None:
        """ConfigError if the module's parameters are not as the spec says."""
        problems = []
        for own, placement in self.placements().items():
            found = dict(module.named_parameters()).get(own)
            shape = None if found is None else tuple(found.shape)
            if shape != placement.global_shape:
                problems.append(
                    f"experts: expected {name}.{own} of shape {placement.global_shape}, got {shape}; fix "
                    "the adapter's ExpertsSpec"
                )
        refuse(problems)


def get_parameter(module: nn.Module, name: str) -> Tensor:
    """The parameter of this name, or what stands in its place while it is sharded."""
    found: Tensor = operator.attrgetter(name)(module)
    return found


def _parted(interleaved_EN: Tensor) -> Tensor:
    """Gates and ups in turn along dim 1, to all gates before all ups."""
    return torch.cat((interleaved_EN[:, ::2], interleaved_EN[:, 1::2]), dim=1)
