"""What one micro-batch keeps for backward, tensor by tensor, as closed formulas.

Every tensor that autograd keeps has a line: its bytes for each of a rank's own tokens, the parts of a layer
that free it when they are recomputed, and the name under which it is offloaded. A storage that several
operations keep is one line. Under ``tp`` a rank has its own range of the tokens between layers and all of
them, with its share of the columns, inside attention: what is split by columns costs a token the same as
without, what is gathered costs ``tp`` times.

    residual stream     x -> norm -> attention -> + -> norm -> experts or MLP -> +
    kept                x    normed  q k v out   x    normed   router, rows, pre-activation, shared

Fused kernels keep less than plain torch: a norm keeps its input alone, where plain torch keeps the normed
rows before their weight and a factor a row. ``is_fused`` says which of them is counted; tests count what
autograd keeps on a CPU, and there nothing is fused.

Sizes of a token: D hidden, H and G query and key-value heads of width d, E experts, K chosen, N their width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from fsdmoe.experts.dispatch import ExpertLayout
from fsdmoe.experts.dispatch.volume import choose_dispatcher
from fsdmoe.models.config import ModelConfig

LayerKind = Literal["dense", "moe", "depth"]
FP32 = 4
INT32 = 4
INT64 = 8
ROW_ALIGNMENT = 128  # of an expert's rows in the fused kernels
CODE_BYTES = 1 + FP32 / 128
"""Of an element in fp8, with its part of a scale."""


class KeptTensor(NamedTuple):
    """One storage that backward needs."""

    name: str
    nbytes: float
    """For each of the rank's own tokens."""
    freed_by: tuple[str, ...] = ()
    """The parts of which any one, recomputed, frees it; whole layers (``layer``) free all but their input."""
    fixed: int = 0
    """Bytes whatever the number of tokens."""
    activation: str = ""
    """The name under which ``memory.offload`` moves it to host memory; empty: it stays."""


@dataclass(frozen=True)
class LayerView:
    """What a layer's tensors depend on, apart from the model."""

    itemsize: int = 2
    tp: int = 1
    ep: int = 1
    etp: int = 1
    dispatcher: str = "auto"
    flex_rows: float = 1.0
    """Of the ``flex`` dispatcher: buffers as a multiple of an even share."""
    skew: float = 1.0
    """Of other dispatchers: what reaches this rank, as a multiple of that."""
    is_fused: bool = True
    coded: frozenset[str] = frozenset()
    """Parts (``precision.covers``) whose layers keep codes."""
    keeps_rows: bool = False
    """Experts keep their sorted rows and activations."""
    clones: int = 0
    """Slots for other ranks' experts."""
    kept_clone_bytes: int = 0
    """Of an element of clones' weights that layers keep."""

    def kept_size(self, part: str) -> float:
        """Bytes of an element that only layers of this part keep."""
        return CODE_BYTES if part in self.coded else self.itemsize

    def freed_with(self, part: str, *names: str) -> tuple[str, ...]:
        """What frees the input of such a layer: recomputing whatever made it does not free its codes."""
        return () if part in self.coded else names


@lru_cache(maxsize=4096)
def layer_tensors(model: ModelConfig, kind: LayerKind, view: LayerView) -> tuple[KeptTensor, ...]:
    """Of one layer; the input of the layer comes first."""
    if kind == "depth":  # which no recipe covers
        view = replace(view, coded=frozenset())
    hidden = model.hidden_size * view.itemsize
    found = [KeptTensor("layer input", hidden, activation="layer_input")]
    found += _norm("input norm", model.hidden_size, 1, view)
    found += _latent_attention(model, view) if model.is_mla else _grouped_attention(model, view)
    found.append(KeptTensor("input of the second norm", hidden, activation="mlp_norm_input"))
    found += _norm("second norm", model.hidden_size, 1, view)
    # Under tp it is the gathered tokens that a dense MLP keeps, not what the norm gave.
    is_gathered = kind == "dense" and view.tp > 1
    freed = () if is_gathered else ("norms",)
    times = view.tp if is_gathered else 1
    mlp_input = KeptTensor("input of the MLP or the experts", times * hidden, freed, 0, "mlp_input")
    if kind == "dense":
        found.append(
            mlp_input._replace(
                nbytes=times * model.hidden_size * view.kept_size("dense"),
                freed_by=view.freed_with("dense", *freed),
            )
        )
        found += _gated_mlp("MLP", model.intermediate_size, view, "dense")
    else:
        found.append(mlp_input)
        found += _experts(model, view)
    if kind == "depth":
        found += [
            KeptTensor("embedded token ahead", hidden),
            KeptTensor("input of the projection", 2 * hidden, ("norms",)),
            KeptTensor("output of the depth", hidden),
            KeptTensor("token ids", INT64),
        ]
        for name in ("norm of the embedding", "norm of the stream", "last norm"):
            found += _norm(name, model.hidden_size, 1, view)
    return tuple(found)


def root_tensors(model: ModelConfig, view: LayerView) -> tuple[KeptTensor, ...]:
    """Outside of the layers: token ids, rotary angles, the last norm."""
    return (
        KeptTensor("token ids", INT64),
        KeptTensor("rotary angles", 2 * view.tp * (model.rotary_dim // 2) * FP32),
        KeptTensor("output of the last layer", model.hidden_size * view.itemsize),
        *_norm("last norm", model.hidden_size, 1, view),
    )


def kept_bytes(tensors: tuple[KeptTensor, ...], tokens: int, recompute: frozenset[str]) -> int:
    """Of a layer's tensors, what is still kept when ``recompute`` is made again."""
    if "layer" in recompute:
        tensors = tensors[:1]
    kept = [t for t in tensors if recompute.isdisjoint(t.freed_by)]
    return round(sum(t.nbytes for t in kept) * tokens) + sum(t.fixed for t in kept)


def _norm(name: str, width: int, rows: int, view: LayerView) -> list[KeptTensor]:
    """What a norm keeps in addition to its input, of ``rows`` vectors a token."""
    if view.is_fused:
        return []
    return [
        KeptTensor(f"{name}: rows before the weight", rows * width * view.itemsize),
        KeptTensor(f"{name}: a factor a row", rows * FP32),
    ]


def _grouped_attention(model: ModelConfig, view: LayerView) -> list[KeptTensor]:
    size, dim = view.itemsize, model.head_dim
    query, key = model.num_attention_heads * dim * size, model.num_key_value_heads * dim * size
    projections = ("attention_projections",)
    rotated = ("norms", *projections) if model.has_qk_norm else projections
    found = [_attention_input(model, view)]
    if model.has_qk_norm:
        found += [
            KeptTensor("queries before their norm", query, projections, 0, "qkv"),
            KeptTensor("keys before their norm", key, projections, 0, "qkv"),
            *_norm("query norm", dim, model.num_attention_heads, view),
            *_norm("key norm", dim, model.num_key_value_heads, view),
        ]
    return [
        *found,
        KeptTensor("queries", query, rotated, 0, "qkv"),
        KeptTensor("keys", key, rotated, 0, "qkv"),
        KeptTensor("values", key, projections, 0, "qkv"),
        KeptTensor("attention output", query, ("attention",), 0, "attention_output"),
        KeptTensor("log-sum-exps", model.num_attention_heads * FP32, ("attention",), 0, "attention_output"),
    ]


def _latent_attention(model: ModelConfig, view: LayerView) -> list[KeptTensor]:
    size, heads, rank = view.itemsize, model.num_attention_heads, model.q_lora_rank
    width = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim) * size
    both = heads * (model.qk_nope_head_dim + model.v_head_dim) * size
    joint = (model.kv_lora_rank + model.qk_rope_head_dim) * size
    down = ("attention_projections",)
    # Under tp the gathered latents are kept, which no norm gives again.
    latent = view.freed_with("attention", *(("norms", *down) if view.tp == 1 else ()))
    coded = view.kept_size("attention")
    found = [_attention_input(model, view, is_gathered=rank is None)]
    if rank is not None:
        found += [
            KeptTensor("query latent before its norm", rank * size, down, 0, "qkv"),
            *_norm("query latent norm", rank, 1, view),
            KeptTensor("query latent", view.tp * rank * coded, latent, 0, "qkv"),
        ]
    gathered = model.kv_lora_rank * coded if view.tp == 1 else view.tp * joint
    return [
        *found,
        KeptTensor("key-value latent before its norm", joint, down, 0, "qkv"),
        *_norm("key-value latent norm", model.kv_lora_rank, 1, view),
        KeptTensor("key-value latent", gathered, latent, 0, "qkv"),
        KeptTensor("queries", width, ("mla_up",), 0, "qkv"),
        KeptTensor("keys", width, ("mla_up",), 0, "qkv"),
        KeptTensor("values, next to keys without positions", both, ("mla_up",), 0, "qkv"),
        KeptTensor(
            "attention output", heads * model.v_head_dim * size, ("attention",), 0, "attention_output"
        ),
        KeptTensor("log-sum-exps", heads * FP32, ("attention",), 0, "attention_output"),
    ]


def _attention_input(model: ModelConfig, view: LayerView, *, is_gathered: bool = True) -> KeptTensor:
    times = view.tp if is_gathered else 1
    freed = view.freed_with("attention", *(("norms",) if times == 1 else ()))
    width = model.hidden_size * view.kept_size("attention")
    return KeptTensor("input of attention", times * width, freed, 0, "attention_input")


def _gated_mlp(name: str, size: int, view: LayerView, part: str) -> list[KeptTensor]:
    """Of a dense MLP or of shared experts of this width; the activation keeps both of its results."""
    whole = ("shared_experts",)
    width = size * view.itemsize
    last = size * view.kept_size(part)
    freed = (*view.freed_with(part, "activation"), *whole)
    return [
        KeptTensor(f"{name}: gates", width, whole),
        KeptTensor(f"{name}: ups", width, whole),
        KeptTensor(f"{name}: activated gates", width, ("activation", *whole)),
        KeptTensor(f"{name}: input of the last projection", last, freed),
    ]


def _experts(model: ModelConfig, view: LayerView) -> list[KeptTensor]:
    """The router, the rows that reach this rank, the experts' pre-activations, shared experts."""
    size, chosen = view.itemsize, model.num_experts_per_tok
    width = model.moe_latent_size or model.hidden_size
    layout = expert_layout(model, view.ep, view.etp)
    crosses = view.ep * view.etp > 1
    share = 1.0 if not crosses else view.flex_rows if view.dispatcher == "flex" else view.skew
    rows = received_rows(layout, view.dispatcher, share, has_clones=view.clones > 0)
    local = model.num_experts // view.ep + view.clones
    gates = 2 * model.moe_intermediate_size // view.etp * view.kept_size("experts")
    padding = local * ROW_ALIGNMENT if view.is_fused else 0
    found = [
        KeptTensor("router logits", model.num_experts * FP32, ("router",)),
        KeptTensor("chosen experts", chosen * INT64),
        KeptTensor("weights of the chosen", rows * chosen * FP32),
        # A choice is one row of the experts; under etp every member has all rows of its group.
        KeptTensor(
            "pre-activations",
            share * view.etp * chosen * gates,
            ("experts",),
            round(padding * gates),
            "expert_pre_activation",
        ),
        KeptTensor("places of rows", (rows + view.etp) * chosen * INT32, (), padding * INT32 + local * INT32),
    ]
    if view.keeps_rows:
        inner = model.moe_intermediate_size // view.etp
        for name, columns in (("sorted rows", width), ("activations of experts", inner)):
            nbytes = share * view.etp * chosen * columns * size
            found.append(KeptTensor(name, nbytes, (), padding * columns * size))
    elif crosses:
        received = rows * width * view.kept_size("experts")
        found.append(KeptTensor("rows received", received, ("dispatch",), activation="expert_input"))
    if view.kept_clone_bytes:
        numel = view.clones * expert_numel(model)
        found.append(KeptTensor("weights of clones", 0, (), numel * view.kept_clone_bytes))
    if model.moe_latent_size:
        times = 1 if crosses or view.keeps_rows else 2
        found.append(KeptTensor("narrow rows", times * width * size))
    shared = model.n_shared_experts * model.moe_intermediate_size
    if shared:
        found += _gated_mlp("shared experts", shared, view, "shared")
    if model.shared_expert_gate:
        found.append(
            KeptTensor("shared experts: output before its gate", model.hidden_size * size + 2 * size)
        )
    return found


def expert_numel(model: ModelConfig) -> int:
    """Elements of one expert's weights."""
    return 3 * (model.moe_latent_size or model.hidden_size) * model.moe_intermediate_size


def expert_layout(model: ModelConfig, ep: int, etp: int, domain: int = 8) -> ExpertLayout:
    """Of a model's experts over ranks, ``domain`` on a node."""
    nodes = ep * etp // domain if ep * etp % domain == 0 else 1
    return ExpertLayout(
        model.num_experts, model.num_experts_per_tok, ep, etp, max(1, nodes), model.n_group, model.topk_group
    )


def received_rows(
    layout: ExpertLayout, dispatcher: str, share: float = 1.0, *, has_clones: bool = False
) -> float:
    """Rows that reach a rank for each token that it brings: under balanced routing a token once for every
    rank that holds one of its experts, or once for every rank (allgather). ``share``: so many times as many,
    which buffers of flex hold whatever comes; with clones as many as pairs of a row and an expert."""
    name = choose_dispatcher(layout).dispatcher if dispatcher == "auto" else dispatcher
    if layout.ep == 1 or name == "local":
        return float(layout.etp)
    needed = 1.0 if name == "allgather" else min(1.0, layout.rank_probability * share)
    rows = layout.ep * needed * layout.etp
    return max(rows, min(layout.ep, share * layout.top_k)) if has_clones and name == "flex" else rows
