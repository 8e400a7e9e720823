"""Whole micro-batches as CUDA graphs: forward and backward with every gather and reduction in them."""

from fsdmoe.graphs.micro_batches import GraphedMicroBatches, MicroBatches, build_micro_batches

__all__ = ["GraphedMicroBatches", "MicroBatches", "build_micro_batches"]
