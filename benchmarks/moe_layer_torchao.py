"""torchao's fp8 experts as a contender of ``moe_layer.py``: its differentiable grouped product (prototype
``moe_training``, one scale a row, weight gradients in fp8), as ``precision.backend = "torchao"`` computes.

At its first call torchao tries 36 forms of the kernel that quantises for weight gradients, 8 of the one for
weights, each compiled when its turn comes: minutes. Here processes compile them side by side beforehand, and
torchao's own choice among all of them finds them on disk.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import torch
from moe_layer_contenders import Data
from torch import Tensor, nn

from fsdmoe.kernels.expert_mlp import expert_function
from fsdmoe.kernels.expert_operands import NO_UPDATES, ExpertPolicy, ExpertWeights, Rows
from fsdmoe.kernels.torchao_products import torchao_products
from fsdmoe.precision.recipes import build_recipe

ALIGNMENT = 16


def _compile_share(index: int, count: int, num_experts: int) -> int:
    """Every ``count``-th form of torchao's kernels, on the smallest matrices; how many there were."""
    from torchao.prototype.moe_training.kernels import float8_rowwise, jagged_float8_scales
    from triton.runtime.errors import OutOfResources

    rows = torch.zeros(num_experts * ALIGNMENT, 256, device="cuda", dtype=torch.bfloat16)
    weights = torch.zeros(num_experts, 256, 256, device="cuda", dtype=torch.bfloat16).transpose(-2, -1)
    ends = torch.arange(1, num_experts + 1, device="cuda", dtype=torch.int32) * ALIGNMENT
    dual = jagged_float8_scales.triton_fp8_per_group_colwise_scales_dual
    weight = float8_rowwise.triton_fp8_colwise_3d_scale_and_cast
    fp8, num_forms = torch.float8_e4m3fn, 0
    for kernel, call in (
        (jagged_float8_scales._triton_fp8_per_group_colwise_scales_dual_kernel,
         functools.partial(dual, rows, rows, ends, fp8, round_scales_to_power_of_2=True)),
        (float8_rowwise._triton_fp8_colwise_3d_scale_and_cast_kernel,
         functools.partial(weight, weights, output_dtype=fp8, round_scales_to_power_of_2=True)),
    ):  # fmt: skip
        forms = kernel.configs
        for form in forms[index::count]:
            kernel.configs = [form]
            try:
                call()
                num_forms += 1
            except OutOfResources:  # torchao passes such a form over too
                pass
        kernel.configs = forms
    return num_forms


@functools.cache
def compile_ahead(num_experts: int) -> None:
    """All forms of torchao's kernels for so many experts, by as many processes as there are cores."""
    began, count = time.perf_counter(), min(16, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        shares = [pool.submit(_compile_share, index, count, num_experts) for index in range(count)]
        num_forms = sum(share.result() for share in shares)
    print(f"torchao: {num_forms} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)


class TorchaoLayer(nn.Module):
    """A layer of fsdmoe with ``precision.backend = "torchao"`` and ``precision.recipe = "fp8_rowwise"``."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        compile_ahead(data.shape.num_experts)
        products = torchao_products("fp8_rowwise", "hopper")
        self.policy = ExpertPolicy(recipe=build_recipe("fp8_rowwise"), products=products)
        self.experts = expert_function(self.policy)
        self.top_k = data.shape.top_k
        self.router = nn.Parameter(data.router)
        self.gate_up = nn.Parameter(data.gate_up)
        self.down = nn.Parameter(data.down)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.view(-1, x_BSD.shape[-1])
        scores_TE = (x_TD @ self.router.t()).float().softmax(-1)
        weights_TK, ids_TK = scores_TE.topk(self.top_k, -1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        rows = Rows(x_TD, weights_TK, ids_TK)
        weights = ExpertWeights(self.gate_up, self.down)
        return self.experts(rows, weights, self.policy, None, NO_UPDATES).view_as(x_BSD)
