"""The gradient of an embedding: rows of many tokens, added up by their ids.

A batch may have far more tokens than ids: 65,536 rows of 264 bytes. Torch sums all rows of an id one after
the other; the kernel (``triton/segment_sum.py``) in blocks that run concurrently. Both add in the same order
every time.

Sizes: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from fsdmoe.kernels.backend import triton_for


def add_rows_by_id_(out_VD: Tensor, ids_T: Tensor, rows_TD: Tensor) -> None:
    """``out[ids[t]] += rows[t]`` for all t."""
    fused = triton_for(rows_TD)
    if fused is not None and out_VD.is_contiguous():
        fused.add_rows_by_id_triton(out_VD, ids_T, rows_TD)
        return
    # Unlike index_add_, this adds the rows of one token in the same order every time.
    out_VD.index_put_((ids_T,), rows_TD.to(out_VD.dtype), accumulate=True)
