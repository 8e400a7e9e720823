"""The loss of pairs, their margin and accuracy are what whole logits give, and TRL's."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fsdmoe
from fsdmoe.core.errors import ConfigError
from fsdmoe.experts.config import CapacityConfig, ExpertsConfig
from fsdmoe.experts.context import RoutingContext
from fsdmoe.huggingface import preference
from fsdmoe.huggingface.preference import PreferenceLM
from fsdmoe.huggingface.preference_config import PreferenceConfig
from fsdmoe.models.causal_lm import StepCounts
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.testing import requires_peft, run_ranks
from tests.huggingface.test_loss import Largest, chunks_of
from tests.support.hf_tiny import tiny_hf

pytestmark = requires_peft
VOCABULARY = 512
CASES = (("sigmoid", 0.3), ("hinge", 0.1), ("ipo", 0.5))
"""Losses, and their beta."""
LENGTHS = ((3, 4, 5), (2, 6, 3), (4, 3, 2))
"""Of the prompt, the chosen answer and the rejected one of each pair."""


def pairs() -> list[dict[str, list[int]]]:
    random = torch.Generator().manual_seed(3)
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [
        {
            name: torch.randint(2, VOCABULARY, (length,), generator=random).tolist()
            for name, length in zip(names, lengths, strict=True)
        }
        for lengths in LENGTHS
    ]


def rows(seq_len: int = 80) -> dict[str, Tensor]:
    """The pairs as ``data.kind = "preference"`` gives them, and a row of padding."""
    size = (len(LENGTHS) + 1, seq_len)
    found = {name: torch.zeros(size, dtype=torch.int64) for name in ("tokens", "labels", "positions", "ids")}
    mask = torch.zeros(size, dtype=torch.bool)
    for row, pair in enumerate(pairs()):
        place = 0
        found["ids"][row] = 2
        for answer, name in enumerate(("chosen_ids", "rejected_ids")):
            tokens = torch.tensor(pair["prompt_ids"] + pair[name])
            end = place + len(tokens)
            found["tokens"][row, place:end] = tokens
            found["labels"][row, place : end - 1] = tokens[1:]
            found["positions"][row, place:end] = torch.arange(len(tokens))
            found["ids"][row, place:end] = answer
            mask[row, place + len(pair["prompt_ids"]) - 1 : end - 1] = True
            place = end
        found["positions"][row, place:] = torch.arange(seq_len - place)
    found["positions"][-1] = torch.arange(seq_len)
    return {
        "tokens_BS": found["tokens"], "labels_BS": found["labels"].masked_fill(~mask, 0),
        "positions_BS": found["positions"], "document_ids_BS": found["ids"], "loss_mask_BS": mask,
    }  # fmt: skip


def made_model(*, unchanged: bool = False, **changes: Any) -> Any:
    """With adapters that change it already, if not ``unchanged``."""
    import peft

    torch.manual_seed(1)
    model: Any = tiny_hf("qwen3_moe", vocab_size=VOCABULARY, output_router_logits=False, **changes)
    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], target_parameters=["mlp.experts.gate_up_proj"],
        init_lora_weights=unchanged,
    )  # fmt: skip
    torch.manual_seed(2)
    return peft.inject_adapter_in_model(config, model)


def ours(loss: str, beta: float) -> tuple[float, ...]:
    """The loss, the norm of the adapters' gradient, and margin and accuracy of rewards."""
    model = fsdmoe.parallelize(made_model(), fsdmoe.build_meshes(ep=1))
    decoder = PreferenceLM(as_causal_lm(model), PreferenceConfig(loss=loss, beta=beta))  # type: ignore[arg-type]
    given = rows()
    names = ("labels_BS", "loss_mask_BS", "document_ids_BS")
    counts = StepCounts.from_vector(decoder.count_tokens(*(given[name] for name in names)))
    assert counts.loss_tokens == len(LENGTHS)
    with Largest() as made:
        out = decoder(**given, counts=counts)
        out.loss.backward()
    assert made.numel < given["tokens_BS"].numel() * VOCABULARY
    assert decoder.rewards_2 is not None
    norm = fsdmoe.clip_grad_norm(model, float("inf")).total.item()
    return out.cross_entropy.item(), norm, *decoder.rewards_2.tolist()


def reference_of(process_seed: int) -> tuple[list[list[float]], bool]:
    """Log-probabilities that answers are compared with, in training; whether training goes on."""
    torch.manual_seed(process_seed)
    model = fsdmoe.parallelize(made_model(attention_dropout=0.5), fsdmoe.build_meshes(ep=1))
    decoder = PreferenceLM(as_causal_lm(model), PreferenceConfig())
    torch.manual_seed(process_seed)
    with mock.patch.object(preference, "PairLosses", wraps=preference.PairLosses) as made:
        decoder(**rows())
    return made.call_args.args[0].sums_2B.tolist(), model.training


def test_the_reference_draws_no_dropout() -> None:
    (one,), (other,) = (run_ranks(reference_of, 1, seed) for seed in (1, 2))
    assert one == other
    assert one[1]


def loss_of_equals(capacity: CapacityConfig) -> float:
    """Of a model whose adapters change nothing yet, with rows that padding fills up."""
    policy = fsdmoe.ParallelPolicy(experts=ExpertsConfig(capacity=capacity))
    model = fsdmoe.parallelize(made_model(unchanged=True), fsdmoe.build_meshes(ep=1), policy)
    decoder, given = PreferenceLM(as_causal_lm(model), PreferenceConfig()), rows()
    routing = RoutingContext(token_mask_T=given["document_ids_BS"] != 2)
    return decoder(**given, routing=routing).cross_entropy.item()


def test_the_reference_routes_padding_as_the_model_does() -> None:
    (loss,) = run_ranks(loss_of_equals, 1, CapacityConfig(factor=1.25, scope="sequence"))
    assert loss == pytest.approx(math.log(2), rel=1e-6)


def norm_of(model: Any) -> float:
    grads = [p.grad.norm() for p in model.parameters() if p.requires_grad and p.grad is not None]
    return torch.stack(grads).norm().item()


def by_logits(loss: str, beta: float) -> tuple[float, ...]:
    model = made_model()

    def log_probs(pair: dict[str, list[int]], name: str) -> Tensor:
        tokens = torch.tensor(pair["prompt_ids"] + pair[name])
        found = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])
        return found[len(pair["prompt_ids"]) - 1 :].sum()

    def switch(enabled: bool) -> None:
        for layer in model.modules():
            if hasattr(layer, "enable_adapters"):
                layer._disable_adapters = not enabled

    total = torch.zeros(())
    margins = []
    for pair in pairs():
        switch(False)
        reference = [log_probs(pair, name).detach() for name in ("chosen_ids", "rejected_ids")]
        switch(True)
        policy = [log_probs(pair, name) for name in ("chosen_ids", "rejected_ids")]
        chosen, rejected = (mine - theirs for mine, theirs in zip(policy, reference, strict=True))
        margins.append(beta * (chosen - rejected).item())
        if loss == "ipo":
            margin = chosen / len(pair["chosen_ids"]) - rejected / len(pair["rejected_ids"])
            total = total + (margin - 1 / (2 * beta)) ** 2
        elif loss == "hinge":
            total = total + torch.relu(1 - beta * (chosen - rejected))
        else:
            total = total - F.logsigmoid(beta * (chosen - rejected))
    mean = total / len(LENGTHS)
    mean.backward()
    accuracy = sum(margin > 0 for margin in margins) / len(margins)
    return mean.item(), norm_of(model), sum(margins) / len(margins), accuracy


def compare_with_logits() -> None:
    with chunks_of(7):  # several chunks, and a last one that is not full
        for case in CASES:
            found, wanted = list(ours(*case)), list(by_logits(*case))
            # A margin is beta times a difference of sums of about -40, whose rounding stays in it.
            assert found.pop(2) == pytest.approx(wanted.pop(2), rel=1e-5, abs=1e-5 * case[1]), case
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6), case


def test_the_loss_of_pairs_is_that_of_whole_logits_which_are_never_made() -> None:
    run_ranks(compare_with_logits, 1)


def by_trl(folder: str, loss: str, beta: float) -> tuple[float, ...]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from examples.sft_trainer import build_tokenizer
    from tests.support import trl_case
    from tests.support.trainer_case import arguments, forget_accelerate

    forget_accelerate()
    model = made_model()
    torch.manual_seed(1)
    reference: Any = tiny_hf("qwen3_moe", vocab_size=VOCABULARY, output_router_logits=False)
    given = arguments(
        folder, DPOConfig, bf16=False, router_aux_loss_coef=0.0, loss_type=[loss], beta=beta,
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer: Any = DPOTrainer(
        model, ref_model=reference, args=given, train_dataset=Dataset.from_list(trl_case.pairs(3)),
        processing_class=build_tokenizer(),
    )  # fmt: skip
    found = trainer.compute_loss(model, trainer.data_collator(pairs()))
    found.backward()
    told = trainer._metrics["train"]
    rewards = [told[name][-1] for name in ("rewards/margins", "rewards/accuracies")]
    return found.item(), norm_of(model), *rewards


def compare_with_trl(folder: str) -> None:
    for case in CASES:
        with chunks_of(7):
            found = ours(*case)
        assert found == pytest.approx(by_trl(folder, *case), rel=1e-5, abs=1e-6), case


@pytest.mark.full  # seconds of imports
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="pip install trl")
def test_the_loss_of_pairs_is_that_of_trl(tmp_path: Path) -> None:
    run_ranks(compare_with_trl, 1, str(tmp_path))


def test_a_beta_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^preference\.beta: expected a number above 0, got 0"):
        PreferenceConfig(beta=0.0)
