"""What the keys of a stock torch.distributed.checkpoint mean: weights, optimizer state, settings, or else.

=====================================  =============================  =====================================
saved as                               key                            meaning
=====================================  =============================  =====================================
``{"model": …, "optim": …}``           ``model.NAME``                 a weight
(FSDP2; also below ``app``)            ``optim.state.NAME.exp_avg``   a moment
                                       ``optim.param_groups.0.lr``    a setting of a parameter group
torchtitan: weights bare, optimizer    ``NAME``                       a weight
state flattened                        ``optimizer.state.NAME.step``  a step count
                                       ``optimizer.param_groups.``    a setting of one parameter
                                       ``NAME.lr``
                                       ``train_state.step``           the step of the run
=====================================  =============================  =====================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fsdmoe.checkpoint.dcp_folder import DCPFolder, Path

_MODEL = ("model", "model_state_dict")
_OPTIMIZER = ("optim", "optimizer", "optimizer_state_dict")
_STEP = ("step", "train_state.step", "app.step")
_TOKENS = ("train_state.ntokens_seen",)
# what wrappers put into names; torch's own state dicts leave most of them out
_WRAPPERS = re.compile(r"(^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")


@dataclass
class DCPState:
    """The keys of a folder by meaning; names are those of the saver's parameters."""

    weights: dict[str, str] = field(default_factory=dict)
    """Name to key."""
    moments: dict[str, dict[str, str]] = field(default_factory=dict)
    """Name to state (``exp_avg``, ``step``) to key."""
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    """Name, or number of a parameter group, to setting (``lr``) to key."""
    step: str | None = None
    tokens: str | None = None
    passed_over: list[str] = field(default_factory=list)
    """Sections that are not read: learning rate schedules, data loaders."""


def sort_keys(folder: DCPFolder) -> DCPState:
    """Tell the keys of a folder apart."""
    state = DCPState()
    for key, path in folder.paths.items():
        if ".".join(path) in _STEP:
            state.step = key
        elif ".".join(path) in _TOKENS:
            state.tokens = key
        else:
            _sort_key(state, key, path, key in folder.tensors)
    state.passed_over = sorted(set(state.passed_over))
    return state


def _sort_key(state: DCPState, key: str, path: Path, is_tensor: bool) -> None:
    at = next((i for i, word in enumerate(path[:-1]) if word in (*_MODEL, *_OPTIMIZER)), None)
    if at is not None and path[at] in _OPTIMIZER:
        _sort_optimizer_key(state, key, ".".join(path[at + 1 :]))
    elif at is not None or len(path) == 1:
        name = plain_name(".".join(path[at + 1 :] if at is not None else path))
        if is_tensor:
            state.weights[name] = key
        elif not name.endswith("_extra_state"):
            state.passed_over.append(key)
    else:
        state.passed_over.append(path[0])


def _sort_optimizer_key(state: DCPState, key: str, rest: str) -> None:
    section, _, tail = rest.partition(".")
    name, _, leaf = tail.rpartition(".")
    if section == "state" and name:
        state.moments.setdefault(plain_name(name), {})[leaf] = key
    elif section == "param_groups" and name:
        state.settings.setdefault(plain_name(name), {})[leaf] = key
    else:
        state.passed_over.append(key)


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers of the module added to it."""
    return _WRAPPERS.sub("", name).removeprefix(".").removeprefix("module.")
