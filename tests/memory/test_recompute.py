"""Freed intermediate results: memory goes in forward, comes back in backward, and gradients do not notice."""

import functools
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fsdmoe.config import build_config
from fsdmoe.errors import ConfigError
from fsdmoe.memory.recompute import discard_and_recompute, may_discard
from fsdmoe.mesh import build_meshes
from fsdmoe.models import Decoder, ModelConfig, preset_config
from fsdmoe.parallel import ParallelPolicy, parallelize
from fsdmoe.plan.activations import LayerView, kept_bytes, layer_tensors
from fsdmoe.testing import run_ranks


def test_a_forgotten_tensor_has_no_memory_until_its_gradient_is_due() -> None:
    x = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(4, 4, requires_grad=True)
    y = x.sin()
    out = y @ weight
    calls = []

    def recompute(memory: torch.Tensor) -> None:
        calls.append(1)
        memory.copy_(x.sin())

    discard_and_recompute(y, until=out, recompute=recompute)
    assert y.untyped_storage().nbytes() == 0
    assert not calls
    out.square().sum().backward()
    wanted = torch.autograd.grad((x.sin() @ weight).square().sum(), (x, weight))
    assert torch.equal(x.grad, wanted[0])
    assert torch.equal(weight.grad, wanted[1])
    assert calls == [1]


def test_a_graph_that_outlives_its_backward_keeps_no_memory() -> None:
    """As between two micro-batches, where the loop still holds the last loss."""
    x = torch.randn(5, 4, requires_grad=True)
    inner = x.exp()
    y = inner.sin()
    out = (y @ torch.randn(4, 4, requires_grad=True)).sum()
    discard_and_recompute(y, until=out, recompute=lambda memory, inner=inner: memory.copy_(inner.sin()))
    alive = weakref.ref(inner)
    del inner, y
    out.backward(retain_graph=True)
    first = x.grad.clone()
    out.backward()
    assert torch.equal(x.grad, 2 * first)
    assert alive() is None


def test_a_view_of_something_larger_is_refused() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    y = x.exp()
    with pytest.raises(ValueError, match="shares its storage"):
        discard_and_recompute(y[:2], until=y.sum(), recompute=lambda memory: None)


def test_nothing_is_forgotten_in_evaluation() -> None:
    assert may_discard()
    with torch.no_grad():
        assert not may_discard()


def gradients(
    preset: str, kind: str, num_documents: int, prepare: Callable[[Decoder], None] = lambda model: None
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Decoder(preset_config(preset))
    for name, parameter in model.named_parameters():
        nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=0.05)
    for layer in model.model.layers:
        if kind != "kept":
            layer.recompute_norms()
        if kind == "discarded and checkpointed":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    prepare(model)
    tokens = torch.randint(0, 50, (2, 24))
    documents = (torch.arange(24) * num_documents // 24).expand(2, -1)
    model(tokens, document_ids_BS=documents, labels_BS=tokens).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-mixtral", "tiny-deepseek-v3"])
@pytest.mark.parametrize("kind", ["discarded", "discarded and checkpointed"])
def test_gradients_are_the_same_to_the_last_bit(preset: str, kind: str) -> None:
    kept, found = gradients(preset, "kept", 2), gradients(preset, kind, 2)
    assert kept.keys() == found.keys()
    for name, gradient in kept.items():
        assert torch.equal(gradient, found[name]), name


def test_a_norm_that_somebody_hooked_is_not_made_again_without_the_hook() -> None:
    seen: list[torch.Tensor] = []

    def double(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        seen.append(output)
        return output * 2

    def hook(model: Decoder) -> None:
        layer = model.model.layers[0]
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm):
            norm.register_forward_hook(double)

    kept, found = (gradients("tiny-qwen3", kind, 2, hook) for kind in ("kept", "discarded"))
    for name, gradient in kept.items():
        assert torch.equal(gradient, found[name]), name
    assert all(tensor.untyped_storage().nbytes() for tensor in seen)


class Alive(TorchDispatchMode):
    """Every storage that operations made and somebody still holds: a graph, a hook, a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                reference = StorageWeakRef(leaf.untyped_storage())
                self.storages[reference.cdata] = reference
        return result

    def nbytes(self) -> int:
        found = [torch.UntypedStorage._new_with_weak_ptr(r.cdata) for r in self.storages.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)


def freed_bytes(config: ModelConfig, num_tokens: int) -> int:
    tensors = layer_tensors(config, "moe", LayerView(itemsize=4))
    kept = [kept_bytes(tensors, num_tokens, parts) for parts in (frozenset[str](), frozenset({"norms"}))]
    return config.num_hidden_layers * (kept[0] - kept[1])


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-mixtral"])
def test_what_the_dry_run_takes_off_is_not_there_after_forward(preset: str) -> None:
    sections = {"model": {"preset": preset}, "context_parallel": {"varlen": "never"}}
    config = build_config(sections, {}, 1, [])
    assert config is not None
    found = {}
    for recomputes in (False, True):
        model = Decoder(config.model)
        for name, parameter in model.named_parameters():
            nn.init.ones_(parameter) if "norm" in name else nn.init.normal_(parameter, std=0.05)
        for layer in [*model.model.layers, *model.model.mtp_layers]:
            if recomputes:
                layer.recompute_norms()
        tokens = torch.randint(0, 50, (2, 32))
        with Alive() as alive:
            loss = model(tokens, labels_BS=tokens).loss
            found[recomputes] = alive.nbytes()
        loss.backward()
    assert found[False] - found[True] == freed_bytes(config.model, tokens.numel())


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


def wrap_foreign() -> str:
    try:
        parallelize(Foreign(), build_meshes(), ParallelPolicy(recompute="norms"))
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_foreign_model_is_refused() -> None:
    assert "train.recompute: norms is for fsdmoe's own decoders" in run_ranks(wrap_foreign, 1)[0]
