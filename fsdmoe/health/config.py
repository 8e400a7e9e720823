"""The ``health`` section: what looks after a long run, and what it does about what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fsdmoe.core.errors import refuse
from fsdmoe.core.rules import at_least, one_of

OnSpike = Literal["none", "skip", "lower", "rollback"]


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """What looks after a long run: slow, stuck and wrong ranks, spikes of the loss, the host's side."""

    step_times: int = 0
    """Steps between two looks at which rank the others wait for, and in which exchange; 0: never. Choose
    20 or more: single steps vary, and a look takes as long as reading the record of 2,000 collectives does
    (some 30 ms of the host)."""
    hang_seconds: float = 0.0
    """A step that takes longer is explained (which collective, which rank never came), with stacks of all
    ranks, and the run ends. Choose more than the longest evaluation or save. 0: collectives wait for 10
    minutes. While it is on, `kill -USR1` to any rank writes stacks of all ranks to <run folder>/stacks."""
    silent_seconds: float = 120.0
    """Of runs on several nodes: a rank that is not heard of for so long is lost, with its connections still
    open (the power or the network of its node is gone). It is named, and the run ends. Threads exchange
    heartbeats for this, apart from the steps. 0: collectives wait for 10 minutes."""
    checksums: int = 0
    """Steps between two comparisons of values that several ranks hold (weights under mesh.dp_outer, buffers);
    a difference ends the run and names the rank. 0: never."""
    on_spike: OnSpike = "none"
    """What to do with a step whose loss is far above the last ones: nothing, skip its update, lower its
    learning rate to a tenth, or roll back to the newest checkpoint and go on with the data behind it."""
    spike_factor: float = 10.0
    """A loss is a spike from so many typical deviations above the median of the last 32 on."""
    max_rollbacks: int = 3
    """Of one start; after so many the run stops."""
    gc_interval: int = 0
    """Python's garbage collection runs on all ranks in the same steps, every so many, and at no other time;
    0 leaves it to Python."""
    bind_cores: bool = False
    """Bind each rank to its share of the cores that are next to its GPU (by PCIe), or of all without one."""

    def __post_init__(self) -> None:
        lowest = dict.fromkeys(
            ("step_times", "hang_seconds", "silent_seconds", "checksums", "gc_interval"), 0
        )
        lowest |= {"spike_factor": 1, "max_rollbacks": 1}
        problems = at_least("health", vars(self), lowest)
        problems += one_of("health", vars(self), {"on_spike": get_args(OnSpike)})
        if self.on_spike == "none" and self.spike_factor != HealthConfig.spike_factor:
            problems.append(
                'health.spike_factor: expected health.on_spike = "skip", "lower" or "rollback", which it '
                'says something of, got "none"; set that, or drop the line'
            )
        refuse(problems)
