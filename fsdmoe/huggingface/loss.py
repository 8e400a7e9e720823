"""The loss of a wrapped causal language model without its logits: chunk by chunk, as our own head has it.

A model of transformers calls ``logits = self.lm_head(hidden)`` and later ``self.loss_function(logits,
labels, ...)``. Where only the loss is wanted, the head returns :class:`UnmadeLogits`: hidden states in place
of their logits. Three things can happen to them inside the model's forward::

    the loss function gets them       the head is called again, with labels, and returns the summed loss
    other code computes with them     the logits are made, and the model's own code goes on
    they are not used                 nothing was computed

So a family that scales or caps its logits, or computes a loss of its own, needs no list: it uses them. Once
the forward is over they cannot be made any more, and reading them raises. The head computes inside its own
forward in every case, so the sharding engine treats it as any module.

Sizes: B rows, S tokens, T = B*S, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rewrites import Rewrite, rewrite
from fsdmoe.fsdp import engine_of, is_fully_sharded
from fsdmoe.huggingface.for_a_while import set_for_a_while
from fsdmoe.huggingface.limits import text_config
from fsdmoe.models.head import LEAN_CHUNK_TOKENS, TokenObjective, linear_cross_entropy, linear_token_losses
from fsdmoe.tensor_parallel.group import TensorGroup

_ADDED_TERMS = ("z_loss_coefficient",)
"""Weights of terms that models add to their loss where they are given labels (Bamba)."""
_HOME, _NAME, _IGNORED = "transformers.loss.loss_utils", "ForCausalLMLoss", -100
_GONE = (
    "outputs.logits: a wrapped model that is called with labels in training computes its loss chunk by chunk "
    "and keeps no logits; wrap it with fsdmoe.parallelize(..., fused_loss=False) to have them, or call it "
    "without labels, in eval mode or under torch.no_grad()"
)
_ABOUT = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "grad", "is_leaf", "is_cuda",
     "is_cpu", "is_meta", "is_sparse", "size", "dim", "numel", "is_floating_point", "is_complex", "__len__"}
)  # fmt: skip
"""Attributes of tensors that do not need their values."""
_MOVES = frozenset({"to", "float", "half", "bfloat16", "detach", "cpu", "cuda"})
_DTYPES = (torch.float32, torch.bfloat16)
LossTargets = tuple[Tensor, Tensor, Tensor]


class UnmadeLogits(Tensor):
    """What stands for ``head(hidden)``; it has a shape and a dtype, but no memory."""

    _head: ChunkedHead
    _hidden_BSD: Tensor | None
    made_BSV: Tensor | None
    """The logits, if they were made."""
    _with_grad: bool

    @staticmethod
    def __new__(cls, head: ChunkedHead, hidden_BSD: Tensor) -> UnmadeLogits:
        shape = (*hidden_BSD.shape[:-1], head.head.weight.shape[0])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=hidden_BSD.dtype, device=hidden_BSD.device)
        made._head, made._hidden_BSD, made.made_BSV = head, hidden_BSD, None
        made._with_grad = torch.is_grad_enabled()
        return made

    @property
    def hidden_BSD(self) -> Tensor:
        """What they would be made from."""
        if self._hidden_BSD is None:
            raise RuntimeError(_GONE)
        return self._hidden_BSD

    def make(self) -> Tensor:
        """The logits. Without gradients where there should be some, for example inside of an autograd
        function, they would be cut off silently: refused."""
        if torch.is_grad_enabled() != self._with_grad:
            raise RuntimeError(_GONE)
        if self.made_BSV is None:
            self.made_BSV = self._head.logits_of(self.hidden_BSD)
        return self.made_BSV

    def close(self) -> None:
        """The model's forward is over: weights may be released, activations must not be kept."""
        self._hidden_BSD = self.made_BSV = None

    def __repr__(self) -> str:
        return f"UnmadeLogits(shape={tuple(self.shape)}: the loss was computed without them)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = _name_of(func), args[0] if args else None
        if name in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in _MOVES and isinstance(first, cls) and first._hidden_BSD is None:
            return first  # casting or moving outputs reads nothing yet
        args, kwargs = tree_map_only(cls, cls.make, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(_GONE)


class ChunkedHead:
    """The forward of a head that can defer its logits, and the model around it that decides when."""

    def __init__(self, head: nn.Linear, model: nn.Module, *, chunk_tokens: int | None) -> None:
        self.head, self.model, self.chunk_tokens = head, model, chunk_tokens
        self._own_loss: Callable[..., Tensor] = model.loss_function  # type: ignore[assignment]
        self._num_hooks = _count_hooks(head)
        self._unmade: list[UnmadeLogits] | None = None
        """While the model runs and needs no logits: their placeholder."""

    # The head

    def project(
        self,
        own: Callable[[Tensor], Tensor],
        input: Tensor,
        labels_BS: Tensor | None = None,
        mask_BS: Tensor | None = None,
        divisor: Tensor | float | TokenObjective = 1.0,
    ) -> Tensor:
        """Logits, made or not; with labels the fp32 sum of the losses of unmasked tokens, over
        ``divisor``, or what an objective in its place makes of them. ``input``, as ``nn.Linear`` calls it:
        the hidden states."""
        if labels_BS is not None and mask_BS is not None:
            tensor: TensorGroup = getattr(self.head, "tensor", TensorGroup())
            hidden_TD = tensor.gather(input).flatten(0, -2)
            labels_T, mask_T = labels_BS.flatten(), mask_BS.flatten()
            if isinstance(divisor, TokenObjective):
                losses_T = linear_token_losses(
                    hidden_TD, self.head.weight, labels_T, mask_T,
                    chunk_tokens=self.chunk_tokens, row_length=labels_BS.shape[-1],
                )  # fmt: skip
                return divisor.loss_of(losses_T)
            return linear_cross_entropy(
                hidden_TD, self.head.weight, labels_T, mask_T, tensor,
                divisor=divisor, chunk_tokens=self.chunk_tokens, row_length=labels_BS.shape[-1],
            )  # fmt: skip
        if self._unmade is None or not self._can_wait(input):
            return own(input)
        self._unmade.append(UnmadeLogits(self, input))
        return self._unmade[-1]

    def _can_wait(self, hidden_BSD: Tensor) -> bool:
        """Whether the sum would be that of the head's own logits. Hooks would be called twice: those of the
        sharding engine may be."""
        weight = self.head.weight
        device = hidden_BSD.device.type
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(device):
            return False
        return hidden_BSD.dtype == weight.dtype in _DTYPES and _count_hooks(self.head) == self._num_hooks

    def logits_of(self, hidden_BSD: Tensor) -> Tensor:
        """What the head would have returned."""
        with set_for_a_while(self, "_unmade", None):
            return self.head(hidden_BSD)

    def _sum(
        self, unmade: UnmadeLogits, labels_BS: Tensor, mask_BS: Tensor, divisor: Tensor | float
    ) -> Tensor:
        return self.head(unmade.hidden_BSD, labels_BS, mask_BS, divisor)

    # The model

    def run(self, own: Any, *args: Any, loss_targets: LossTargets | None = None, **kwargs: Any) -> Any:
        """The model's forward. With ``loss_targets``, labels that are shifted already, their mask and a
        divisor, the output's ``loss`` is the sum of their losses over it; None where the model needed its
        logits itself."""
        is_trained = kwargs.get("labels") is not None and self.model.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling() or not (is_trained or loss_targets is not None):
            return own(*args, **kwargs)
        before, self._unmade = self._unmade, []
        try:
            output = own(*args, **kwargs)
            logits = None if loss_targets is None else output.logits
            if loss_targets is not None and isinstance(logits, UnmadeLogits) and logits.made_BSV is None:
                output["loss"] = self._sum(logits, *loss_targets)
            return _with_made(output)
        finally:
            for unmade in self._unmade:
                unmade.close()
            self._unmade = before

    def loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """transformers' ``ForCausalLMLoss``, of logits that may not have been made."""
        if isinstance(logits, UnmadeLogits) and logits.made_BSV is None and logits.shape[-1] == vocab_size:
            targets = _shifted(labels, ignore_index) if shift_labels is None else shift_labels
            if targets.numel() == logits.shape[:-1].numel():
                targets = targets.reshape(logits.shape[:-1]).to(logits.device)
                mask = targets != ignore_index
                return _mean(functools.partial(self._sum, logits, targets, mask), mask, num_items_in_batch)
        return self._own_loss(
            logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index, shift_labels=shift_labels, **kwargs,
        )  # fmt: skip


def fuse_loss(model: nn.Module, *, lean: bool = False) -> bool:
    """Let the causal language model in ``model`` compute its training loss chunk by chunk, where its head is
    a plain projection and its loss transformers' own; whether they are. ``lean``: in smaller chunks. To be
    called last, on a sharded model."""
    found = ((owner, _plain_head(owner)) for owner in model.modules())
    owner, head = next(((owner, head) for owner, head in found if head is not None), (model, None))
    if (
        head is None
        or not _is_known(owner.loss_function)
        or _count_hooks(head) != _num_own_hooks(model, head)
    ):
        return False
    made = ChunkedHead(head, owner, chunk_tokens=LEAN_CHUNK_TOKENS if lean else None)
    rewrite(head, Rewrite.LOSS, made.project, says="loss in chunks, without logits")
    rewrite(owner, Rewrite.LOSS, made.run, says="loss in chunks, without logits")
    owner.loss_function = made.loss  # type: ignore[assignment]
    if owner is model:  # one around it may not hand targets on
        model.has_fused_loss = True  # type: ignore[assignment]
    return True


def has_fused_loss(model: nn.Module) -> bool:
    """Whether ``model`` takes ``loss_targets`` (see :meth:`ChunkedHead.run`)."""
    return "has_fused_loss" in vars(model)


def refuse_own_loss(model: nn.Module) -> None:
    """ConfigError for a model whose loss is more than the cross-entropy of next tokens and the auxiliary loss
    in its output. To be called for one that is going to be run without labels, which leaves the rest out."""
    kind, remedy = type(model).__name__, "or call the model itself with labels in a loop of your own"
    for key in _ADDED_TERMS:
        config = text_config(getattr(model, "config", None))
        if value := getattr(model, key, getattr(config, key, None)):
            raise ConfigError(
                f"model.hf: expected {key} = 0 in the configuration of {kind}, got {value}: the model adds "
                f"that term where it is given labels, which as_causal_lm and train.py do not; set it to 0, "
                f"{remedy}"
            )
    if has_fused_loss(model) or not isinstance(getattr(type(model), "loss_function", None), property):
        return
    own: Any = model.loss_function
    theirs = getattr(sys.modules.get(_HOME), _NAME, own)
    if own is not theirs and not _computes_ours(own):
        raise ConfigError(
            f"model.hf: expected {_NAME} of transformers as the loss_function of {kind}, or what computes "
            f"the same, got {getattr(own, '__qualname__', own)}, which as_causal_lm and train.py do not "
            f"call; leave it out, {remedy}"
        )


def _plain_head(module: nn.Module) -> nn.Linear | None:
    """The head of a model of transformers, if it is one projection without a bias and without adapters."""
    if not isinstance(getattr(type(module), "loss_function", None), property):
        return None
    head = module.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    is_split = hasattr(head, "tensor_plan")  # its forward gathers tokens, as ours does
    return head if is_split or "forward" not in vars(head) else None


def _num_own_hooks(model: nn.Module, head: nn.Module) -> int:
    """How many hooks of the sharding engine the head has; a tied one is part of the root."""
    if not is_fully_sharded(model):
        return 0
    return 2 * any(unit.module is head and len(unit.groups) > 0 for unit in engine_of(model).units)


def _count_hooks(module: nn.Module) -> int:
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks)
    return sum(map(len, hooks)) + len(module._backward_hooks)


def _is_known(loss: Any) -> bool:
    """Whether a model's loss is that of transformers for causal language models, and computes what we do."""
    theirs: Any = getattr(sys.modules.get(_HOME), _NAME, None)
    return theirs is not None and theirs is loss and _computes_ours(loss)


@torch.no_grad()
def _computes_ours(loss: Any) -> bool:
    random = torch.Generator().manual_seed(0)
    logits_BSV = torch.randn(2, 6, 5, generator=random)
    labels_BS = torch.randint(0, 5, (2, 6), generator=random).index_fill(1, torch.tensor([2]), _IGNORED)
    targets_BS = _shifted(labels_BS, _IGNORED).contiguous()
    mask_BS = targets_BS != _IGNORED
    flat = logits_BSV.flatten(0, 1), targets_BS.flatten()
    total = F.cross_entropy(*flat, ignore_index=_IGNORED, reduction="sum")
    cases: list[dict[str, Any]] = [{}, {"num_items_in_batch": 7}, {"shift_labels": targets_BS}]
    try:
        found = [loss(logits=logits_BSV, labels=labels_BS, vocab_size=5, **case) for case in cases]
    except Exception:  # another version's function, called as it may not expect: not known
        return False
    ours = [_mean(total.div, mask_BS, case.get("num_items_in_batch")) for case in cases]
    return all(map(torch.allclose, found, ours))


def _shifted(labels_BS: Tensor, ignored: int) -> Tensor:
    """Each token's label is the next one's; the last has none."""
    return F.pad(labels_BS, (0, 1), value=ignored)[..., 1:]


def _mean(
    sum_over: Callable[[Tensor | float], Tensor], mask: Tensor, num_items: Tensor | float | None
) -> Tensor:
    """Over ``num_items``, or the tokens with a label. A mean of none is not a number, and has no gradient."""
    if num_items is not None:
        return sum_over(num_items.to(mask.device) if isinstance(num_items, Tensor) else num_items)
    count = mask.sum()
    return torch.where(count > 0, sum_over(count.clamp(min=1)), torch.nan)


def _with_made(output: Any) -> Any:
    """Logits that were made after all take their place in the model's output."""

    def made(value: Any) -> Any:
        made_BSV = value.made_BSV if isinstance(value, UnmadeLogits) else None
        return value if made_BSV is None else made_BSV

    if isinstance(output, tuple):
        return tuple(map(made, output))
    if isinstance(output, dict):
        for key, value in output.items():
            output[key] = made(value)
    return output


def _name_of(func: Any) -> str:
    """Of a method or a function of tensors, or of the attribute that is read."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
