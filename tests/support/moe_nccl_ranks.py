"""One of four NCCL ranks that share a GPU: split layers against the one-process layer, in fp32."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdmoe.mesh import build_meshes
from tests.support.moe_case import Case, check_case

LAYOUTS = [{"ep": 4}, {"ep": 2}, {"ep": 2, "etp": 2}, {"etp": 4}]


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    worst = 0.0
    for degrees in LAYOUTS:
        meshes = build_meshes(**degrees)
        torch.set_default_device("cuda")
        for dispatcher in ("allgather", "all_to_all"):
            for extras, routing, tokens in (("shared", "random", "uneven"), ("gated", "skewed", "even")):
                errors = check_case(Case(dispatcher, routing, tokens, extras=extras), meshes)
                worst = max(worst, *errors.values())
        torch.set_default_device("cpu")
    assert worst <= 1e-5, worst
    print(f"worst relative error over NCCL: {worst:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
