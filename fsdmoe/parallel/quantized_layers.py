"""Which layers of a model a recipe covers, and giving it to them.

A layer's part follows from the names on its path, which are Hugging Face's in fsdmoe's own decoders too::

    model.layers.3.self_attn.q_proj             attention
    model.layers.3.mlp.experts                  experts
    model.layers.3.mlp.shared_experts.up_proj   shared
    model.layers.0.mlp.down_proj                dense

Routers, gates of shared experts, projections to and from latent experts, embedding and head are of no part:
they are small or decide too much. Nor are layers of multi-token prediction, and towers for pictures or sound.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.placement import computes_on_dtensor
from fsdmoe.core.rank_facts import RankFacts, require_one_capability
from fsdmoe.core.rewrites import Rewrite, computed_by, foreign_forward, rewrite
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.fsdp import Engine
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of
from fsdmoe.kernels.fp8_linear import KeptCodes
from fsdmoe.kernels.head_products import fp8_head
from fsdmoe.kernels.libraries import LIBRARIES
from fsdmoe.kernels.linear import Linear
from fsdmoe.kernels.products import Products
from fsdmoe.kernels.quantized_linear import LinearPolicy
from fsdmoe.kernels.recipe_support import chosen_backend, fused_parts, library_products
from fsdmoe.models.head import LMHead
from fsdmoe.models.projections import linear_forward
from fsdmoe.precision.config import Part, PrecisionConfig
from fsdmoe.precision.formats import Recipe
from fsdmoe.precision.operand_state import OperandState
from fsdmoe.precision.quantized_weight import WeightCoding, quantize_for_gather

_TOWER = re.compile(r"(^|\.)(vision|visual|audio)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OUTPUT = re.compile(r"\.(o|out|output)_proj$|\.(wo|dense)$")
_PARTS: tuple[tuple[Part, re.Pattern[str]], ...] = (
    ("shared", re.compile(r"\.shared_experts?\.(gate|up|down)_proj$")),
    ("attention", re.compile(r"\.(self_attn|attention|attn)\.(\w+\.)*\w+$")),
    ("dense", re.compile(r"\.(mlp|feed_forward)\.(gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3)$")),
)


class Covered(NamedTuple):
    """What a recipe was given to."""

    line: str
    """Says which layers."""
    states: list[OperandState]
    """Of their projections, where statistics are wanted."""


def apply_recipe(
    model: nn.Module,
    precision: PrecisionConfig,
    facts: Sequence[RankFacts] = (),
    *,
    keeps_codes: bool = False,
) -> Covered | None:
    """Give the recipe to every layer that it covers; None without a recipe. ``facts``: of all ranks.
    ``keeps_codes``: see ``memory.keep``."""
    recipe = precision.build_recipe()
    if recipe is None:
        return None
    require_one_capability(facts, "precision.recipe")
    found: Counter[str] = Counter()
    states: list[OperandState] = []
    given: dict[nn.Module, Part] = {}
    fused = fused_parts(precision)
    products = library_products(precision)
    parts = {name: part for name, module in model.named_modules() if (part := part_of(name, module))}
    last = max((layer_number(name) or 0 for name in parts), default=0)
    _refuse_unused_patterns(precision.keep, parts)
    for name, part in parts.items():
        module, number = model.get_submodule(name), layer_number(name)
        if number is None or part not in precision.covers:
            continue
        is_inner = precision.keep_first_layers <= number <= last - precision.keep_last_layers
        if not is_inner or any(fnmatchcase(name, pattern) for pattern in precision.keep):
            found["kept"] += 1
        else:
            states += _give(module, recipe, name, precision, products)
            if keeps_codes:
                _keep_codes_of_input(model, name, part)
            given[module] = part
            found[part] += 1
    if precision.quantized_weights:
        others = {p for m in model.modules() if m not in given for p in m.parameters(recurse=False)}
        for module, part in given.items():
            # Without emulation kernels compute it wherever it runs, also where this machine only plans.
            is_fused = part in fused or not precision.emulate
            found["travel"] += _quantize_weights(module, recipe, others, transposed=is_fused)
    line = _line(recipe, precision, found)
    if precision.head == "fp8":
        _quantize_head(model, recipe, precision)
        line += "; the head's loss"
    return Covered(f"{line}; codes are kept for backward" if keeps_codes else line, states)


def _line(recipe: Recipe, precision: PrecisionConfig, found: Counter[str]) -> str:
    covered = {part: found[part] for part in precision.covers if found[part]}
    if not covered:
        raise ConfigError(
            f"precision.recipe: {recipe.name} covers no layer of this model by precision.covers = "
            f"{list(precision.covers)}, precision.keep and the layers kept; let it cover some, or write bf16"
        )
    what = ", ".join(f"{count} of {part}" for part, count in covered.items())
    is_fused = bool(fused_parts(precision) & set(precision.covers))
    how = " (emulated where there are no kernels)" if is_fused else " (emulated)"
    how = how if precision.emulate else ""
    backend = chosen_backend(precision)
    how = how if backend == "own" else f" by {LIBRARIES[backend].name}{how}"
    kept = f"; {found['kept']} kept in {precision.param_dtype}" if found["kept"] else ""
    travel = f"; {found['travel']} weights travel quantised" if precision.quantized_weights else ""
    return f"{recipe.name}{how}: modules {what}{kept}{travel}"


def _refuse_unused_patterns(patterns: tuple[str, ...], names: Iterable[str]) -> None:
    known = list(names)
    unused = [p for p in patterns if not any(fnmatchcase(name, p) for name in known)]
    if unused:
        raise ConfigError(
            f"precision.keep: no layer that a recipe could cover has a name like {unused[0]!r}; names are "
            f"whole ({known[0] if known else 'there are none'}), so begin with *."
        )


def part_of(name: str, module: nn.Module) -> Part | None:
    """What a module is for a recipe, by its name and kind."""
    if _TOWER.search(name) or layer_number(name) is None:
        return None
    if isinstance(module, GroupedExperts) or parallel_forward_of(module) is not None:
        return "experts"
    if type(module) not in (nn.Linear, Linear) or "lora_" in name:
        return None
    plain = name.removesuffix(".base_layer")  # peft's name for the layer that it adapts
    return next((part for part, pattern in _PARTS if pattern.search(plain)), None)


def layer_number(name: str) -> int | None:
    """Of the decoder layer that a name lies in."""
    match = _LAYER.search(f"{name}.")
    return None if match is None else int(match[1])


def _quantize_weights(
    module: nn.Module, recipe: Recipe, others: Collection[nn.Parameter], *, transposed: bool
) -> int:
    """Ask for fp8 shards of what the layer's products read as it lies in memory, and count them. What is
    frozen, is re-ordered for the kernels, or is tied to a layer that the recipe does not cover (``others``)
    stays in ``param_dtype`` and is quantised where it is used. ``transposed``: kernels compute the layer, and
    their backward reads transposed weights."""
    scaling, forward = recipe.gather_scaling, parallel_forward_of(module)
    assert scaling is not None
    if forward is not None and forward.spec.is_reordered:
        return 0
    num_dims = 2 if isinstance(module, nn.Linear) else 3  # less: a bias
    own = module.named_parameters(recurse=False)
    marked = [key for key, p in own if p.dim() == num_dims and p.requires_grad and p not in others]
    for key in marked:
        quantize_for_gather(module, key, WeightCoding(scaling, transposed))
    return len(marked)


def _give(
    module: Any, recipe: Recipe, name: str, precision: PrecisionConfig, products: Products | None
) -> list[OperandState]:
    """The states of its projections, where there are any."""
    if products is not None:
        _check_widths(name, module, products)
    owner = module if isinstance(module, GroupedExperts) else parallel_forward_of(module)
    if owner is not None:
        if owner.policy.sequential:
            raise AssertionError("a recipe of sequential experts, which fsdmoe.config.compatibility refuses")
        first, second = _states((f"{name}.gate_up_proj", f"{name}.down_proj"), precision)
        owner.policy = owner.policy._replace(
            recipe=recipe, emulate=precision.emulate, states=(first, second), products=products
        )
        return [state for state in (first, second) if state is not None]
    if computes_on_dtensor(module.weight):
        raise ConfigError(
            f"precision.recipe: {name} computes on DTensors, whose products are torch's; leave the model "
            "whole and set mesh.tp, or keep it out by precision.keep"
        )
    give_forward(name, module, Rewrite.RECIPE, "precision.recipe")
    (state,) = _states((name,), precision)
    module.quantized = LinearPolicy(recipe, precision.emulate, state, products=products)
    return [] if state is None else [state]


def _quantize_head(model: nn.Module, recipe: Recipe, precision: PrecisionConfig) -> None:
    heads = [module for module in model.modules() if isinstance(module, LMHead)]
    if not heads:
        raise ConfigError(
            'precision.head: expected a decoder of fsdmoe, got a model whose loss is its own; set "bf16"'
        )
    for head in heads:
        head.products_of = partial(fp8_head, recipe, precision.emulate)


def _keep_codes_of_input(model: nn.Module, name: str, part: Part) -> None:
    """Of what nobody else keeps: attention keeps its output anyway, and the router the input of the shared
    experts, and of experts on the same rank."""
    module: Any = model.get_submodule(name)
    wrapped = parallel_forward_of(module)
    if wrapped is not None:
        is_own = wrapped.dispatcher.crosses_ranks
        wrapped.policy = wrapped.policy._replace(keeps_codes=True, has_own_rows=is_own)
        return
    if isinstance(module, GroupedExperts):
        layer = model.get_submodule(name.rpartition(".")[0])
        is_own = isinstance(layer, MoE) and layer.has_own_rows
        module.policy = module.policy._replace(keeps_codes=True, has_own_rows=is_own)
        return
    is_kept_anyway = {
        "attention": _OUTPUT.search(name) is not None,
        "shared": not name.endswith(".down_proj"),
    }
    module.quantized = module.quantized._replace(keeps_codes=not is_kept_anyway.get(part, False))


def _check_widths(name: str, module: nn.Module, products: Products) -> None:
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.dim() > 1 and any(width % products.width for width in parameter.shape[-2:]):
            raise ConfigError(
                f"precision.backend: expected widths that are multiples of {products.width} for "
                f"{products.library}, got {name}.{key} {tuple(parameter.shape)}; keep it out by "
                "precision.keep"
            )


def keep_codes(engine: Engine) -> None:
    """Let covered linear layers whose weight stays in memory whole quantise it once a step, instead of for
    each product."""
    for group in engine.groups:
        if group.plan.gathered or group.plan.scaling is not None:  # gathered: others use its memory too
            continue
        for param in group.params:
            for module, key in param.places:
                layer: Any = module
                policy = getattr(layer, "quantized", None)
                if key == "weight" and isinstance(policy, LinearPolicy):
                    layer.quantized = policy._replace(kept=KeptCodes(group.weights.refreshed_version))


def give_forward(name: str, module: nn.Linear, which: Rewrite, key: str) -> None:
    """Let a linear layer of torch compute as fsdmoe's do, unless it does already. A forward that is neither
    fsdmoe's nor its class's is refused."""
    if foreign_forward(module) is not None:
        raise ConfigError(
            f"{key}: expected linear layers with the forward of their class, got another one on {name} (a "
            "hook that some library put there, say), whose product is torch's; take it off before "
            "fsdmoe.parallelize"
            + (", or keep the layer out by precision.keep" if key == "precision.recipe" else "")
        )
    if type(module) is nn.Linear and computed_by(module) is None:
        rewrite(module, which, linear_forward)


def _states(names: tuple[str, ...], precision: PrecisionConfig) -> list[OperandState | None]:
    """What counts the operands of a module's projections: nothing, unless statistics are wanted."""
    return [OperandState(name) if precision.statistics else None for name in names]
