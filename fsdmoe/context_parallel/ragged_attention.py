"""Causal attention inside documents of any lengths, by cuDNN, in one call.

torch has cuDNN for rows of one length only. ``nvidia-cudnn-frontend`` (extra ``cudnn``) has it for tensors
whose documents lie one behind the other, at *ragged offsets* that the kernel reads from the device. It is
about one and a half times as fast as torch's flash kernel on Hopper.

cuDNN builds a plan for each shape, in 0.1 s, or 2 s the first time. A shape is a number of documents, the
longest one, and a number of tokens. All three are rounded up here, so that a run has few plans: documents of
no tokens fill up the number. Borders are read from the device alone, so a call can be captured in a CUDA
graph.

Shape suffixes: T tokens, H query heads, G key-value heads, D width of queries and keys, E width of values.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdmoe.context_parallel.blocks import Block

_MIN_DOCUMENTS, _MIN_LENGTH, _TOKENS = 8, 1024, 4096
"""The smallest numbers of a plan; tokens are rounded up to a multiple."""


@cache
def has_frontend() -> bool:
    """Whether the extra is installed, and the installed cuDNN has these kernels for all widths here."""
    return find_spec("cudnn") is not None and (torch.backends.cudnn.version() or 0) >= 91000


def takes(q_THD: Tensor, v_TGE: Tensor, block: Block) -> bool:
    """Each document's queries see its own keys, and offsets fit 32 bits."""
    is_square = block.causal and block.window is None and block.query_lengths == block.key_lengths
    is_small = len(q_THD) * max(q_THD.stride(0), v_TGE.stride(0)) < 1 << 31
    return is_square and is_small


def ragged_forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[T, H, E]`` and fp32 log-sum-exps ``[T, H]``."""
    q, k, v = _with_rows(q_THD), _with_rows(k_TGD), _with_rows(v_TGE)
    plan = _plan(_RaggedShape.of(q, k, v, block, scale), q.device)
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    plan.run("forward", {"q": q, "k": k, "v": v, "out": out, "lse": lse}, block.query_ends)
    return out, lse


def ragged_backward(
    grad_THE: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_THE: Tensor,
    lse_TH: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    q, k, v = (_with_rows(x) for x in qkv)
    plan = _plan(_RaggedShape.of(q, k, v, block, scale), q.device)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    given = {"grad": grad_THE.contiguous(), "out": out_THE.contiguous(), "lse": lse_TH.contiguous()}
    plan.run("backward", {"q": q, "k": k, "v": v, **given, "dq": dq, "dk": dk, "dv": dv}, block.query_ends)
    return dq, dk, dv


def _with_rows(x_THD: Tensor) -> Tensor:
    """Heads and their numbers side by side; tokens may be any distance apart."""
    is_row = x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2] and not x_THD.stride(0) % 8
    return x_THD if is_row else x_THD.contiguous()


class _RaggedShape(NamedTuple):
    """What a plan is built for."""

    documents: int
    length: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    strides: tuple[int, int, int]
    """From one token's queries, keys and values to the next one's."""
    dtype: torch.dtype
    scale: float

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> _RaggedShape:
        return cls(
            _power_of_two(len(block.query_lengths), _MIN_DOCUMENTS),
            _power_of_two(block.max_queries, _MIN_LENGTH),
            -(-len(q) // _TOKENS) * _TOKENS,
            q.shape[1], k.shape[1], q.shape[2], v.shape[2],
            (q.stride(0), k.stride(0), v.stride(0)), q.dtype, scale,
        )  # fmt: skip

    def layouts(self) -> dict[str, tuple[int, int, int]]:
        """Heads, width, and distance of tokens, of each tensor."""
        query = self.heads * self.width
        value = self.heads * self.value_width
        q_stride, k_stride, v_stride = self.strides
        return {
            "q": (self.heads, self.width, q_stride),
            "k": (self.kv_heads, self.width, k_stride),
            "v": (self.kv_heads, self.value_width, v_stride),
            "out": (self.heads, self.value_width, value),
            "grad": (self.heads, self.value_width, value),
            "lse": (self.heads, 1, self.heads),
            "dq": (self.heads, self.width, query),
            "dk": (self.kv_heads, self.width, self.kv_heads * self.width),
            "dv": (self.kv_heads, self.value_width, self.kv_heads * self.value_width),
        }


def _power_of_two(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())


@lru_cache(maxsize=256)
def _plan(shape: _RaggedShape, device: torch.device) -> _RaggedPlan:
    return _RaggedPlan(shape, device)


@cache
def _handle(device: torch.device) -> Any:
    import cudnn  # an extra: only where it is chosen

    with torch.cuda.device(device):
        return cudnn.create_handle()


class _RaggedPlan:
    """cuDNN's plans of a shape, forward and backward; the latter is built when it is first called."""

    def __init__(self, shape: _RaggedShape, device: torch.device) -> None:
        self._shape = shape
        self._layouts = shape.layouts()
        strides = sorted({stride for *_, stride in self._layouts.values()})
        self._row_of = {stride: row for row, stride in enumerate(strides)}
        self._strides = torch.tensor(strides, dtype=torch.int32, device=device)[:, None]
        self._graphs: dict[str, Any] = {}

    def run(self, direction: str, tensors: dict[str, Tensor], ends: Tensor) -> None:
        import cudnn

        handle = _handle(ends.device)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(ends.device).cuda_stream)
        if direction not in self._graphs:
            self._graphs[direction] = self._build(direction, handle)
        graph = self._graphs[direction]
        missing = self._shape.documents + 1 - len(ends)
        if missing:  # documents of no tokens behind the last one
            ends = torch.cat((ends, ends[-1:].expand(missing)))
        offsets = ends * self._strides
        given = {_ID[name]: tensor for name, tensor in tensors.items()}
        given |= {_ID[name] + _OFFSET: offsets[self._row_of[self._layouts[name][2]]] for name in tensors}
        given[_LENGTHS] = ends.diff()
        scratch = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=ends.device)
        graph.execute(given, scratch, handle=handle)

    def _build(self, direction: str, handle: Any) -> Any:
        import cudnn

        shape = self._shape
        number = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[shape.dtype]
        wide = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=number, intermediate_data_type=wide, compute_data_type=wide, handle=handle
        )

        def whole_numbers(count: int, identity: int) -> Any:
            return graph.tensor(
                dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32, uid=identity
            )

        def sizes(name: str) -> tuple[list[int], list[int]]:
            heads, width, stride = self._layouts[name]
            head_stride = 1 if name == "lse" else width
            return [shape.documents, heads, shape.length, width], [
                shape.length * stride,
                head_stride,
                stride,
                1,
            ]

        def given(name: str) -> Any:
            dim, stride = sizes(name)
            kind = wide if name == "lse" else number
            tensor = graph.tensor(dim=dim, stride=stride, data_type=kind, uid=_ID[name])
            tensor.set_ragged_offset(whole_numbers(shape.documents + 1, _ID[name] + _OFFSET))
            return tensor

        def written(tensor: Any, name: str) -> None:
            dim, stride = sizes(name)
            tensor.set_output(True).set_dim(dim).set_stride(stride).set_uid(_ID[name])
            tensor.set_data_type(wide if name == "lse" else number)
            tensor.set_ragged_offset(whole_numbers(shape.documents + 1, _ID[name] + _OFFSET))

        q, k, v = given("q"), given("k"), given("v")
        lengths = whole_numbers(shape.documents, _LENGTHS)
        common = {
            "attn_scale": shape.scale, "use_causal_mask": True, "use_padding_mask": True,
            "seq_len_q": lengths, "seq_len_kv": lengths,
        }  # fmt: skip
        if direction == "forward":
            out, lse = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **common)
            written(out, "out")
            written(lse, "lse")
        else:
            found = graph.sdpa_backward(
                q=q, k=k, v=v, o=given("out"), dO=given("grad"), stats=given("lse"),
                max_total_seq_len_q=shape.tokens, max_total_seq_len_kv=shape.tokens, **common,
            )  # fmt: skip
            for tensor, name in zip(found, ("dq", "dk", "dv"), strict=True):
                written(tensor, name)
        graph.build([cudnn.heur_mode.A])
        return graph


_ID = {name: 1 + row for row, name in enumerate(("q", "k", "v", "out", "lse", "grad", "dq", "dk", "dv"))}
_OFFSET, _LENGTHS = 100, 200
"""Of a tensor's ragged offsets next to its own identity, and of the documents' lengths."""
