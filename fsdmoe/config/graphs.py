"""What ``train.graphs`` does not go with: what the host decides, reads or moves inside of a micro-batch."""

from __future__ import annotations

from fsdmoe.config.refusals import Found, refuse
from fsdmoe.config.schema import Config
from fsdmoe.errors import ConfigError
from fsdmoe.precision.config import PrecisionConfig


def check_graphs(config: Config) -> None:
    """Refuse what a graph cannot replay, with the reason."""
    if config.train.graphs != "none":
        refuse("train.graphs", '"none"', _found(config))


def require_gpu(graphs: str, device_type: str) -> None:
    """Refuse graphs on a device that has none."""
    if graphs != "none" and device_type != "cuda":
        raise ConfigError(
            f'train.graphs: expected a GPU for "{graphs}", got a run on {device_type}: graphs are CUDA\'s; '
            'set train.graphs = "none"'
        )


def device_problems(config: Config, *, has_gpu: bool) -> list[str]:
    """What this machine cannot run."""
    try:
        require_gpu(config.train.graphs, "cuda" if has_gpu else "cpu")
    except ConfigError as error:
        return list(error.problems)
    return []


def _found(config: Config) -> Found:
    yield from _found_in_any(config)
    yield from _found_in_steps(config) if config.train.graphs == "step" else _found_in_layers(config)


def _found_in_any(config: Config) -> Found:
    mesh, fsdp, precision = config.mesh, config.fsdp, config.precision
    planned = "which rank attends to what is planned on the host for every micro-batch"
    if config.context_parallel.dynamic:
        yield "context_parallel.dynamic", True, "false", planned
    elif mesh.cp > 1:
        yield "mesh.cp", mesh.cp, "1", planned
    if config.memory.offload:
        why = "a graph copies to the same host memory every time, which several micro-batches would share"
        yield "memory.offload", list(config.memory.offload), "[]", why
    if config.optim.state_offload:
        why = "a capture cannot wait for moments that are still on their way"
        yield "optim.state_offload", config.optim.state_offload, "0", why
    if fsdp.cpu_offload:
        yield "fsdp.cpu_offload", True, "false", "the host waits for copies to its memory"
    if fsdp.lean:
        yield "fsdp.lean", True, "false", "gradients lie at other addresses in every step"
    if fsdp.debug:
        yield "fsdp.debug", True, "false", "values are checked on the host"
    if precision.frozen_dtype is not None:
        why = "this was never measured with graphs"
        yield "precision.frozen_dtype", precision.frozen_dtype, '"none"', why


def _found_in_steps(config: Config) -> Found:
    """Of all that a micro-batch does."""
    mesh, experts = config.mesh, config.experts
    for axis in ("ep", "etp"):
        if getattr(mesh, axis) > 1 and experts.dispatcher != "flex":
            fix = '1 (or experts.dispatcher = "flex", or train.graphs = "layer")'
            yield f"mesh.{axis}", getattr(mesh, axis), fix, "rows are counted on the host in every layer"
    if config.train.kernels == "torch":
        yield "train.kernels", "torch", '"auto"', "plain torch reads the sizes of experts on the host"
    for key in ("record", "replay"):
        if getattr(experts, key) is not None:
            why = "decisions of routers go through the host"
            yield f"experts.{key}", getattr(experts, key), '"none"', why
    if experts.compute == "sequential":
        yield "experts.compute", "sequential", '"grouped"', "the rows of each expert are found on the host"
    if experts.capacity is not None and experts.capacity.scope == "sequence" and mesh.tp > 1:
        why = "choices of several ranks are counted on the host"
        yield "experts.capacity.scope", "sequence", '"sub_sequence"', why
    reasons = {
        "param_dtype": "products of experts in float16 are split up by the host",
        "reduce_dtype": "the loss is multiplied by a number that the host changes",
    }
    for key, why in reasons.items():
        if getattr(config.precision, key) == "float16":
            yield f"precision.{key}", "float16", '"bfloat16"', why
    yield from _found_in_recipe(config.precision)


_CAPTURED_PARTS = ("norms", "attention_projections", "mla_up", "attention", "layer")


def _found_in_layers(config: Config) -> Found:
    """Of the attention side."""
    if config.mesh.tp > 1:
        why = "attention exchanges tokens between ranks, which was never captured layer by layer"
        yield "mesh.tp", config.mesh.tp, '1 (or train.graphs = "step")', why
    if inside := [part for part in config.memory.recompute if part in _CAPTURED_PARTS]:
        rest = [part for part in config.memory.recompute if part not in inside]
        why = "a graph keeps all that attention saves for backward"
        yield "memory.recompute", list(config.memory.recompute), str(rest).replace("'", '"'), why
    for key in ("param_dtype", "reduce_dtype"):
        if getattr(config.precision, key) == "float16":
            yield f"precision.{key}", "float16", '"bfloat16"', "this was never measured with graphs"
    if config.precision.recipe != "bf16":
        why = "attention in fp8 was never captured layer by layer"
        yield "precision.recipe", config.precision.recipe, '"bf16" (or train.graphs = "step")', why
    if config.model.hf is not None:
        why = "it is known of fsdmoe's own decoders alone where attention ends"
        yield "model.hf", config.model.hf, '"none" (or train.graphs = "step")', why


def _found_in_recipe(precision: PrecisionConfig) -> Found:
    recipe = precision.build_recipe()
    if recipe is None:
        return
    if recipe.name != "fp8_blockwise":
        why = "products of experts have kernels in one recipe only"
        yield "precision.recipe", precision.recipe, '"fp8_blockwise"', why
    elif not precision.quantized_weights:
        why = "the host decides when weights are quantised again"
        yield "precision.quantized_weights", False, "true", why
    if precision.emulate:
        yield "precision.emulate", True, "false", "the emulation reads the sizes of experts on the host"
    if precision.statistics:
        yield "precision.statistics", precision.statistics, "0", "they are read by the host"
