"""Parts of wrapped models that are recomputed, called as their users call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsdmoe
from fsdmoe.core.errors import ConfigError
from fsdmoe.memory.config import Activation, MemoryConfig, Part
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import FAMILIES, VOCABULARY, tiny_hf

pytestmark = requires_transformers
DROPPED = 0.3


def gradients(
    model: Any, memory: MemoryConfig, adapt: Callable[[Any], Any] = lambda model: model
) -> dict[str, torch.Tensor]:
    """Of a call that leaves ``use_cache`` as it is: on."""
    if model.config.model_type != "gpt_oss":  # which has no other attention than its own
        model.set_attn_implementation("sdpa")
    model = adapt(model)
    policy = fsdmoe.ParallelPolicy(memory=memory, precision=PrecisionConfig(param_dtype="float32"))
    fsdmoe.parallelize(model, fsdmoe.build_meshes(), policy)
    tokens = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    assert model.config.use_cache
    torch.manual_seed(2)
    model.train()(tokens, labels=tokens).loss.backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"what is drawn next": torch.rand(9)}


def tiny(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return tiny_hf(family, **changes)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        off = (found[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert off < 1e-5, f"{what}: the gradient of {name} is off by {off:.2g}"


def compare() -> None:
    wanted = gradients(tiny("qwen3_moe"), MemoryConfig())
    for recompute in (("layer",), ("attention_projections",)):
        assert_same(gradients(tiny("qwen3_moe"), MemoryConfig(recompute=recompute)), wanted, recompute)


def test_a_cache_in_training_is_not_written_twice() -> None:
    run_ranks(compare, 1)


def prefixed(recompute: tuple[Any, ...]) -> tuple[float, float] | str:
    """A logit of a token behind others: those given as a cache, or in the same row. Why, where that is
    refused."""
    model: Any = tiny_hf("qwen3_moe")
    model.set_attn_implementation("sdpa")
    policy = fsdmoe.ParallelPolicy(memory=MemoryConfig(recompute=recompute))
    fsdmoe.parallelize(model, fsdmoe.build_meshes(), policy)
    tokens = torch.randint(VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        cache = model(tokens[:, :6], use_cache=True).past_key_values
    assert cache.get_seq_length() == 6
    try:
        behind = model.train()(tokens[:, 6:], past_key_values=cache).logits[0, -1, 0]
    except ConfigError as error:
        return str(error)
    return behind.item(), model(tokens, use_cache=False).logits[0, -1, 0].item()


def test_a_cache_that_a_caller_gives_is_used_or_refused_by_name() -> None:
    ((behind, whole),) = run_ranks(prefixed, 1, ())
    assert behind == pytest.approx(whole, rel=1e-5)
    (told,) = run_ranks(prefixed, 1, ("layer",))
    assert str(told).startswith("past_key_values: expected none in a forward of Qwen3MoeModel with gradients")


def noisy(model: Any) -> Any:
    """Random numbers wherever a part may draw some: in every projection, norm, activation and router."""
    for layer in model.model.layers:
        for name, module in layer.named_modules():
            own = name.rpartition(".")[2]
            if isinstance(module, nn.Linear) and own not in ("gate", "router"):
                module.register_forward_hook(lambda _, __, y: F.dropout(y, DROPPED))
            elif ".experts." in name:
                continue  # by their activation our kernels know what they are
            elif "norm" in own or own.startswith("act") or own in ("gate", "router"):
                module.forward = Noisy(module.forward)
    return model


class Noisy:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.forward(F.dropout(x, DROPPED), *args, **kwargs)


def with_adapters(model: Any) -> Any:
    import peft

    targets = r".*(q_proj|q_b_proj|kv_b_proj|o_proj)"
    config = peft.LoraConfig(r=4, lora_dropout=DROPPED, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        parameter.requires_grad_(True)
    return adapted


def dropout_is_repeated(family: str, parts: tuple[Any, ...], how: str) -> None:
    changes = {"attention_dropout": DROPPED}
    adapt = {"noise": noisy, "adapters": with_adapters, "attention": lambda model: model}[how]
    wanted = gradients(tiny(family, **changes), MemoryConfig(), adapt)
    for part in parts:
        try:
            found = gradients(tiny(family, **changes), MemoryConfig(recompute=part), adapt)
        except ConfigError as error:
            if not any(said in str(error) for said in ("found in no layer", "to call scaled_dot")):
                raise
            continue  # the family has no such part
        assert_same(found, wanted, part)


def test_attention_that_is_computed_again_drops_what_it_dropped() -> None:
    run_ranks(dropout_is_repeated, 1, "qwen3_moe", (("attention",), ("attention_projections",)), "attention")


def test_random_numbers_are_the_same_in_every_part_that_is_computed_again() -> None:
    parts = [(part,) for part in get_args(Part)] + [tuple(part for part in get_args(Part) if part != "layer")]
    run_ranks(dropout_is_repeated, 1, "deepseek_v3", tuple(parts[::-1][:3]), "noise")


@pytest.mark.full
@pytest.mark.parametrize("how", ["attention", "noise", "adapters"])
@pytest.mark.parametrize("family", [*FAMILIES, "granite_shared", "llama"])
def test_random_numbers_are_the_same_in_every_family(family: str, how: str) -> None:
    if how == "adapters":
        pytest.importorskip("peft")
    all_but_layer = tuple(part for part in get_args(Part) if part != "layer")
    parts = [(part,) for part in get_args(Part)] + [("attention_projections", "attention"), all_but_layer]
    run_ranks(dropout_is_repeated, 1, family, tuple(parts), how, timeout=300)


def offload_repeats() -> None:
    wanted = gradients(tiny("qwen3_moe", attention_dropout=DROPPED), MemoryConfig())
    for recompute in ((), ("attention",)):
        memory = MemoryConfig(recompute=recompute, offload=get_args(Activation), offload_keep_last=0)
        assert_same(gradients(tiny("qwen3_moe", attention_dropout=DROPPED), memory), wanted, memory)


def test_activations_that_wait_in_host_memory_are_those_that_dropout_left() -> None:
    run_ranks(offload_repeats, 1)
