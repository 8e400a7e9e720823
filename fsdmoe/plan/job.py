"""What is planned: a :class:`Job` says what is to be trained, a :class:`Setting` how, on one rank's view.

Both are small and immutable: a search makes hundreds of thousands of settings, so sections of the
configuration are shared between them and nothing is checked here. What the engine and the optimizer plan for
them is asked once for each mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from fsdmoe.config import Config
from fsdmoe.context_parallel.config import ContextParallelConfig
from fsdmoe.experts.config import ExpertsConfig
from fsdmoe.fsdp.config import FSDPConfig
from fsdmoe.fsdp.memory_plan import MemoryPlan, memory_of
from fsdmoe.huggingface.lora_config import AdapterConfig
from fsdmoe.memory.config import MemoryConfig
from fsdmoe.mesh import Degrees, resolve_degrees
from fsdmoe.models.config import ModelConfig
from fsdmoe.optim import count_state
from fsdmoe.optim.config import OptimConfig
from fsdmoe.optim.group_config import GroupConfig
from fsdmoe.plan.loads import Cloning, Loads, Skew
from fsdmoe.plan.parameters import EnginePlan, ModelSource, plan_parameters
from fsdmoe.precision.config import PrecisionConfig, torch_dtype


@dataclass(frozen=True, eq=False)  # one is made for all settings of a search, which ask of it by identity
class Job:
    """What is trained, whatever the layout."""

    model: ModelConfig
    seq_len: int
    global_batch_size: int
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    is_wrapped: bool = False
    """It is a model of transformers."""
    has_plain_layers: bool = False
    """Its layers compute, and keep for backward, what plain torch does."""
    has_adapters: bool = False
    """Only adapters on attention and experts are trained."""
    groups: tuple[GroupConfig, ...] = ()
    """Of parameters; some are not trained."""
    loads: Loads = field(default_factory=Loads)
    """Of experts."""

    @classmethod
    def of(cls, config: Config) -> Job:
        is_wrapped = config.model.hf is not None
        return cls(
            config.model,
            config.data.seq_len,
            config.train.global_batch_size,
            config.experts,
            config.adapter,
            is_wrapped=is_wrapped,
            has_plain_layers=is_wrapped and not config.train.fused_layers,
            has_adapters=config.adapter.is_on,
            groups=config.optim.groups,
        )

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    def source(self, precision: PrecisionConfig) -> ModelSource:
        return ModelSource(self.model, self.experts, self.adapter, precision, self.groups)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How it is trained: degrees, and the sections that memory and time depend on."""

    degrees: Degrees
    micro_batch_size: int = 1
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    context: ContextParallelConfig = field(default_factory=ContextParallelConfig)
    is_replayed: bool = False
    """Micro-batches are CUDA graphs, which no host launches kernel by kernel."""

    @classmethod
    def of(cls, config: Config, world_size: int) -> Setting:
        return cls(
            degrees=resolve_degrees(config.mesh, world_size),
            micro_batch_size=config.train.micro_batch_size,
            memory=config.memory,
            fsdp=config.fsdp,
            precision=config.precision,
            optim=config.optim,
            experts=config.experts,
            context=config.context_parallel,
            is_replayed=config.train.graphs == "step",
        )

    @property
    def recompute(self) -> frozenset[str]:
        """Parts, of the layers that ``memory.layers`` names."""
        return frozenset(self.memory.recompute)

    @property
    def offload(self) -> frozenset[str]:
        """Activations that wait in host memory."""
        return frozenset(self.memory.offload)

    def cloning(self, job: Job) -> Cloning | None:
        """Of hot experts; None without."""
        experts = self.experts
        if not experts.clones or self.degrees.ep == 1:
            return None
        pairs = self.tokens(job) * job.model.num_experts_per_tok
        return Cloning(job.model.num_experts, experts.clones, experts.clone_rows, pairs)

    def skew(self, job: Job) -> Skew:
        """Of its ranks' experts."""
        return job.loads.skew(self.degrees.ep, self.cloning(job))

    @property
    def dispatcher(self) -> str:
        """As a run decides it, but for ``auto`` without clones, which the sizes of the model decide."""
        has_clones = self.experts.clones and self.experts.dispatcher == "auto"
        return "all_to_all" if has_clones else self.experts.dispatcher

    @property
    def param_bytes(self) -> int:
        return torch_dtype(self.precision.param_dtype).itemsize

    @property
    def expert_bytes(self) -> int:
        """Of an element of experts' weights as layers hold them: codes are sent and cloned as codes."""
        precision = self.precision
        is_coded = precision.quantized_weights and "experts" in precision.covers
        return 1 if is_coded else self.param_bytes

    @property
    def main_bytes(self) -> int:
        return torch_dtype(self.precision.main_dtype).itemsize

    @property
    def grad_bytes(self) -> int:
        """Of main gradients."""
        return torch_dtype(self.precision.grad_dtype or self.precision.main_dtype).itemsize

    @property
    def reduce_bytes(self) -> int:
        return torch_dtype(self.precision.reduce_dtype).itemsize

    def tokens(self, job: Job) -> int:
        """Of one micro-batch, on this rank between layers."""
        degrees = self.degrees
        if self.context.dynamic:
            return max(1, self.context.max_tokens // degrees.tp)
        return max(1, self.micro_batch_size * job.seq_len // (degrees.cp * degrees.tp))

    def num_micro_batches(self, job: Job) -> int:
        """Of one rank in a step; with dynamic context parallelism, if all of them were full."""
        degrees = self.degrees
        if self.context.dynamic:
            ranks = degrees.dp_outer * degrees.dp_shard * degrees.cp
            return math.ceil(job.tokens_per_step / (ranks * self.context.max_tokens))
        rows = job.global_batch_size // (degrees.dp_outer * degrees.dp_shard)
        return max(1, rows // self.micro_batch_size)


@lru_cache(maxsize=1024)
def _engine_plan(job: Job, degrees: Degrees, fsdp: FSDPConfig, precision: PrecisionConfig) -> EnginePlan:
    return plan_parameters(job.source(precision), degrees, fsdp)


def engine_plan(job: Job, setting: Setting) -> EnginePlan:
    """What the engine plans for a rank."""
    return _engine_plan(job, setting.degrees, setting.fsdp, setting.precision)


@lru_cache(maxsize=1024)
def _memory_plan(plan: EnginePlan, optim: OptimConfig) -> MemoryPlan:
    return memory_of(plan.model, plan.at, plan.policy, count_state(optim, plan.policy.precision))


def memory_plan(job: Job, setting: Setting) -> MemoryPlan:
    """What the engine and the optimizer hold, for one micro-batch a step."""
    return _memory_plan(engine_plan(job, setting), setting.optim)
