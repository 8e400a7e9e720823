"""AdamW over flat shards: one fused pass over each buffer, whatever number of parameters it holds.

A flat shard is cut into a few *stretches* of parameters with the same weight decay. Where a fused kernel can
run, each stretch is one launch, which also rounds the new weights to compute precision; elsewhere all
stretches of the model go through one multi-tensor call per decay. Padding between parameters has
zero gradients and stays zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdmoe.errors import ConfigError
from fsdmoe.fsdp import engine_of
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.kernels.backend import triton_for
from fsdmoe.labels import raise_noted
from fsdmoe.optim.config import MAX_BETA2_BF16, beta2_problem

# Elements updated at a time where moments are stored in lower precision than they are computed in.
CHUNK = 1 << 24

DecayRule = Callable[[str, torch.Tensor], bool]


@dataclass(frozen=True)
class Stretch:
    """A run of one flat shard with one weight decay, and the same run of gradients and moments."""

    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor
    group: ParamGroup
    indices: list[int]
    """Which of the group's parameters it covers."""
    held: slice
    """Where in the group's flat shard it lies."""
    cast: torch.Tensor | None
    """The same run of the weights in compute precision, where they are kept apart from ``main``."""

    @property
    def grad(self) -> torch.Tensor:
        grad = self.group.grad
        assert grad is not None
        assert grad.main is not None
        return grad.main[self.held]


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay for a fully sharded model.

    ``param_groups`` has two entries on every rank, decayed and not decayed, with the model's parameters; a
    schedule sets ``lr`` in both. ``state`` shows the moments by parameter, as torch's optimizers do, so that
    torch's tools read and fill them; they lie in flat buffers.

    A parameter whose gradient is ``None`` is not updated, whether its unit took no part in the step or its
    gradient was dropped; a parameter of a unit that did take part counts as having a gradient, zero if it was
    not used.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        moment_dtype: torch.dtype = torch.float32,
        decays: DecayRule | None = None,
    ) -> None:
        """Take the parameters of ``model`` that are trained.

        Args:
            model: From ``parallelize`` or ``fully_shard``.
            lr: Learning rate; torch's schedulers change it.
            betas: Decay of the first and of the second moment.
            eps: Added to the root of the second moment.
            weight_decay: Decoupled, for the parameters that ``decays`` names.
            moment_dtype: How the moments are kept: float32 or bfloat16.
            decays: ``decays(name, parameter)`` says which parameters are decayed; by default those with two
                dims or more, biases of experts aside.

        Raises:
            ConfigError: ``betas[1]`` is too close to 1 for moments in bfloat16.
        """
        if moment_dtype == torch.bfloat16 and betas[1] > MAX_BETA2_BF16:
            raise ConfigError(beta2_problem(betas[1]))
        self._engine = engine_of(model)
        self._moment_dtype = moment_dtype
        # Biases of experts have two dims: one is the expert.
        rule = decays or (lambda name, parameter: parameter.dim() >= 2 and not name.endswith("bias"))
        # By parameter, not by name: a shell around the sharded model (peft's) has longer ones.
        self._is_decayed = {parameter: rule(name, parameter) for name, parameter in model.named_parameters()}
        self._moments: list[tuple[ParamGroup, dict[str, torch.Tensor]]] = []
        self._stretches: tuple[list[Stretch], list[Stretch]] = ([], [])
        self._uneven: set[ParamGroup] = set()
        """Groups whose parameters have taken different numbers of steps: they are updated one by one."""
        for group in self._engine.groups:
            if group.plan.requires_grad:
                self._add_group(group)
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter in model.parameters():  # the model's order, which no layout changes
            if parameter.requires_grad:
                (decayed if self._is_decayed[parameter] else others).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": weight_decay, "name": "decayed"},
            {"params": others, "weight_decay": 0.0, "name": "not decayed"},
        ]
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        for group, moments in self._moments:
            for index, param in enumerate(group.params):
                self.state[param.sharded] = {
                    "step": moments["step"][index],
                    "exp_avg": group.sharded_view(param, moments["exp_avg"]),
                    "exp_avg_sq": group.sharded_view(param, moments["exp_avg_sq"]),
                }

    def _add_group(self, group: ParamGroup) -> None:
        moments = {
            "exp_avg": torch.zeros_like(group.weights.main, dtype=self._moment_dtype),
            "exp_avg_sq": torch.zeros_like(group.weights.main, dtype=self._moment_dtype),
            "step": torch.zeros(len(group.params), dtype=torch.float32, device=group.weights.main.device),
        }
        self._moments.append((group, moments))
        for indices in self._runs(group):
            decayed = self._is_decayed[group.params[indices[0]].sharded]
            self._stretches[0 if decayed else 1].append(_stretch(group, moments, indices))

    def _runs(self, group: ParamGroup) -> list[list[int]]:
        """Neighbouring parameters with the same decay, of those that this rank holds something of."""
        runs: list[tuple[bool, list[int]]] = []
        for index, param in enumerate(group.params):
            if group.owned_range(param).numel:
                decayed = self._is_decayed[param.sharded]
                if not runs or runs[-1][0] != decayed:
                    runs.append((decayed, []))
                runs[-1][1].append(index)
        return [indices for _, indices in runs]

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
        self._engine.note_scaling(False)  # clipping has reported it before, where a scaler is used
        raise_noted()  # before anything is changed
        if found_inf is not None and self._moments:  # shards may live in host memory, the norm does not
            found_inf = found_inf.to(self._moments[0][0].weights.main.device)
        counters, absent = self._count_steps()
        if counters:
            torch._foreach_add_(counters, 1)
        for steps, left_alone in absent:
            steps.sub_(left_alone)
        for settings, stretches in zip(self.param_groups, self._stretches, strict=True):
            present = [s for whole in stretches for s in self._present(whole)]
            if present:
                self._update(settings, present, found_inf)
        if found_inf is not None and counters:
            torch._foreach_sub_(counters, [found_inf] * len(counters))
            for steps, left_alone in absent:
                steps.addcmul_(left_alone, found_inf)

    def _count_steps(self) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The counters of all groups with gradients; where some of a group's parameters have none, their
        counters again, with ones for those parameters."""
        counters, absent = [], []
        for group, moments in self._moments:
            if not group.has_grad:
                continue
            group.weights.mark_changed(cast=triton_for(group.weights.main) is not None)
            steps, missing = moments["step"], [not grad.is_present for grad in group.param_grads]
            counters.append(steps)
            if any(missing):
                self._uneven.add(group)
                absent.append((steps, torch.tensor(missing, dtype=steps.dtype, device=steps.device)))
        return counters, absent

    def _present(self, stretch: Stretch) -> list[Stretch]:
        """The stretch if its parameters step together; else those of them that have a gradient."""
        if stretch.group not in self._uneven:
            return [stretch] if stretch.group.has_grad else []
        moments = next(moments for group, moments in self._moments if group is stretch.group)
        present = [i for i in stretch.indices if stretch.group.param_grads[i].is_present]
        return [_stretch(stretch.group, moments, [index]) for index in present]

    def _update(
        self, settings: dict[str, Any], stretches: list[Stretch], found_inf: torch.Tensor | None
    ) -> None:
        beta1, beta2 = settings["betas"]
        stretches = [s for s in stretches if not _update_fused(s, settings, found_inf)]
        if not stretches:
            return
        if self._moment_dtype == stretches[0].main.dtype:
            torch._fused_adamw_(
                [s.main for s in stretches],
                [s.grad for s in stretches],
                [s.exp_avg for s in stretches],
                [s.exp_avg_sq for s in stretches],
                [],
                [s.step for s in stretches],
                lr=settings["lr"], beta1=beta1, beta2=beta2, weight_decay=settings["weight_decay"],
                eps=settings["eps"], amsgrad=False, maximize=False, grad_scale=None, found_inf=found_inf,
            )  # fmt: skip
            return
        for stretch in stretches:
            for start in range(0, stretch.main.numel(), CHUNK):
                _update_chunk(stretch, slice(start, start + CHUNK), settings, found_inf)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the model."""
        self._engine.zero_grad()

    # Checkpoints: state by parameter name, as sharded tensors that a load fills in place.

    def checkpoint_state(self) -> dict[str, Any]:
        state = {
            param.name: self.state[param.sharded] for group, _ in self._moments for param in group.params
        }
        groups = [
            {key: list(v) if isinstance(v, tuple) else v for key, v in group.items() if key != "params"}
            for group in self.param_groups
        ]
        return {"state": state, "groups": groups}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Tensors were filled in place; what remains are the settings of the groups."""
        counters = ((group, moments["step"]) for group, moments in self._moments)
        self._uneven = {group for group, steps in counters if bool((steps != steps[0]).any())}
        stored = {group["name"]: group for group in state.get("groups", [])}
        for group in self.param_groups:
            for key, value in stored.get(group["name"], {}).items():
                if key != "params":
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take another optimizer's ``state_dict()``: tensors of the same layout, or whole ones of the global
        shape. As in torch, parameters are matched by their order, and the saved settings win."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        missing = [key for key in keys if key not in state_dict["state"]]
        if len(keys) != len(mine) or missing:
            raise ConfigError(
                f"optim: expected the state of {len(mine)} parameters, got {len(keys) - len(missing)}; load "
                "what the same model's optimizer saved"
            )
        for key, parameter in zip(keys, mine, strict=True):
            for name, tensor in self.state[parameter].items():
                tensor.copy_(state_dict["state"][key][name])
        self.load_checkpoint_state({"groups": state_dict["param_groups"]})


def _stretch(group: ParamGroup, moments: dict[str, torch.Tensor], indices: list[int]) -> Stretch:
    """The run of neighbouring parameters ``indices`` of a group; they have taken the same steps."""
    first, last = (group.owned_range(group.params[index]) for index in (indices[0], indices[-1]))
    held = slice(first.offset, last.offset + last.numel)
    return Stretch(
        main=group.weights.main[held],
        exp_avg=moments["exp_avg"][held],
        exp_avg_sq=moments["exp_avg_sq"][held],
        step=moments["step"][indices[0]],
        group=group,
        indices=indices,
        held=held,
        cast=None if group.weights.cast is None else group.weights.cast[held],
    )


def _update_fused(stretch: Stretch, settings: dict[str, Any], found_inf: torch.Tensor | None) -> bool:
    """One launch for everything, where it can run; whether it did."""
    fused = triton_for(stretch.main)
    if fused is None:
        return False
    beta1, beta2 = settings["betas"]
    numbers = fused.AdamWStep(
        lr=settings["lr"], beta1=beta1, beta2=beta2, eps=settings["eps"],
        weight_decay=settings["weight_decay"], step=stretch.step, found_inf=found_inf,
    )  # fmt: skip
    fused.adamw_(
        stretch.main, stretch.grad, stretch.exp_avg, stretch.exp_avg_sq, numbers, weight=stretch.cast
    )
    return True


def _update_chunk(
    stretch: Stretch, part: slice, settings: dict[str, Any], found_inf: torch.Tensor | None
) -> None:
    """The same update with moments computed in fp32 and rounded when stored."""
    main, grad = stretch.main[part], stretch.grad[part].float()
    exp_avg, exp_avg_sq = stretch.exp_avg[part], stretch.exp_avg_sq[part]
    beta1, beta2 = settings["betas"]
    average = exp_avg.float().lerp_(grad, 1 - beta1)
    square = exp_avg_sq.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    step = stretch.step
    denominator = (square / (1 - beta2**step)).sqrt_().add_(settings["eps"])
    update = (
        (average / (1 - beta1**step)).div_(denominator).add_(main.float(), alpha=settings["weight_decay"])
    )
    if found_inf is not None:
        keep = found_inf == 0
        update = torch.where(keep, update, 0.0)
        average, square = torch.where(keep, average, exp_avg), torch.where(keep, square, exp_avg_sq)
    main.add_(update.to(main.dtype), alpha=-settings["lr"])
    exp_avg.copy_(average)
    exp_avg_sq.copy_(square)
