"""Models from the meta device: wrapped, then initialised or loaded, as under FSDP2."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdmoe.fsdp2 as our_fsdp
from fsdmoe.core.errors import ConfigError
from fsdmoe.testing import run_ranks
from tests.fsdp2.test_fully_shard import Model, loss_of, wrap_blocks


class WithBuffer(Model):
    """It computes its buffer when it is initialised, as rotary frequencies are."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("scale", torch.tensor(2.0))

    def reset_parameters(self) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        self.scale.fill_(2.0)  # type: ignore[operator]


def on_meta(**options: Any) -> Any:
    with torch.device("meta"):
        model = WithBuffer()
    wrap_blocks(our_fsdp, model, **options)
    return model.to_empty(device="cpu")


def check_initialised() -> None:
    torch.manual_seed(7)
    plain = WithBuffer().to_empty(device="cpu")
    torch.manual_seed(7)
    plain.reset_parameters()
    torch.manual_seed(7 + dist.get_rank())  # the first rank's counts
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = on_meta(mesh=mesh)
    model.reset_parameters()
    assert model.scale == 2
    for (name, own), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), want, msg=name)
    loss_of(model, 0).backward()
    torch.testing.assert_close(loss_of(model, 0), loss_of(plain, 0))


def test_initialised_after_wrapping_it_is_the_model_of_one_process() -> None:
    run_ranks(check_initialised, 4)


def check_loaded() -> None:
    torch.manual_seed(0)
    plain, model = WithBuffer(), on_meta()
    with pytest.raises(
        ConfigError, match=r"fsdp2: blocks\.0\.\w+\.\w+ was on the meta device and has no values"
    ):
        model(torch.zeros(1, 8, dtype=torch.long))
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(loss_of(model, 0), loss_of(plain, 0))
    with pytest.raises(ConfigError, match=r"to_empty: expected cpu, where the shards are, got cuda"):
        model.to_empty(device=torch.device("cuda"))


def test_it_is_refused_until_it_has_values_and_takes_those_of_a_state_dict() -> None:
    run_ranks(check_loaded, 2)
