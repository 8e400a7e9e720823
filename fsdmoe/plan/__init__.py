"""What a configuration costs before anything is built: memory, traffic and time of a step, the search for
the best one, and the page that shows them."""

from fsdmoe.plan.estimate import Estimate, estimate
from fsdmoe.plan.hardware import GPUS, Gpu
from fsdmoe.plan.job import Job, Setting

__all__ = ["GPUS", "Estimate", "Gpu", "Job", "Setting", "estimate"]
