"""Micro-batches as CUDA graphs: whole, with every gather and reduction in them, or attention alone."""

from fsdmoe.graphs.build import build_micro_batches
from fsdmoe.graphs.layers import LayeredMicroBatches
from fsdmoe.graphs.micro_batches import GraphedMicroBatches
from fsdmoe.models.causal_lm import MicroBatches

__all__ = ["GraphedMicroBatches", "LayeredMicroBatches", "MicroBatches", "build_micro_batches"]
