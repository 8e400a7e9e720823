"""Tensor parallelism for Hugging Face decoders: the parts that can be split are recognised by structure.

A decoder layer has an attention and an MLP with projections of known names; in front of the first ones the
tokens of all ranks are gathered, behind the last one they are summed and scattered, and everything around
them (norms, routers, experts, the residual stream) sees this rank's tokens alone::

    own tokens --norm--> gather --> q k v --> attention --> o --> scatter --> + --norm--> experts --> +

Shared experts stay whole as well: they work on this rank's tokens, with no exchange, so a rank of ``tp`` does
its share of their work.

The modules stay what they are. Each gets a plan (:mod:`fsdmoe.tensor_parallel.split`) and a group, as modules
of ours have by themselves. Attention needs rows that transformers' masks do not cover, so it follows the plan
that comes with every call (:func:`fsdmoe.huggingface.transformers_api.use_planned_attention`).

A parameter that no rule here covers is refused by name: its gradient might be counted several times.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn

from fsdmoe.checkpoint.adapter_names import is_adapter_name
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rewrites import Rewrite, rewrite
from fsdmoe.huggingface.attention import require_plan
from fsdmoe.huggingface.lora import base_of, first_factors, is_first_factor, magnitudes, scattered_magnitude
from fsdmoe.models.projections import scatter_projection
from fsdmoe.tensor_parallel.divide import check_tensor_parallel
from fsdmoe.tensor_parallel.group import TensorGroup
from fsdmoe.tensor_parallel.split import TensorPlan
from fsdmoe.tensor_parallel.vocabulary import own_rows


class _Form(NamedTuple):
    """The projections of an attention or an MLP, by their names."""

    first: tuple[str, ...]
    """Cut by rows: this rank's heads or columns."""
    last: str
    """Cut by columns: its outputs are parts of a sum."""
    between: tuple[str, ...] = ()
    """Whole, on all tokens, in front of this rank's heads: their gradients are parts of a sum too."""


_ATTENTION = (
    _Form(("q_proj", "k_proj", "v_proj"), "o_proj"),
    _Form(
        ("q_b_proj", "kv_b_proj"),
        "o_proj",
        ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
    ),
    _Form(("q_proj", "kv_b_proj"), "o_proj", ("kv_a_proj_with_mqa", "kv_a_layernorm")),
)
_MLP = (_Form(("gate_proj", "up_proj"), "down_proj"),)


def plan_tensors(model: nn.Module, tp: int, experts: Iterable[str]) -> None:
    """Give every part of ``model`` that can be split a plan, for
    :func:`fsdmoe.tensor_parallel.split.parallelize_tensors`; ConfigError where a part is of no known form.
    ``experts`` names the modules that ``ep`` splits instead."""
    embedding, head, body = _vocabulary(model)
    known = {id(p) for module in (embedding, head) for p in module.parameters()}
    known |= {id(p) for child in body.children() if _is_norm(child) for p in child.parameters()}
    routed = {id(model.get_submodule(name)) for name in experts}
    found: list[tuple[nn.Module, _Form]] = []
    for layer in _layers(body):
        for name, child in layer.named_children():
            form = _form_of(child)
            if form is not None:
                found.append((child, form))
            sees_own_tokens = _is_norm(child) or _is_shared_expert(name, child)
            if form is not None or sees_own_tokens or any(id(m) in routed for m in child.modules()):
                known |= {id(p) for p in child.parameters()}
    left = [name for name, p in model.named_parameters() if id(p) not in known]
    if left or not any(form in _ATTENTION for _, form in found):
        raise ConfigError(
            f"mesh.tp: {type(model).__name__} has parts that cannot be split over {tp} ranks because their "
            f"form is not known here ({', '.join(left[:3]) or 'no attention was found'}); set mesh.tp = 1 "
            "and use mesh.cp, mesh.ep and sharding"
        )
    _check_sizes(model, tp, embedding.num_embeddings, found)
    for module, form in found:
        _connect(module, form)
    _attach(embedding, {"weight": 0}, _embed)
    _attach(head, {name: 0 for name, _ in head.named_parameters()}, _project)


def _vocabulary(model: nn.Module) -> tuple[nn.Embedding, nn.Linear, nn.Module]:
    """The embedding, the head, and the module with the layers between them."""
    get = [getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    embedding, head = (None if each is None else each() for each in get)
    body = getattr(model, "base_model", model)
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear or body is model:
        raise ConfigError(
            f"mesh.tp: expected a causal language model of transformers with a plain embedding and a plain "
            f"head, got a {type(model).__name__}; set mesh.tp = 1"
        )
    return embedding, head, cast(nn.Module, body)


def _layers(body: nn.Module) -> Iterator[nn.Module]:
    for child in body.children():
        if isinstance(child, nn.ModuleList):
            yield from child


def _is_norm(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and all(p.ndim == 1 for p in module.parameters())


def _is_shared_expert(name: str, module: nn.Module) -> bool:
    """An expert for all tokens next to the routed ones (Granite's ``shared_mlp``; inside of their block it is
    part of that): linear layers alone, which see this rank's tokens and stay whole."""
    with_parameters = (n for n, m in module.named_modules() if m._parameters and type(m) is not nn.Linear)
    return name.startswith("shared_") and all(map(is_adapter_name, with_parameters))


def _is_linear(module: nn.Module | None) -> bool:
    """A plain linear layer, or one with low-rank adapters around it."""
    return module is not None and type(base_of(module)) is nn.Linear


def _form_of(module: nn.Module) -> _Form | None:
    """How an attention or an MLP is built, if we know all of it."""
    children = dict(module.named_children())
    head_dim = getattr(module, "head_dim", None)
    for form in (*_ATTENTION, *_MLP):
        named = (*form.first, form.last, *form.between)
        if not all(_is_linear(children.get(name)) for name in (*form.first, form.last)):
            continue
        if any(children.get(name) is None for name in form.between):
            continue
        rest = [(n.partition(".")[0], p) for n, p in module.named_parameters()]
        is_known = (
            name in children and _is_norm(children[name]) and tuple(p.shape) == (head_dim,)
            for name, p in rest
            if name not in named
        )  # fmt: skip
        if all(is_known):  # norms on each head: a parameter of the module itself may be anything
            return form
    return None


def _check_sizes(model: nn.Module, tp: int, vocab_size: int, found: list[tuple[nn.Module, _Form]]) -> None:
    config: Any = model.config
    heads: tuple[int, ...] = (config.num_attention_heads,)
    if any("k_proj" in form.first for _, form in found):
        heads = (*heads, getattr(config, "num_key_value_heads", None) or heads[0])
    widths = {module.get_submodule(form.last).in_features for module, form in found if form in _MLP}
    check_tensor_parallel(tp, heads=heads, vocab_size=vocab_size, widths=tuple(sorted(widths)))  # type: ignore[arg-type]


def _connect(module: nn.Module, form: _Form) -> None:
    """Gather in front of the module, scatter behind its last projection; say what becomes of its weights."""
    plan: TensorPlan = {}
    for name, _ in module.named_parameters():
        child = name.partition(".")[0]
        if child == form.last and is_adapter_name(name):
            plan[name] = "tokens"
        elif child in form.first and not is_first_factor(name):
            plan[name] = 0
        else:  # the first factor of an adapter stands in front of this rank's heads, as those between do
            plan[name] = "heads"
    last = module.get_submodule(form.last)
    scattered = [base_of(last), *first_factors(last)]  # few columns are scattered then, not all of them
    own = {id(p) for linear in scattered for p in linear.parameters()}
    _attach(module, {n: how for n, how in plan.items() if id(module.get_parameter(n)) not in own})
    planned: Any = module
    planned.gathered_argument = next(iter(inspect.signature(module.forward).parameters))
    if form in _ATTENTION:  # before any module gets tokens that it does not expect
        module.register_forward_pre_hook(_refuse_without_plan, with_kwargs=True)
    module.register_forward_pre_hook(_gather_input, with_kwargs=True)
    cut: TensorPlan = {"weight": 1, "bias": "tokens"}
    for linear in scattered:
        _attach(linear, {name: cut[name] for name, _ in linear.named_parameters()}, _scatter_output)
    for magnitude in magnitudes(last):
        rewrite(magnitude, Rewrite.TENSOR, scattered_magnitude)


def _attach(module: nn.Module, plan: TensorPlan, forward: Any = None) -> None:
    """What :class:`fsdmoe.tensor_parallel.split.TensorParallel` requires. Forwards and hooks are the same
    functions in every layer, or torch.compile would compile each layer for itself."""
    planned: Any = module
    planned.tensor = TensorGroup()
    planned.tensor_plan = functools.partial(dict, plan)
    if forward is not None:
        rewrite(module, Rewrite.TENSOR, forward)


def _refuse_without_plan(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not module.tensor.replicated:
        require_plan(kwargs.get("attention_plan"))


def _gather_input(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (module.tensor.gather(args[0]), *args[1:]), kwargs
    name = module.gathered_argument
    return args, kwargs | {name: module.tensor.gather(kwargs[name])}


def _scatter_output(self: Any, x_BSD: Tensor) -> Tensor:
    return scatter_projection(self, x_BSD, self.tensor)


def _embed(self: Any, tokens_BS: Tensor) -> Tensor:
    tensor, num_rows = self.tensor, self.weight.shape[0]
    rows, inside = own_rows(tokens_BS, num_rows, tensor)
    padding = self.padding_idx  # the token whose row gets no gradient, on the rank that has it
    if padding is not None:
        padding -= tensor.rank * num_rows
        padding = padding if 0 <= padding < num_rows else None
    return tensor.scatter(F.embedding(rows, self.weight, padding).masked_fill(~inside[..., None], 0.0))


def _project(self: Any, hidden_BsD: Tensor) -> Tensor:
    """Logits of this rank's part of the vocabulary, of all tokens: the loss takes them as they are.
    Generation looks at all of them."""
    logits_BSV = F.linear(self.tensor.gather(hidden_BsD), self.weight, self.bias)
    return self.tensor.join_columns(logits_BSV) if self.tensor.replicated else logits_BSV


def tensor_group_of(model: nn.Module) -> TensorGroup:
    """The ranks over which the vocabulary of ``model`` is split."""
    get = getattr(model, "get_output_embeddings", None)
    return getattr(None if get is None else get(), "tensor", TensorGroup())
