"""Fused kernels in Triton for Hopper GPUs (compile-checked for Blackwell), each behind one function.

Needs the ``triton`` package, which torch's CUDA builds bring along: import this package only once chosen.
"""

from fsdmoe.kernels.triton.experts import experts_mlp_triton, supports
from fsdmoe.kernels.triton.router import router_topk_triton, supports_router
from fsdmoe.kernels.triton.router_policy import RouterTopK, TopKPolicy, router_topk_reference

__all__ = [
    "RouterTopK",
    "TopKPolicy",
    "experts_mlp_triton",
    "router_topk_reference",
    "router_topk_triton",
    "supports",
    "supports_router",
]
