"""Fused kernels in Triton for Hopper GPUs (compile-checked for Blackwell), each behind one function.

Needs the ``triton`` package, which torch's CUDA builds bring along: import this package only once chosen.
"""
# ruff: noqa: F401  what ``triton_for`` hands out

from fsdmoe.kernels.router_policy import RouterTopK, TopKPolicy
from fsdmoe.kernels.triton.adamw_codes_kernel import adamw_codes_
from fsdmoe.kernels.triton.adamw_kernel import adamw_
from fsdmoe.kernels.triton.balance_kernel import BalanceFactors, balance_triton
from fsdmoe.kernels.triton.clone_plan_kernel import plan_clones_triton
from fsdmoe.kernels.triton.cross_entropy import cross_entropy_
from fsdmoe.kernels.triton.exchange_kernels import index_rows_triton
from fsdmoe.kernels.triton.four_bit_kernels import decode_four_bit
from fsdmoe.kernels.triton.fp8_ranges import encode_range_, measure_range_
from fsdmoe.kernels.triton.fp8_rows import decode_rows
from fsdmoe.kernels.triton.fp8_weights import encode_weight_
from fsdmoe.kernels.triton.low_rank_terms import supports_updates
from fsdmoe.kernels.triton.muon_kernels import apply_update_triton, look_ahead_triton
from fsdmoe.kernels.triton.norm_rope_kernels import norm_rope_triton, supports_norm_rope
from fsdmoe.kernels.triton.packed_rows_kernels import (
    pack_rows_triton,
    supports_packing,
    unpack_rows_triton,
)
from fsdmoe.kernels.triton.permute_kernels import sum_rows_triton, take_rows_triton
from fsdmoe.kernels.triton.quantize_kernels import (
    quantize_both_triton,
    quantize_side_by_side_triton,
    transpose_codes_triton,
)
from fsdmoe.kernels.triton.rms_norm_kernels import gated_norm_triton, rms_norm_triton
from fsdmoe.kernels.triton.rope_kernel import rope_triton
from fsdmoe.kernels.triton.rounded_mlp import (
    experts_mlp_rounded,
    rounded_matmul,
    supports_matmul,
    supports_rounded,
)
from fsdmoe.kernels.triton.router_grad import router_input_grad, supports_router_grad
from fsdmoe.kernels.triton.router_topk import router_topk_triton, supports_router
from fsdmoe.kernels.triton.row_map import build_group_map
from fsdmoe.kernels.triton.scale import scale_
from fsdmoe.kernels.triton.segment_sum import add_rows_by_id_triton
from fsdmoe.kernels.triton.send_order_kernel import order_rows_triton
from fsdmoe.kernels.triton.swiglu_mlp import (
    FusedProducts,
    experts_mlp_triton,
    supports,
    supports_shape,
)
from fsdmoe.kernels.triton.symmetric_product import supports_symmetric, symmetric_product_triton
