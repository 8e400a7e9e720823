"""What the decoder adds up: means over split batches, multi-token prediction, transformers' balance loss."""

import pytest
import torch

from fsdmoe.experts.config import BalanceConfig, ExpertsConfig
from fsdmoe.models import Decoder, StepCounts, preset_config
from fsdmoe.models.mtp import Targets, next_targets
from fsdmoe.models.rope_config import RopeConfig
from fsdmoe.testing import requires_transformers
from tests.support.hf_pairs import hf_model, randomize, tiny


def decoder(preset: str, experts: ExpertsConfig | None = None, **changes: object) -> Decoder:
    model = Decoder(preset_config(preset, **changes), experts)
    randomize(model, 0.1)
    return model


def rows(num: int, length: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    stream = torch.randint(96, (num, length + 1))
    return stream[:, :-1], stream[:, 1:], torch.rand(num, length) < 0.6


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-deepseek-v3"])
def test_losses_and_gradients_of_micro_batches_add_up_to_those_of_the_whole_batch(preset: str) -> None:
    model = decoder(preset, ExpertsConfig(balance=BalanceConfig(sequence=0.1, z_loss=0.1)))
    tokens, labels, mask = rows(4)
    counts = StepCounts.from_vector(model.count_tokens(labels, mask, None))
    whole = model(tokens, labels_BS=labels, loss_mask_BS=mask)
    expected = torch.autograd.grad(whole.loss, list(model.parameters()))
    total = 0.0
    for part in (slice(0, 1), slice(1, 4)):
        out = model(tokens[part], labels_BS=labels[part], loss_mask_BS=mask[part], counts=counts)
        out.loss.backward()
        total += out.loss.item()
    assert total == pytest.approx(whole.loss.item(), rel=1e-5)
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        scale = gradient.abs().max() + 1e-8
        assert (parameter.grad - gradient).abs().max() / scale < 1e-4, name


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_documents_without_positions_count_their_own(kind: str) -> None:
    """Frequencies of the second type follow the length of the text."""
    rope = RopeConfig() if kind == "default" else RopeConfig(type="dynamic", factor=2.0)
    model = decoder("tiny-qwen3", max_position_embeddings=16, rope=rope).double()
    tokens = torch.randint(96, (1, 40))
    documents = (torch.arange(40) >= 32).long()[None]
    packed = model(tokens, document_ids_BS=documents)
    alone = model(tokens[:, 32:])
    torch.testing.assert_close(packed.logits_BSV[:, 32:], alone.logits_BSV)


def test_further_targets_stay_inside_their_document() -> None:
    tokens = torch.tensor([[10, 11, 12, 20, 21, 22]])
    labels = torch.tensor([[11, 12, 0, 21, 22, 23]])  # documents of 3 and 3 tokens; the row cuts the second
    mask = torch.tensor([[True, True, False, True, True, True]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    first = next_targets(Targets(tokens, labels, mask), documents)
    assert first.inputs_BS[mask].tolist() == [11, 12, 21, 22, 23]
    assert first.labels_BS[first.mask_BS].tolist() == [12, 22, 23]
    assert first.mask_BS.tolist() == [[True, False, False, True, True, False]]
    second = next_targets(first, documents)
    assert second.labels_BS[second.mask_BS].tolist() == [23]


def test_tokens_without_loss_are_read_on_the_way_to_further_targets() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    labels = torch.tensor([[0, 0, 0, 5, 6, 7]])  # a prompt of 4 tokens, then the answer 5 6 7
    first = next_targets(Targets(tokens, labels, labels > 0), None)
    assert first.inputs_BS.tolist() == [[2, 3, 4, 5, 6, 7]]
    assert first.labels_BS[first.mask_BS].tolist() == [5, 6, 7]
    second = next_targets(first, None)
    assert second.inputs_BS[0, :5].tolist() == [3, 4, 5, 6, 7]


def test_multi_token_prediction_has_its_own_count_and_weight() -> None:
    tokens, labels, mask = rows(2)
    model = decoder("tiny-deepseek-v3", mtp_loss_coef=0.5)
    out = model(tokens, labels_BS=labels, loss_mask_BS=mask)
    counts = model.count_tokens(labels, mask, None)
    assert counts.tolist() == [32, int(mask.sum()), int(mask[:, 1:].sum())]
    depth_loss = (out.loss - out.cross_entropy) / 0.5
    doubled = StepCounts.from_vector(counts * torch.tensor([1, 1, 2]))
    half = model(tokens, labels_BS=labels, loss_mask_BS=mask, counts=doubled)
    torch.testing.assert_close((half.loss - half.cross_entropy) / 0.5, depth_loss / 2)
    assert depth_loss > 1


def test_a_model_predicts_two_ahead_only_from_what_it_may_see() -> None:
    model = decoder("tiny-deepseek-v3")
    tokens, labels, _ = rows(1)
    changed = labels.clone()
    changed[0, -1] = (
        changed[0, -1] + 1
    ) % 96  # the target of the last position, and two ahead of the one before
    last = torch.zeros_like(labels, dtype=torch.bool)
    last[0, :-2] = True
    first = model(tokens, labels_BS=labels, loss_mask_BS=last).loss
    torch.testing.assert_close(model(tokens, labels_BS=changed, loss_mask_BS=last).loss, first)


@requires_transformers
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_the_auxiliary_loss_equals_transformers(architecture: str) -> None:
    config = tiny(architecture)
    theirs = hf_model(config, output_router_logits=True, router_aux_loss_coef=0.7)
    ours = Decoder(config, ExpertsConfig(balance=BalanceConfig(transformers=0.7)))
    ours.load_state_dict(theirs.state_dict())
    tokens, labels, _ = rows(2)
    reference = theirs(tokens, labels=tokens)
    out = ours(tokens, labels_BS=labels)
    assert out.balance_loss.item() == pytest.approx(0.7 * reference.aux_loss.item(), rel=1e-5)
    (0.7 * reference.aux_loss).backward()
    (out.loss - out.loss.detach()).backward()  # adds the cross-entropy's gradient too: take it off again
    with_balance = ours.model.layers[0].mlp.gate.weight.grad.clone()
    ours.zero_grad()
    plain = Decoder(config)
    plain.load_state_dict(theirs.state_dict())
    plain(tokens, labels_BS=labels).loss.backward()
    gradient = with_balance - plain.model.layers[0].mlp.gate.weight.grad
    expected = theirs.model.layers[0].mlp.gate.weight.grad
    assert ((gradient - expected).abs().max() / expected.abs().max()).item() < 1e-4


def test_a_model_without_experts_has_no_loads() -> None:
    model = decoder("tiny-qwen3", first_k_dense_replace=2)
    tokens, labels, _ = rows(1)
    out = model(tokens, labels_BS=labels)
    assert out.loads_LE.shape == (0, 8)
    assert out.loss.item() == out.cross_entropy.item()


def test_rows_of_the_loads_are_known_by_the_models_layer_numbers() -> None:
    model = decoder(
        "tiny-deepseek-v3", num_hidden_layers=3, first_k_dense_replace=1, num_nextn_predict_layers=1
    )
    tokens, labels, _ = rows(1)
    assert model.moe_layers() == [1, 2, 3]
    assert len(model(tokens, labels_BS=labels).loads_LE) == 3
