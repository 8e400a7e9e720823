"""Which parameter is in which group of an optimizer, and with which settings.

Every parameter of a model belongs to one group of the configuration, or to the rest. Each of them is a
parameter group of the optimizer; where no weight decay is written for it, it is two, since only matrices are
decayed then.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.rules import nearest
from fsdmoe.optim.group_config import DECAYED, MUON, NOT_DECAYED, SUFFIXES, GroupConfig, group_problems

MEMBERS = "members"
"""The key of a stored parameter group for the names of its parameters."""
DecayRule = Callable[[str, torch.Tensor], bool]
MuonRule = Callable[[str, nn.Parameter, GroupConfig], bool]


@dataclass
class NamedGroup:
    """A parameter group to be made."""

    name: str
    settings: dict[str, Any]
    """Where they are not the optimizer's defaults."""
    params: list[nn.Parameter] = field(default_factory=list)

    def for_torch(self) -> dict[str, Any]:
        return {"params": self.params, **self.settings, "name": self.name}


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """What is decayed by default: biases of experts have two dims, and one is the expert."""
    return is_matrix_of(name, parameter.dim())


def is_matrix_of(name: str, num_dims: int) -> bool:
    """The same of a parameter that is not here."""
    return num_dims >= 2 and not name.endswith("bias")


def unnamed(number: int) -> str:
    """What a group is called that has no name of its own."""
    return f"group {number}"


def of_most_members(number: int, mine: set[str], stored: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings of the stored group that holds most of these parameters, that at the same place where none
    holds more."""
    common = [len(mine.intersection(group.get(MEMBERS, ()))) for group in stored]
    is_same = number < len(common) and common[number] == max(common)
    return without_members(stored[number if is_same else common.index(max(common))])


def without_members(stored: dict[str, Any]) -> dict[str, Any]:
    """The settings of a stored group."""
    return {key: value for key, value in stored.items() if key != MEMBERS}


def assign(model: nn.Module, groups: Sequence[GroupConfig]) -> dict[nn.Parameter, GroupConfig]:
    """The group of each parameter that one names.

    Raises:
        ConfigError: A pattern matches nothing, or a parameter is in two groups.
    """
    # Under all names: a tied parameter has several.
    named = list(model.named_parameters(remove_duplicate=False))
    found: dict[nn.Parameter, GroupConfig] = {}
    problems: list[str] = []
    for number, group in enumerate(groups):
        for pattern in group.params:
            matched = [(name, p) for name, p in named if fnmatchcase(name, pattern)]
            if not matched:
                problems.append(
                    f"optim.groups[{number}].params: expected names of parameters, got {pattern!r}, which "
                    f"matches none; {_near_pattern(pattern, [name for name, _ in named])}"
                )
            for name, parameter in matched:
                other = found.setdefault(parameter, group)
                if other is not group:
                    problems.append(_twice(number, group, other, name))
                    break  # one of its parameters says it
    refuse(problems)
    return found


def _near_pattern(pattern: str, names: Sequence[str]) -> str:
    """A pattern that matches, where one lies near: behind any prefix, or around a word of the names."""
    if any(fnmatchcase(name, f"*{pattern}") for name in names):
        return f"did you mean '*{pattern}'? A pattern is for the whole name, such as {names[0]}"
    written = max((part for part in re.split(r"[.*?]", pattern)), key=len)
    words = dict.fromkeys(part for name in names for part in name.split("."))
    close = difflib.get_close_matches(written, words, n=1, cutoff=0.5)
    return f"did you mean '*{close[0]}*'?" if close else nearest(pattern, names)


def _twice(number: int, group: GroupConfig, other: GroupConfig, name: str) -> str:
    both = "frozen by both" if group.frozen and other.frozen else "in both"
    return (
        f"optim.groups[{number}].params: expected parameters of no other group, got {name}, which is {both} "
        f"{other.title!r} and {group.title!r}; narrow the patterns of one"
    )


def freeze(model: nn.Module, groups: Sequence[GroupConfig]) -> None:
    """Stop training what groups say is frozen; before the model is sharded.

    Raises:
        ConfigError: The groups do not fit the model.
    """
    found = assign(model, groups)
    for parameter, group in found.items():
        if group.frozen:
            parameter.requires_grad_(False)
    trained = {found.get(p) for p in model.parameters() if p.requires_grad}
    if groups and not trained:
        raise ConfigError(
            "optim.groups: expected something that is trained, got groups that freeze all parameters; narrow "
            "their patterns"
        )
    refuse([
        f"optim.groups[{number}].params: expected trained parameters, got {', '.join(group.params)}, "
        "which are all frozen (adapters leave the base so); drop the group"
        for number, group in enumerate(groups)
        if not group.frozen and group not in trained
    ])  # fmt: skip


def make_groups(
    model: nn.Module,
    groups: Sequence[GroupConfig],
    *,
    lr: float,
    weight_decay: float,
    decays: DecayRule = is_matrix,
    by_muon: MuonRule | None = None,
) -> list[NamedGroup]:
    """Parameter groups, those of the rest first; the same on every rank, in the model's order. ``by_muon``
    says which parameters are updated as matrices: they are in groups of their own."""
    found = assign(model, groups)
    unfrozen = [g for g in groups if g.frozen for p, own in found.items() if own is g and p.requires_grad]
    if unfrozen:
        raise ConfigError(
            f"optim.groups: expected {unfrozen[0].title!r} frozen before the model was sharded, got trained "
            "parameters; call fsdmoe.optim.freeze(model, groups) before fsdmoe.parallelize"
        )
    rest = GroupConfig(name="rest")
    made: dict[tuple[GroupConfig, str], NamedGroup] = {
        (rest, DECAYED): NamedGroup(DECAYED, {"weight_decay": weight_decay}),
        (rest, NOT_DECAYED): NamedGroup(NOT_DECAYED, {"weight_decay": 0.0}),
    }
    if by_muon is not None:
        made[rest, MUON] = NamedGroup(MUON, {"weight_decay": weight_decay, MUON: True})
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        group = found.get(parameter, rest)
        kind = DECAYED if group.weight_decay is not None or decays(name, parameter) else NOT_DECAYED
        if by_muon is not None and by_muon(name, parameter, group):
            kind = MUON
        if (group, kind) not in made:
            made[group, kind] = _group(group, lr, weight_decay, kind)
        made[group, kind].params.append(parameter)
    return list(made.values())


def _group(group: GroupConfig, lr: float, weight_decay: float, kind: str) -> NamedGroup:
    decay = weight_decay if group.weight_decay is None else group.weight_decay
    settings: dict[str, Any] = {"weight_decay": 0.0 if kind == NOT_DECAYED else decay, "lr": group.rate(lr)}
    if kind == MUON:
        settings[MUON] = True
    else:
        settings |= {key: getattr(group, key) for key in ("betas", "eps") if getattr(group, key) is not None}
    return NamedGroup(group.title if kind == DECAYED else f"{group.title} ({kind})", settings)


def config_of(groups: Sequence[GroupConfig], name: str) -> GroupConfig | None:
    """Which of ``groups`` made the parameter group of this name; none: the rest."""
    return next((g for g in groups if name in (g.title, *(g.title + suffix for suffix in SUFFIXES))), None)


def group_lines(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: Sequence[GroupConfig]
) -> dict[str, str]:
    """A line for each group that has parameters: tensors, parameters, settings; and one for what is frozen.
    None where ``groups`` leave all parameters alike."""
    lines: dict[str, str] = {}
    if not groups and not any(MUON in group for group in optimizer.param_groups):
        return lines
    for number, group in enumerate(optimizer.param_groups):
        if group["params"]:
            keys = ("lr", "weight_decay") if MUON in group else ("lr", "weight_decay", "betas", "eps")
            settings = {key: group[key] for key in keys if key in group}
            shown = ", ".join(f"{key.replace('_', ' ')} {_shown(value)}" for key, value in settings.items())
            lines[f"group {group.get('name', number)}"] = f"{_counted(group['params'])}, {shown}"
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return lines | ({"frozen": _counted(frozen)} if frozen else {})


def _counted(params: Sequence[torch.Tensor]) -> str:
    return f"{len(params):,} tensors, {sum(p.numel() for p in params):,} parameters"


def _shown(value: Any) -> str:
    return " ".join(f"{number:g}" for number in value) if isinstance(value, tuple) else f"{value:g}"


def check_groups(groups: Sequence[GroupConfig], optimizer: str = "adamw") -> None:
    """Refuse groups that no model could have, for whoever builds an optimizer by hand."""
    refuse(group_problems(groups, optimizer))
