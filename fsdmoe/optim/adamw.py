"""AdamW over flat shards: one fused pass over each buffer, whatever number of parameters it holds.

A flat shard is cut into a few *update ranges* of parameters of one parameter group. Where a fused kernel
can run, each range is one launch, which also rounds the new weights to compute precision; elsewhere all
ranges of the model go through one multi-tensor call per group. Padding between parameters has
zero gradients and stays zero."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.labels import raise_noted
from fsdmoe.fsdp.engine import Engine, engine_of, engine_of_parameters
from fsdmoe.fsdp.loss_scaling import note_scaler
from fsdmoe.fsdp.memory_plan import MomentBytes
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.optim.config import beta2_problems, check_offload, check_torchao
from fsdmoe.optim.group_config import MUON, GroupConfig
from fsdmoe.optim.groups import (
    MEMBERS,
    DecayRule,
    NamedGroup,
    check_groups,
    is_matrix,
    make_groups,
    of_most_members,
    unnamed,
    without_members,
)
from fsdmoe.optim.moments import MomentFormat, MomentPolicy, host_choice, ring_bytes
from fsdmoe.optim.state_stream import StateStream
from fsdmoe.optim.update import rounds_weights, update
from fsdmoe.optim.update_ranges import GroupMoments, HostGuard, UpdateRange

logger = logging.getLogger(__name__)

_REFUSED = ("amsgrad", "maximize", "differentiable")
_TAKEN = ("foreach", "capturable", "fused")
"""Switches of ``torch.optim.AdamW`` that change no number: steps are fused already."""


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay for a fully sharded model.

    It takes what ``torch.optim.AdamW`` takes, with the same defaults. Given the model instead of parameters,
    it decays matrices only: ``param_groups`` then has two entries on every rank, decayed and not decayed,
    and those of ``groups``. ``state`` shows the moments by parameter, as torch's optimizers do, so that
    torch's tools read and fill them; they lie in flat buffers.

    A parameter whose gradient is ``None`` is not updated, whether its unit took no part in the step or its
    gradient was dropped; a parameter of a unit that did take part counts as having a gradient, zero if it was
    not used.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        groups: Sequence[GroupConfig] = (),
        moment_dtype: MomentFormat | tuple[MomentFormat, MomentFormat] = torch.float32,
        state_offload: float = 0.0,
        state_prefetch: float = 0.65,
        decays: DecayRule | None = None,
        **switches: bool | None,
    ) -> None:
        """Take the parameters that are trained.

        Args:
            params: A model from ``parallelize`` or ``fully_shard``; or, as for torch, parameters of one, or
                dicts of them with settings of their own.
            lr: Learning rate; torch's schedulers change it.
            betas: Decay of the first and of the second moment.
            eps: Added to the root of the second moment.
            weight_decay: Decoupled. Of a model, for the parameters that ``decays`` names.
            groups: With a model: patterns over names, with settings of their own.
            moment_dtype: How the moments are kept: ``torch.float32``, ``torch.bfloat16`` or ``"float8"``
                (eight bits in blocks, the same numbers on every mesh); a pair for one each; or
                ``"torchao_8bit"``, ``"torchao_4bit"``, ``"torchao_float8"``, as torchao's optimizers keep
                them.
            state_offload: The share of the moments, 0 to 1, that lives in host memory and is streamed through
                the device by each step.
            state_prefetch: Of those, the share that the device has space for; it is copied during backward.
            decays: With a model: ``decays(name, parameter)`` says which parameters are decayed; by default
                those with two dims or more, biases of experts aside.
            **switches: The others of ``torch.optim.AdamW``.

        Raises:
            ConfigError: A group does not fit the model, a switch is not supported, ``betas[1]`` is too close
                to 1 for the second moment's format, or the mesh would cut its blocks.
        """
        _refuse_switches(switches)
        pair = moment_dtype if isinstance(moment_dtype, tuple) else (moment_dtype, moment_dtype)
        for each in (betas, *(group.betas for group in groups)):
            refuse([] if each is None else beta2_problems(each[1], str(pair[1]).removeprefix("torch.")))
        if isinstance(params, nn.Module):
            engine = engine_of(params)
            check_groups(groups)
            rule = decays or is_matrix
            made = make_groups(params, groups, lr=lr, weight_decay=weight_decay, decays=rule)
            if decays is None and weight_decay:
                logger.info("AdamW: of a model only matrices are decayed, where torch.optim.AdamW decays all")
        else:
            _refuse_model_arguments(groups, decays)
            made = _torch_groups(params)
            engine = engine_of_parameters([p for group in made for p in group.params])
        check_offload(state_offload, engine.policy.fsdp, state_prefetch)
        check_torchao(pair, state_offload, engine.policy.precision)
        is_stochastic = engine.policy.precision.main_rounding == "stochastic"
        policy = MomentPolicy(*pair, offload=state_offload, prefetch=state_prefetch, stochastic=is_stochastic)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._build(engine, made, defaults, policy)

    def _build(
        self, engine: Engine, made: list[NamedGroup], defaults: dict[str, Any], policy: MomentPolicy
    ) -> None:
        super().__init__([group.for_torch() for group in made], defaults)
        self._engine, self._policy = engine, policy
        self._names = {param.sharded: param.name for group in engine.groups for param in group.params}
        self._moments: list[GroupMoments] = []
        self._update_ranges: list[list[UpdateRange]] = [[] for _ in self.param_groups]
        self._uneven: set[ParamGroup] = set()
        """Groups whose parameters have taken different numbers of steps: they are updated one by one."""
        self._mixed: set[ParamGroup] = set()
        """Groups with parameters that another rule updates: a step does not write all of their weights in
        compute precision."""
        mine = {parameter for group in self.param_groups for parameter in group["params"]}
        self._steps_all = all(p in mine for p in self._names if p.requires_grad)
        """No other optimizer has parameters of the model."""
        self._stream: StateStream | None = None
        """Through which moments in host memory are stepped; made by the first step."""
        self._guard = HostGuard()
        self._add_moments()

    def _add_moments(self) -> None:
        # By parameter, not by name: a shell around the sharded model (peft's) has longer ones.
        group_of = {
            parameter: number
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if MUON not in group
        }
        trained = [group for group in self._engine.groups if group.plan.requires_grad]
        on_host = host_choice([group.plan for group in trained], self._engine.meshes, self._policy)
        for group, chosen in zip(trained, on_host, strict=True):
            numbers = [group_of.get(param.sharded) for param in group.params]
            held = [number is not None for number in numbers]
            moments = GroupMoments(group, self._policy, chosen, self._guard, held)
            self._moments.append(moments)
            for indices in moments.runs(numbers):
                number = numbers[indices[0]]
                assert number is not None
                self._update_ranges[number].append(moments.update_range(indices))
            for index, param in enumerate(group.params):
                if held[index]:
                    self.state[param.sharded] = moments.state(index)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is built: moments are laid out once."""
        if hasattr(self, "_moments"):
            raise ConfigError(
                "optim: expected all parameter groups when the optimizer is built, got one more; pass it then"
            )
        super().add_param_group(param_group)

    @property
    def moment_bytes(self) -> MomentBytes:
        """What the moments take on this rank, and the buffers that those in host memory are stepped in."""
        device, host = (
            sum(moments.nbytes(on_host=away) for moments in self._moments) for away in (False, True)
        )
        return MomentBytes(device, host, sum(tensor.nbytes for tensor in self.scratch_tensors()))

    def scratch_tensors(self) -> list[torch.Tensor]:
        """Device memory apart from the state, whose values nobody needs, for ``engine.release``."""
        return [] if self._stream is None else self._stream.tensors()

    @torch.no_grad()
    def step(self, closure: None = None, *, found_inf: torch.Tensor | None = None) -> None:
        """Update every parameter that has a gradient.

        Args:
            closure: Not supported; there for torch's signature.
            found_inf: 1.0 or 0.0 on the device; 1.0 skips the step, without waiting for the device.
        """
        if closure is not None:
            raise NotImplementedError("AdamW over shards takes no closure: call backward before step")
        self._engine.require_complete_gradients()
        if self._engine.wants_scaler:
            note_scaler(self._engine, None)  # clipping has reported it before, where a scaler is used
        raise_noted()  # before anything is changed
        if found_inf is not None and self._moments:  # shards may live in host memory, the norm does not
            found_inf = found_inf.to(self._moments[0].step.device)
        counters, absent = self._count_steps()
        if counters:
            torch._foreach_add_(counters, 1)
        for steps, left_alone in absent:
            steps.sub_(left_alone)
        self._update(found_inf)
        if found_inf is not None and counters:
            torch._foreach_sub_(counters, [found_inf] * len(counters))
            for steps, left_alone in absent:
                steps.addcmul_(left_alone, found_inf)

    def _update(self, found_inf: torch.Tensor | None) -> None:
        away: list[tuple[UpdateRange, dict[str, Any]]] = []
        snapshot = _Snapshot.of(self._moments, found_inf) if self._policy.offload else None
        for settings, ranges in zip(self.param_groups, self._update_ranges, strict=True):
            present = [s for whole in ranges for s in self._present(whole)]
            update(settings, [s for s in present if not s.on_host], found_inf)
            away += [(s, settings) for s in present if s.on_host]
        if away:
            assert snapshot is not None
            self._step_away(away, snapshot)

    def _step_away(self, away: list[tuple[UpdateRange, dict[str, Any]]], snapshot: _Snapshot) -> None:
        """Step what has its moments in host memory, concurrently with what the caller does next; each layer's
        forward waits for its own."""
        if self._stream is None:
            plans = [moments.group.plan for moments in self._moments]
            num_bytes = ring_bytes(plans, self._engine.meshes, self._policy)
            self._stream = StateStream(away[0][0].main.device, num_bytes)
            self._guard.finish = self._stream.finish
        steps, flag = snapshot.steps, snapshot.found_inf
        order = {group: number for number, group in enumerate(steps)}
        work = [
            (replace(s, step=steps[s.group][s.indices[0]]), partial(_update_one, settings, flag))
            for s, settings in sorted(away, key=lambda pair: order[pair[0].group])
        ]
        done = self._stream.run(work, ready=snapshot.taken, held=snapshot)
        for group, event in done.items():
            group.busy_until(event)
            if self._engine.policy.fsdp.lean:  # its gradients' memory goes before the next forward
                group.weights.guard.wait()

    def _count_steps(self) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The counters of all groups with gradients; where some of a group's parameters have none, their
        counters again, with ones for those parameters."""
        counters, absent = [], []
        for moments in self._moments:
            group = moments.group
            if not group.has_grad:
                continue
            group.weights.mark_changed(cast=rounds_weights(moments) and group not in self._mixed)
            steps, missing = moments.step, [not grad.is_present for grad in group.param_grads]
            counters.append(steps)
            if any(missing):
                self._uneven.add(group)
                absent.append((steps, torch.tensor(missing, dtype=steps.dtype, device=steps.device)))
        return counters, absent

    def _present(self, piece: UpdateRange) -> list[UpdateRange]:
        """The range if its parameters step together; else those of them that have a gradient."""
        if piece.group not in self._uneven:
            return [piece] if piece.group.has_grad else []
        moments = next(moments for moments in self._moments if moments.group is piece.group)
        present = [i for i in piece.indices if piece.group.param_grads[i].is_present]
        return [moments.update_range([index]) for index in present]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of its parameters, or zero them; those of other optimizers stay."""
        if set_to_none and self._steps_all:
            self._engine.zero_grad()
        else:
            super().zero_grad(set_to_none)

    # Checkpoints: state by parameter name, as sharded tensors that a load fills in place.

    def checkpoint_state(self) -> dict[str, Any]:
        state = {
            param.name: self.state[param.sharded]
            for moments in self._moments
            for param in moments.group.params
            if param.sharded in self.state
        }
        groups = [
            {key: list(v) if isinstance(v, tuple) else v for key, v in group.items() if key != "params"}
            | {MEMBERS: self._members(group)}
            for group in self.param_groups
        ]
        return {"state": state, "groups": groups}

    def _members(self, group: dict[str, Any]) -> list[str]:
        return [self._names[parameter] for parameter in group["params"]]

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Tensors were filled in place; what remains are the settings of the groups."""
        counters = ((moments.group, moments.step) for moments in self._moments)
        self._uneven = {group for group, steps in counters if bool((steps != steps[0]).any())}
        stored = state.get("groups", [])
        for number in range(len(self.param_groups)):
            self._take_settings(number, self._stored_settings(number, stored))

    def _stored_settings(self, number: int, stored: list[dict[str, Any]]) -> dict[str, Any]:
        """Of the stored group of the same name; of one without a name, of the group that holds most of its
        parameters."""
        group = self.param_groups[number]
        if group["name"] == unnamed(number) and any(MEMBERS in each for each in stored):
            return of_most_members(number, set(self._members(group)), stored)
        return without_members(next((each for each in stored if each.get("name") == group["name"]), {}))

    def _take_settings(self, number: int, settings: dict[str, Any]) -> None:
        group = self.param_groups[number]
        for key, value in settings.items():
            if key not in ("params", "name"):
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take another optimizer's ``state_dict()``: tensors of the same layout, or whole ones of the global
        shape. As in torch, parameters and groups are matched by their order, and the saved settings win.

        Raises:
            ConfigError: It is of other parameters, or of groups of other sizes.
        """
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        pairs = zip(keys, mine, strict=False)
        held = [(key, self.state[p]) for key, p in pairs if p in self.state]  # what is frozen has no state
        missing = [key for key, _ in held if key not in state_dict["state"]]
        if len(keys) != len(mine) or missing:
            raise ConfigError(
                f"optim: expected the state of {len(mine)} parameters, got {len(keys) - len(missing)}; load "
                "what the same model's optimizer saved"
            )
        sizes, saved = (
            [len(group["params"]) for group in groups]
            for groups in (self.param_groups, state_dict["param_groups"])
        )
        if sizes != saved:
            raise ConfigError(
                f"optim: expected groups of {sizes} parameters, got {saved}; load what an optimizer with the "
                "same groups saved"
            )
        for stored in state_dict["param_groups"]:
            _refuse_switches({name: stored[name] for name in _REFUSED if name in stored})
        for key, moments in held:
            for name, tensor in moments.items():
                tensor.copy_(state_dict["state"][key][name])
        self.load_checkpoint_state({})
        for number, settings in enumerate(state_dict["param_groups"]):
            self._take_settings(number, settings)


@dataclass(frozen=True)
class _Snapshot:
    """What updates on another stream read: copies, for counters change again, and the flag may be gone,
    before the last of them runs."""

    steps: dict[ParamGroup, torch.Tensor]
    found_inf: torch.Tensor | None
    taken: torch.cuda.Event | None
    """Behind the gradients and before the updates of moments on the device, which run concurrently."""

    @classmethod
    def of(cls, moments: list[GroupMoments], found_inf: torch.Tensor | None) -> _Snapshot:
        steps = {each.group: each.step.clone() for each in moments}
        flag = None if found_inf is None else found_inf.clone()
        is_cuda = any(counter.is_cuda for counter in steps.values())
        return cls(steps, flag, torch.cuda.current_stream().record_event() if is_cuda else None)


def _update_one(settings: dict[str, Any], found_inf: torch.Tensor | None, piece: UpdateRange) -> None:
    update(settings, [piece], found_inf)


def _refuse_switches(switches: dict[str, bool | None]) -> None:
    unknown = [name for name in switches if name not in (*_REFUSED, *_TAKEN)]
    if unknown:
        raise TypeError(f"AdamW takes no argument {unknown[0]!r}")
    refuse([
        f"optim: expected {name} = False, got {value}: AdamW over flat shards has none; drop it, or pass "
        "model.parameters() to torch.optim.AdamW"
        for name, value in switches.items()
        if name in _REFUSED and value
    ])  # fmt: skip


def _refuse_model_arguments(groups: Sequence[GroupConfig], decays: DecayRule | None) -> None:
    if groups or decays is not None:
        raise ConfigError(
            "optim: groups and decays go by names: expected a model, got parameters; pass the model, "
            "or say it in the dicts of parameters"
        )


def _torch_groups(params: Iterable[Any]) -> list[NamedGroup]:
    """From parameters, or dicts of them, as torch takes them."""
    given = list(params)
    dicts = given if given and isinstance(given[0], dict) else [{"params": given}]
    made = []
    for number, each in enumerate(dicts):
        members = [each["params"]] if isinstance(each["params"], torch.Tensor) else list(each["params"])
        plain = [member[1] if isinstance(member, tuple) else member for member in members]  # with names
        settings = {key: value for key, value in each.items() if key not in ("params", "name")}
        made.append(NamedGroup(each.get("name", unnamed(number)), settings, plain))  # type: ignore[arg-type]
    return made
