"""The ``[experts]`` section: how tokens reach experts and what balances the experts' loads.

Facts about the architecture (how many experts, top-k, score function) belong to the model and come as a
:class:`fsdmoe.experts.router_spec.RouterSpec`; the policies of a run are here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

from fsdmoe.core.errors import refuse
from fsdmoe.core.features import CANNOT, Row, above, choice
from fsdmoe.core.rules import at_least, one_of

DispatcherName = Literal["auto", "local", "allgather", "all_to_all", "by_node", "flex"]
Scope = Literal["sequence", "micro_batch", "global_batch"]


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """What pushes the router towards even loads. Each number is a coefficient; 0 switches the term off."""

    sequence: float = 0.0
    """Auxiliary loss over each sequence (DeepSeek-V3's); the same under every layout of ranks."""
    micro_batch: float = 0.0
    """Auxiliary loss over the tokens of one micro-batch of one data-parallel rank (Switch, GShard)."""
    global_batch: float = 0.0
    """Auxiliary loss whose loads are counted over all ranks and the step's micro-batches so far."""
    device: float = 0.0
    """Auxiliary loss that treats the experts of one EP rank as one (DeepSeek-V2, MegaScale-MoE)."""
    device_scope: Scope = "micro_batch"
    """Tokens over which the device term counts loads."""
    transformers: float = 0.0
    """transformers' load_balancing_loss_func: one product over all layers together, over a micro-batch."""
    z_loss: float = 0.0
    """Mean squared log-sum-exp of the router's logits: keeps them small."""
    bias_rate: float = 0.0
    """Auxiliary-loss-free balancing: how far each expert's selection bias moves at every optimizer step."""
    family: bool = True
    """Keep the auxiliary loss that the config.json of a Hugging Face model asks for (output_router_logits,
    router_aux_loss_coef), in addition to the terms above; false leaves it out."""

    def __post_init__(self) -> None:
        problems = [
            f"experts.balance.{name}: expected 0 or more, got {value}; write 0 to switch it off"
            for name, value in vars(self).items()
            if isinstance(value, (int, float)) and not value >= 0
        ]
        refuse(problems)

    @functools.cached_property
    def uses_probabilities(self) -> bool:
        """Whether any term needs the summed routing probabilities."""
        return any((self.sequence, self.micro_batch, self.global_batch, self.device, self.transformers))

    @functools.cached_property
    def has_terms(self) -> bool:
        """Whether anything is added to the loss."""
        return self.uses_probabilities or self.z_loss > 0

    @functools.cached_property
    def uses_sequences(self) -> bool:
        """Whether loads must be kept apart by sequence."""
        return self.sequence > 0 or (self.device > 0 and self.device_scope == "sequence")


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """How many tokens an expert may take; what is above is dropped (it keeps its residual)."""

    factor: float = 1.25
    """Capacity as a multiple of an even share, tokens * top_k / experts, rounded up."""
    scope: Literal["sub_sequence", "sequence"] = "sub_sequence"
    """Which tokens compete: those on this rank (no communication), or each whole sequence over cp and tp."""
    policy: Literal["probability", "position"] = "probability"
    """Who stays: the highest routing weights, or the earliest tokens."""
    per: Literal["expert", "device"] = "expert"
    """Whose capacity: each expert's, or that of all experts of one EP rank together."""
    pad_to_max: bool = False
    """Fill every expert up to its capacity with rows of weight zero, so that each computes the same number of
    rows every time (how many rows are sent between ranks still follows the routing)."""

    def __post_init__(self) -> None:
        problems = []
        if not self.factor > 0:
            problems.append(
                f"experts.capacity.factor: expected a number above 0, got {self.factor}; "
                f"write 1.0 or more, or leave experts.capacity out to drop nothing"
            )
        if self.pad_to_max and self.per == "device":
            problems.append(
                "experts.capacity.pad_to_max: expected a capacity for each expert, got per = 'device'; "
                "set experts.capacity.per = 'expert'"
            )
        if self.pad_to_max and self.scope == "sequence":
            problems.append(
                "experts.capacity.pad_to_max: expected scope = 'sub_sequence', got 'sequence', whose share "
                "on a rank changes from batch to batch; set experts.capacity.scope = 'sub_sequence'"
            )
        refuse(problems)


@dataclass(frozen=True, kw_only=True)
class ExpertChoiceConfig:
    """Expert-choice routing: each expert picks its tokens, so loads are even by construction."""

    factor: float = 1.0
    """Tokens an expert picks, as a multiple of tokens * top_k / experts."""
    max_experts_per_token: int = 0
    """Keep at most so many experts of a token, the highest scores; 0 keeps all, in one column an expert."""

    def __post_init__(self) -> None:
        problems = []
        if not self.factor > 0:
            problems.append(
                f"experts.expert_choice.factor: expected a number above 0, got {self.factor}; write 1.0"
            )
        if self.max_experts_per_token < 0:
            problems.append(
                f"experts.expert_choice.max_experts_per_token: expected 0 or more, got "
                f"{self.max_experts_per_token}; write 0 for no limit"
            )
        refuse(problems)


@dataclass(frozen=True, kw_only=True)
class FlexConfig:
    """The flex dispatcher: rows are written into buffers of a fixed size, and no host waits for counts."""

    rows: float = 2.0
    """How much a rank's buffers hold (rows that it receives, and what its experts compute of them), as a
    multiple of what an even routing brings. If more comes, the step is run again by all_to_all."""
    blocks: int = 32
    """Thread blocks of the kernels that write rows into other ranks' memory; each takes a multiprocessor."""
    domain: int = 0
    """Neighbouring ranks that reach each other's memory (an NVLink domain); 0 takes the ranks of a node."""

    def __post_init__(self) -> None:
        problems = []
        if not self.rows > 0:
            problems.append(f"experts.flex.rows: expected a number above 0, got {self.rows}; write 2.0")
        if self.blocks < 1:
            problems.append(f"experts.flex.blocks: expected 1 or more, got {self.blocks}; write 32")
        if self.domain < 0:
            problems.append(
                f"experts.flex.domain: expected 0 or more, got {self.domain}; write 0 for the ranks of a node"
            )
        refuse(problems)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The MoE layers: routing, balance, dispatch."""

    dispatcher: DispatcherName = "auto"
    """How tokens reach experts; auto picks by expected communication volume and logs the choice at
    start-up. by_node is all_to_all in two exchanges: a token goes to each node once, which hands it on to its
    ranks and sums their outputs."""
    dispatch_dtype: Literal["same", "float8"] = "same"
    """What rows are sent to experts in: the dtype of activations, or eight bits with a scale for every 128,
    which is half the bytes of bfloat16. Rows come back as they are."""
    dispatch_grad_dtype: Literal["same", "float8"] = "same"
    """The same for gradients on their way to the experts in backward."""
    chunks: int = 1
    """In how many chunks a layer's rows are sent to experts and back, each while another one is computed.
    All of them hold the routing of one batch, so results are those of one chunk; nothing changes where
    nothing is sent (ep 1, etp 1)."""
    sub_batches: int = 1
    """In how many sub-batches the rows of a micro-batch go through the layers: while those of one are sent to
    experts and back, attention and experts of another are computed. Each is routed as a micro-batch of its
    own; nothing changes where nothing is sent (ep 1, etp 1), or in evaluation."""
    clones: int = 0
    """Slots a rank for clones of other ranks' experts: what a rank has above the mean is computed by clones
    on ranks below it, planned for each layer and batch. Two bring the busiest rank within a few percent of
    the mean; 0 clones nothing. auto then takes all_to_all; flex has them too (no wait for the host, so also
    in graphs) where the ranks of an ep group share an NVLink domain. Nothing changes at ep 1."""
    clone_rows: int = 1024
    """An expert is cloned to a rank only if it takes over more rows there than this: what sending its weights
    and their gradients costs, in rows of compute."""
    clone_keep: bool = True
    """Keep the weights of clones from forward to backward; false sends them again instead. Layers that are
    recomputed as a whole keep none and send them again in any case: leave it true there."""
    transfer_sms: int = 16
    """Multiprocessors that the experts' products leave free while rows are exchanged concurrently, as many as
    an exchange takes: NCCL 16 to 32, one-sided kernels fewer. Too few, and products wait for each other."""
    selection: Literal["top_k", "expert_choice", "forced_balance"] = "top_k"
    """Who chooses: each token its top-k experts, each expert its tokens, or (benchmarks only) a fixed
    round-robin."""
    compute: Literal["grouped", "sequential"] = "grouped"
    """How a rank computes its experts: all in grouped products, or one after the other in plain torch, which
    is slow and easy to follow in a debugger."""
    record: str | None = None
    """Folder to write every training token's routing to, a file a step and rank; see docs/routing.md."""
    replay: str | None = None
    """Recorded routing to follow, a file or a folder: experts are taken from it, weights from the router."""
    replay_weights: bool = False
    """Take the recorded weights too, as values; gradients reach the router as if it had produced them."""
    weight_after: bool = False
    """Apply the routing weight after the second projection instead of before it: the same value, rounded
    elsewhere."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    capacity: CapacityConfig | None = None
    """Drop tokens above a capacity; none is dropless."""
    expert_choice: ExpertChoiceConfig = field(default_factory=ExpertChoiceConfig)
    flex: FlexConfig = field(default_factory=FlexConfig)

    @functools.cached_property
    def routing_keys(self) -> tuple[str, ...]:
        """The keys by which tokens are routed or balanced otherwise than the architecture alone says."""
        terms = [name for name in _TERMS if getattr(self.balance, name)]
        others = {
            "selection": self.selection != "top_k",
            "capacity": self.capacity is not None,
            "replay_weights": self.replay_weights,
        }
        named = [f"balance.{name}" for name in terms] + [name for name, is_on in others.items() if is_on]
        return tuple(f"experts.{name}" for name in named)

    @property
    def _fixed_rows(self) -> tuple[str, float]:
        """The key that says how many rows go to experts whatever the router decides, as a multiple of an even
        share; none, and 0, where the router does."""
        if self.selection == "expert_choice":
            return "experts.expert_choice.factor", self.expert_choice.factor
        if self.capacity is not None and self.capacity.pad_to_max:
            return "experts.capacity.factor", self.capacity.factor
        return "", 0.0

    def __post_init__(self) -> None:
        dtypes = dict.fromkeys(("dispatch_dtype", "dispatch_grad_dtype"), ("same", "float8"))
        least = at_least("experts", vars(self), _LEAST)
        problems = one_of("experts", vars(self), dtypes) + least + self._flex_problems()
        if self.selection == "expert_choice":
            balanced = [name for name in _TERMS if name != "z_loss" and getattr(self.balance, name)]
            problems += [
                f"experts.balance.{name}: expert choice is balanced by construction, got a coefficient of "
                f"{getattr(self.balance, name)}; set it to 0"
                for name in balanced
            ]
            if self.capacity is not None:
                problems.append(
                    "experts.capacity: expert choice has its own experts.expert_choice.factor; "
                    "leave experts.capacity out"
                )
        if self.record is not None and self.replay is not None:
            problems.append(
                "experts.record: expected record or replay, got both; what is replayed is recorded already"
            )
        if self.replay_weights and self.replay is None:
            problems.append(
                "experts.replay_weights: expected a recording in experts.replay, got none; name one"
            )
        if self.selection == "forced_balance" and (self.record or self.replay):
            problems.append(
                "experts.selection: forced_balance does not follow the router, so there is nothing to record "
                "or replay; set it to top_k"
            )
        refuse(problems)

    def _flex_problems(self) -> list[str]:
        if self.dispatcher != "flex":
            return [
                f"experts.flex.{key}: expected experts.dispatcher = flex, which alone has it, got "
                f"{self.dispatcher}; choose flex, or drop the line"
                for key, default in vars(FlexConfig()).items()
                if getattr(self.flex, key) != default
            ]
        key, factor = self._fixed_rows
        if factor <= self.flex.rows:
            return []
        return [
            f"experts.flex.rows: expected at least {key}, whose rows would never fit, got "
            f"{self.flex.rows}; set it to {factor} or more"
        ]


_LEAST = {"chunks": 1, "sub_batches": 1, "transfer_sms": 0, "clones": 0, "clone_rows": 0}
_TERMS = ("sequence", "micro_batch", "global_batch", "device", "transformers", "z_loss", "bias_rate")


EXPERT_PARALLELISM = above("expert parallelism", "mesh.ep")
LOCAL = choice("experts that stay", "experts.dispatcher", "local", "auto")
EXPERTS_ELSEWHERE = Row(LOCAL, EXPERT_PARALLELISM, CANNOT, "tokens have to reach experts on other ranks")
"""A row of the table in :mod:`fsdmoe.config.compatibility`."""
