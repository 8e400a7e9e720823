"""Muon over flat shards: matrices that a rank holds whole are computed there, others are brought together.

One step::

    parts          of cut matrices start on their way, packed: one exchange over all ranks
    whole ones     Newton–Schulz, batches of one shape, meanwhile
    cut ones       Newton–Schulz at their owners, when the parts have come
    results        back to whoever holds a part: one exchange
    AdamW          of embeddings, heads, norms, routers and biases

Momentum follows the gradient in the pass that reads it for Newton–Schulz, and the pass that steps the main
weights writes those in compute precision too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.placement import Coordinates
from fsdmoe.fsdp.engine import Engine, engine_of
from fsdmoe.fsdp.memory_plan import MomentBytes, MomentCount
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.fsdp.plan import GroupPlan, ParamPlan
from fsdmoe.kernels.backend import triton_for
from fsdmoe.kernels.newton_schulz import newton_schulz
from fsdmoe.mesh import Axis
from fsdmoe.optim.adamw import AdamW
from fsdmoe.optim.config import beta2_problems, check_rounding
from fsdmoe.optim.group_config import MUON, GroupConfig
from fsdmoe.optim.groups import check_groups, make_groups
from fsdmoe.optim.matrices import FlatMatrices, has_matrices
from fsdmoe.optim.matrix_exchange import (
    MatrixBatch,
    RangeCopy,
    RankExchange,
    assign_blocks,
    plan_exchange,
    world_size,
)
from fsdmoe.optim.moments import MomentPolicy
from fsdmoe.optim.muon_config import MuonConfig, is_left_to_adamw
from fsdmoe.precision.config import torch_dtype

STATE = "momentum_buffer"
"""As in ``torch.optim.Muon``."""


@dataclass(frozen=True, eq=False)
class MuonParam:
    """A parameter that is updated as matrices, and this rank's part of it."""

    group: ParamGroup
    index: int
    settings: dict[str, Any]
    matrices: FlatMatrices
    momentum: torch.Tensor

    @property
    def is_present(self) -> bool:
        return self.group.param_grads[self.index].is_present

    @property
    def main(self) -> torch.Tensor:
        return self._of(self.group.weights.main)

    @property
    def cast(self) -> torch.Tensor | None:
        """The weights in compute precision, where they are other tensors."""
        cast = self.group.weights.cast
        return None if cast is None else self._of(cast)

    @property
    def grad(self) -> torch.Tensor:
        assert self.group.grad is not None
        assert self.group.grad.main is not None
        return self._of(self.group.grad.main)

    def _of(self, flat: torch.Tensor) -> torch.Tensor:
        return self.group.owned_range(self.group.params[self.index]).of(flat)


class Muon(AdamW):
    """Muon for the matrices of a fully sharded model, AdamW for the rest, in one optimizer.

    ``param_groups`` has an entry for matrices, ``muon``, and those of :class:`AdamW`. All ranks step the same
    parameters: a gradient that is dropped must be dropped on all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        muon: MuonConfig | None = None,
        groups: Sequence[GroupConfig] = (),
        moment_dtype: torch.dtype | tuple[torch.dtype, torch.dtype] = torch.float32,
    ) -> None:
        """Take the parameters that are trained.

        Args:
            model: From ``parallelize`` or ``fully_shard``.
            lr: Learning rate, of both.
            betas: AdamW's.
            eps: AdamW's.
            weight_decay: Decoupled, of matrices.
            muon: What is done with a matrix; None takes the defaults.
            groups: Patterns over names, with settings of their own; ``optimizer`` says who updates them.
            moment_dtype: How momentum and AdamW's moments are kept; a pair for AdamW's second apart.

        Raises:
            ConfigError: A group does not fit the model, or Muon cannot update it so.
        """
        engine = engine_of(model)
        self.config = muon or MuonConfig()
        check_groups(groups, "muon")
        check_rounding("muon", engine.policy.precision)
        pair = moment_dtype if isinstance(moment_dtype, tuple) else (moment_dtype, moment_dtype)
        refuse(beta2_problems(betas[1], str(pair[1]).removeprefix("torch.")))
        made = make_groups(model, groups, lr=lr, weight_decay=weight_decay, by_muon=_chooser(engine))
        self._head_rows = head_rows(model) if self.config.heads == "each" else {}
        self._matrices: list[MuonParam] = []
        self._plans: dict[tuple[bool, ...], RankExchange] = {}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._build(engine, made, defaults, MomentPolicy(*pair))

    def _add_moments(self) -> None:
        super()._add_moments()
        settings = {p: group for group in self.param_groups if MUON in group for p in group["params"]}
        for moments in self._moments:
            group = moments.group
            for index, param in enumerate(group.params):
                if param.sharded not in settings:
                    continue
                owned = group.owned_range(param)
                buffer = torch.zeros(owned.numel, dtype=self._policy.first, device=moments.step.device)  # type: ignore[arg-type]
                matrices = FlatMatrices.of(group.plan, index, self._head_rows.get(param.sharded, 0))
                found = MuonParam(group, index, settings[param.sharded], matrices, buffer)
                self._matrices.append(found)
                if group.weights.scales is not None:
                    self._mixed.add(group)
                self.state[param.sharded] = {
                    "step": moments.step[index], STATE: param.sharded.with_piece(buffer)  # type: ignore[attr-defined]
                }  # fmt: skip

    @property
    def moment_bytes(self) -> MomentBytes:
        """What momentum and moments take on this rank."""
        momentum = sum(param.momentum.nbytes for param in self._matrices)
        return MomentBytes(super().moment_bytes.device + momentum)

    def exchange(self) -> RankExchange:
        """What this rank computes and sends in a step in which all parameters have gradients."""
        return self._plan([True] * len(self._matrices))

    def _plan(self, present: Sequence[bool]) -> RankExchange:
        key = tuple(present)
        if key not in self._plans:
            meshes = self._engine.meshes
            params = [p.matrices for p, is_present in zip(self._matrices, key, strict=True) if is_present]
            self._plans[key] = plan_exchange(
                params, assign_blocks(params, meshes), meshes.rank(Axis.WORLD), meshes
            )
        return self._plans[key]

    def _update(self, found_inf: torch.Tensor | None) -> None:
        present = [param.is_present for param in self._matrices]
        params = [p for p, is_present in zip(self._matrices, present, strict=True) if is_present]
        if params:
            _Step(self.config, params, self._plan(present), self._engine, found_inf).run()
        super()._update(found_inf)


class _Step:
    """One update of some matrices."""

    def __init__(
        self,
        config: MuonConfig,
        params: list[MuonParam],
        plan: RankExchange,
        engine: Engine,
        found_inf: torch.Tensor | None,
    ) -> None:
        self._config, self._params, self._plan = config, params, plan
        self._found_inf = found_inf
        self._mains = [param.main for param in params]
        self._casts = [param.cast for param in params]
        self._grads = [self._clean(param.grad) for param in params]
        self._group = engine.meshes.group(Axis.WORLD)
        self._travels = world_size(engine.meshes) > 1
        device = engine.meshes.device
        self._like = torch.empty(0, dtype=torch_dtype(config.ns_dtype_on(device.type)), device=device)

    def run(self) -> None:
        plan = self._plan
        for copy in plan.elsewhere:
            self._follow(copy)
        outgoing = self._like.new_empty(sum(plan.parts_to))
        for copy in plan.parts:
            self._put_ahead(copy, outgoing)
        incoming, work = self._start(outgoing, plan.parts_from, plan.parts_to)
        results = self._like.new_empty(sum(plan.results_to))
        for batch in plan.here:
            self._compute(batch, incoming, results)
        if work is not None:
            work.wait()
        for batch in plan.gathered:
            self._compute(batch, incoming, results)
        returned, work = self._start(results, plan.results_from, plan.results_to)
        if work is not None:
            work.wait()
        for copy in plan.results:
            self._apply(copy, returned)

    def _clean(self, grad: torch.Tensor) -> torch.Tensor:
        """Zeros for a gradient that is not to be stepped with."""
        return grad if self._found_inf is None else grad.masked_fill(self._found_inf.bool(), 0)

    def _follow(self, copy: RangeCopy) -> tuple[torch.Tensor, torch.Tensor]:
        """Let momentum follow the gradient in a range of a parameter; both."""
        weight: float | torch.Tensor = 1 - self._config.momentum
        if self._found_inf is not None:
            weight = weight * (1 - self._found_inf)
        momentum, grad = self._momentum_and_grad(copy)
        if momentum.dtype == grad.dtype == torch.float32:
            momentum.lerp_(grad, weight)
        else:
            momentum.copy_(momentum.float().lerp_(grad.float(), weight))
        return momentum, grad

    def _momentum_and_grad(self, copy: RangeCopy) -> tuple[torch.Tensor, torch.Tensor]:
        part = slice(copy.offset, copy.offset + copy.numel)
        return self._params[copy.param].momentum[part], self._grads[copy.param][part]

    def _put_ahead(self, copy: RangeCopy, flat: torch.Tensor) -> None:
        """Let momentum follow the gradient in a range of a parameter, and write what is to be orthogonalised
        to its place."""
        out = flat[copy.place : copy.place + copy.numel]
        fused = triton_for(self._grads[copy.param])
        if fused is not None and self._config.nesterov and self._found_inf is None:
            fused.look_ahead_triton(*self._momentum_and_grad(copy), out, self._config.momentum)
            return
        momentum, grad = self._follow(copy)
        if self._config.nesterov:
            out.copy_(grad.float().lerp(momentum.float(), self._config.momentum))
        else:
            out.copy_(momentum)

    def _start(
        self, outgoing: torch.Tensor, counts_from: list[int], counts_to: list[int]
    ) -> tuple[torch.Tensor, Any]:
        incoming = self._like.new_empty(sum(counts_from))
        if not self._travels:
            return incoming, None
        work = dist.all_to_all_single(
            incoming, outgoing, counts_from, counts_to, group=self._group, async_op=True
        )
        return incoming, work

    def _compute(self, batch: MatrixBatch, incoming: torch.Tensor, results: torch.Tensor) -> None:
        """Orthogonalise the blocks of a batch; what this rank holds of them is stepped, the rest goes to
        ``results``."""
        number, num_parts = batch.form
        form = self._params[number].matrices.form
        blocks = self._like.new_empty(batch.count * form.numel)
        for copy in batch.own:
            self._put_ahead(copy, blocks)
        for packed, place, numel in batch.received:
            blocks[place : place + numel].copy_(incoming[packed : packed + numel])
        matrices = form.join(blocks.view(batch.count, form.numel), num_parts)
        done = newton_schulz(matrices, self._config.ns_coefficients, self._config.ns_steps)
        flat = form.part(done, num_parts).view(-1)
        for copy in batch.own:
            self._apply(copy, flat)
        for place, packed, numel in batch.sent:
            results[packed : packed + numel].copy_(flat[place : place + numel])

    def _apply(self, copy: RangeCopy, orthogonal: torch.Tensor) -> None:
        """Decay and step a range of a parameter; each element is in one."""
        param = self._params[copy.param]
        rate = param.settings["lr"] * self._config.factor(*param.matrices.form.outputs_and_inputs)
        decay = param.settings["lr"] * param.settings["weight_decay"]
        part = slice(copy.offset, copy.offset + copy.numel)
        main = self._mains[copy.param][part]
        whole = self._casts[copy.param]
        cast = None if whole is None else whole[part]
        update = orthogonal[copy.place : copy.place + copy.numel].to(main.device)
        fused = triton_for(main)
        if fused is not None and self._found_inf is None:
            fused.apply_update_triton(main, update, cast, 1 - decay, rate)
            return
        if self._found_inf is not None:
            update = update * (1 - self._found_inf)
        if decay:
            main.mul_(1 - (decay if self._found_inf is None else decay * (1 - self._found_inf)))
        main.add_(update, alpha=-rate)
        if cast is not None and fused is not None:  # without kernels the next forward casts all weights
            cast.copy_(main)


def _chooser(engine: Engine) -> Any:
    """Which parameters are Muon's: matrices, by their names and as groups say."""
    placements = {
        param.sharded: plan.placement
        for group in engine.groups
        for param, plan in zip(group.params, group.plan.params, strict=True)
    }

    def is_muons(name: str, parameter: nn.Parameter, group: GroupConfig) -> bool:
        can = parameter in placements and has_matrices(name, placements[parameter])
        if group.optimizer == "muon" and not can:
            raise ConfigError(
                f"optim.groups: expected matrices for Muon in {group.title!r}, got {name} "
                f'{tuple(parameter.shape)}; narrow the patterns, or set optimizer = "adamw"'
            )
        return can and (group.optimizer == "muon" or (group.optimizer is None and not is_left_to_adamw(name)))

    return is_muons


_HEADS = {
    "q_proj": (("head_dim",),), "k_proj": (("head_dim",),), "v_proj": (("head_dim",),),
    "q_b_proj": (("qk_head_dim",), ("nope_dim", "rope_dim")),
    "kv_b_proj": (("qk_nope_head_dim", "v_head_dim"), ("nope_dim", "value_dim")),
}  # fmt: skip
"""Projections by head, and which attributes of their attention add up to the rows of one."""


def head_rows(model: nn.Module) -> dict[nn.Parameter, int]:
    """Rows of each head of the projections that have heads.

    Raises:
        ConfigError: The model has no such projections.
    """
    found = {weight: rows for module in model.modules() for weight, rows in _projections(module)}
    if not found:
        raise ConfigError(
            "optim.muon.heads: expected attention with q_proj, k_proj, v_proj and head_dim (or MLA's) for "
            '"each", got a model without; set optim.muon.heads = "whole"'
        )
    return found


def _projections(module: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    is_latent = hasattr(module, "kv_b_proj")
    for name, choices in _HEADS.items():
        weight = getattr(getattr(module, name, None), "weight", None)
        if is_latent and name == "q_proj":
            choices = _HEADS["q_b_proj"]
        sizes: list[list[Any]] = [[getattr(module, key, None) for key in keys] for keys in choices]
        whole = [sum(each) for each in sizes if all(isinstance(size, int) for size in each)]
        if (
            isinstance(weight, nn.Parameter)
            and weight.dim() == 2
            and whole
            and weight.shape[0] % whole[0] == 0
        ):
            yield weight, whole[0]


def muon_bytes(policy: MomentPolicy, groups: Sequence[GroupConfig]) -> MomentCount:
    """What Muon will hold for groups of parameters, for plans: one momentum of matrices, two moments of the
    rest."""
    first, both = (
        sum(kept.itemsize for kept in formats if isinstance(kept, torch.dtype))
        for formats in (policy.formats[:1], policy.formats)
    )

    def count(plans: Sequence[GroupPlan], at: Coordinates) -> MomentBytes:
        held = 0
        for plan in plans:
            owned = [piece.numel for piece in plan.layout.owned(at.rank(plan.axis))]
            by_muon = [_is_planned(param, groups) for param in plan.params]
            if any(by_muon):
                held += sum(n * (first if muons else both) for n, muons in zip(owned, by_muon, strict=True))
            else:
                held += plan.layout.slice_numel * both
        return MomentBytes(held)

    return count


def _is_planned(param: ParamPlan, groups: Sequence[GroupConfig]) -> bool:
    """Whether Muon updates a parameter of a plan. Layers that are alike have the names of the first."""
    if not has_matrices(param.name, param.placement):
        return False
    for group in groups:
        if group.optimizer is not None and any(fnmatchcase(param.name, each) for each in group.params):
            return group.optimizer == "muon"
    return not is_left_to_adamw(param.name)
