"""The MoE layer: its definition, Hugging Face's blocks from the same weights, what it keeps for backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdmoe.experts.context import Routing
from fsdmoe.experts.dispatch import Links
from fsdmoe.experts.dispatch.local import LocalDispatcher
from fsdmoe.experts.moe import GroupedExperts, MoE
from fsdmoe.experts.parallel import parallelize_experts
from fsdmoe.experts.routed import RoutedExperts
from fsdmoe.experts.router import Router
from fsdmoe.experts.router_spec import RouterSpec
from fsdmoe.experts.shared import SharedExperts
from fsdmoe.kernels.expert_mlp import experts_mlp_reference
from fsdmoe.kernels.expert_operands import ExpertWeights, Rows
from fsdmoe.mesh import build_meshes
from fsdmoe.testing import requires_transformers, run_ranks
from tests.support.coordinates import use_local_tensors
from tests.support.moe_case import Case, build_layer, relative, run


@pytest.mark.parametrize("extras", ["none", "shared", "gated", "latent"])
def test_the_layer_is_its_definition(extras: str) -> None:
    layer, x = build_layer(Case("local", extras=extras)), torch.randn(3, 5, 16)
    y, aux = layer(x)
    rows = x.view(15, 16)
    routing = layer.gate(rows)
    inner = rows if layer.fc1_latent_proj is None else layer.fc1_latent_proj(rows)
    expected = experts_mlp_reference(
        Rows(inner, routing.weights_TK, routing.ids_TK),
        ExpertWeights(layer.experts.gate_up_proj, layer.experts.down_proj),
    )
    if layer.fc2_latent_proj is not None:
        expected = layer.fc2_latent_proj(expected)
    shared = layer.shared_experts or layer.shared_expert
    if shared is not None:
        gate = 1.0 if layer.shared_expert_gate is None else layer.shared_expert_gate(rows).sigmoid()
        expected = expected + gate * shared(rows)
    torch.testing.assert_close(y, expected.view(x.shape))
    assert torch.equal(aux.load_E, routing.ids_TK.flatten().bincount(minlength=8).float())


def test_a_dropped_layer_is_freed_at_once() -> None:
    """Layer and routed experts hold no circle of references: weights need no garbage collector."""
    layer = build_layer(Case("local", extras="shared"))
    layer(torch.randn(2, 16))
    alive = weakref.ref(layer)
    del layer
    assert alive() is None


def _block(family: str) -> tuple[nn.Module, MoE]:
    """A transformers block with random weights, and our layer of the same architecture."""
    import transformers.models as models

    common: dict[str, Any] = {"hidden_size": 32, "moe_intermediate_size": 16}
    if family == "qwen3_moe":
        config = models.qwen3_moe.Qwen3MoeConfig(
            **common, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
        )
        block = models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
        gate = Router(RouterSpec(num_experts=8, top_k=3, norm_topk=True), 32)
        return block, MoE(gate, GroupedExperts(8, 32, 16))
    if family == "qwen2_moe":
        config = models.qwen2_moe.Qwen2MoeConfig(
            **common, num_experts=8, num_experts_per_tok=3, shared_expert_intermediate_size=24
        )
        block = models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(config)
        return block, MoE(
            Router(RouterSpec(num_experts=8, top_k=3), 32),
            GroupedExperts(8, 32, 16),
            shared_expert=SharedExperts(32, 24),
            shared_expert_gate=nn.Linear(32, 1, bias=False),
        )
    config = models.deepseek_v3.DeepseekV3Config(
        **common, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=2
    )
    block = models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(config)
    spec = RouterSpec(
        num_experts=8, top_k=3, score="sigmoid", norm_topk=True, scaling=config.routed_scaling_factor,
        num_groups=4, topk_groups=2, correction_bias=True,
    )  # fmt: skip
    return block, MoE(Router(spec, 32), GroupedExperts(8, 32, 16), shared_experts=SharedExperts(32, 32))


@requires_transformers
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_a_transformers_block_loads_by_name_and_gives_the_same(family: str) -> None:
    block, layer = _block(family)
    for tensor in block.state_dict().values():
        nn.init.normal_(tensor, std=0.3)
    layer.load_state_dict(block.state_dict())  # strict: the same names and shapes
    x = torch.randn(2, 7, 32)
    theirs_in = x.clone().requires_grad_()
    theirs = block(theirs_in)
    (theirs * torch.linspace(0.5, 1.5, 32)).sum().backward()
    ours_in = x.clone().requires_grad_()
    ours, _ = layer(ours_in)
    (ours * torch.linspace(0.5, 1.5, 32)).sum().backward()
    assert relative(ours, theirs) < 1e-5
    assert relative(ours_in.grad, theirs_in.grad) < 1e-5
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    assert gradients.keys() == {name for name, p in layer.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        assert relative(layer.get_parameter(name).grad, gradient) < 1e-5, name


class FixedGate(nn.Module):
    """Routes as told, so that all that is kept for backward is kept by dispatch and experts."""

    def __init__(self, ids_TK: Tensor, num_experts: int) -> None:
        super().__init__()
        self.spec = RouterSpec(num_experts=num_experts, top_k=ids_TK.shape[1])
        self.ids_TK, self.weights_TK = ids_TK, torch.rand(ids_TK.shape, requires_grad=True)

    def forward(self, x_TD: Tensor, *, context: object = None) -> Routing:
        zero = torch.zeros(())
        return Routing(self.weights_TK, self.ids_TK, zero, zero, zero, x_TD)


def _kept_bytes(layer: MoE, x: Tensor) -> tuple[int, int]:
    """(bytes of bf16 rows, bytes of everything else) kept for backward, parameters apart."""
    parameters = {parameter.data_ptr() for parameter in layer.parameters()}
    kept: dict[tuple[int, torch.Size], Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr(), tensor.shape] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    rows = [tensor for tensor in kept.values() if tensor.dtype == torch.bfloat16]
    rest = [tensor for tensor in kept.values() if tensor.dtype != torch.bfloat16]
    return sum(t.nbytes for t in rows), sum(t.nbytes for t in rest)


T, K, E, D, N = 64, 4, 8, 128, 64


def _measure(ep: int, etp: int, dispatcher: str) -> tuple[int, int, int, int]:
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    ids = torch.rand(T, E).argsort(1)[:, :K]
    layer = MoE(FixedGate(ids, E), GroupedExperts(E, D, N).bfloat16())  # type: ignore[arg-type]
    seen: list[tuple[int, int]] = []
    layer.experts.register_forward_pre_hook(
        lambda _, args, options: seen.append((args[0].shape[0], options["max_rows"])), with_kwargs=True
    )
    if ep * etp > 1:
        parallelize_experts(layer, build_meshes(ep=ep, etp=etp), dispatcher=dispatcher)
        use_local_tensors(layer)
    rows, rest = _kept_bytes(layer, torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True))
    return rows, rest, *seen[0]


def test_kept_without_ep_are_the_input_and_the_pre_activation() -> None:
    rows, rest, _, _ = _measure(1, 1, "local")
    formula = 2 * T * D + 4 * T * K * N
    print(f"kept {rows} bytes, 2·T·d + 4·T·K·n = {formula}; weights and indices {rest}")
    assert rows == formula
    assert rest <= 16 * T * K + 4 * E


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (4, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("dispatcher", ["allgather", "all_to_all", "flex"])
def test_kept_with_ep_are_received_rows_and_their_pre_activation(dispatcher: str, ep: int, etp: int) -> None:
    """R of the bound counts received (token, expert) pairs; a token that serves two experts came once."""
    for rows, rest, num_rows, num_pairs in run_ranks(_measure, ep * etp, ep, etp, dispatcher):
        exact = 2 * num_rows * D + 4 * num_pairs * N // etp
        bound = 2 * num_pairs * D + 4 * num_pairs * N // etp
        assert rows == exact
        if dispatcher == "all_to_all":
            assert rows <= bound
        assert rest <= 16 * (num_rows + T) * K + 16 * T * K + 4 * (E + ep)
    print(
        f"{dispatcher} ep {ep} etp {etp}: kept {rows} bytes; {num_rows} rows, {num_pairs} pairs: "
        f"2·rows·d + 4·pairs·n/etp = {exact}, 2·R·d + 4·R·n/etp = {bound}; weights and indices {rest}"
    )


def test_a_layer_built_on_meta_runs_once_materialised() -> None:
    with torch.device("meta"):
        layer = build_layer(Case("local", extras="shared"))
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    y, dx = run(layer, torch.randn(4, 16))
    assert torch.isfinite(y).all()
    assert dx.norm() > 0


def test_a_layer_that_the_caller_compiles_gives_the_same() -> None:
    layer, x = build_layer(Case("local", extras="shared")), torch.randn(6, 16)
    y, dx = run(layer, x)
    expected = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    compiled_y, compiled_dx = run(torch.compile(layer, backend="aot_eager"), x)
    assert relative(compiled_y, y) < 1e-6
    assert relative(compiled_dx, dx) < 1e-6
    for name, parameter in layer.named_parameters():
        assert relative(parameter.grad, expected[name]) < 1e-6, name


def test_two_names_for_shared_experts_are_one_too_many() -> None:
    spec = RouterSpec(num_experts=2, top_k=1)
    with pytest.raises(AssertionError, match="two names of one thing"):
        MoE(
            Router(spec, 8),
            GroupedExperts(2, 8, 8),
            shared_experts=SharedExperts(8, 8),
            shared_expert=SharedExperts(8, 8),
        )


def test_all_six_phases_run_in_order_around_the_compute_with_work_beside_while_rows_travel() -> None:
    said: list[str] = []

    def heard(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            said.append(name)
            return function(*args)

        return called

    dispatcher = LocalDispatcher(Links.alone(), 2)
    phases = ["prepare", "dispatch", "gather", "reduce", "combine", "restore"]
    for name in phases:
        setattr(dispatcher, name, heard(name, getattr(dispatcher, name)))
    compute = heard("compute", lambda rows, max_rows: 2 * rows.x_RD)
    beside = heard("beside", lambda x_TD: -x_TD)
    x = torch.randn(3, 4)
    rows = Rows(x, torch.ones(3, 1), torch.zeros(3, 1))
    y, other = RoutedExperts(dispatcher).run(rows, lambda: compute, beside, x)
    assert said == [*phases[:2], "beside", phases[2], "compute", *phases[3:]]
    assert torch.equal(y, 2 * x)
    assert other is not None
    assert torch.equal(other, -x)
