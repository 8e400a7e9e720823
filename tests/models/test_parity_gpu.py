"""In bf16 on a GPU the decoders stay within bf16's error of transformers' models.

The two round their router inputs differently, so a token whose last two candidates nearly tie may visit another
expert; such batches are left out (the routing is compared, not assumed), and enough must remain.
"""

import pytest
import torch
from torch import nn

from fsdmoe.experts.router import Router
from fsdmoe.testing import requires_gpu, requires_transformers
from tests.models.hf_pairs import hf_model, native_model, tiny

pytestmark = [requires_gpu, requires_transformers]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


def chosen_experts(model: nn.Module) -> list[torch.Tensor]:
    """Filled by each forward with the sorted choices of every router."""
    found: list[torch.Tensor] = []

    def remember(module: nn.Module, _: object, out: tuple[torch.Tensor, ...]) -> None:
        ids = out.ids_TK if isinstance(module, Router) else out[2]  # type: ignore[attr-defined]
        found.append(ids.sort(dim=-1).values)

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(remember)
    return found


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_bf16_logits_and_gradients_stay_within_two_percent(architecture: str) -> None:
    config = tiny(architecture, hidden_size=128, moe_intermediate_size=64)
    theirs = hf_model(config).to("cuda", torch.bfloat16)
    ours = native_model(config, theirs).to("cuda", torch.bfloat16)
    our_ids, their_ids = chosen_experts(ours), chosen_experts(theirs)
    worst, compared = 0.0, 0
    for seed in range(20):
        stream = torch.randint(
            config.vocab_size, (1, 25), generator=torch.Generator().manual_seed(seed)
        ).cuda()
        tokens, labels = stream[:, :-1], stream[:, 1:]
        our_ids.clear()
        their_ids.clear()
        ours.zero_grad()
        theirs.zero_grad()
        logits = theirs(tokens).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()
        ours(tokens, labels_BS=labels).loss.backward()
        if not all(torch.equal(a, b) for a, b in zip(our_ids, their_ids, strict=True)):
            continue
        compared += 1
        worst = max(worst, relative_error(ours(tokens).logits_BSV, logits))
        gradients = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            worst = max(worst, relative_error(parameter.grad, gradients[name].grad))
    print(f"{architecture}: worst relative error {worst:.2e} over {compared} batches with equal routing")
    assert compared >= 3
    assert worst <= 2e-2
