"""``[[optim.groups]]``: parameters with settings of their own, chosen by patterns over their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Some parameters, and what is different for them."""

    params: tuple[str, ...] = ()
    """Patterns over names of parameters, as in a shell: ["*.bias", "layers.0.*"]. A parameter may be in one
    group at most; those that no group names keep the settings of the section."""
    name: str | None = None
    """What tables and checkpoints call the group; none: its first pattern."""
    lr: float | None = None
    """Peak learning rate; none: optim.lr."""
    lr_scale: float | None = None
    """Peak learning rate as a multiple of optim.lr (with muP: base width / width for hidden matrices)."""
    weight_decay: float | None = None
    """Decoupled weight decay of all these parameters, vectors too; none: optim.weight_decay, of matrices."""
    betas: tuple[float, float] | None = None
    """AdamW: decay of both moments; none: optim.beta1 and optim.beta2."""
    eps: float | None = None
    """AdamW: added to the root of the second moment; none: optim.eps."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; none: optim.warmup_steps."""
    optimizer: Literal["muon", "adamw"] | None = None
    """Muon: who updates them; none: Muon matrices, AdamW the rest, embeddings, heads and routers."""
    frozen: bool = False
    """They are not trained."""

    @property
    def title(self) -> str:
        """What the group is called."""
        return self.name or (self.params[0] if self.params else "")

    @property
    def changes(self) -> list[str]:
        """Keys that it sets, apart from those that name it."""
        kept = ("params", "name")
        return [f.name for f in fields(self) if f.name not in kept and getattr(self, f.name) != f.default]

    def rate(self, lr: float) -> float:
        """Its peak where the section's is ``lr``."""
        return self.lr if self.lr is not None else lr * (1.0 if self.lr_scale is None else self.lr_scale)


DECAYED, NOT_DECAYED, MUON = "decayed", "not decayed", "muon"
OWN_GROUPS = (DECAYED, NOT_DECAYED, MUON)
"""Names of the optimizer's own parameter groups, of what no group names. ``MUON`` is also the key of
parameter groups whose parameters are updated as matrices."""
SUFFIXES = tuple(f" ({part})" for part in OWN_GROUPS[1:])
"""Of the names of a group's other parts; the decayed one has none."""


def group_problems(groups: Sequence[GroupConfig], optimizer: str) -> list[str]:
    """What is wrong with groups, whatever the model is."""
    problems: list[str] = []
    titles = [group.title for group in groups]
    for number, group in enumerate(groups):
        key = f"optim.groups[{number}]"
        problems += _number_problems(key, group)
        if not group.params:
            problems.append(
                f'{key}.params: expected patterns over names, got none; write params = ["*.bias"]'
            )
        if group.title in OWN_GROUPS or group.title.endswith(SUFFIXES):
            problems.append(
                f"{key}.name: expected another name, got {group.title!r}, which the optimizer gives to "
                "groups of its own; change it"
            )
        if titles.index(group.title) != number:
            problems.append(
                f"{key}.name: expected a name of its own, got {group.title!r}, which optim.groups"
                f"[{titles.index(group.title)}] has too; give each group a name"
            )
        if not group.changes:
            problems.append(
                f"{key}: expected a setting (lr, weight_decay, frozen ...), got none; drop the group"
            )
        if group.frozen and len(group.changes) > 1:
            others = ", ".join(change for change in group.changes if change != "frozen")
            problems.append(
                f"{key}.frozen: expected no setting of what is not trained, got {others}; drop one of the two"
            )
        if group.lr is not None and group.lr_scale is not None:
            problems.append(f"{key}.lr_scale: expected either lr or lr_scale, got both; drop one")
        if group.optimizer is not None and optimizer != "muon":
            problems.append(f'{key}.optimizer: expected optim.name = "muon", got "{optimizer}"; drop it')
        unread = [k for k in ("betas", "eps") if getattr(group, k) is not None and optimizer == "sgd"]
        problems += [
            f'{key}.{k}: expected optim.name = "adamw", got "sgd", which has none; drop it' for k in unread
        ]
    return problems


def _number_problems(key: str, group: GroupConfig) -> list[str]:
    betas = group.betas or (0.0, 0.0)
    bounds = {
        "lr": (group.lr is None or 0 <= group.lr < inf, "0 or more"),
        "lr_scale": (group.lr_scale is None or 0 <= group.lr_scale < inf, "0 or more"),
        "weight_decay": (group.weight_decay is None or 0 <= group.weight_decay < inf, "0 or more"),
        "betas": (all(0 <= beta < 1 for beta in betas), "0 to below 1"),
        "eps": (group.eps is None or 0 < group.eps < inf, "above 0"),
        "warmup_steps": (group.warmup_steps is None or group.warmup_steps >= 0, "0 or more"),
    }
    return [
        f"{key}.{name}: expected a number {wanted}, got {getattr(group, name)}; change it or drop the line"
        for name, (holds, wanted) in bounds.items()
        if not holds
    ]
