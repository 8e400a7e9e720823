"""The loss of wrapped Hugging Face models, computed without their logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdmoe.huggingface.loss import UnmadeLogits, has_fused_loss
from fsdmoe.mesh import build_meshes
from fsdmoe.models import head
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.hf_tiny import FAMILIES, VOCABULARY, batch, tiny_config, tiny_hf

pytestmark = requires_transformers
TIED = "llama"
Found = dict[str, tuple[float, dict[str, Tensor]]]


def cases(rank: int) -> dict[str, dict[str, Any]]:
    """What a model is called with, by what is special about it."""
    tokens = batch(0, rank, rows=2, length=12)
    labels = tokens.masked_fill(torch.arange(12) % 5 == 2, -100)
    shifted = tokens.roll(-1, 1).masked_fill(torch.arange(12) % 6 == 5, -100)
    packed = (torch.arange(12) % 6).expand_as(tokens)  # two documents a row
    return {
        "ignored labels": {"labels": labels},
        "items of the batch": {"labels": labels, "num_items_in_batch": torch.tensor(31)},
        "packed rows": {
            "labels": tokens, "shift_labels": shifted, "position_ids": packed, "use_cache": False
        },
    }  # fmt: skip


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in found.items()}
    model.zero_grad()
    return whole


def losses_and_gradients(model: nn.Module, rank: int) -> Found:
    found = {}
    for name, inputs in cases(rank).items():
        loss = model(batch(0, rank, rows=2, length=12), **inputs).loss
        loss.backward()
        found[name] = loss.item(), gradients(model)
    return found


@contextmanager
def chunks_of(tokens: int) -> Iterator[None]:
    before, head.CHUNK_TOKENS = head.CHUNK_TOKENS, tokens
    try:
        yield
    finally:
        head.CHUNK_TOKENS = before


def sharded(families: tuple[str, ...]) -> dict[str, Found]:
    found = {}
    for family in families:
        model = parallelize(tiny_hf(family), build_meshes(ep=1 if family == TIED else 2))
        assert has_fused_loss(model)
        with chunks_of(10):
            found[family] = losses_and_gradients(model, dist.get_rank())
    return found


FEW = ("qwen3_moe", TIED)
REST = tuple(family for family in FAMILIES if family not in FEW)


@pytest.mark.parametrize(
    "families", [FEW, pytest.param(REST, marks=pytest.mark.full)], ids=("few", "the rest")
)
def test_two_ranks_get_the_losses_and_gradients_of_transformers(families: tuple[str, ...]) -> None:
    ranks = run_ranks(sharded, 2, families)
    for family in families:
        alone = [losses_and_gradients(tiny_hf(family), rank) for rank in range(2)]
        for case in cases(0):
            for rank in range(2):
                assert ranks[rank][family][case][0] == pytest.approx(alone[rank][case][0], rel=1e-5)
            got = ranks[0][family][case][1]
            assert got.keys() == alone[0][case][1].keys()
            for name, gradient in got.items():
                mean = (alone[0][case][1][name] + alone[1][case][1][name]) / 2
                difference = (gradient - mean).abs().max() / mean.abs().max().clamp(min=1e-3)
                assert difference <= 1e-5, f"{family}, {case}, {name}: {difference}"


# Memory


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that anything made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return made


VOCAB = 512
LENGTH = 64


def largest(kind: str, tp: int, fused: bool) -> int:
    model = parallelize(tiny_hf("mixtral", vocab_size=VOCAB), build_meshes(tp=tp), fused_loss=fused)
    tokens = batch(0, 0, length=LENGTH)
    decoder = as_causal_lm(model) if kind == "decoder" else None
    mask = torch.ones_like(tokens, dtype=torch.bool)

    def run() -> Tensor:
        if decoder is None:
            return model(tokens, labels=tokens).loss
        return decoder(tokens, labels_BS=tokens, loss_mask_BS=mask).loss

    with chunks_of(8), Largest() as made:
        run().backward()
    with chunks_of(8), torch.no_grad(), Largest() as evaluated:
        run()
    return max(made.numel, evaluated.numel if kind == "decoder" else 0)


@pytest.mark.parametrize(
    ("kind", "tp"), [("model", 1), pytest.param("decoder", 1, marks=pytest.mark.full), ("decoder", 2)]
)
def test_nothing_as_large_as_the_logits_is_ever_made(kind: str, tp: int) -> None:
    logits = LENGTH * VOCAB // tp
    assert max(run_ranks(largest, tp, kind, tp, True)) <= logits // 2
    assert min(run_ranks(largest, tp, kind, tp, False)) >= logits


# The output


def outputs() -> dict[str, Any]:
    model, tokens = parallelize(tiny_hf("qwen3_moe"), build_meshes()), batch(0, 0)
    out = model(tokens, labels=tokens)
    found: dict[str, Any] = {"kind": type(out.logits), "shape": tuple(out.logits.shape), "text": repr(out)}
    found["tuple"] = len(out.to_tuple()), len(model(tokens, labels=tokens, return_dict=False))
    logits = out.logits
    reads: dict[str, Callable[[], Any]] = {
        "argmax": lambda: logits.argmax(-1), "index": lambda: logits[0], "cast": lambda: logits.float() + 1,
        "softmax": lambda: torch.softmax(logits, -1), "numpy": lambda: logits.detach().cpu().numpy(),
        "list": lambda: logits.tolist(), "loop": lambda: list(logits), "truth": lambda: bool(logits),
    }  # fmt: skip
    for name, read in reads.items():
        with pytest.raises(RuntimeError, match="fused_loss=False"):
            read()
        found[name] = True
    real = {"no labels": model(tokens).logits}
    with torch.no_grad():
        real["no grad"] = model(tokens, labels=tokens).logits
    model.eval()
    real["eval"] = model(tokens, labels=tokens).logits
    plain = parallelize(tiny_hf("qwen3_moe"), build_meshes(), fused_loss=False)
    real["off"] = plain(tokens, labels=tokens).logits
    policy = ParallelPolicy(precision=PrecisionConfig(param_dtype="float32", output_dtype="bfloat16"))
    cast = parallelize(tiny_hf("qwen3_moe"), build_meshes(), policy)
    cast(tokens, labels=tokens).loss.backward()
    return found | {"real": {name: logits.detach() for name, logits in real.items()}}


def test_logits_that_were_not_made_say_so_and_those_of_evaluation_are_real() -> None:
    found = run_ranks(outputs, 1)[0]
    assert found["kind"] is UnmadeLogits
    assert found["shape"] == (1, 8, VOCABULARY)
    assert "computed without them" in found["text"]
    assert found["tuple"][0] == found["tuple"][1]
    with torch.no_grad():
        expected = tiny_hf("qwen3_moe")(batch(0, 0)).logits
    assert set(found["real"]) == {"no labels", "no grad", "eval", "off"}
    for logits in found["real"].values():
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


# Where the model's own loss stays


def capped() -> nn.Module:
    return other("Gemma2", final_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=64)


def scaled() -> nn.Module:
    return other("Granite", logits_scaling=3.0)


def biased() -> nn.Module:
    return other("Phi")


def hooked() -> nn.Module:
    model = tiny_hf("llama", tie_word_embeddings=False)
    model.lm_head.register_forward_pre_hook(lambda _, args: (2 * args[0],))  # type: ignore[union-attr]
    return model


def with_its_own_loss() -> nn.Module:
    model = tiny_hf("llama")
    model.loss_function = lambda logits, labels, **_: logits.square().mean()  # type: ignore[assignment]
    return model


def other(name: str, **changes: Any) -> nn.Module:
    import transformers

    settings = tiny_config("llama").to_dict() | {"pad_token_id": 0, "attn_implementation": "eager"} | changes
    drop = ("model_type", "architectures", "transformers_version", "tie_word_embeddings")
    config = getattr(transformers, f"{name}Config")(**{k: v for k, v in settings.items() if k not in drop})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).train()


OWN = (capped, scaled, biased, hooked, with_its_own_loss)


def own_losses() -> list[Found]:
    return [losses_and_gradients(parallelize(build(), build_meshes()), 0) for build in OWN]


def test_models_that_change_their_logits_or_compute_another_loss_train_as_they_do_alone() -> None:
    for build, got in zip(OWN, run_ranks(own_losses, 1)[0], strict=True):
        compare(got, losses_and_gradients(build(), 0), build.__name__)


def compare(got: Found, wanted: Found, what: str) -> None:
    for case, (loss, grads) in wanted.items():
        assert got[case][0] == pytest.approx(loss, rel=1e-5), f"{what}, {case}"
        for name, gradient in grads.items():
            difference = (got[case][1][name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-3)
            assert difference <= 1e-5, f"{what}, {case}, {name}: {difference}"


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def squares(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits.square().mean()


def late_changes() -> tuple[Found, Found, type]:
    """A hook, a loss, and autocast that come after the model was wrapped."""
    model, tokens = parallelize(tiny_hf("qwen3_moe"), build_meshes()), batch(0, 0)
    handle = model.lm_head.register_forward_hook(doubled)  # type: ignore[union-attr, operator]
    hooked = losses_and_gradients(model, 0)
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = type(model(tokens, labels=tokens).logits)
    model.loss_function = squares  # type: ignore[assignment]
    return hooked, losses_and_gradients(model, 0), under_autocast


def test_what_is_done_to_a_wrapped_model_later_counts() -> None:
    hooked, other_loss, under_autocast = run_ranks(late_changes, 1)[0]
    model = tiny_hf("qwen3_moe")
    handle = model.lm_head.register_forward_hook(doubled)  # type: ignore[union-attr, operator]
    compare(hooked, losses_and_gradients(model, 0), "hook")
    handle.remove()
    model.loss_function = squares  # type: ignore[assignment]
    compare(other_loss, losses_and_gradients(model, 0), "loss")
    assert under_autocast is Tensor


def compiled(num_layers: int) -> tuple[float, dict[str, Tensor]]:
    model = parallelize(tiny_hf("llama", num_hidden_layers=num_layers), build_meshes())
    torch._dynamo.reset()
    loss = torch.compile(model, backend="eager")(batch(0, 0), labels=batch(0, 0), use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.full  # the compiler takes long
def test_a_model_that_is_compiled_as_a_whole_computes_its_own_loss() -> None:
    model, tokens = tiny_hf("llama", num_hidden_layers=1), batch(0, 0)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    compare({"": run_ranks(compiled, 1, 1)[0]}, {"": (loss.item(), gradients(model))}, "compiled")


class Around(nn.Module):
    """A model in another, as adapters wrap it: its forward is called past its hooks, its base is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.base = tiny_hf("qwen3_moe")
        self.base.requires_grad_(False).model.norm.requires_grad_(True)  # type: ignore[union-attr]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base.forward(*args, **kwargs)


def wrapped_twice() -> tuple[Found, type]:
    model, tokens = parallelize(Around(), build_meshes()), batch(0, 0)
    return losses_and_gradients(model, 0), type(model(tokens, labels=tokens).logits)


def test_a_model_inside_another_with_a_frozen_head_needs_no_logits_either() -> None:
    got, kind = run_ranks(wrapped_twice, 1)[0]
    assert kind is UnmadeLogits
    wanted = losses_and_gradients(Around(), 0)
    assert set(wanted["packed rows"][1]) == {"base.model.norm.weight"}
    compare(got, wanted, "frozen")


# Labels


def odd_labels() -> tuple[float, float, float, str]:
    model, tokens = parallelize(tiny_hf("llama"), build_meshes()), batch(0, 0)
    ignored = torch.full_like(tokens, -100)
    nothing = model(tokens, labels=ignored).loss
    nothing.backward()
    norm = sum(g.abs().sum().item() for g in gradients(model).values())
    share = model(tokens, labels=ignored, num_items_in_batch=4).loss.item()
    with pytest.raises(RuntimeError) as caught:
        model(tokens, labels=tokens + VOCABULARY)
    model(tokens, labels=tokens).loss.backward()  # as if nothing had been
    return nothing.item(), norm, share, str(caught.value)


def test_rows_without_labels_give_no_gradient_and_labels_outside_of_the_vocabulary_are_refused() -> None:
    loss, norm, share, message = run_ranks(odd_labels, 1)[0]
    assert loss != loss  # transformers' mean of nothing
    assert (norm, share) == (0.0, 0.0)
    assert "labels: expected numbers below 64" in message
