"""What goes with what: one table of pairs of features, read by the checks of configurations, ``parallelize``,
``--dry-run``, the planner's search and the documentation.

A row holds two features, a verdict, the reason and the fix. ``docs/compatibility.md`` is written from it::

    python -m fsdmoe.config.compatibility_page docs/compatibility.md

Keys of one section that exclude each other are checked by that section, and sizes that do not divide each
other by the part that divides them; they are not features.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, permutations
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from fsdmoe.config import features as on
from fsdmoe.config.schema import Config
from fsdmoe.core.features import CANNOT, NOT_BUILT, RIGHT, Row, refuse_together, refused_rows
from fsdmoe.experts.config import EXPERT_PARALLELISM, EXPERTS_ELSEWHERE
from fsdmoe.fsdp.config import CPU_OFFLOAD, FROZEN_CODES, LEAN, SHARDING_ROWS
from fsdmoe.optim.config import (
    EMA,
    MUON,
    OFFLOADED_TWICE,
    QK_CLIP,
    ROUNDED_ROWS,
    SMALL_GRANULES,
    SMALL_MOMENTS,
    STATE_OFFLOAD,
    TORCHAO_MOMENTS,
    TORCHAO_ROWS,
)
from fsdmoe.precision.config import PrecisionConfig

_PLANNED = "which rank attends to what is planned on the host for every micro-batch"
_DECIDED = "decisions of routers go through the host"
_RECORDED = "a recording holds one decision for each layer and micro-batch"
_LOADS = "loads of one are not known when another is routed"
_FLEX_OR_LAYER = '(or experts.dispatcher = "flex", or train.graphs = "layer")'

GRAPH_ROWS = (
    Row(on.ANY_GRAPHS, on.DYNAMIC_CONTEXT, CANNOT, _PLANNED),
    Row(on.ANY_GRAPHS, on.CONTEXT_PARALLELISM, CANNOT, _PLANNED),
    Row(on.ANY_GRAPHS, on.OFFLOAD, CANNOT,
        "a graph copies to the same host memory every time, which several micro-batches would share"),
    Row(on.ANY_GRAPHS, STATE_OFFLOAD, CANNOT,
        "a capture cannot wait for moments that are still on their way"),
    Row(on.ANY_GRAPHS, CPU_OFFLOAD, CANNOT, "the host waits for copies to its memory"),
    Row(on.ANY_GRAPHS, LEAN, CANNOT, "gradients lie at other addresses in every step"),
    Row(on.ANY_GRAPHS, on.DEBUG, CANNOT, "values are checked on the host"),
    Row(on.ANY_GRAPHS, on.QAT, NOT_BUILT, "the rounding of gathered weights is not captured"),
    Row(on.GRAPHS_OF_STEPS, on.COUNTED_BY_EP, CANNOT, "rows are counted on the host in every layer",
        f"set mesh.ep = 1 {_FLEX_OR_LAYER}"),
    Row(on.GRAPHS_OF_STEPS, on.COUNTED_BY_ETP, CANNOT, "rows are counted on the host in every layer",
        f"set mesh.etp = 1 {_FLEX_OR_LAYER}"),
    Row(on.GRAPHS_OF_STEPS, on.PLAIN_TORCH, CANNOT, "plain torch reads the sizes of experts on the host"),
    Row(on.GRAPHS_OF_STEPS, on.RECORD, CANNOT, _DECIDED),
    Row(on.GRAPHS_OF_STEPS, on.REPLAY, CANNOT, _DECIDED),
    Row(on.GRAPHS_OF_STEPS, on.SEQUENTIAL, CANNOT, "the rows of each expert are found on the host"),
    Row(on.GRAPHS_OF_STEPS, on.SEQUENCE_CAPACITY, CANNOT, "choices of several ranks are counted on the host"),
    Row(on.GRAPHS_OF_STEPS, on.FLOAT16, CANNOT, "products of experts in float16 are split up by the host"),
    Row(on.GRAPHS_OF_STEPS, on.FLOAT32_EXPERTS, CANNOT,
        "products of experts in float32 are split up by the host"),
    Row(on.GRAPHS_OF_STEPS, on.REDUCED_IN_FLOAT16, CANNOT,
        "the loss is multiplied by a number that the host changes"),
    Row(on.GRAPHS_OF_STEPS, on.OTHER_RECIPE, CANNOT,
        "without kernels, products of experts are split up by the host"),
    Row(on.GRAPHS_OF_STEPS, on.TE_EXPERTS, CANNOT, "the host reads how many rows each expert has"),
    Row(on.GRAPHS_OF_STEPS, on.EMULATION, CANNOT, "the emulation reads the sizes of experts on the host"),
    Row(on.GRAPHS_OF_STEPS, on.STATISTICS, CANNOT, "statistics are read by the host"),
    Row(on.GRAPHS_OF_LAYERS, on.TENSOR_PARALLELISM, NOT_BUILT,
        "attention that exchanges tokens between ranks is not captured layer by layer",
        'set mesh.tp = 1 (or train.graphs = "step")'),
    Row(on.GRAPHS_OF_LAYERS, on.RECOMPUTED_SIDE, CANNOT,
        "a graph keeps all that attention saves for backward"),
    Row(on.GRAPHS_OF_LAYERS, on.FLOAT16, NOT_BUILT, "attention in float16 is not captured layer by layer"),
    Row(on.GRAPHS_OF_LAYERS, on.REDUCED_IN_FLOAT16, NOT_BUILT,
        "a scaled loss is not part of graphs of layers"),
    Row(on.GRAPHS_OF_LAYERS, on.RECIPE, NOT_BUILT, "attention in fp8 is not captured layer by layer",
        'set precision.recipe = "bf16" (or train.graphs = "step")'),
    Row(on.GRAPHS_OF_LAYERS, FROZEN_CODES, NOT_BUILT,
        "attention whose weights are codes is not captured layer by layer",
        'set precision.frozen_dtype = "none" (or train.graphs = "step")'),
    Row(on.GRAPHS_OF_LAYERS, on.WRAPPED, NOT_BUILT,
        "only in fsdmoe's own decoders is it known where attention ends",
        'set model.hf = "none" (or train.graphs = "step")'),
)  # fmt: skip
"""What the host decides, reads or moves inside of a micro-batch cannot be replayed."""

SUB_BATCH_ROWS = (
    Row(on.SUB_BATCHES, on.WRAPPED, NOT_BUILT, "layers of a wrapped model cannot be called in halves"),
    Row(on.SUB_BATCHES, on.FEW_ROWS, CANNOT, "each sub-batch holds whole rows"),
    Row(on.SUB_BATCHES, on.CHUNKS, NOT_BUILT, "rows travel in sub-batches or in chunks"),
    Row(on.SUB_BATCHES, on.FLEX, NOT_BUILT, "layers of flex share their buffers"),
    Row(on.SUB_BATCHES, on.DYNAMIC_CONTEXT, CANNOT, "ranks have different numbers of rows"),
    Row(on.SUB_BATCHES, on.RECOMPUTED_LAYERS, CANNOT,
        "a layer that is run again would have to wait for the layer before it again",
        "set memory.recompute = parts of a layer"),
    Row(on.SUB_BATCHES, on.OFFLOAD, NOT_BUILT, "inputs of layers are still on their way"),
    Row(on.SUB_BATCHES, on.ANY_GRAPHS, NOT_BUILT, "graphs hold one micro-batch at a time"),
    Row(on.SUB_BATCHES, on.TE_PRODUCTS, NOT_BUILT,
        "its products on two streams would share one workspace"),
    Row(on.SUB_BATCHES, on.RECORD, NOT_BUILT, _RECORDED),
    Row(on.SUB_BATCHES, on.REPLAY, NOT_BUILT, _RECORDED),
    Row(on.SUB_BATCHES, on.GLOBAL_BALANCE, CANNOT, _LOADS),
    Row(on.SUB_BATCHES, on.GLOBAL_DEVICE_BALANCE, CANNOT, _LOADS),
)  # fmt: skip
"""What needs the rows of a micro-batch together."""

CLONE_ROWS = (
    Row(on.CLONES, on.BY_NODE, NOT_BUILT, "a node hands rows on by the experts that its ranks own"),
    Row(on.CLONES, on.ALL_GATHER, CANNOT, "rows that all ranks get need no clones"),
    Row(on.CLONES, on.EXPERT_TENSOR_PARALLELISM, NOT_BUILT, "clones are of whole experts"),
    Row(on.CLONES, on.LIBRARY_EXPERTS, NOT_BUILT,
        "other libraries' products write the gradients of a rank's own experts alone",
        'set precision.backend = "own"'),
    Row(on.CLONES, FROZEN_CODES, NOT_BUILT, "clones of frozen codes are not decoded"),
    Row(on.CLONES, on.SEQUENTIAL, NOT_BUILT, "clones are computed in one call with a rank's own experts"),
    Row(on.CLONES, on.QAT, NOT_BUILT, "clones are not rounded"),
    Row(on.CLONES, on.ADAPTED_EXPERTS, NOT_BUILT, "clones are made of weights alone",
        "set adapter.target_parameters = []"),
    Row(on.CLONES, on.OFFLOAD, NOT_BUILT, "what clones keep has no names"),
    Row(on.CLONES, CPU_OFFLOAD, NOT_BUILT, "clones are sent between devices"),
)  # fmt: skip
"""What sees experts, or rows on their way to them, in a form of its own."""

RESEND_ROWS = (
    Row(on.RESENT_ROWS, on.BY_NODE, NOT_BUILT, "rows that a node hands on are not sent again"),
    Row(on.RESENT_ROWS, on.FLEX, NOT_BUILT, "rows of all layers are written into the same buffers"),
    Row(on.RESENT_ROWS, on.EXPERT_TENSOR_PARALLELISM, NOT_BUILT,
        "rows are handed on to the ranks that share an expert"),
    Row(on.RESENT_ROWS, on.SUB_BATCHES, NOT_BUILT, "outputs come back while the next layer runs"),
    Row(on.RESENT_ROWS, on.KEPT_ROWS, CANNOT, "sorted rows are kept in place of received ones"),
    Row(on.RESENT_ROWS, on.KEPT_CODES, CANNOT, "codes are kept in place of received rows"),
)  # fmt: skip
"""What keeps rows in another form, or receives them in two exchanges."""

_APART = "replicas plan their micro-batches apart and cannot count over the global batch together"
_REFERENCE = "the reference of pairs of answers is the model without its adapters"

OTHER_ROWS = (
    Row(on.GLOBAL_BALANCE, on.DYNAMIC_REPLICAS, CANNOT, _APART),
    Row(on.GLOBAL_DEVICE_BALANCE, on.DYNAMIC_REPLICAS, CANNOT, _APART),
    Row(on.RECOMPUTED_ATTENTION, on.CONTEXT_PARALLELISM, CANNOT,
        'keys and values would be sent again, which ["layer"] does',
        'set memory.recompute = ["layer"]'),
    Row(FROZEN_CODES, on.TENSOR_PARALLELISM, NOT_BUILT, "it would cut blocks that share a scale",
        "set mesh.tp = 1, and use mesh.ep and sharding"),
    Row(FROZEN_CODES, on.EXPERT_TENSOR_PARALLELISM, NOT_BUILT, "it would cut blocks that share a scale",
        "set mesh.etp = 1, and use mesh.ep and sharding"),
    Row(FROZEN_CODES, on.DORA, NOT_BUILT, "DoRA reads the rows of whole weights"),
    Row(on.QAT, on.TENSOR_PARALLELISM, NOT_BUILT, "it would cut rows that share a scale",
        "set mesh.tp = 1, and use mesh.ep and sharding"),
    Row(on.QAT, on.EXPERT_TENSOR_PARALLELISM, NOT_BUILT, "it would cut rows that share a scale",
        "set mesh.etp = 1, and use mesh.ep and sharding"),
    Row(on.QAT, on.ADAPTERS, NOT_BUILT,
        "adapters are stored for a base that is not rounded"),
    Row(on.RECIPE_OF_EXPERTS, on.SEQUENTIAL, NOT_BUILT,
        "experts that are computed one after the other keep their own precision"),
    Row(on.RECIPE_OF_EXPERTS, on.TRAINED_ADAPTED_EXPERTS, NOT_BUILT,
        "kernels of adapted experts compute no gradients of quantised weights",
        'set adapter.freeze_base = true, or leave "experts" out of precision.covers'),
    Row(on.LIBRARY_EXPERTS, on.ADAPTED_EXPERTS, NOT_BUILT,
        "other libraries' products take no low-rank updates",
        'set adapter.target_parameters = [], or precision.backend = "own"'),
    Row(on.BALANCING_BIAS, on.ADAPTERS, CANNOT, "an adapter has no place for the biases that move"),
    Row(on.EXPERT_CHOICE, on.ADAPTERS, CANNOT, "an adapter has no place for how tokens are routed"),
    Row(on.ADAPTERS, on.NATIVE, NOT_BUILT, "adapters are for the model of a Hugging Face folder",
        "name one with model.hf (to-hf writes it from a checkpoint)"),
    Row(on.PAIRS, on.NATIVE, NOT_BUILT, _REFERENCE, "name a Hugging Face folder with model.hf"),
    Row(on.PAIRS, on.NO_ADAPTERS, NOT_BUILT, _REFERENCE,
        "set adapter.rank (or train the whole model with TRL's DPOTrainer, docs/trainers.md)"),
    Row(on.PAIRS, on.TRAINED_BASE, CANNOT, _REFERENCE),
    Row(on.PAIRS, on.TENSOR_PARALLELISM, NOT_BUILT, "losses of single tokens need the whole vocabulary"),
    Row(on.PAIRS, on.CONTEXT_PARALLELISM, NOT_BUILT, "an answer is summed up by one rank"),
    Row(on.PAIRS, on.DYNAMIC_CONTEXT, NOT_BUILT, "an answer is summed up by one rank"),
    Row(on.PAIRS, on.PLANNED_ROWS, NOT_BUILT, "answers are summed up in rows that are not planned"),
    Row(on.PAIRS, on.ANY_GRAPHS, NOT_BUILT, "the forward of the reference is not captured"),
    Row(on.PAIRS, on.RECORD, NOT_BUILT, _RECORDED),
    Row(on.PAIRS, on.REPLAY, NOT_BUILT, _RECORDED),
)  # fmt: skip

KEPT_CODES_ROWS = (
    Row(on.KEPT_CODES, on.NOT_BLOCKWISE, CANNOT, "codes are those that fp8_blockwise makes"),
    Row(on.KEPT_CODES, on.EMULATION, CANNOT, "the emulation rounds values, and keeps these"),
    Row(on.KEPT_CODES, on.LIBRARY_PRODUCTS, NOT_BUILT, "other libraries keep what they keep"),
    Row(on.KEPT_CODES, on.OFFLOAD, NOT_BUILT, "codes have no names by which they could be offloaded"),
    Row(on.KEPT_CODES, on.ADAPTERS, NOT_BUILT, "experts with adapters keep their values"),
)

_NO_GRADIENTS = "frozen weights have no gradients that rows are kept for"
KEPT_ROWS_ROWS = (
    Row(on.KEPT_ROWS, on.OFFLOAD, CANNOT, "rows are laid out again in less time than the host sends them"),
    Row(on.KEPT_ROWS, on.SEQUENTIAL, CANNOT, "experts that are computed one after the other keep their rows"),
    Row(
        on.KEPT_ROWS,
        on.RECIPE_OF_EXPERTS,
        NOT_BUILT,
        "quantised products lay out rows of their own",
        'leave "experts" out of precision.covers',
    ),
    Row(
        on.KEPT_ROWS,
        on.TRAINED_ADAPTED_EXPERTS,
        NOT_BUILT,
        "experts with adapters lay out rows of their own",
        "set adapter.target_parameters = []",
    ),
    Row(on.KEPT_ROWS, on.FROZEN_BASE, CANNOT, _NO_GRADIENTS),
    Row(on.KEPT_ROWS, FROZEN_CODES, CANNOT, _NO_GRADIENTS),
)

HEAD_ROWS = (
    Row(on.HEAD_IN_FP8, on.WRAPPED, NOT_BUILT, "a wrapped model's head multiplies in its own precision"),
    Row(on.HEAD_IN_FP8, on.LIBRARY_PRODUCTS, NOT_BUILT, "the head takes fsdmoe's own products"),
)

MUON_ROWS = (
    Row(MUON, STATE_OFFLOAD, NOT_BUILT, "matrices are stepped together, not in chunks of elements"),
    Row(MUON, SMALL_MOMENTS, NOT_BUILT, "momentum is kept in float32 or bfloat16"),
    Row(MUON, TORCHAO_MOMENTS, NOT_BUILT, "momentum is kept in float32 or bfloat16"),
    Row(TORCHAO_MOMENTS, SMALL_GRANULES, CANNOT, "a slice must not cut a block of 256 elements"),
)

DETERMINISTIC_ROWS = (
    Row(on.DETERMINISTIC, on.GRAPHS_OF_PACKED_ROWS, NOT_BUILT,
        "attention in a graph adds up by another number of documents than in the first steps after a start",
        'set train.graphs = "none" (or data.pack = false)'),
    Row(on.DETERMINISTIC, on.LIBRARY_PRODUCTS, NOT_BUILT, "it is not known in which order it adds up"),
)  # fmt: skip
"""What has other bits in a run that is resumed, or may have."""

_PIECE = "a rank has the keys of its own piece of a row"
QK_CLIP_ROWS = (
    Row(QK_CLIP, on.WRAPPED, NOT_BUILT, "only in fsdmoe's own decoders are queries and keys known"),
    Row(QK_CLIP, on.ANY_GRAPHS, NOT_BUILT, "looking at queries and keys is not captured"),
    Row(QK_CLIP, on.CONTEXT_PARALLELISM, NOT_BUILT, _PIECE),
    Row(QK_CLIP, on.DYNAMIC_CONTEXT, NOT_BUILT, _PIECE),
)

EMA_ROWS = (
    Row(EMA, on.ANY_GRAPHS, NOT_BUILT, "weights that change places for an evaluation are not captured"),
    Row(EMA, on.ADAPTERS, NOT_BUILT, "adapters are stored and exported without an average"),
)

_WITH_GRAPHS = "tests/behaviour/test_graphs_gpu.py"
TESTED_ROWS = (
    *(
        Row(on.GRAPHS_OF_STEPS, other, RIGHT, _WITH_GRAPHS)
        for other in (
            on.FLEX,
            on.WRAPPED,
            on.ADAPTERS,
            FROZEN_CODES,
            on.RECOMPUTED_LAYERS,
            on.RECOMPUTED_EXPERTS,
            MUON,
        )
    ),
    Row(on.GRAPHS_OF_LAYERS, MUON, RIGHT, _WITH_GRAPHS),
    Row(on.DETERMINISTIC, EXPERT_PARALLELISM, RIGHT, "tests/behaviour/test_deterministic.py"),
    Row(FROZEN_CODES, EXPERT_PARALLELISM, RIGHT, "tests/parallel/test_frozen_layers.py"),
    Row(FROZEN_CODES, on.ADAPTERS, RIGHT, "tests/parallel/test_frozen_layers.py"),
    Row(FROZEN_CODES, on.RECIPE, RIGHT, "tests/parallel/test_frozen_layers.py"),
    Row(on.RECIPE_OF_EXPERTS, on.ADAPTED_EXPERTS, RIGHT, "tests/parallel/test_frozen_layers.py"),
    Row(on.CLONES, on.RECIPE_OF_EXPERTS, RIGHT, "tests/behaviour/experts/test_clones.py"),
    Row(on.QAT, EXPERT_PARALLELISM, RIGHT, "tests/parallel/test_rounded_layers.py"),
    Row(on.QAT, on.WRAPPED, RIGHT, "tests/parallel/test_rounded_layers.py"),
    Row(on.ADAPTERS, on.WRAPPED, RIGHT, "tests/behaviour/test_adapter_run.py"),
    Row(on.POLICIES, on.WRAPPED, RIGHT, "tests/behaviour/huggingface/test_policies.py"),
    Row(on.MEMORY_COPIES, EXPERT_PARALLELISM, RIGHT, "tests/behaviour/test_elastic.py"),
)

EXACT = (
    EXPERT_PARALLELISM, on.EXPERT_TENSOR_PARALLELISM, on.TENSOR_PARALLELISM, on.CONTEXT_PARALLELISM,
    on.EXCHANGED_HEADS, on.REPLICAS, on.CHUNKS, on.SUB_BATCHES, on.CLONES, on.FLEX, on.SEQUENTIAL, on.RECORD,
    on.RECOMPUTED_LAYERS, on.RECOMPUTED_ATTENTION, on.RECOMPUTED_EXPERTS, on.RESENT_ROWS, on.ZERO_1,
    on.ZERO_2, on.KEPT_WEIGHTS, on.REDUCED_LAST, on.WHOLE_ROWS, LEAN, on.DEBUG, on.OFFLOAD, STATE_OFFLOAD,
    on.KEPT_ROWS,
)  # fmt: skip
"""Features that change no number of a run, and do something on a CPU. Two of them that no row refuses are
right together: ``tests/behaviour/test_compatibility.py`` trains them."""


def _exact_rows(refused: tuple[Row, ...]) -> Iterator[Row]:
    known = {frozenset((row.feature, row.other)) for row in refused}
    for pair in combinations(EXACT, 2):
        if frozenset(pair) not in known and pair[0].key != pair[1].key:
            yield Row(*pair, RIGHT, "tests/behaviour/test_compatibility.py")


REFUSED: tuple[Row, ...] = (
    *GRAPH_ROWS, *SUB_BATCH_ROWS, *CLONE_ROWS, *RESEND_ROWS, *SHARDING_ROWS, OFFLOADED_TWICE, *ROUNDED_ROWS,
    *TORCHAO_ROWS,
    *KEPT_CODES_ROWS, *KEPT_ROWS_ROWS, *HEAD_ROWS, *MUON_ROWS, *QK_CLIP_ROWS, *EMA_ROWS, EXPERTS_ELSEWHERE,
    *OTHER_ROWS, *DETERMINISTIC_ROWS,
)  # fmt: skip
_WITH_MUON = tuple(
    Row(MUON, other, RIGHT, "tests/behaviour/optim/test_muon_pairs.py")
    for other in (*EXACT, CPU_OFFLOAD, on.RECIPE, on.ADAPTERS)
    if other is not STATE_OFFLOAD
)
_WITH_QK_CLIP = tuple(
    Row(QK_CLIP, other, RIGHT, "tests/behaviour/optim/test_muon_pairs.py")
    for other in (*EXACT, CPU_OFFLOAD, MUON)
    if other not in (on.CONTEXT_PARALLELISM, on.EXCHANGED_HEADS)
)
_WITH_EMA = tuple(
    Row(EMA, other, RIGHT, "tests/behaviour/optim/test_ema_pairs.py")
    for other in (*EXACT, CPU_OFFLOAD, SMALL_MOMENTS, MUON, QK_CLIP)
)
TABLE: tuple[Row, ...] = (
    *REFUSED, *TESTED_ROWS, *_WITH_MUON, *_WITH_QK_CLIP, *_WITH_EMA, *_exact_rows(REFUSED),
)  # fmt: skip


class ChosenKeys:
    """What a configuration says, by dotted key."""

    def __init__(self, config: Config | SimpleNamespace) -> None:
        self._config = config

    def __getitem__(self, key: str, /) -> Any:
        return attrgetter(key)(self._config)


def check_compatibility(config: Config) -> list[tuple[Row, str]]:
    """The rows that refuse this configuration, each with its line."""
    chosen = ChosenKeys(config)
    return [(row, row.problem(chosen)) for row in refused_rows(REFUSED, chosen)]


def refuse_incompatible(config: Config) -> None:
    """Raise a ``ConfigError`` with the lines of all rows that refuse this configuration."""
    refuse_together(REFUSED, ChosenKeys(config))


def refuse_sections(sections: Mapping[str, Any]) -> None:
    """The same where only some ``sections`` of a configuration are known: rows about others say nothing."""
    refuse_together(_rows_about(sections), ChosenKeys(SimpleNamespace(**sections)))


def _rows_about(sections: Container[str]) -> list[Row]:
    return [row for row in REFUSED if row.feature.section in sections and row.other.section in sections]


def own_where_needed(sections: Mapping[str, Any]) -> PrecisionConfig:
    """The precision of these ``sections``, whose ``backend = "auto"`` takes fsdmoe's own products where a
    feature that is on goes with no other library's. Sections that are not known say nothing."""
    precision: PrecisionConfig = sections["precision"]
    if precision.backend != "auto" or precision.recipe == "bf16":
        return precision
    as_library = SimpleNamespace(**{**vars(precision), "backend": "torchao"})
    chosen = ChosenKeys(SimpleNamespace(**{**sections, "precision": as_library}))
    rows = [row for row in _rows_about(sections) if "precision.backend" in (row.feature.key, row.other.key)]
    needs_own = any(row.applies(chosen) for row in rows)
    return replace(precision, backend="own") if needs_own else precision


def has_rows_with(sections: Mapping[str, Any], later: Container[str]) -> bool:
    """Whether a feature that is on in these ``sections`` has a row with a feature of the sections ``later``,
    which are not known yet."""
    chosen = ChosenKeys(SimpleNamespace(**sections))
    pairs = [pair for row in REFUSED for pair in permutations((row.feature, row.other))]
    return any(
        one.section in sections and other.section in later and one.is_on(chosen) for one, other in pairs
    )
