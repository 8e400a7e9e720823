"""What tests need: real gloo ranks from a pool, and marks for what a machine lacks."""

from fsdmoe.testing.marks import NO_GPU, requires_gpu, requires_nccl, requires_peft, requires_transformers
from fsdmoe.testing.ranks import RankFailure, run_ranks

__all__ = [
    "NO_GPU",
    "RankFailure",
    "requires_gpu",
    "requires_nccl",
    "requires_peft",
    "requires_transformers",
    "run_ranks",
]
