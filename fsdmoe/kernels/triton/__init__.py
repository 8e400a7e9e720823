"""Fused kernels in Triton for Hopper GPUs (compile-checked for Blackwell), each behind one function.

Needs the ``triton`` package, which torch's CUDA builds bring along: import this package only once chosen.
"""

from fsdmoe.kernels.triton.adamw_codes_kernel import adamw_codes_
from fsdmoe.kernels.triton.adamw_kernel import adamw_, adamw_reference_
from fsdmoe.kernels.triton.cross_entropy import cross_entropy_, cross_entropy_reference_
from fsdmoe.kernels.triton.exchange_kernels import index_rows_triton
from fsdmoe.kernels.triton.fp8_ranges import encode_range_, measure_range_
from fsdmoe.kernels.triton.fp8_weights import encode_weight_
from fsdmoe.kernels.triton.low_rank_mlp import experts_mlp_low_rank, supports_updates
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
from fsdmoe.kernels.triton.rms_norm_kernels import rms_norm_triton
from fsdmoe.kernels.triton.rope_kernel import rope_reference, rope_triton
from fsdmoe.kernels.triton.rounded_mlp import (
    experts_mlp_rounded,
    rounded_matmul,
    supports_matmul,
    supports_rounded,
)
from fsdmoe.kernels.triton.router_grad import (
    router_input_grad,
    router_input_grad_reference,
    supports_router_grad,
)
from fsdmoe.kernels.triton.router_policy import RouterTopK, TopKPolicy, router_topk_reference
from fsdmoe.kernels.triton.router_topk import router_topk_triton, supports_router
from fsdmoe.kernels.triton.row_map import build_group_map
from fsdmoe.kernels.triton.scale import scale_
from fsdmoe.kernels.triton.send_order_kernel import order_rows_triton
from fsdmoe.kernels.triton.swiglu_mlp import experts_mlp_triton, supports

__all__ = [
    "RouterTopK",
    "TopKPolicy",
    "adamw_",
    "adamw_codes_",
    "adamw_reference_",
    "build_group_map",
    "cross_entropy_",
    "cross_entropy_reference_",
    "encode_range_",
    "encode_weight_",
    "experts_mlp_low_rank",
    "experts_mlp_rounded",
    "experts_mlp_triton",
    "index_rows_triton",
    "measure_range_",
    "norm_rope_triton",
    "order_rows_triton",
    "pack_rows_triton",
    "quantize_both_triton",
    "quantize_side_by_side_triton",
    "rms_norm_triton",
    "rope_reference",
    "rope_triton",
    "rounded_matmul",
    "router_input_grad",
    "router_input_grad_reference",
    "router_topk_reference",
    "router_topk_triton",
    "scale_",
    "sum_rows_triton",
    "supports",
    "supports_matmul",
    "supports_norm_rope",
    "supports_packing",
    "supports_rounded",
    "supports_router",
    "supports_router_grad",
    "supports_updates",
    "take_rows_triton",
    "transpose_codes_triton",
    "unpack_rows_triton",
]
