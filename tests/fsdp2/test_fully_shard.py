"""FSDP2's calls on fsdmoe's engine, beside FSDP2 itself."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdmoe.fsdp2 as our_fsdp
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp import ShardedTensor, engine_of
from fsdmoe.fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdmoe.testing import run_ranks

WIDTH, VOCAB = 24, 40
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50), nn.Linear(50, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


class Model(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens) if scale is None else self.embed(tokens) * scale[..., None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def built(num_blocks: int = 4) -> Model:
    torch.manual_seed(0)
    return Model(num_blocks)


def tokens_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = tokens_of(step, dist.get_rank())
    logits = model(tokens, torch.linspace(0.5, 1.5, 8)).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, -1).flatten())


# Each wraps a model with the module it is given: torch's or ours.


def wrap_blocks(fsdp: ModuleType, model: Model, **options: Any) -> None:
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)


def wrap_like_torchtitan(fsdp: ModuleType, model: Model, **options: Any) -> None:
    fsdp.fully_shard(model.embed, **options, reshard_after_forward=True)
    for block in model.blocks:
        fsdp.fully_shard(block, **options, reshard_after_forward=True)
    fsdp.fully_shard([model.norm, model.head], **options, reshard_after_forward=False)
    fsdp.fully_shard(model, **options)
    for one, other in zip(model.blocks, model.blocks[1:]):
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])


def wrap_root_only(fsdp: ModuleType, model: Model, **options: Any) -> None:
    fsdp.fully_shard(model, **options)


WRAPS = {wrap.__name__: wrap for wrap in (wrap_blocks, wrap_like_torchtitan, wrap_root_only)}


def train(fsdp: ModuleType, wrap: str, options: dict[str, Any], steps: int = 3) -> list[float]:
    model = built()
    if "mesh" in options:
        names = ("replicate", "shard")[-len(options["mesh"]) :]
        options = options | {"mesh": init_device_mesh("cpu", options["mesh"], mesh_dim_names=names)}
    WRAPS[wrap](fsdp, model, **options)
    root: Any = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(steps):
        for micro in range(2):
            root.set_requires_gradient_sync(micro == 1)
            loss = loss_of(model, micro) / 2
            loss.backward()
            losses.append(loss.item())
        losses.append(float(_whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _whole(norm: Any) -> torch.Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def train_both(wrap: str, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    return train(our_fsdp, wrap, options), train(torch_fsdp, wrap, options)


@pytest.mark.parametrize(
    ("world", "wrap", "options", "tolerance"),
    [
        pytest.param(2, "wrap_blocks", {}, 1e-5, marks=pytest.mark.full),
        (2, "wrap_like_torchtitan", {}, 1e-5),
        pytest.param(2, "wrap_root_only", {}, 1e-5, marks=pytest.mark.full),
        (2, "wrap_blocks", {"mp_policy": BF16}, 5e-3),
        (2, "wrap_blocks", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 1e-5),
        (4, "wrap_blocks", {"mesh": (2, 2)}, 1e-5),
        pytest.param(3, "wrap_like_torchtitan", {"mesh": (3,)}, 1e-5, marks=pytest.mark.full),
    ],
)
def test_losses_and_norms_are_those_of_fsdp2(
    world: int, wrap: str, options: dict[str, Any], tolerance: float
) -> None:
    for ours, theirs in run_ranks(train_both, world, wrap, options):
        assert ours == pytest.approx(theirs, rel=tolerance)
        assert ours[0] > ours[-2] > 0, "it learns"


def check_looks() -> None:
    model: Any = built()
    assert fully_shard(model.blocks[0]) is model.blocks[0]
    for block in model.blocks[1:]:
        fully_shard(block)
    assert fully_shard(model) is model
    for module, name in ((model, "FSDPModel"), (model.blocks[1], "FSDPBlock")):
        assert isinstance(module, FSDPModule)
        assert type(module).__name__ == name
        assert name in str(model)
    assert isinstance(model, Model)
    assert not isinstance(model.norm, FSDPModule)
    assert type(nn.Sequential(*model.blocks)[:2]) is nn.Sequential
    assert all(isinstance(p, ShardedTensor) and p.dtype == torch.float32 for p in model.parameters())
    assert list(model.state_dict()) == list(built().state_dict())
    assert [unit.name for unit in engine_of(model).units][-1] == "the root module"
    assert len(engine_of(model).units) == 5
    for module in (model, model.blocks[0]):
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.deepcopy(module)
    sliced: Any = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert type(sliced[:1]) is nn.Sequential


def test_a_wrapped_module_looks_as_fsdp2s_does() -> None:
    run_ranks(check_looks, 2)


def check_unshard() -> None:
    plain, model = built(), built()
    wrap_blocks(our_fsdp, model)
    root: Any = model
    first, second, third = (root.blocks[i] for i in range(3))
    first.unshard()
    assert type(first.up.weight.data) is torch.Tensor
    assert torch.equal(first.up.weight, plain.blocks[0].up.weight)  # type: ignore[union-attr]
    handle = second.unshard(async_op=True)
    assert isinstance(second.up.weight, ShardedTensor)
    handle.wait()
    handle.wait()
    assert torch.equal(second.up.weight, plain.blocks[1].up.weight)  # type: ignore[union-attr]
    assert torch.equal(first.up.weight, plain.blocks[0].up.weight)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"blocks\.2 cannot be gathered: blocks\.0 is in its memory"):
        third.unshard()
    assert all(isinstance(value, ShardedTensor) for value in model.state_dict().values())
    assert isinstance(first.up.weight, ShardedTensor), "a state dict is of sharded parameters"
    first.unshard()
    loss = loss_of(model, 0)  # evicts what is held, uses what was gathered
    assert isinstance(first.up.weight, ShardedTensor)
    want = loss_of(plain, 0)
    torch.testing.assert_close(loss, want)
    root.unshard()
    assert torch.equal(root.head.weight, plain.head.weight)
    torch.testing.assert_close(loss_of(model, 1), loss_of(plain, 1))
    root.unshard()
    root.reshard()
    assert isinstance(root.head.weight, ShardedTensor)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        first.unshard()  # takes up what was written
        assert torch.equal(first.up.weight, plain.blocks[0].up.weight * 0.5)  # type: ignore[union-attr]
    first.reshard()
    loss_of(model, 2).backward()


def test_unshard_shows_whole_parameters_until_reshard() -> None:
    run_ranks(check_unshard, 2)


def check_gradient_calls() -> None:
    grads = []
    for factor in (None, 1.0):
        model: Any = built()
        wrap_blocks(our_fsdp, model)
        if factor is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(factor)  # type: ignore[attr-defined]
        model.set_is_last_backward(True)
        loss_of(model, 0).backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
        with pytest.raises(RuntimeError, match="divided already"):
            model.set_gradient_divide_factor(2.0)
    for mean, total in zip(*grads, strict=True):
        torch.testing.assert_close(total, mean * dist.get_world_size())
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="set_requires_gradient_sync"):
        next(model.parameters()).grad.full_tensor()
    model.reset_iter_state()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    assert not engine_of(model).is_last_micro_batch
    model.set_requires_all_reduce(True)
    assert engine_of(model).is_last_micro_batch


def test_gradients_are_divided_and_completed_as_told() -> None:
    run_ranks(check_gradient_calls, 2)


def check_precision() -> None:
    model: Any = built(2)
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fully_shard(model.head, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    seen = []
    hook = model.blocks[0].norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    out = model.blocks[1].register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    assert model(tokens_of(0, 0), torch.ones(8)).dtype == torch.float32
    assert seen == [torch.bfloat16, torch.bfloat16]
    hook.remove()
    out.remove()
    assert engine_of(model).policy.reduce_dtype == torch.bfloat16, "none means the compute dtype, as in FSDP2"
    low: Any = built(2).bfloat16()
    wrap_blocks(our_fsdp, low)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert low(tokens_of(0, 0)).dtype == torch.bfloat16
    keeping: Any = built(2)
    wrap_blocks(
        our_fsdp,
        keeping,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
    )
    with pytest.raises(RuntimeError, match="dtype"):
        keeping(tokens_of(0, 0), torch.ones(8))


def test_precision_is_that_of_the_policy() -> None:
    run_ranks(check_precision, 2)


def check_forward_method() -> None:
    plain, model = built(), built()
    wrap_blocks(our_fsdp, model)
    x = torch.randn(3, WIDTH)
    our_fsdp.register_fsdp_forward_method(model.blocks[1], "project")
    our_fsdp.register_fsdp_forward_method(plain.blocks[1], "project")  # not wrapped: nothing happens
    got, want = (each.blocks[1].project(x) for each in (model, plain))  # type: ignore[union-attr,operator]
    torch.testing.assert_close(got, want)
    got.sum().backward()
    want.sum().backward()
    parameter: Any = model.blocks[1].up.weight  # type: ignore[union-attr]
    torch.testing.assert_close(parameter.grad.full_tensor(), plain.blocks[1].up.weight.grad)  # type: ignore
    with pytest.raises(ConfigError, match="no method 'nothing'"):
        our_fsdp.register_fsdp_forward_method(model, "nothing")


def test_a_registered_method_runs_with_whole_parameters() -> None:
    run_ranks(check_forward_method, 2)
