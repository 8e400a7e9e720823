"""The decoders equal transformers' models: logits, every gradient, the auxiliary loss, and packed
documents."""

import pytest
import torch

from fsdmoe.testing import requires_transformers
from tests.support.hf_pairs import hf_model, in_native_names, in_transformers_names, native_model, tiny

pytestmark = requires_transformers
ARCHITECTURES = ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss"]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def tokens_and_labels(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.randint(vocab_size, (2, 33))
    return stream[:, :-1], stream[:, 1:]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_all_gradients_equal_transformers(architecture: str, tied: bool) -> None:
    config = tiny(architecture, tie_word_embeddings=tied, use_qk_norm=not tied)  # GLM-4.5 has both kinds
    theirs = hf_model(config)
    ours = native_model(config, theirs)
    tokens, labels = tokens_and_labels(config.vocab_size)

    logits = theirs(tokens).logits
    assert relative_error(ours(tokens).logits_BSV, logits) <= 1e-5

    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    ours(tokens, labels_BS=labels).loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    if architecture == "gpt_oss":
        gradients = in_native_names(gradients)
    assert {name for name, _ in ours.named_parameters()} == set(gradients)
    for name, parameter in ours.named_parameters():
        assert gradients[name].abs().max() > 0, name
        assert relative_error(parameter.grad, gradients[name]) <= 1e-5, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_travel_back_to_transformers_unchanged(architecture: str) -> None:
    config = tiny(architecture)
    theirs, fresh = hf_model(config), hf_model(config)
    ours = native_model(config, theirs)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    state = ours.state_dict()
    fresh.load_state_dict(in_transformers_names(state) if architecture == "gpt_oss" else state)
    for (name, a), (_, b) in zip(theirs.state_dict().items(), fresh.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_documents_equal_the_documents_alone(architecture: str) -> None:
    config = tiny(architecture)
    ours = native_model(config, hf_model(config))
    first, second = torch.randint(config.vocab_size, (1, 20)), torch.randint(config.vocab_size, (1, 12))
    positions = torch.cat((torch.arange(20), torch.arange(12)))[None]
    documents = torch.tensor([0] * 20 + [1] * 12)[None]
    packed = ours(torch.cat((first, second), 1), positions_BS=positions, document_ids_BS=documents).logits_BSV
    alone = torch.cat((ours(first).logits_BSV, ours(second).logits_BSV), 1)
    assert relative_error(packed, alone) <= 1e-5
