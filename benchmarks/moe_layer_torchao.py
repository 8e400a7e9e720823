"""torchao's fp8 experts as a contender of ``moe_layer.py``: its differentiable grouped product (prototype
``moe_training``, one scale a row, weight gradients in fp8), in the fastest layer we could
build around it.

The product wants groups of a multiple of 16 rows. The permutation pads them, on the device, so that neither
torchao's padding kernels nor a host wait is needed; permuting is a gather both ways, without atomics.

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
from typing import Any

import torch
from moe_layer_contenders import Data
from torch import Tensor, nn

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


class Permute(torch.autograd.Function):
    """Rows of experts from tokens; backward gathers and sums each token's rows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        return torch.cat((x_TD, x_TD.new_zeros(1, x_TD.shape[1])))[token_R]  # padding takes the last one

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        return grad_RD[row_TK].sum(1), None, None


class Unpermute(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        return y_RD[row_TK].sum(1)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        (token_R,) = ctx.saved_tensors
        return torch.cat((grad_TD, grad_TD.new_zeros(1, grad_TD.shape[1])))[token_R], None, None


class TorchaoLayer(nn.Module):
    def __init__(self, data: Data) -> None:
        super().__init__()
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

        compile_ahead(data.shape.num_experts)
        self.product = _to_fp8_rowwise_then_scaled_grouped_mm
        self.top_k, self.num_experts = data.shape.top_k, data.shape.num_experts
        self.router = nn.Parameter(data.router)
        self.gate_up = nn.Parameter(data.gate_up)
        self.down = nn.Parameter(data.down)

    def rows(self, ids_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The token of each row, the row of each choice, and where each expert's rows end."""
        num_tokens, num_choices = ids_TK.shape[0], ids_TK.numel()
        num_rows = num_choices + self.num_experts * ALIGNMENT
        flat = ids_TK.flatten()
        order = flat.argsort(stable=True)
        # Not by bincount, which waits for the device.
        counts_E = flat.new_zeros(self.num_experts).scatter_add(0, flat, torch.ones_like(flat))
        padded_E = (counts_E + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        shift_E = (padded_E.cumsum(0) - padded_E) - (counts_E.cumsum(0) - counts_E)
        row_of_sorted = torch.arange(num_choices, device=flat.device) + shift_E[flat[order]]
        token_R = flat.new_full((num_rows,), num_tokens).scatter(0, row_of_sorted, order // self.top_k)
        row_TK = torch.empty_like(flat).scatter(0, order, row_of_sorted).view_as(ids_TK)
        ends_E = padded_E.cumsum(0).int()
        ends_E = torch.cat((ends_E[:-1], ends_E.new_full((1,), num_rows)))  # the last takes what is left
        return token_R, row_TK, ends_E

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.view(-1, x_BSD.shape[-1])
        scores_TE = (x_TD @ self.router.t()).float().softmax(-1)
        weights_TK, ids_TK = scores_TE.topk(self.top_k, -1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        token_R, row_TK, ends_E = self.rows(ids_TK)
        weight_R = weights_TK.new_zeros(len(token_R)).scatter(0, row_TK.flatten(), weights_TK.flatten())
        x_RD = Permute.apply(x_TD, token_R, row_TK)
        h_R2N = self._grouped(x_RD, self.gate_up, ends_E)
        gate_RN, up_RN = h_R2N.chunk(2, -1)
        h_RN = (nn.functional.silu(gate_RN) * up_RN * weight_R[:, None]).to(x_TD.dtype)
        y_RD = self._grouped(h_RN, self.down, ends_E)
        return Unpermute.apply(y_RD, token_R, row_TK).view_as(x_BSD)

    def _grouped(self, x_RK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
        return self.product(x_RK, weight_ENK.transpose(-2, -1), ends_E, pad_token_groups_for_grouped_mm=False)
