"""The features of a run that a row of the table (:mod:`fsdmoe.config.compatibility`) names.

Those that a lower part names in a row of its own stand next to that part.
"""

from __future__ import annotations

from typing import get_args

from fsdmoe.core.features import Chosen, Feature, above, choice, switch
from fsdmoe.memory.config import Part

# Graphs
GRAPHS_OF_STEPS = choice("CUDA graphs of micro-batches", "train.graphs", "step", "none")
GRAPHS_OF_LAYERS = choice("CUDA graphs of attention", "train.graphs", "layer", "none")
ANY_GRAPHS = Feature(
    name="CUDA graphs", key="train.graphs", shown='"step" or "layer"', off='"none"',
    is_on=lambda chosen: chosen["train.graphs"] != "none",
)  # fmt: skip
DETERMINISTIC = switch("the same bits in every run", "train.deterministic")
GRAPHS_OF_PACKED_ROWS = Feature(
    name="CUDA graphs of packed rows", key="train.graphs",
    shown='"step" or "layer" with data.pack = true', off='"none"',
    is_on=lambda chosen: ANY_GRAPHS.is_on(chosen) and chosen["data.pack"],
)  # fmt: skip

# Meshes
TENSOR_PARALLELISM = above("tensor parallelism", "mesh.tp")
CONTEXT_PARALLELISM = above("context parallelism", "mesh.cp")
EXPERT_TENSOR_PARALLELISM = above("tensor parallelism of experts", "mesh.etp")
REPLICAS = above("replicas", "mesh.dp_outer")
DYNAMIC_CONTEXT = switch("dynamic context parallelism", "context_parallel.dynamic")
DYNAMIC_REPLICAS = Feature(
    name="dynamic context parallelism in replicas", key="mesh.dp_outer",
    shown="above 1 with context_parallel.dynamic = true", off="1",
    is_on=lambda chosen: REPLICAS.is_on(chosen) and DYNAMIC_CONTEXT.is_on(chosen),
)  # fmt: skip
PLANNED_ROWS = choice("attention planned for all rows", "context_parallel.varlen", "always", "auto")
EXCHANGED_HEADS = choice(
    "context parallelism by exchanged heads", "context_parallel.mode", "all_to_all", "ring"
)

# Checkpoints
MEMORY_COPIES = Feature(
    name="copies in memory of two nodes", key="checkpoint.in_memory", shown="above 0", off="0",
    is_on=lambda chosen: chosen["checkpoint.in_memory"] > 0,
)  # fmt: skip

# Experts
FLEX = choice("exchange without counts on the host", "experts.dispatcher", "flex", "auto")

ALL_GATHER = choice("exchange of all rows with all ranks", "experts.dispatcher", "allgather", "auto")
BY_NODE = choice("rows that go to a node once", "experts.dispatcher", "by_node", "auto")
CLONES = above("clones of hot experts", "experts.clones", 0)


def _is_counted(axis: str) -> Feature:
    return Feature(
        name=f"rows of mesh.{axis} counted on the host", key=f"mesh.{axis}",
        shown='above 1 without experts.dispatcher = "flex"', off="1",
        is_on=lambda chosen: chosen[f"mesh.{axis}"] > 1 and not FLEX.is_on(chosen),
    )  # fmt: skip


COUNTED_BY_EP = _is_counted("ep")
COUNTED_BY_ETP = _is_counted("etp")
CHUNKS = above("exchange in chunks", "experts.chunks")
SUB_BATCHES = above("sub-batches", "experts.sub_batches")
FEW_ROWS = Feature(
    name="micro-batches with fewer rows than sub-batches", key="train.micro_batch_size",
    shown="below experts.sub_batches", off=lambda chosen: str(chosen["experts.sub_batches"]),
    is_on=lambda chosen: chosen["train.micro_batch_size"] < chosen["experts.sub_batches"],
)  # fmt: skip
SEQUENTIAL = choice("experts one after the other", "experts.compute", "sequential", "grouped")


def _names_folder(name: str, key: str) -> Feature:
    return Feature(
        name=name, key=key, shown="a folder", off='"none"', is_on=lambda chosen: chosen[key] is not None
    )


RECORD = _names_folder("recorded routing", "experts.record")
REPLAY = _names_folder("replayed routing", "experts.replay")
GLOBAL_BALANCE = Feature(
    name="balance over the global batch", key="experts.balance.global_batch", shown="above 0",
    off="0 (experts.balance.sequence is of each row)",
    is_on=lambda chosen: bool(chosen["experts.balance.global_batch"]),
)  # fmt: skip
BALANCING_BIAS = above("balancing by a bias", "experts.balance.bias_rate", 0)
EXPERT_CHOICE = choice("experts that choose their tokens", "experts.selection", "expert_choice", "top_k")
GLOBAL_DEVICE_BALANCE = Feature(
    name="balance of devices over the global batch", key="experts.balance.device_scope",
    shown='"global_batch"', off='"micro_batch"',
    is_on=lambda chosen: bool(chosen["experts.balance.device"])
    and chosen["experts.balance.device_scope"] == "global_batch",
)  # fmt: skip
SEQUENCE_CAPACITY = Feature(
    name="capacity of sequences on several ranks", key="experts.capacity.scope",
    shown='"sequence" with mesh.tp above 1', off='"sub_sequence"',
    is_on=lambda chosen: chosen["experts.capacity"] is not None
    and chosen["experts.capacity.scope"] == "sequence"
    and TENSOR_PARALLELISM.is_on(chosen),
)  # fmt: skip

# Models
WRAPPED = _names_folder("a model of transformers", "model.hf")
NATIVE = Feature(
    name="a decoder of fsdmoe", key="model.hf", shown='"none"', off="a Hugging Face folder",
    is_on=lambda chosen: chosen["model.hf"] is None,
)  # fmt: skip


POLICIES = Feature(
    name="routing policies", key="experts.balance", off="the default",
    shown="terms or bias_rate, experts.capacity, experts.selection, experts.replay_weights",
    is_on=lambda chosen: bool(chosen["experts"].routing_keys),
)  # fmt: skip


def _has_adapters(chosen: Chosen) -> bool:
    return chosen["adapter.rank"] > 0 and chosen["adapter.kind"] != "none"


ADAPTERS = Feature(name="adapters", key="adapter.rank", shown="above 0", off="0", is_on=_has_adapters)
NO_ADAPTERS = Feature(
    name="no adapters", key="adapter.rank", shown="0", off="8", is_on=lambda chosen: not _has_adapters(chosen)
)
TRAINED_BASE = Feature(
    name="weights trained next to adapters", key="adapter.freeze_base", shown="false", off="true",
    is_on=lambda chosen: _has_adapters(chosen) and not chosen["adapter.freeze_base"],
)  # fmt: skip
FROZEN_BASE = Feature(
    name="frozen weights next to adapters", key="adapter.freeze_base", shown="true", off="false",
    is_on=lambda chosen: _has_adapters(chosen) and chosen["adapter.freeze_base"],
)  # fmt: skip
PAIRS = Feature(
    name="pairs of answers", key="data.kind", shown='"preference"', off='"completion"',
    is_on=lambda chosen: chosen["data"].has_pairs,
)  # fmt: skip
DORA = Feature(
    name="DoRA", key="adapter.kind", shown='"dora"', off='"lora"',
    is_on=lambda chosen: _has_adapters(chosen) and chosen["adapter.kind"] == "dora",
)  # fmt: skip
ADAPTED_EXPERTS = Feature(
    name="adapters on experts", key="adapter.target_parameters", shown="names, or by default with LoRA",
    off="[]", is_on=lambda chosen: _has_adapters(chosen) and chosen["adapter"].adapts_experts,
)  # fmt: skip
TRAINED_ADAPTED_EXPERTS = Feature(
    name="experts trained next to their adapters", key="adapter.freeze_base", off="true",
    shown="false with adapters on experts",
    is_on=lambda chosen: ADAPTED_EXPERTS.is_on(chosen) and TRAINED_BASE.is_on(chosen),
)  # fmt: skip

# Memory and speed
KEPT_CODES = choice("codes kept for backward", "memory.keep", "codes", "values")
KEPT_ROWS = choice("experts' rows kept for backward", "memory.keep", "rows", "values")
OFFLOAD = Feature(
    name="activations in host memory", key="memory.offload", shown="names", off="[]",
    is_on=lambda chosen: bool(chosen["memory.offload"]),
)  # fmt: skip


def _recomputes(name: str, shown: str, parts: tuple[str, ...]) -> Feature:
    def without(chosen: Chosen) -> str:
        rest = [part for part in chosen["memory.recompute"] if part not in parts]
        return str(rest).replace("'", '"')

    return Feature(
        name=name, key="memory.recompute", shown=shown, off=without,
        is_on=lambda chosen: any(part in parts for part in chosen["memory.recompute"]),
    )  # fmt: skip


RECOMPUTED_LAYERS = _recomputes("recomputed layers", '["layer"]', ("layer",))
RECOMPUTED_ATTENTION = _recomputes("recomputed attention", '["attention"]', ("attention",))
_OF_ATTENTION: tuple[Part, ...] = ("norms", "attention_projections", "mla_up", "attention", "layer")
RECOMPUTED_SIDE = _recomputes(
    "recomputed parts of attention", "one of " + ", ".join(_OF_ATTENTION), _OF_ATTENTION
)
RESENT_ROWS = _recomputes("rows sent again in backward", '["dispatch"]', ("dispatch",))
RECOMPUTED_EXPERTS = _recomputes(
    "recomputed parts of experts",
    "one of experts, router, shared_experts",
    tuple(part for part in get_args(Part) if part not in ("dispatch", *_OF_ATTENTION)),
)
DEBUG = switch("checked buffers", "fsdp.debug")
ZERO_2 = choice("gradients and states sharded (ZeRO-2)", "fsdp.shard", "grads", "params")
ZERO_1 = choice("states sharded (ZeRO-1)", "fsdp.shard", "optimizer", "params")
KEPT_WEIGHTS = Feature(
    name="weights that stay gathered", key="fsdp.reshard_after_forward", shown="false", off="true",
    is_on=lambda chosen: not chosen["fsdp.reshard_after_forward"],
)  # fmt: skip
REDUCED_LAST = choice("gradients reduced after the last micro-batch", "fsdp.reduce", "last", "each")
WHOLE_ROWS = choice("slices of whole rows", "fsdp.granule", "rows", "elements")
PLAIN_TORCH = choice("plain torch in place of kernels", "train.kernels", "torch", "auto")

# Precision
FLOAT16 = choice("products in float16", "precision.param_dtype", "float16", "bfloat16")
REDUCED_IN_FLOAT16 = choice("gradients reduced in float16", "precision.reduce_dtype", "float16", "bfloat16")
FLOAT32_EXPERTS = Feature(
    name="experts in float32", key="precision.param_dtype", shown='"float32" with experts', off='"bfloat16"',
    is_on=lambda chosen: chosen["precision.param_dtype"] == "float32"
    and chosen["model"].num_moe_layers > 0,
)  # fmt: skip
_CAPTURED_RECIPES = ("bf16", "fp8_blockwise", "fp8_fast")
RECIPE = Feature(
    name="a recipe", key="precision.recipe", shown='any but "bf16"', off='"bf16"',
    is_on=lambda chosen: chosen["precision.recipe"] != "bf16",
)  # fmt: skip
RECIPE_OF_EXPERTS = Feature(
    name="a recipe that covers experts", key="precision.recipe",
    shown='any but "bf16", with "experts" in precision.covers', off='"bf16"',
    is_on=lambda chosen: RECIPE.is_on(chosen) and "experts" in chosen["precision.covers"],
)  # fmt: skip
LIBRARY_PRODUCTS = Feature(
    name="products of another library", key="precision.backend", shown='"torchao" or "te"', off='"own"',
    is_on=lambda chosen: chosen["precision.backend"] in ("torchao", "te"),
)  # fmt: skip
TE_PRODUCTS = Feature(
    name="products of Transformer Engine", key="precision.backend", shown='"te"', off='"own"',
    is_on=lambda chosen: RECIPE.is_on(chosen) and chosen["precision.backend"] == "te",
)  # fmt: skip
LIBRARY_EXPERTS = Feature(
    name="another library's products of experts", key="precision.backend",
    shown='"torchao" or "te", with "experts" in precision.covers', off='"own"',
    is_on=lambda chosen: RECIPE_OF_EXPERTS.is_on(chosen) and LIBRARY_PRODUCTS.is_on(chosen),
)  # fmt: skip
TE_EXPERTS = Feature(
    name="Transformer Engine's products of experts", key="precision.backend",
    shown='"te", with "experts" in precision.covers', off='"own"',
    is_on=lambda chosen: RECIPE_OF_EXPERTS.is_on(chosen) and chosen["precision.backend"] == "te",
)  # fmt: skip
OTHER_RECIPE = Feature(
    name="a recipe whose experts have no kernels", key="precision.recipe",
    shown=f"none of {', '.join(_CAPTURED_RECIPES)}",
    off=" or ".join(f'"{name}"' for name in _CAPTURED_RECIPES),
    is_on=lambda chosen: chosen["precision.recipe"] not in _CAPTURED_RECIPES,
)  # fmt: skip
NOT_BLOCKWISE = Feature(
    name="a recipe without scales of 1 x 128", key="precision.recipe", shown='any but "fp8_blockwise"',
    off='"fp8_blockwise"',
    is_on=lambda chosen: chosen["precision.recipe"] not in ("fp8_blockwise", "fp8_fast"),
)  # fmt: skip
HEAD_IN_FP8 = choice("the head in fp8", "precision.head", "fp8", "bf16")
QAT = Feature(
    name="quantisation-aware training", key="precision.qat", shown="a format", off='"none"',
    is_on=lambda chosen: chosen["precision.qat"] is not None,
)  # fmt: skip
EMULATION = switch("an emulated recipe", "precision.emulate")
STATISTICS = above("statistics of a recipe", "precision.statistics", 0)
