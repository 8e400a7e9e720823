"""In bf16 on a GPU the decoders stay within bf16's own error of transformers' models.

Two bf16 implementations differ by as much as each differs from fp32, so logits and the whole gradient are
compared with transformers in bf16, and each parameter's gradient with fp32, where transformers' own error is
the yardstick. Router inputs are rounded differently too, so a token whose last two candidates nearly tie may
visit another expert: such batches are left out (the routing is compared, not assumed), and enough must
remain.
"""

from collections import defaultdict

import pytest
import torch
from torch import nn

from fsdmoe.experts.router import Router
from fsdmoe.testing import requires_gpu, requires_transformers
from tests.support.hf_pairs import hf_model, native_model, tiny

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


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_bf16_stays_within_two_percent_of_transformers(architecture: str) -> None:
    config = tiny(architecture, hidden_size=128, moe_intermediate_size=64)
    exact = hf_model(config, std=0.02).cuda()
    theirs = hf_model(config, std=0.02).to("cuda", torch.bfloat16)
    ours = native_model(config, theirs).to("cuda", torch.bfloat16)
    ids = [chosen_experts(model) for model in (exact, theirs, ours)]
    logit_error, whole_error, compared = 0.0, 0.0, 0
    our_errors, their_errors = defaultdict(list), defaultdict(list)
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        stream = torch.randint(config.vocab_size, (1, 25), generator=generator).cuda()
        tokens, labels = stream[:, :-1], stream[:, 1:]
        for found, model in zip(ids, (exact, theirs, ours), strict=True):
            found.clear()
            model.zero_grad()
        logits = [model(tokens).logits for model in (exact, theirs)]
        for each in logits:
            torch.nn.functional.cross_entropy(each.flatten(0, 1).float(), labels.flatten()).backward()
        ours(tokens, labels_BS=labels).loss.backward()
        if not all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*ids, strict=True)):
            continue
        compared += 1
        true, hf, native = (gradients(model) for model in (exact, theirs, ours))
        logit_error = max(logit_error, relative_error(ours(tokens).logits_BSV, logits[1]))
        whole_error = max(whole_error, relative_error(flat(native), flat(hf)))
        for name in true:
            our_errors[name].append(relative_error(native[name], true[name]))
            their_errors[name].append(relative_error(hf[name], true[name]))
    print(f"{architecture}: logits {logit_error:.1e}, gradient {whole_error:.1e}, {compared} batches")
    assert compared >= 3
    assert logit_error <= 2e-2
    assert whole_error <= 2e-2
    for name in our_errors:
        assert max(our_errors[name]) <= 1.5 * max(their_errors[name]), name
