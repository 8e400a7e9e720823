"""What a run is: the facts its observer counts with, and the card that ``train.py`` prints at the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fsdmoe.config import Config
from fsdmoe.config.compatibility import check_compatibility
from fsdmoe.core.rules import counted
from fsdmoe.data import DataConfig, DataStream
from fsdmoe.data.holdout import Holdout
from fsdmoe.data.stream import SourceFacts
from fsdmoe.fsdp import engine_of
from fsdmoe.kernels.architecture import architecture
from fsdmoe.mesh import Axis, Degrees, Meshes
from fsdmoe.observe import RunFacts
from fsdmoe.observe.busy_ranks import UNEVEN
from fsdmoe.observe.devices import GIB, device_name
from fsdmoe.observe.text import short
from fsdmoe.optim import count_state
from fsdmoe.parallel.token_cost import token_cost
from fsdmoe.plan import Job, Setting
from fsdmoe.plan.hardware import NEVER_RAN
from fsdmoe.plan.memory import offloaded_bytes, step_bytes
from fsdmoe.run.kept_config import decided

MOST_SOURCES = 3  # a mixture of dozens stays one line
LOOKED_AT = 1_000_000  # tokens of each source, to estimate which share of them carries loss
FEWEST_DOCUMENTS = 10
FEWEST_TOKENS = 10_000
"""Of a held-out slice: below, its loss says more about the slice than about the model."""


def run_facts(
    config: Config, meshes: Meshes, model: nn.Module, start_step: int, start_tokens: int
) -> RunFacts:
    """For the observer of ``train.py``. Of pairs of answers the reference makes a forward of its own."""
    cost = token_cost(model, config.model, config.data.seq_len)
    return RunFacts(
        flops_per_token=cost.training_flops + config.data.has_pairs * cost.forward_flops,
        device=meshes.device,
        total_steps=config.train.steps,
        tokens_per_step=config.train.global_batch_size * config.data.seq_len,
        num_ranks=meshes.size(Axis.WORLD),
        start_step=start_step,
        start_tokens=start_tokens,
        ep=meshes.size(Axis.EP),
        num_experts=config.model.num_experts,
        when_uneven=what_if_uneven(config, meshes.size(Axis.WORLD)),
    )


def what_if_uneven(config: Config, world_size: int) -> str:
    """What to do where one EP rank computes far more than others; empty where its experts are cloned."""
    if config.experts.clones:
        return ""
    cloned = replace(config, experts=replace(config.experts, clones=2))
    cloning = Setting.of(cloned, world_size).cloning(Job.of(cloned))
    is_worth_it = cloning is not None and (UNEVEN - 1) * cloning.pairs > cloning.least_rows
    if not is_worth_it or check_compatibility(cloned):
        return "balance experts more (docs/routing.md)"
    if config.model.hf is not None:  # whether its experts can be cloned is known once it is built
        return (
            "balance experts more (docs/routing.md), or try experts.clones = 2 "
            "(docs/experts.md#clones-of-hot-experts)"
        )
    return (
        "experts.clones = 2 has others compute what is above the mean (docs/experts.md#clones-of-hot-experts)"
    )


def start_card(
    config: Config,
    meshes: Meshes,
    model: nn.Module,
    data: DataStream,
    *,
    resumed_at: int | None,
    loaded: str = "",
    decisions: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Name -> text of the lines of the card. ``resumed_at`` is the step of the checkpoint that was loaded;
    None where there was none; ``loaded`` its name. ``decisions``: what was decided for keys that are no
    longer open here."""
    graphs = {} if config.train.graphs == "none" else {"graphs": graphs_text(config, meshes.size(Axis.WORLD))}
    adapters = {"adapters": adapters_text(config, model)} if config.adapter.is_on else {}
    taken = decided(config, meshes) | dict(decisions or {})
    balance = {"balance": balance_text(config, model)} if config.model.num_moe_layers else {}
    return {
        "model": _model_text(config, model),
        "weights": _weights_text(config, resumed_at, loaded),
        **adapters,
        **balance,
        "data": data_text(data, config.data),
        "loss": loss_text(data),
        "evaluation": evaluation_text(config, data),
        "precision": _precision_text(config),
        "devices": _devices_text(meshes),
        "batch": _batch_text(config, resumed_at or 0),
        "memory": _memory_text(config, model),
        "activations": _activations_text(config, meshes.size(Axis.WORLD)),
        **graphs,
        "decided": "; ".join(f"{key} = {value}" for key, value in taken.items()) or "nothing",
        "output": config.train.output_dir,
    }


def data_text(data: DataStream, config: DataConfig) -> str:
    """Sources with their documents, tokens and what was left out of them, and the tokenizer."""
    sources = [_source_text(source) for source in data.sources()]
    return "; ".join([*_shortened(sources), f"tokenizer {config.tokenizer}, {data.vocab_size:,} ids"])


def _source_text(source: SourceFacts) -> str:
    share = f" ({source.weight:.0%} of the tokens)" if source.weight < 1 else ""
    text = f"{source.name}{share}: {counted(source.documents, 'document')}, {short(source.tokens)} tokens"
    if source.cut:
        text = f"{text}, of which {source.cut_text}"
    left_out = [f"{count:,} {reason}" for reason, count in source.dropped.items()]
    return f"{text}, left out: {', '.join(left_out)}" if left_out else text


def _shortened(sources: Sequence[str]) -> list[str]:
    rest = len(sources) - MOST_SOURCES
    return [*sources[:MOST_SOURCES], *([f"and {rest} more sources"] if rest > 0 else [])]


def loss_text(data: DataStream) -> str:
    """Which share of the tokens is learnt: all of a text, the answers of a chat."""
    sources = data.sources()
    shares = [
        source.weight * (1.0 if store.targets is None else float((store.targets[:LOOKED_AT] == 1).mean()))
        for store, source in zip(data.stores, sources, strict=True)
    ]
    if all(store.targets is None for store in data.stores):
        return "on every token"
    text = f"on {sum(shares):.1%} of the tokens (estimated from the first {short(LOOKED_AT)} of each source)"
    lost = [f"{source.name} has {source.without_loss}" for source in sources if source.without_loss]
    return "; warning: ".join([text, *_shortened(lost)])


def evaluation_text(config: Config, data: DataStream) -> str:
    """What is held out, and whether that is enough to tell something."""
    train = config.train
    if train.eval_interval < 0:
        return "never (train.eval_interval = -1)"
    held_out = Holdout(data.stores, config.data.holdout).documents()
    num_documents = len(held_out.document_N)
    when = f"every {train.eval_interval} steps and at the end" if train.eval_interval else "at the end"
    text = (
        f"{when}, on up to {train.eval_batches * train.global_batch_size} rows of "
        f"{counted(num_documents, 'held-out document')}, {short(held_out.num_tokens)} tokens "
        f"(data.holdout = {config.data.holdout:g})"
    )
    if num_documents >= FEWEST_DOCUMENTS and held_out.num_tokens >= FEWEST_TOKENS:
        return text
    return f"{text}; warning: so few that the loss on them is mostly chance, raise data.holdout"


def adapters_text(config: Config, model: nn.Module) -> str:
    """Rank, what has one, and how much is trained."""
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    num_trained = sum(count for count, is_trained in counts if is_trained)
    owners = [name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name]
    targets = dict.fromkeys(name.replace(".base_layer", "").rpartition(".")[2] for name in owners)
    share = num_trained / sum(count for count, _ in counts)
    return (
        f"{config.adapter.kind} of rank {config.adapter.rank} on {', '.join(targets)}; "
        f"{short(num_trained)} parameters are trained, {share:.2%} of all"
    )


def balance_text(config: Config, model: nn.Module) -> str:
    """What keeps the experts' loads even."""
    if config.adapter.is_on and config.adapter.freeze_base:
        return "as the model has it: its routers are frozen, unless an adapter is on them"
    if config.experts.selection != "top_k":
        return f"even by construction (experts.selection = {config.experts.selection})"
    balance = config.experts.balance
    found = {k: v for k, v in vars(balance).items() if isinstance(v, float) and k != "z_loss"}
    terms = [f"{name} {value:g}" for name, value in found.items() if value]
    texts = [f"{', '.join(terms)} (experts.balance)"] if terms else []
    is_wrapped = config.model.hf is not None
    if is_wrapped and balance.family and (own := _own_auxiliary_loss(getattr(model, "config", None))):
        texts.append(f"the model's own auxiliary loss, {own}")
    if texts:
        return "; ".join(texts)
    has_own = ", or output_router_logits = true in the config.json of a model with a loss of its own"
    return (
        "warning: nothing keeps the experts' loads even, so a few may get most of the tokens; set "
        f"experts.balance.sequence = 0.01 (docs/routing.md){has_own if is_wrapped else ''}"
    )


def _own_auxiliary_loss(config: Any) -> str:
    """Of a Hugging Face model; empty where it is off."""
    names = ("router_aux_loss_coef", "aux_loss_coef")
    found = [f"{name} {value:g}" for name in names if (value := getattr(config, name, None))]
    return found[0] if found and getattr(config, "output_router_logits", False) else ""


def _model_text(config: Config, built: nn.Module) -> str:
    model = config.model
    num_parameters = sum(parameter.numel() for parameter in built.parameters())
    active = token_cost(built, model, config.data.seq_len).active_params
    text = f"{model.hf or model.preset}: {short(num_parameters)} parameters, {short(active)} active a token; "
    text += counted(model.num_hidden_layers, "layer")
    if model.num_moe_layers:
        text += f", {model.num_moe_layers} with {model.num_experts} experts, top {model.num_experts_per_tok}"
    return text


def _weights_text(config: Config, resumed_at: int | None, loaded: str = "") -> str:
    """By what was loaded, which need not be what ``checkpoint.load`` names."""
    if resumed_at is not None and config.checkpoint.load_only_model and resumed_at == 0:
        return f"{loaded}, weights only (checkpoint.load_only_model)"
    if resumed_at is not None:
        return f"checkpoint of step {resumed_at} ({loaded})"
    if config.model.hf is not None and not config.model.random_weights:
        return f"{config.model.hf} (model.hf)"
    return f"random, seed {config.train.seed}"


def _precision_text(config: Config) -> str:
    precision = config.precision
    recipe = "" if precision.recipe == "bf16" else f"{precision.recipe} in "
    grads = "" if precision.grad_dtype is None else f", main gradients {precision.grad_dtype}"
    return (
        f"{recipe}{precision.param_dtype}, gradients summed in {precision.reduce_dtype}, main weights "
        f"{precision.main_dtype}{grads}"
    )


def _devices_text(meshes: Meshes) -> str:
    ranks = f"{meshes.size(Axis.WORLD)} x {device_name(meshes.device)}"
    is_known = meshes.device.type != "cuda" or architecture(meshes.device) == "hopper"
    return ", ".join([ranks, *mesh_axes(meshes.degrees)]) + ("" if is_known else f"; {NEVER_RAN}")


def mesh_axes(degrees: Degrees) -> list[str]:
    """The axes that a user sets and that do something, as ``ep 8``."""
    return [f"{axis} {size}" for axis, size in vars(degrees).items() if size > 1 and axis != Axis.EDP]


def _batch_text(config: Config, start_step: int) -> str:
    train, seq_len = config.train, config.data.seq_len
    text = (
        f"{train.global_batch_size * seq_len:,} tokens a step ({train.global_batch_size} sequences of "
        f"{seq_len}), "
    )
    return text + (f"steps {start_step + 1} to {train.steps}" if start_step < train.steps else "no step left")


def _memory_text(config: Config, model: nn.Module) -> str:
    """Of this rank, before any activation."""
    engine = engine_of(model)
    trained = [group.plan for group in engine.groups if group.plan.requires_grad]
    moments = count_state(config.optim, config.precision)(trained, engine.meshes)
    held = engine.held_bytes() | {"moments": moments.device, "buffers to step moments": moments.staging}
    parts = ", ".join(f"{name} {nbytes / GIB:.3g}" for name, nbytes in held.items() if nbytes)
    text = f"{sum(held.values()) / GIB:.3g} GiB a rank before activations: {parts}"
    return f"{text}; in host memory: moments {moments.host / GIB:.3g}" if moments.host else text


def _activations_text(config: Config, world_size: int) -> str:
    """What of them is kept, computed again, or waits on the host."""
    memory = config.memory
    layers = "" if memory.layers == "all" else f" in layers {memory.layers}"
    again = [name for name in memory.recompute if name != "activation"]
    parts = [f"recomputed{layers}: {', '.join(again)}"] if again else []
    if "activation" in memory.recompute:
        parts.append("SwiGLU of routed experts is never kept (built in), other SwiGLU is recomputed")
    if memory.offload:
        kept = f", not of the last {memory.offload_keep_last}" * bool(memory.offload_keep_last)
        parts.append(f"to host memory{_host_text(config, world_size)}: {', '.join(memory.offload)}{kept}")
    return "; ".join(parts) or "kept (memory.recompute and memory.offload keep less)"


def _host_text(config: Config, world_size: int) -> str:
    """The plan; a wrapped model's first step says what it needs."""
    if config.model.hf is not None:
        return ""
    planned = offloaded_bytes(Job.of(config), Setting.of(config, world_size))
    return f" ({planned / GIB:.3g} GiB a rank)"


def graphs_text(config: Config, world_size: int) -> str:
    """What is captured, and the plan of the memory that stays with it: activations and all that a micro-batch
    needs for a moment."""
    shapes = f"of up to {config.train.graph_shapes} shapes"
    if config.train.graphs == "layer":
        return f"norms and attention of each layer are captured, {shapes}; what they save is kept"
    text = f"micro-batches are captured, {shapes}; their activations keep "
    if config.model.hf is not None:
        return f"{text}their memory"
    step = step_bytes(Job.of(config), Setting.of(config, world_size))
    planned = step.kept + max(step.loss, step.workspace) + step.dispatch
    return f"{text}about {planned / GIB:.3g} GiB"
