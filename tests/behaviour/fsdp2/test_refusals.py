"""What fsdmoe.fsdp2 does not do is refused by name, with the fix."""

import inspect
import math
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdmoe
import fsdmoe.fsdp2 as our_fsdp
from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdmoe.testing import run_ranks
from tests.fsdp2.test_fully_shard import built, loss_of, wrap_blocks

ARGUMENTS: dict[str, Any] = {
    "reshard_after_forward": 2,
    "shard_placement_fn": lambda parameter: None,
    "ignored_params": {nn.Parameter(torch.zeros(1))},
    "dp_mesh_dims": object(),
}
CALLS: dict[str, tuple[Any, ...]] = {
    "set_custom_all_gather": (None,),
    "set_custom_reduce_scatter": (None,),
    "set_all_reduce_hook": (None,),
    "set_post_optim_event": (None,),
    "set_force_sum_reduction_for_comms": (True,),
    "set_reduce_scatter_max_input_buffers": (2,),
    "set_separate_reduce_scatter_group": (),
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_symm_mem_for_comm": (),
    "set_reduce_scatter_unused_params": (False,),
    "set_gradient_divide_factor": (0.0,),
    "set_reshard_after_forward": (False,),
    "set_reshard_after_backward": (False,),
}


def check_arguments() -> None:
    for key, value in ARGUMENTS.items():
        with pytest.raises(ConfigError, match=f"fsdp2.{key}"):
            fully_shard(built(), **{key: value})
    for key, value in (
        ("offload_policy", CPUOffloadPolicy()),
        ("mp_policy", MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        ("mp_policy", MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
    ):
        model: Any = built()
        fully_shard(model.blocks[1], **{key: value})
        with pytest.raises(ConfigError, match=f"FSDPBlock: {key}.* is .*pass the same to all calls"):
            fully_shard(model)
    for mesh, why in (
        (init_device_mesh("cpu", (2, 1, 1)), r"expected 1 dim \(FSDP\) or 2"),
        (init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"], "expected all 2 ranks in order"),
    ):
        with pytest.raises(ConfigError, match=f"fsdp2.mesh: {why}"):
            wrap_blocks(our_fsdp, built(), mesh=mesh)


def check_wrapping() -> None:
    model: Any = built()
    with pytest.raises(ConfigError, match="ModuleList has no forward"):
        fully_shard(model.blocks)
    fully_shard(model.blocks[0])
    with pytest.raises(ConfigError, match="wrapped already"):
        fully_shard(model.blocks[0])
    nested: Any = built()
    fully_shard(nested.blocks[0].up)
    fully_shard(nested.blocks[0])
    with pytest.raises(
        ConfigError,
        match=r"FSDPBlock inside .*Model .* is wrapped around FSDPLinear, .*; wrap one of the two",
    ):
        fully_shard(nested)
    for is_built in (False, True):
        outside_in: Any = built()
        fully_shard(outside_in)
        if is_built:
            list(outside_in.parameters())
        with pytest.raises(ConfigError, match=r"Linear is inside Model, which was wrapped .*inside-out"):
            fully_shard(outside_in.blocks[0].up)
    used: Any = built()
    fully_shard(used.blocks[0])
    list(used.blocks[0].parameters())
    with pytest.raises(ConfigError, match="used before the root was wrapped"):
        fully_shard(used)
    mixed: Any = built()
    mixed.head.bfloat16()
    with pytest.raises(ConfigError, match=r"trained parameters are of torch\.bfloat16, torch\.float32"):
        wrap_blocks(our_fsdp, mixed)
    for dtype, why in ((torch.float16, "float16 parameters"), (torch.float64, "torch.float64 of the param")):
        with pytest.raises(ConfigError, match=why):
            wrap_blocks(our_fsdp, built().to(dtype))


def check_lost_parameters() -> None:
    """What an optimizer took before parameters were sharded is not what is trained."""
    around: Any = built()
    for block in around.blocks:
        fully_shard(block)
    held = torch.optim.AdamW(around.parameters())
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"holds parameters of FSDPBlock from before .* shard that one too"
        ):
            loss_of(around, 0)
    early: Any = built()
    held = torch.optim.AdamW(early.parameters())
    wrap_blocks(our_fsdp, early)
    with pytest.raises(ConfigError, match=r"holds parameters of FSDPModel .*; make it after"):
        loss_of(early, 0)
    held = torch.optim.AdamW(early.parameters())
    loss_of(early, 0).backward()
    held.step()
    # Who only looked at them loses nothing.
    alone: Any = built()
    last = list(alone.parameters())[-1]
    fully_shard(alone)
    loss_of(alone, 0).backward()
    assert last is not None


def check_calls() -> None:
    model: Any = built()
    wrap_blocks(our_fsdp, model)
    for name, args in CALLS.items():
        with pytest.raises(ConfigError, match=f"fsdp2.{name}: "):
            getattr(model, name)(*args)
    for name, args in (("set_requires_gradient_sync", (False,)), ("set_requires_all_reduce", (False,))):
        with pytest.raises(ConfigError, match=f"fsdp2.{name}: .*call it on the root"):
            getattr(model.blocks[0], name)(*args)
        with pytest.raises(ConfigError, match="recurse=True"):
            getattr(model, name)(*args, recurse=False)
    with pytest.raises(ConfigError, match="expected modules that fully_shard wrapped, got LayerNorm"):
        model.set_modules_to_forward_prefetch([model.norm])
    model.set_reshard_after_forward(True)
    model.set_reshard_after_backward(True)
    model.set_reduce_scatter_unused_params(True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])
    with pytest.raises(NotImplementedError, match=r"Muon needs .*, which a ShardedTensor does not have"):
        optimizer.step()


def check_tools() -> None:
    """A scaler of torch and random values are refused, and what the messages name works."""
    model: Any = built(1)
    wrap_blocks(our_fsdp, model)
    weight = model.blocks[0].up.weight
    with pytest.raises(NotImplementedError, match=r"Initialise before fully_shard.*parameter\.copy_"):
        nn.init.normal_(weight)
    with torch.no_grad():
        weight.copy_(whole := torch.full(weight.shape, 0.01))
    assert torch.equal(weight.full_tensor(), whole)

    loss_of(model, 0).backward()
    plain = weight.grad.full_tensor().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(NotImplementedError, match=r"GradScaler.*fsdmoe\.LossScaler.*or bfloat16"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    ours = fsdmoe.LossScaler()
    ours.scale(loss_of(model, 0)).backward()
    norm = fsdmoe.clip_grad_norm(model, math.inf, ours)
    assert ours.update(norm.total)
    torch.testing.assert_close(weight.grad.full_tensor(), plain)


@pytest.mark.parametrize(
    "check", [check_arguments, check_wrapping, check_lost_parameters, check_calls, check_tools]
)
def test_what_is_not_supported_is_refused_by_name(check: Any) -> None:
    run_ranks(check, 2)


def test_every_public_method_and_argument_of_fsdp2_is_there() -> None:
    theirs = {name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_")}
    assert theirs <= set(dir(FSDPModule))
    assert set(inspect.signature(torch_fsdp.fully_shard).parameters) <= set(
        inspect.signature(fully_shard).parameters
    )
