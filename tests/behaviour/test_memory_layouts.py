"""What is recomputed or offloaded changes no bit of any loss or gradient: native and wrapped decoders, every
name, on any layout."""

from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch

from fsdmoe.feed import Feed
from fsdmoe.fsdp import FSDPConfig, engine_of
from fsdmoe.memory.config import Activation, MemoryConfig, Part
from fsdmoe.mesh import MeshConfig, Meshes, build_meshes
from fsdmoe.parallel.auto_model import as_causal_lm
from fsdmoe.parallel.build import ParallelPolicy, parallelize
from fsdmoe.precision.config import PrecisionConfig
from fsdmoe.testing import run_ranks
from tests.support.hf_tiny import tiny_hf
from tests.support.parallel_case import EXPERTS, Layout, model_of, own_rows
from tests.support.sent_bytes import SentBytes

Found = tuple[list[float], dict[str, torch.Tensor], int]


@dataclass(frozen=True)
class Case:
    """A model, native or wrapped, on some ranks."""

    family: str
    mesh: MeshConfig
    world: int = 1
    wrapped: bool = False
    micro_batches: int = 2

    def __str__(self) -> str:
        kind = "wrapped-" if self.wrapped else ""
        return f"{kind}{self.family}-{Layout(self.mesh)}"


def train(case: Case, choices: list[MemoryConfig]) -> list[Found]:
    """Two steps of two micro-batches under each choice: losses, all gradients of the second step, and
    the bytes that this rank sent."""
    meshes = build_meshes(case.mesh)
    return [_train(case, meshes, memory) for memory in choices]


def _train(case: Case, meshes: Meshes, memory: MemoryConfig) -> Found:
    policy = ParallelPolicy(
        experts=EXPERTS,
        fsdp=FSDPConfig(debug=True),
        precision=PrecisionConfig(param_dtype="float32", reduce_dtype="float32"),
        memory=memory,
        grad_divisor=1.0,
    )
    if case.wrapped:
        policy = replace(policy, experts=type(EXPERTS)())
    model: Any = tiny_hf(case.family) if case.wrapped else model_of(case.family, 2)
    if case.wrapped:
        model.set_attn_implementation("sdpa")
    model = parallelize(model, meshes, policy)
    decoder, layout = as_causal_lm(model), Layout(case.mesh, micro_batches=case.micro_batches)
    feed = Feed(meshes, layout.context, own_attention=case.wrapped)
    optim = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, gradients, sent = [], {}, SentBytes()
    for step in range(2):
        optim.zero_grad()
        inputs = feed.inputs(feed.prepare(own_rows(step, meshes, feed.data_axis, layout)))
        counts = feed.count(decoder, inputs)
        for index, each in enumerate(inputs):
            with sent, engine_of(model).micro_batch(last=index == len(inputs) - 1):
                out: Any = decoder(**each, counts=counts, routing=feed.routing())
                out.loss.backward()
            losses.append(out.loss.item())
        gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
        optim.step()
    return losses, gradients, sent.total


def check(case: Case, choices: list[MemoryConfig]) -> None:
    for ranks in run_ranks(train, case.world, case, [MemoryConfig(), *choices], timeout=240):
        (wanted_losses, wanted, wanted_bytes), *others = ranks
        for choice, (losses, gradients, num_bytes) in zip(choices, others, strict=True):
            assert losses == wanted_losses, choice
            sends_again = "layer" in choice.recompute and case.mesh.ep * case.mesh.tp * case.mesh.cp > 1
            sends_again |= "dispatch" in choice.recompute and case.mesh.ep > 1
            assert num_bytes > wanted_bytes if sends_again else num_bytes == wanted_bytes, choice
            different = [name for name, value in wanted.items() if not torch.equal(gradients[name], value)]
            assert not different, (choice, different)


def parts_of(case: Case) -> list[Part]:
    absent = {"layer"}
    if "deepseek" not in case.family:
        absent |= {"mla_up", "shared_experts"}
    if case.mesh.cp > 1:
        absent |= {"attention"}
    return [name for name in get_args(Part) if name not in absent]


def together(*names: Part, **others: Any) -> MemoryConfig:
    return MemoryConfig(recompute=names, **others)


@pytest.mark.parametrize(
    "case",
    [
        Case("deepseek_v3", MeshConfig(ep=2), 2),
        Case("qwen3_moe", MeshConfig(), wrapped=True),
    ],
    ids=str,
)
def test_all_parts_together_change_nothing(case: Case) -> None:
    check(case, [together(*parts_of(case)), together("layer")])


LAYOUTS = [(1, MeshConfig()), (2, MeshConfig(ep=2)), (2, MeshConfig(tp=2)), (2, MeshConfig(cp=2))]
CASES = [
    Case(family, mesh, world, wrapped)
    for wrapped in (False, True)
    for family in ("qwen3_moe", "mixtral", "deepseek_v3")
    for world, mesh in LAYOUTS
]


OFFLOADED = get_args(Activation)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("qwen3_moe", MeshConfig(ep=2), 2), marks=pytest.mark.full),
        Case("deepseek_v3", MeshConfig(), wrapped=True),
    ],
    ids=str,
)
def test_offload_changes_nothing_with_recompute_and_without(case: Case) -> None:
    check(case, [together(offload=OFFLOADED), together("norms", "router", offload=OFFLOADED)])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_activation_that_is_offloaded_changes_a_bit_on_any_layout(case: Case) -> None:
    choices = [together(offload=(name,), offload_keep_last=0) for name in OFFLOADED]
    more = [together(offload=OFFLOADED, offload_limit_gib=1e-5), together("layer", offload=("layer_input",))]
    check(case, [*choices, *more, together(*parts_of(case), offload=OFFLOADED)])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_name_changes_a_bit_on_any_layout(case: Case) -> None:
    names = parts_of(case)
    check(
        case,
        [
            *(together(name) for name in names),
            together("layer"),
            together("norms", "router", "experts"),
            together(*names),
            together(*names, layers="1"),
        ],
    )
