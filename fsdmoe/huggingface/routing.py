"""Routing policies of wrapped models: the rules of our own routers, applied to the logits of the model's.

::

    x ─ the router's own logits ─ RoutingRules ─┬─ logits, weights, ids: in the order and dtypes of the router
                                                └─ balance terms, loads: kept until the model's forward ends

A router is known by trying it (:mod:`fsdmoe.huggingface.router_forms`). Who hands over what to route by, and
takes what was kept:

=====================================  =======================================================================
``as_causal_lm(model)``, ``train.py``  the loop gives the context; terms and loads come back in ``LossOutput``
``model(tokens, labels=...)``          each row is a sequence, ``attention_mask`` says what is padding; in
                                       training the loss that comes back has the terms, as means over the
                                       call's tokens; ``end_step`` moves biases
=====================================  =======================================================================

Legend: T tokens of this rank, D hidden width, E experts, K choices a token, L routers of the model.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fsdmoe.checkpoint.hf_held import routing_not_held
from fsdmoe.core.autograd import is_in_backward
from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rewrites import Rewrite, computed_by, foreign_forward, rewrite
from fsdmoe.data.origin import Origin
from fsdmoe.experts.bias import update_biases
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.experts.context import RoutingContext
from fsdmoe.experts.moe import MoEAux, total_balance
from fsdmoe.experts.replay import RoutingTape
from fsdmoe.experts.router import RoutingRules
from fsdmoe.fsdp.outputs import tensors_of
from fsdmoe.huggingface.adapters import find_unknown_moe
from fsdmoe.huggingface.lora import base_of, path_around, peel
from fsdmoe.huggingface.replay import follow_routing
from fsdmoe.huggingface.router_forms import RouterForm, Trials, is_router_like, router_form
from fsdmoe.huggingface.wrapped_experts import parallel_forward_of
from fsdmoe.memory.calls import plain_calls
from fsdmoe.mesh import Axis, Meshes

logger = logging.getLogger(__name__)
ADDED_BIAS = "e_score_correction_bias"
_IGNORED = -100
_SWITCH = "output_router_logits"


class PolicyRouter:
    """The forward of one wrapped router."""

    def __init__(self, module: nn.Module, form: RouterForm, config: ExpertsConfig) -> None:
        self.module = module
        self.form = form
        self.memory_calls = plain_calls("router")
        self.context: RoutingContext | None = None
        """What to route by; None: by the model itself."""
        self.aux: MoEAux | None = None
        """Of the last forward, until it is collected."""
        self._rules = RoutingRules(form.spec, config)
        self._correction = form.correction
        if config.balance.bias_rate > 0:
            self._correction = _wide_bias(module, form)

    @property
    def e_score_correction_bias(self) -> Tensor | None:
        """The buffer that moves the choice, whatever the family calls it."""
        return None if self._correction is None else getattr(self.module, self._correction)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        router: Any = self.module
        if self.context is None:
            return type(router).forward(router, x)
        x_TD = x.reshape(-1, x.shape[-1])
        product = self.form.product
        bias_E = router._parameters.get("bias")
        logits_TE = self.memory_calls["router"](product, x_TD, router.weight, bias_E)
        wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        routing = self._rules(wide_TE, x_TD, self.e_score_correction_bias, self._context_of(len(x_TD)))
        if not is_in_backward():  # a recomputation finds the same once more
            self.aux = MoEAux.of(routing)
        return self.form.returned(logits_TE, routing.weights_TK, routing.ids_TK, x.dtype)

    def _context_of(self, num_tokens: int) -> RoutingContext:
        context = self.context
        assert context is not None
        ids_T = context.sequence_ids_T
        if ids_T is not None and len(ids_T) != num_tokens:
            raise ConfigError(
                f"experts.balance: expected {len(ids_T)} tokens, as many as the rows of this call have, got "
                f"{num_tokens} in front of {type(self.module).__name__}; call the model with input_ids or "
                "inputs_embeds of whole rows, or leave the routing to it"
            )
        return context


def _wide_bias(module: nn.Module, form: RouterForm) -> str:
    """The name of the router's selection bias: its own in fp32, as steps are smaller than bf16 can add, or
    one of zeros."""
    name = form.correction or ADDED_BIAS
    own = module._buffers.get(name)
    device = next(module.parameters()).device
    zeros_E = torch.zeros(form.spec.num_experts, dtype=torch.float32, device=device)
    module.register_buffer(name, zeros_E if own is None else own.float())
    if own is None:
        module.added_buffers = (name,)  # type: ignore[assignment]  # which no folder has
    return name


class RoutingPolicies:
    """The routers of one model, what they route by, and what their last forward left."""

    def __init__(
        self, model: nn.Module, routers: Mapping[str, PolicyRouter], config: ExpertsConfig, meshes: Meshes
    ) -> None:
        """``routers``: by the names of their experts, in the order of the model."""
        self._model = model
        self.by_experts = dict(routers)
        self._config = config
        self._world = meshes.group(Axis.WORLD)
        self._around = RoutingContext(global_group=self._world, num_devices=meshes.size(Axis.EP))
        self._is_split = meshes.size(Axis.TP) > 1
        self._signature = inspect.signature(type(model).forward)
        self._is_led = False
        self._loads_LE: Tensor | None = None
        """Of the forwards of a training step, where nobody else keeps them."""
        self.has_rows = True
        """False while a call without rows is made with one of zeros."""

    # A loop that knows the step

    @contextlib.contextmanager
    def following(self, context: RoutingContext | None) -> Iterator[None]:
        """Route by ``context``, by the model itself where it is None, in a call of the model inside."""
        self._route_by(context)
        self._is_led = True
        try:
            yield
        finally:
            self._is_led = False

    def collect(self, context: RoutingContext) -> tuple[Tensor, Tensor]:
        """After a forward: this rank's share of all balance terms, and the loads ``[L, E]``."""
        auxes = [router.aux for router in self.by_experts.values()]
        for router in self.by_experts.values():
            router.aux = None
        called = [aux for aux in auxes if aux is not None]
        spec = next(iter(self.by_experts.values())).form.spec
        if not called:
            raise AssertionError("expected a forward that has called routers, got none")
        loads = [torch.zeros_like(called[0].load_E) if aux is None else aux.load_E.detach() for aux in auxes]
        balance = total_balance(called, self._config.balance, context, top_k=spec.top_k)
        return balance, torch.stack(loads)

    def follow_backward(self, loss: Tensor, context: RoutingContext) -> None:
        """Let layers that are recomputed for this loss route by the context of its forward again, even if
        another forward came between."""
        if loss.grad_fn is not None:
            loss.register_hook(lambda _: self._route_by(context))

    def _route_by(self, context: RoutingContext | None) -> None:
        for layer, router in enumerate(self.by_experts.values()):
            router.context = None if context is None else context.at_layer(layer)

    def follow_tape(self, tape: RoutingContext | None) -> None:
        """In calls of the model itself, record or replay as the context says; None ends it."""
        tape = tape or RoutingContext()
        self._around = replace(
            self._around, replay=tape.replay, origin=tape.origin, micro_batch=tape.micro_batch
        )

    # Calls of the model itself

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's forward; outside of :meth:`following` its rows are all that is known."""
        has_switch = _SWITCH in self._signature.parameters
        if has_switch and not self._config.balance.family and kwargs.get(_SWITCH) is None:
            kwargs[_SWITCH] = False
        if self._is_led or not self.by_experts:
            return forward(*args, **kwargs)
        given = self._signature.bind_partial(self._model, *args, **kwargs).arguments
        given = given | given.get("kwargs", {})
        context = self._context_of(given)
        with self.following(context):
            out = forward(*args, **kwargs)
        out = self._with_balance(out, given, context)
        for tensor in tensors_of(out):
            self.follow_backward(tensor, context)
        return out

    def _context_of(self, given: Mapping[str, Any]) -> RoutingContext:
        if self._is_split:  # by tp: only generation calls the model itself
            return self._around
        rows = next(
            (given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None
        )
        if rows is None:
            raise ConfigError(
                f"experts.balance: expected input_ids or inputs_embeds in a call of "
                f"{type(self._model).__name__}, got neither; name them"
            )
        shape = rows.shape[:2]
        context = RoutingContext.for_rows(*shape, device=rows.device)
        context = replace(
            self._around, sequence_ids_T=context.sequence_ids_T, num_sequences=context.num_sequences,
            equal_sequences=True, sequence_positions_T=context.sequence_positions_T,
        )  # fmt: skip
        mask = given.get("attention_mask")
        if not self.has_rows:
            return replace(
                context, token_mask_T=torch.zeros(shape.numel(), dtype=torch.bool, device=rows.device)
            )
        if isinstance(mask, Tensor) and mask.shape == shape:
            return replace(context, token_mask_T=mask.flatten().bool())
        return context

    def _with_balance(self, out: Any, given: Mapping[str, Any], context: RoutingContext) -> Any:
        """The output of a call in training with the balance terms in its loss."""
        balance, loads_LE = self.collect(context)
        if not (self._model.training and torch.is_grad_enabled()):
            return out
        if self._config.balance.bias_rate:
            self._loads_LE = loads_LE if self._loads_LE is None else self._loads_LE + loads_LE
        has_labels = any(given.get(name) is not None for name in ("labels", "shift_labels"))
        loss: Tensor | None = None
        if has_labels:
            loss = out[0] if isinstance(out, tuple) else out.loss
        if loss is None:
            if not self._config.balance.has_terms:
                return out
            raise ConfigError(
                f"experts.balance: expected labels in a training call of {type(self._model).__name__}, whose "
                "loss gets the balance terms, got none; pass labels, call it through fsdmoe.as_causal_lm, or "
                "set the coefficients to 0"
            )
        total = loss + self._share(given) * balance if self._config.balance.has_terms else loss
        if isinstance(out, tuple):
            return (total, *out[1:])
        out["loss"] = total
        return out

    @staticmethod
    def _share(given: Mapping[str, Any]) -> Tensor | float:
        """Of a step whose loss is a sum over all of its micro-batches by ``num_items_in_batch``: this call's
        share of the labels. Any other loss is a mean, and so are the terms."""
        num_items = given.get("num_items_in_batch")
        if num_items is None:
            return 1.0
        labels = given.get("shift_labels")
        labels = given["labels"][..., 1:] if labels is None else labels
        return (labels != _IGNORED).sum() / num_items

    def end_step(self) -> None:
        """After an optimizer step: move the biases by the loads of the step's forwards. Collective."""
        if self._loads_LE is not None:
            pairs = zip(self.by_experts.values(), self._loads_LE, strict=True)
            update_biases(pairs, rate=self._config.balance.bias_rate, group=self._world)
        self._loads_LE = None


def apply_policies(
    model: nn.Module, experts: Mapping[str, Any], config: ExpertsConfig, meshes: Meshes
) -> None:
    """Let the routers next to ``experts`` choose and balance as the policies of ``config`` say, if there are
    any; ConfigError where a router is not known."""
    keys = config.routing_keys
    if not keys and config.balance.family:
        return
    routers: dict[str, PolicyRouter] = {}
    unknown = find_unknown_moe(model, experts) if keys else {}
    if keys and (unknown or not experts):
        found = next((f"{names[0]} ({kind})" for kind, names in unknown.items()), "none")
        raise ConfigError(
            f"{keys[0]}: expected experts that are known, got {found} in {type(model).__name__}; describe "
            "them with fsdmoe.register_moe_adapter, or drop the key"
        )
    trials = Trials()
    for name in experts if keys else ():
        router, form = _router_next_to(model, path_around(name), keys[0], trials)
        made = PolicyRouter(router, form, config)
        router.policy_router = made  # type: ignore[assignment]
        router.memory_calls = made.memory_calls  # type: ignore[assignment]
        rewrite(router, Rewrite.ROUTER, _forward, says=f"policies: {', '.join(keys)}")
        routers[name] = made
    numbers = {(router.form.spec.num_experts, router.form.spec.top_k) for router in routers.values()}
    if len(numbers) > 1:
        raise ConfigError(
            f"{keys[0]}: expected as many experts and choices in all layers, got {sorted(numbers)}; drop it"
        )
    policies = RoutingPolicies(model, routers, config, meshes)
    if routers:
        model.routing_policies = policies  # type: ignore[assignment]
    model.policy_keys = keys  # type: ignore[assignment]
    rewrite(model, Rewrite.POLICIES, policies.run, says="balance terms in the loss")
    if meshes.rank(Axis.WORLD) == 0:
        _warn(model, routers, config)


def _warn(model: nn.Module, routers: Mapping[str, PolicyRouter], config: ExpertsConfig) -> None:
    """Of what the folder of such a model cannot hold, and of two losses that balance."""
    kind, own = type(model).__name__, getattr(model, "config", None)
    if config.balance.has_terms and config.balance.family and getattr(own, _SWITCH, False):
        logger.warning(
            "experts.balance: its terms are added to the auxiliary loss that the configuration of %s asks "
            "for (%s); set experts.balance.family = false to leave that out",
            kind, _SWITCH,
        )  # fmt: skip
    holds_bias = all(router.form.correction is not None for router in routers.values())
    lost = config.balance.bias_rate > 0 and not holds_bias
    for line in routing_not_held(kind, has_bias=lost, selection=config.selection):
        logger.warning("%s", line.replace(": ", ": this run cannot be exported to transformers: ", 1))


def _router_next_to(model: nn.Module, experts: str, key: str, trials: Trials) -> tuple[nn.Module, RouterForm]:
    block = model.get_submodule(experts.rpartition(".")[0])
    found = []
    for module in map(base_of, block.children()):
        is_plain = all(type(p) is nn.Parameter for p in module.parameters(recurse=False))
        if is_plain and is_router_like(module) and computed_by(module) is None:
            form = trials(router_form, module)
            if form is not None:
                found.append((module, form))
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"{key}: expected one router that chooses by softmax or sigmoid, top-k and groups next to {experts}, "
        f"got {len(found)} in {type(block).__name__}; drop the key: the model then routes as its config.json "
        "says"
    )


@torch.compiler.disable(reason="sums over ranks, and terms of the loss that are kept outside")
def _forward(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    return module.policy_router(x)


def policies_of(model: nn.Module) -> RoutingPolicies | None:
    """Those of a wrapped model from ``parallelize``; None where it routes by itself."""
    return model.__dict__.get("routing_policies")


def refuse_passed_over(model: nn.Module, trainer: str) -> None:
    """ConfigError for policies that a trainer of TRL would pass over: its forward, asked for a fused head,
    calls the decoder inside of the model, and not the forward that applies them."""
    for owner in model.modules():
        keys: tuple[str, ...] | None = owner.__dict__.get("policy_keys")
        if keys is None or not _has_fused_head(owner):
            continue
        fix = "leave it out, or train with transformers.Trainer, train.py or a loop of your own"
        if not keys:
            config: Any = owner.config
            if not getattr(config.get_text_config(), _SWITCH, False):
                continue  # there is no auxiliary loss to leave out
            keys = ("experts.balance.family",)
            fix = f"leave it out and set {_SWITCH} = False in the model's configuration"
        raise ConfigError(
            f"{keys[0]}: expected no such policy with {trainer}, which calls the decoder inside of "
            f"{type(owner).__name__} and makes the loss itself, so that it would do nothing; {fix}"
        )


def _has_fused_head(model: nn.Module) -> bool:
    forward = foreign_forward(model)
    if forward is None:
        return False
    return "fused_lm_head" in inspect.signature(forward, follow_wrapped=False).parameters


@contextlib.contextmanager
def routing_tape(
    model: nn.Module, tape: RoutingTape, origin: Origin | None = None, *, micro_batch: int = 0
) -> Iterator[None]:
    """Record or replay the routing of a wrapped model that is called in this block.

    Layers that are recomputed in backward follow what their forward did. Weights are replayed (``enforce =
    "ids_and_weights"``) where ``ExpertsConfig.replay_weights`` is part of the policy.

    Args:
        model: From ``parallelize``; its experts are known, and it is called with whole rows.
        tape: ``RoutingTape(num_experts)`` records, ``RoutingTape.load(path)`` replays.
        origin: Documents and positions of the tokens, in the shape of the call's ``input_ids``; without it
            tokens are known by ``micro_batch`` and their place.
        micro_batch: Another number for each call that is recorded before the tape is saved.
    """
    experts = {n: f for n, m in model.named_modules() if (f := parallel_forward_of(m)) is not None}
    flat = None if origin is None else origin.map(lambda column: column.flatten())
    policies = policies_of(peel(model))
    routing = RoutingContext(replay=tape, origin=flat, micro_batch=micro_batch)
    if policies is not None:
        policies.follow_tape(routing)
        try:
            yield
        finally:
            policies.follow_tape(None)
        return
    with follow_routing(model, experts, routing) as follow_again:
        hook = peel(model).register_forward_hook(lambda module, args, out: follow_again(out))
        try:
            yield
        finally:
            hook.remove()
