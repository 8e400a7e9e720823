"""The ``train`` section: the loop of ``train.py``, which is a program and has no folder of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fsdmoe.core.errors import ConfigError, refuse
from fsdmoe.core.rules import at_least, one_of

Graphs = Literal["none", "layer", "step"]
SelfCheck = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop."""

    steps: int = 300
    """Optimizer steps of the whole run."""
    global_batch_size: int = 16
    """Sequences in one optimizer step, over all ranks and micro-batches."""
    micro_batch_size: int = 4
    """Sequences in one forward of one rank; the rest of the step's share is accumulated."""
    output_dir: str = "runs/quickstart"
    """Folder of this run: metrics, TensorBoard, checkpoints, summary. Without it runs/NAME, by the file of
    the configuration or, without a file, by model.preset."""
    seed: int = 0
    """Seed of the initial weights and of the data order, and of dropout, which also depends on the mesh."""
    eval_interval: int = 100
    """Steps between evaluations on the held-out slice; 0 evaluates only at the end, -1 never."""
    eval_batches: int = 8
    """Global batches of held-out rows in one evaluation; the same rows whatever the number of ranks."""
    sample_prompts: tuple[str, ...] = ()
    """Texts that the model goes on with at every evaluation, greedily for 32 tokens: printed, and written to
    metrics.jsonl. Markers such as <|im_start|> in them are the tokens that they name. On the command line a
    comma ends a text; write those with commas as '["Once upon a time, there"]'."""
    max_skipped_steps: int = 10
    """Steps with a non-finite loss or gradient are skipped; after so many in a row the run stops. Those that
    lower precision.loss_scale do not count."""
    self_check: SelfCheck = "auto"
    """Before training, look whether the machines are well: versions, clocks, the shared folder, rates of
    every GPU and group, a small MoE layer against one process, a save that is read again. auto: where ranks
    are on several nodes. What fails ends the run; what is slow is named (docs/many_machines.md)."""
    kernels: Literal["auto", "torch"] = "auto"
    """Fused Triton kernels wherever they can run, or plain torch everywhere: to compare, or to rule them
    out."""
    graphs: Graphs = "none"
    """step: forward and backward of a micro-batch are captured as CUDA graphs, with all gathers and
    reductions, and replayed, so that the host issues one call instead of thousands (docs/graphs.md). layer:
    only norms and attention of each layer, whatever the dispatcher."""
    graph_shapes: int = 4
    """With graphs: so many shapes of micro-batches are captured; further ones run without a graph."""
    deterministic: bool = False
    """Runs of the same configuration on the same machines have the same bits, resumed ones too: kernels add
    up in a fixed order (docs/training.md#the-same-bits)."""
    fused_layers: bool = True
    """With model.hf: norms, projections, rotary positions, routers and attention of the model are computed as
    in fsdmoe's own decoders, where they compute the same; false leaves them to transformers."""

    def evaluates_at(self, step: int) -> bool:
        """Whether an evaluation follows ``step``."""
        return self.eval_interval >= 0 and (
            step == self.steps or (self.eval_interval > 0 and step % self.eval_interval == 0)
        )

    def require_device(self, device_type: str) -> None:
        """Refuse graphs on a device that has none."""
        if self.graphs != "none" and device_type != "cuda":
            raise ConfigError(
                f'train.graphs: expected a GPU for "{self.graphs}", got a run on {device_type}: graphs are '
                'CUDA\'s; set train.graphs = "none"'
            )

    def __post_init__(self) -> None:
        lowest = {
            "steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "eval_interval": -1,
            "eval_batches": 1, "max_skipped_steps": 0, "graph_shapes": 1,
        }  # fmt: skip
        problems = at_least("train", vars(self), lowest)
        problems += one_of(
            "train", vars(self), {"graphs": get_args(Graphs), "self_check": get_args(SelfCheck)}
        )
        if self.graphs == "none" and self.graph_shapes != TrainConfig.graph_shapes:
            problems.append(
                'train.graph_shapes: expected train.graphs = "step" or "layer", which it says something of, '
                'got "none"; set that, or drop the line'
            )
        if not all(self.sample_prompts):
            problems.append("train.sample_prompts: expected texts, got an empty one; write a word or more")
        if self.sample_prompts and self.eval_interval < 0:
            problems.append(
                "train.sample_prompts: expected evaluations, after which samples are made, got "
                "train.eval_interval = -1; set it to 0 (at the end) or more, or drop the prompts"
            )
        if not self.output_dir:
            problems.append("train.output_dir: expected a folder, got an empty string; name one")
        refuse(problems)
