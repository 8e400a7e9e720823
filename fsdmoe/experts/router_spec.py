"""How an architecture routes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdmoe.core.errors import refuse
from fsdmoe.kernels.router_policy import TopKPolicy


@dataclass(frozen=True, kw_only=True)
class RouterSpec(TopKPolicy):
    """How an architecture routes; a fact of its checkpoints, not a policy of the run.

    ==================  =============  =========  =======  ============  ===============
    family              score          norm_topk  scaling  group_score   correction_bias
    ==================  =============  =========  =======  ============  ===============
    Qwen3-MoE, OLMoE    softmax_topk   as config  1        (no groups)   no
    Mixtral             softmax_topk   yes        1        (no groups)   no
    gpt-oss             topk_softmax   (always)   1        (no groups)   no, router_bias
    DeepSeek-V2         softmax_topk   no         config   max           no
    DeepSeek-V3, GLM-4  sigmoid        as config  config   top2_sum      yes
    ==================  =============  =========  =======  ============  ===============
    """

    num_experts: int
    correction_bias: bool = False
    """A per-expert bias, ``e_score_correction_bias``, that moves the choice but never the weights."""
    router_bias: bool = False
    """The logits have a learned bias (gpt-oss)."""

    def __post_init__(self) -> None:
        refuse(list(self._problems()))

    def _problems(self) -> Iterator[str]:
        if self.num_experts < 1:
            yield f"model.num_experts: expected a positive number, got {self.num_experts}; write at least 1"
            return
        if not 1 <= self.top_k <= self.num_experts:
            yield (
                f"model.num_experts_per_tok: expected 1 to num_experts = {self.num_experts}, "
                f"got {self.top_k}; lower it or add experts"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            yield (
                f"model.n_group: expected a divisor of num_experts = {self.num_experts}, "
                f"got {self.num_groups}; write 1 for no groups"
            )
            return
        if not 1 <= self.topk_groups <= self.num_groups:
            yield (
                f"model.topk_group: expected 1 to n_group = {self.num_groups}, got {self.topk_groups}; "
                f"lower it or add groups"
            )
            return
        reachable = self.topk_groups * (self.num_experts // self.num_groups)
        if self.top_k > reachable:
            yield (
                f"model.topk_group: {self.topk_groups} of {self.num_groups} groups hold {reachable} experts, "
                f"fewer than num_experts_per_tok = {self.top_k}; raise topk_group or lower that"
            )
        if self.num_groups > 1 and self.group_score == "top2_sum" and self.num_experts == self.num_groups:
            yield (
                f"model.n_group: groups of one expert have no two best, got n_group = num_experts = "
                f"{self.num_groups}; lower n_group"
            )
