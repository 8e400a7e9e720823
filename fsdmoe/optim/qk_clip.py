"""QK-clip, which with Muon makes MuonClip (Kimi K2, 2025): heads whose attention logits grow past a threshold
get smaller query and key weights after the optimizer's step.

The largest logit of a head over the step's micro-batches and all ranks is ``S``. Its factor is
``g = min(1, threshold / S)``, which the weights share:

==================================  ==========================================================================
attention                           what is scaled
==================================  ==========================================================================
grouped queries                     q and k by √g, with the smallest g of the heads that share a key head
with norms of queries and keys      the norms' weights by √g, with the smallest g of the layer: a norm undoes
                                    what is done to the projection before it, and all heads share its weight
multi-head latent                   by head: q and k without positions by √g, q with positions by g; the key
                                    with positions, which all heads share, is left alone
==================================  ==========================================================================

Kernels of attention do not return their largest logit, so it is found on a sample: ``rows`` queries of each
row, evenly spaced, the last one included, against all keys that they see (those of the rank's own piece under
``cp``, which runs refuse). What looks at them stands around a layer's attention, only if this is on.
One update may carry logits past the threshold by its own growth: the factor is of those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp.engine import engine_of
from fsdmoe.fsdp.flat_param import FlatParam
from fsdmoe.fsdp.param_group import ParamGroup
from fsdmoe.mesh import Axis

_CHUNK = 1 << 26
"""Logits that are looked at together."""

Factors = Callable[[Tensor], Tensor]
"""Of a parameter's rows, from those of a layer's heads."""


class QKClip:
    """Looks at the attention of a sharded model, and scales its weights after each step.

    ::

        clip = QKClip(model, 100.0)
        ...
        optimizer.step()
        clip.step()
    """

    def __init__(self, model: nn.Module, threshold: float, *, rows: int = 128) -> None:
        """Look at the attention of ``model`` from now on, wherever gradients are on.

        Args:
            model: From ``parallelize``, a decoder of fsdmoe's own.
            threshold: The largest logit that is let alone; Kimi K2 has 100.
            rows: Queries of each row that are looked at; as many as a row has for all of them.

        Raises:
            ConfigError: Its attention is not known, or its projections are not trained.
        """
        self._engine, self._threshold, self._rows = engine_of(model), threshold, rows
        found = [module for module in model.modules() if "attend" in getattr(module, "memory_calls", {})]
        if not found:
            raise ConfigError(
                "optim.qk_clip: expected a decoder of fsdmoe's own, whose attention it knows, got "
                f"{type(model).__name__}; set optim.qk_clip = 0"
            )
        homes = {param.sharded: (group, param) for group in self._engine.groups for param in group.params}
        heads = [_num_heads(module) for module in found]
        self._flat = torch.full((sum(heads),), -torch.inf, device=self._engine.meshes.device)
        self._layers = list(self._flat.split(heads))
        self._scaled = [[_Scaled.of(each, homes) for each in _parameters(module)] for module in found]
        self._seen = self._flat
        for largest_H, module in zip(self._layers, found, strict=True):
            calls: dict[str, Any] = vars(module)["memory_calls"]
            calls["attend"] = partial(self._attend, largest_H, module, calls["attend"])

    def _attend(
        self, largest_H: Tensor, module: Any, call: Any, attend: Any, query: Tensor, key: Tensor, *rest: Any
    ) -> Tensor:
        """Around a layer's attention: ``attend`` is of a context; ``rest`` are values, scale, sinks and
        window."""
        if torch.is_grad_enabled():  # recomputed attention is seen twice, which changes no maximum
            _, scale, _, window = rest
            with torch.no_grad():
                here = query.shape[2] * module.tensor.rank
                own_H = largest_H[here : here + query.shape[2]]
                found_H = largest_logits(query, key, attend.__self__, scale, window, self._rows)
                torch.maximum(own_H, found_H.to(own_H.dtype), out=own_H)
        return call(attend, query, key, *rest)

    @torch.no_grad()
    def step(self) -> None:
        """After the optimizer's step: scale what has grown too far. Collective over all ranks."""
        dist.all_reduce(self._flat, dist.ReduceOp.MAX, group=self._engine.meshes.group(Axis.WORLD))
        is_past = self._flat.isfinite() & (self._flat > self._threshold)
        factors = torch.where(is_past, self._threshold / self._flat, 1.0)
        sizes = [len(each) for each in self._layers]
        for scaled, factor_H in zip(self._scaled, factors.split(sizes), strict=True):
            for each in scaled:
                each.multiply(factor_H)
        self._seen = self._flat.clone()
        self.reset()

    def reset(self) -> None:
        """Drop what was seen: the step is not taken."""
        self._flat.fill_(-torch.inf)

    def largest(self) -> list[float]:
        """The largest logit of each layer in the last step that was taken, of all ranks; waits for the
        device."""
        sizes = [len(each) for each in self._layers]
        return torch.stack([layer_H.max() for layer_H in self._seen.split(sizes)]).tolist()


class _Scaled:
    """A parameter that is scaled row by row, and where it lies."""

    def __init__(self, group: ParamGroup, param: FlatParam, factors: Factors) -> None:
        self._group, self._param, self._factors = group, param, factors

    @classmethod
    def of(
        cls, found: tuple[str, nn.Parameter, Factors], homes: dict[Any, tuple[ParamGroup, FlatParam]]
    ) -> _Scaled:
        name, parameter, factors = found
        if parameter not in homes or not parameter.requires_grad:
            raise ConfigError(
                f"optim.qk_clip: expected {name} to be trained, which it scales, got a frozen one; take it "
                "out of frozen groups, or set optim.qk_clip = 0"
            )
        group, param = homes[parameter]
        return cls(group, param, factors)

    def multiply(self, factor_H: Tensor) -> None:
        group = self._group
        group.weights.guard.wait()  # moments in host memory are stepped on another stream
        piece = group.owned_range(self._param).of(group.weights.main)
        factor_R = self._factors(factor_H).to(piece.device, piece.dtype)
        for box in self._param.sharded.boxes:  # type: ignore[attr-defined]
            own_R = factor_R[box.offsets[0] : box.offsets[0] + box.sizes[0]]
            box.view_of(piece).mul_(own_R.view(-1, *(1 for _ in box.sizes[1:])))
        group.weights.mark_changed()


def _num_heads(module: Any) -> int:
    """Of all ranks."""
    if hasattr(module, "kv_b_proj"):
        return int(module.kv_b_proj.weight.shape[0]) // (module.nope_dim + module.value_dim)
    return int(module.q_proj.weight.shape[0]) // module.head_dim


def _parameters(module: Any) -> Iterator[tuple[str, nn.Parameter, Factors]]:
    """What is scaled of an attention, and how the factors of its rows follow from those of its heads."""
    if hasattr(module, "kv_b_proj"):
        query = "q_b_proj" if module.has_query_rank else "q_proj"
        parts = {
            query: (module.nope_dim, module.rope_dim, 1.0),
            "kv_b_proj": (module.nope_dim, module.value_dim, 0.0),
        }
        for name, sizes in parts.items():
            yield name, getattr(module, name).weight, partial(_of_latent_heads, *sizes)
    elif isinstance(module.q_norm, nn.Identity):
        num_keys = int(module.k_proj.weight.shape[0]) // module.head_dim
        for name in ("q_proj", "k_proj"):
            layer = getattr(module, name)
            for parameter in (layer.weight, layer.bias):
                if parameter is not None:
                    yield name, parameter, partial(_of_groups, num_keys, parameter.shape[0])
    else:
        for name in ("q_norm", "k_norm"):
            parameter = getattr(module, name).weight
            yield name, parameter, partial(_of_groups, 1, parameter.shape[0])


def _of_groups(num_groups: int, num_rows: int, factor_H: Tensor) -> Tensor:
    """√ of the smallest factor of each group of heads, for the rows that are the group's."""
    smallest_G = factor_H.view(num_groups, -1).amin(1)
    return smallest_G.sqrt().repeat_interleave(num_rows // num_groups)


def _of_latent_heads(nope: int, others: int, power: float, factor_H: Tensor) -> Tensor:
    """√ of each head's factor for its rows without positions, another power for the others."""
    parts = factor_H.sqrt()[:, None].expand(-1, nope), factor_H.pow(power)[:, None].expand(-1, others)
    return torch.cat(parts, dim=1).flatten()


def largest_logits(
    query_BSHD: Tensor, key_BSGD: Tensor, context: Any, scale: float, window: int | None, rows: int
) -> Tensor:
    """The largest logit of each head, ``[H]``, over a sample of ``rows`` queries and the keys that they see.

    ``context`` is the :class:`fsdmoe.models.attention.AttentionContext` of the queries."""
    batch, length, num_heads, width = query_BSHD.shape
    num_groups = key_BSGD.shape[2]
    count = min(rows, length)
    rows_N = length - 1 - torch.arange(count, device=query_BSHD.device) * length // count
    places_BS, documents_BS = _places(context, batch, length, query_BSHD.device)
    found = []
    per_chunk = max(1, _CHUNK // (num_heads * length))
    for number in range(batch):
        keys_GDS = key_BSGD[number].permute(1, 2, 0)
        for chosen_N in rows_N.split(per_chunk):
            seen_NS = _sees(places_BS[number], chosen_N, window)
            if documents_BS is not None:
                seen_NS &= documents_BS[number][chosen_N, None] == documents_BS[number]
            queries = query_BSHD[number, chosen_N].unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3)
            logits = (queries.reshape(num_groups, -1, width) @ keys_GDS).view(num_heads, -1, length)
            found.append(logits.masked_fill_(~seen_NS, -torch.inf).amax((1, 2)))
    return torch.stack(found).amax(0).float() * scale


def _places(context: Any, batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Where in its row each token is, and its document; -1 is padding."""
    if context.split is not None:
        own = context.split.plan.own
        return own.index_BL, own.document_BL
    return torch.arange(length, device=device).expand(batch, -1), context.document_ids_BS


def _sees(places_S: Tensor, chosen_N: Tensor, window: int | None) -> Tensor:
    """``[N, S]``: which keys each of the chosen queries may see."""
    distance_NS = places_S[chosen_N, None] - places_S
    seen_NS = (distance_NS >= 0) & (places_S >= 0)
    return seen_NS if window is None else seen_NS & (distance_NS < window)
