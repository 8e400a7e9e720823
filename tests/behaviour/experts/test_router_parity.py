"""Our router against transformers' own, from the same weights: ids, weights and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdmoe.experts.config import BalanceConfig, ExpertsConfig
from fsdmoe.experts.router import Router, RouterSpec
from fsdmoe.testing import requires_transformers

D, E, K, T = 32, 16, 4, 50


def _qwen3(norm: bool) -> tuple[nn.Module, RouterSpec]:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as family
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

    config = Qwen3MoeConfig(hidden_size=D, num_experts=E, num_experts_per_tok=K, norm_topk_prob=norm)
    return family.Qwen3MoeTopKRouter(config), RouterSpec(num_experts=E, top_k=K, norm_topk=norm)


def _olmoe() -> tuple[nn.Module, RouterSpec]:
    from transformers.models.olmoe import modeling_olmoe as family
    from transformers.models.olmoe.configuration_olmoe import OlmoeConfig

    config = OlmoeConfig(hidden_size=D, num_experts=E, num_experts_per_tok=K, norm_topk_prob=False)
    return family.OlmoeTopKRouter(config), RouterSpec(num_experts=E, top_k=K)


def _mixtral() -> tuple[nn.Module, RouterSpec]:
    from transformers.models.mixtral import modeling_mixtral as family
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig

    config = MixtralConfig(hidden_size=D, num_local_experts=E, num_experts_per_tok=K)
    return family.MixtralTopKRouter(config), RouterSpec(num_experts=E, top_k=K, norm_topk=True)


def _deepseek_v3(norm: bool = True) -> tuple[nn.Module, RouterSpec]:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as family
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=D, n_routed_experts=E, num_experts_per_tok=K, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=norm,
    )  # fmt: skip
    spec = RouterSpec(
        num_experts=E, top_k=K, score="sigmoid", norm_topk=norm, scaling=2.5, num_groups=4, topk_groups=2,
        correction_bias=True,
    )  # fmt: skip
    return family.DeepseekV3TopkRouter(config), spec


def _glm4() -> tuple[nn.Module, RouterSpec]:
    from transformers.models.glm4_moe import modeling_glm4_moe as family
    from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig

    config = Glm4MoeConfig(
        hidden_size=D, n_routed_experts=E, num_experts_per_tok=K, n_group=1, topk_group=1,
        routed_scaling_factor=1.5, norm_topk_prob=True,
    )  # fmt: skip
    spec = RouterSpec(
        num_experts=E, top_k=K, score="sigmoid", norm_topk=True, scaling=1.5, correction_bias=True
    )
    return family.Glm4MoeTopkRouter(config), spec


def _deepseek_v2(method: str) -> tuple[nn.Module, RouterSpec]:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as family
    from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config

    config = DeepseekV2Config(
        hidden_size=D, n_routed_experts=E, num_experts_per_tok=K, n_group=4, topk_group=2, topk_method=method,
        routed_scaling_factor=16.0,
    )  # fmt: skip
    groups = (4, 2) if method == "group_limited_greedy" else (1, 1)
    spec = RouterSpec(
        num_experts=E, top_k=K, scaling=16.0, num_groups=groups[0], topk_groups=groups[1], group_score="max"
    )
    return family.DeepseekV2TopkRouter(config), spec


def _gpt_oss() -> tuple[nn.Module, RouterSpec]:
    from transformers.models.gpt_oss import modeling_gpt_oss as family
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig

    config = GptOssConfig(hidden_size=D, num_local_experts=E, num_experts_per_tok=K)
    spec = RouterSpec(num_experts=E, top_k=K, score="topk_softmax", router_bias=True)
    return family.GptOssTopKRouter(config), spec


FAMILIES: dict[str, Callable[[], tuple[nn.Module, RouterSpec]]] = {
    "qwen3_moe": lambda: _qwen3(True),
    "qwen3_moe without norm": lambda: _qwen3(False),
    "olmoe": _olmoe,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3 without norm": lambda: _deepseek_v3(norm=False),
    "glm4_moe": _glm4,
    "deepseek_v2 greedy": lambda: _deepseek_v2("greedy"),
    "deepseek_v2 groups": lambda: _deepseek_v2("group_limited_greedy"),
    "gpt_oss": _gpt_oss,
}


def _by_expert(weights_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Some of transformers' routers leave their choices unsorted."""
    ids_TK, order_TK = ids_TK.sort(-1)
    return weights_TK.gather(1, order_TK), ids_TK


@requires_transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_weights_and_gradients_equal_transformers(family: str) -> None:
    theirs, spec = FAMILIES[family]()
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.normal_(std=0.3)
    ours = Router(spec, D)
    ours.load_state_dict(theirs.state_dict())
    x_TD, cotangent_TE = torch.randn(T, D), torch.randn(T, E)

    results: list[dict[str, Any]] = []
    for router in (theirs, ours):
        x = x_TD.clone().requires_grad_()
        if router is ours:
            weights_TK, ids_TK = ours(x)[:2]
        else:
            _, weights_TK, ids_TK = router(x)
        (weights_TK * cotangent_TE.gather(1, ids_TK)).sum().backward()
        weights_TK, ids_TK = _by_expert(weights_TK.detach(), ids_TK)
        grads = {name: p.grad for name, p in router.named_parameters()}
        results.append({"weights": weights_TK, "ids": ids_TK, "x": x.grad, **grads})

    expected, found = results
    assert expected.keys() == found.keys()
    assert torch.equal(found.pop("ids"), expected.pop("ids"))
    for name, value in expected.items():
        assert value is not None
        assert value.abs().max() > 0, name
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@requires_transformers
@pytest.mark.parametrize("masked", [False, True])
def test_the_joint_balance_loss_equals_transformers(masked: bool) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    from fsdmoe.experts.balance import joint_balance_loss, statistics_of_logits

    logits = [torch.randn(T, E, requires_grad=True) for _ in range(3)]
    mask_T = (torch.rand(T) < 0.7) if masked else None
    attention_mask = None if mask_T is None else mask_T.view(2, T // 2).float()
    expected = load_balancing_loss_func(tuple(logits), E, K, attention_mask)
    expected_grads = torch.autograd.grad(expected, logits)
    loads, prob_sums = zip(*(statistics_of_logits(layer_TE, K, mask_T) for layer_TE in logits), strict=True)
    found = joint_balance_loss(torch.stack(loads), torch.stack(prob_sums), top_k=K)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for mine, theirs in zip(torch.autograd.grad(found, logits), expected_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)


@requires_transformers
def test_our_routers_hand_out_what_the_joint_loss_needs() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    from fsdmoe.experts.balance import joint_balance_loss

    config = ExpertsConfig(balance=BalanceConfig(transformers=0.01))
    routers = [Router(RouterSpec(num_experts=E, top_k=K, norm_topk=True), D, config) for _ in range(3)]
    x_TD = torch.randn(T, D)
    routings = [router(x_TD) for router in routers]
    found = joint_balance_loss(
        torch.stack([r.load_E for r in routings]), torch.stack([r.prob_sum_E for r in routings]), top_k=K
    )
    expected = load_balancing_loss_func(tuple(x_TD @ router.weight.t() for router in routers), E, K)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    weights = [router.weight for router in routers]
    for mine, theirs in zip(
        torch.autograd.grad(found, weights), torch.autograd.grad(expected, weights), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)
