"""What the low-rank factors of an adapter add to which weights of a model.

==============================  ===========================  ===============================================
factors, in peft's file         weight                       what is added
==============================  ===========================  ===============================================
``lora_A [Q, N], B [M, Q]``     linear ``[M, N]``            ``scaling * B A``
``lora_A [Q, M], B [N, Q]``     ``Conv1D [M, N]``            transposed
``lora_embedding_A, _B``        embedding ``[M, N]``         transposed
``lora_A [E*Q, N], B [M, Q*E]`` experts ``[E, M, N]``        of each expert; transposed experts: transposed
``lora_magnitude_vector``       with one of the first three  rows (transposed: columns) get this norm: DoRA
==============================  ===========================  ===============================================

Names say the module, and shapes say which of its weights. Whether a layer is transposed is said by
``fan_in_fan_out`` of the configuration, whether experts are by shapes (of peft 0.18 all are). Where these do
not tell, because a weight is square, the adapter's other experts must; else it is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdmoe.checkpoint.adapter_names import BASE, EMBEDDING_FACTORS, FACTORS, INITIAL, MAGNITUDE, SHELL
from fsdmoe.checkpoint.errors import CheckpointError
from fsdmoe.checkpoint.format import Shape
from fsdmoe.checkpoint.saved_box import Boxes, SavedBox
from fsdmoe.checkpoint.tree import Tree

_FACTOR = re.compile(
    rf"{re.escape(SHELL)}(?P<module>.+?)(\.{BASE})*\.({FACTORS[0]}|(?P<embedding>{EMBEDDING_FACTORS[0]}))(\.weight)?"
)
# All else that is switched on in a configuration may change what is computed.
_KNOWN = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size",
    "r", "rank_pattern", "revision", "runtime_config", "target_modules", "target_parameters", "task_type",
    "use_dora", "use_rslora",
))  # fmt: skip
# Other initialisations change the base as well: what was trained is not a sum with the base as it is.


@dataclass(frozen=True)
class Factors:
    """Those of one weight, read when they are needed."""

    first: SavedBox
    """A, with experts one after another in its rows."""
    second: SavedBox
    """B, with experts taking turns along its columns."""
    magnitude: SavedBox | None
    """Of DoRA, which needs the whole weight at once."""
    read: Callable[[SavedBox], Tensor]
    scaling: float
    num_experts: int
    is_transposed: bool

    def left(self, expert: int) -> Tensor:
        """``[M, Q]``, which :meth:`right` is multiplied with."""
        return self._first_of(expert).t() if self.is_transposed else self._second_of(expert)

    def right(self, expert: int) -> Tensor:
        """``[Q, N]``."""
        return self._second_of(expert).t() if self.is_transposed else self._first_of(expert)

    def added_to(self, weight: Tensor, low: Shape) -> Tensor:
        """The sum for the region of the weight that begins at ``low``, in place; ``weight`` is float32."""
        expert, row, column = (0, *low)[-3:]
        for part_MN in weight.view(-1, *weight.shape[-2:]):
            left_MQ = self.left(expert).float()[row : row + part_MN.shape[0]]
            right_QN = self.right(expert).float()[:, column : column + part_MN.shape[1]]
            part_MN.add_(left_MQ @ right_QN, alpha=self.scaling)
            expert += 1
        if self.magnitude is not None:
            dim = 0 if self.is_transposed else 1
            norms = torch.linalg.vector_norm(weight, dim=dim)
            weight.mul_((self.read(self.magnitude).float() / norms).unsqueeze(dim))
        return weight

    def _first_of(self, expert: int) -> Tensor:
        return self.read(self.first).unflatten(0, (self.num_experts, -1))[expert]

    def _second_of(self, expert: int) -> Tensor:
        return self.read(self.second)[:, expert :: self.num_experts]


@dataclass(frozen=True)
class _Pair:
    """Two factors of one module, and the weights that they may be of, each with whether it is transposed."""

    module: str
    first: SavedBox
    second: SavedBox
    magnitude: SavedBox | None
    weights: dict[str, Shape]
    """All matrices of the module."""
    kinds: list[tuple[str, bool]]

    @property
    def is_of_experts(self) -> bool:
        return any(len(shape) == 3 for shape in self.weights.values())


def refuse_other_kinds(where: str, config: Tree) -> None:
    """Raise for an adapter whose configuration says more than LoRA, rsLoRA and DoRA."""
    kind = config.get("peft_type", "LORA")
    wrong = [] if kind == "LORA" else [f"peft_type: expected LORA, got {kind}"]
    initial = config.get("init_lora_weights", True)
    if initial not in INITIAL:
        wrong.append(
            f"init_lora_weights: expected one that leaves the base as it is, got {initial!r}; save it as "
            "plain LoRA with peft (path_initial_model_for_weight_conversion of save_pretrained)"
        )
    wrong += [
        f"{key}: expected a number, got {config.get(key)!r}"
        for key in ("r", "lora_alpha")
        if kind == "LORA" and not isinstance(config.get(key), int | float)
    ]
    wrong += [
        f"{key}: expected none, got {config[key]!r}" for key in sorted(config.keys() - _KNOWN) if config[key]
    ]
    if wrong:
        raise CheckpointError(
            f"{where}: LoRA, rsLoRA and DoRA can be merged here; merge this adapter with peft:\n  "
            + "\n  ".join(wrong)
        )


def find_factors(
    found: Boxes, config: Tree, shapes: Mapping[str, Shape], parameters: Mapping[str, str]
) -> tuple[dict[str, Factors], Boxes, list[str]]:
    """The factors by the names of their weights, the tensors that are none, and what is wrong.

    Args:
        found: The tensors of an adapter, by their names in peft's file.
        config: Its configuration.
        shapes: Of the base's weights, by their names in memory and on disk.
        parameters: The names in memory of weights on disk.
    """
    rest = {box.name: box for box in found}
    pairs = _pairs(rest, config, shapes)
    sure = {pair.kinds[0][1] for pair in pairs if len(pair.kinds) == 1 and pair.is_of_experts}
    factors: dict[str, Factors] = {}
    problems = []
    for pair in pairs:
        kinds = [kind for kind in pair.kinds if len(pair.kinds) == 1 or kind[1] in sure]
        if len(kinds) != 1 or kinds[0][0] in factors:
            got = f"A {list(pair.first.shape)} and B {list(pair.second.shape)}"
            there = ", ".join(f"{name} {list(shape)}" for name, shape in pair.weights.items())
            problems.append(
                f"{pair.module}: expected factors of one weight of the base, which has {there or 'none'} "
                f"there; got {got}"
            )
            continue
        name, is_transposed = kinds[0]
        num_experts = shapes[name][0] if len(shapes[name]) == 3 else 1
        rank = pair.first.shape[0] // num_experts
        expected, alpha = rank_and_alpha(config, pair.module, name, parameters.get(name, name), num_experts)
        if rank != expected:
            problems.append(f"{pair.module}: expected rank {expected} as its configuration says, got {rank}")
        if config.get("use_dora") and (pair.magnitude is None or num_experts > 1):
            problems.append(f"{pair.module}: DoRA without its {MAGNITUDE}")
        factors[name] = Factors(
            pair.first, pair.second, pair.magnitude, lambda box: found[box](),
            scaling=scaling_of(config, rank, alpha),
            num_experts=num_experts, is_transposed=is_transposed,
        )  # fmt: skip
    return factors, {box: found[box] for box in rest.values()}, problems


def _pairs(rest: dict[str, SavedBox], config: Tree, shapes: Mapping[str, Shape]) -> list[_Pair]:
    """Takes all factors and magnitudes out of ``rest``."""
    modules = _weights_of_modules(shapes)
    pairs = []
    for name in list(rest):
        match = _FACTOR.fullmatch(name)
        if match is None:
            continue
        is_embedding = match["embedding"] is not None
        ours, other = EMBEDDING_FACTORS if is_embedding else FACTORS
        before, _, after = name.rpartition(ours)
        if before + other + after not in rest:
            continue
        first = rest.pop(name)
        second = rest.pop(before + other + after)
        is_transposed = is_embedding or bool(config.get("fan_in_fan_out"))
        weights = modules.get(match["module"], {})
        kinds = [
            (weight, way)
            for weight, shape in weights.items()
            for way in ((False, True) if len(shape) == 3 else (is_transposed,))
            if _fits(shape, first.shape, second.shape, way)
        ]
        magnitude = rest.pop(before + MAGNITUDE, None) if config.get("use_dora") else None
        pairs.append(_Pair(match["module"], first, second, magnitude, weights, kinds))
    return pairs


def _weights_of_modules(shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """The matrices of each module: a linear layer has one, fused experts have two."""
    found: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        if len(shape) in (2, 3) and not name.endswith("bias"):
            found.setdefault(name.rpartition(".")[0], {})[name] = shape
    return found


def _fits(weight: Shape, first: Shape, second: Shape, is_transposed: bool) -> bool:
    """Whether factors of these shapes may be of a weight of this one."""
    num_experts = weight[0] if len(weight) == 3 else 1
    if len(first) != 2 or len(second) != 2 or first[0] != second[1] or first[0] % num_experts:
        return False
    ends = (first[1], second[0]) if is_transposed else (second[0], first[1])
    return ends == weight[-2:]


def scaling_of(config: Tree, rank: int, alpha: float) -> float:
    """What an update counts."""
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def rank_and_alpha(
    config: Tree, module: str, weight: str, parameter: str, num_experts: int
) -> tuple[int, float]:
    """As peft finds them: by the first pattern that matches the module, or the parameter if it has one."""
    by_parameter = any(parameter.endswith(name) for name in config.get("target_parameters") or ())
    names = [weight] if by_parameter or num_experts > 1 else [module]
    if weight != parameter:  # one expert of a fused weight, whose own name was in the patterns
        names = [module, parameter]
    values = []
    for patterns, plain in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        stated = config.get(patterns) or {}
        matching = (
            value for name in names for key, value in stated.items() if re.match(rf"(.*\.)?({key})$", name)
        )
        values.append(next(matching, config[plain]))
    return values[0], values[1]
