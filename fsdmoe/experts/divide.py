"""What experts can be divided by."""

from __future__ import annotations

from fsdmoe.errors import ConfigError
from fsdmoe.rules import divisor_problems


def experts_per_rank(num_experts: int, ep: int, world_size: int = 0) -> int:
    """How many of a layer's experts each EP rank holds; ConfigError where ``ep`` does not divide them, with
    what so many ranks can have instead."""
    if not divides(ep, num_experts):
        if world_size == 1:  # of one process, which was perhaps only forgotten to be several
            (line,) = ep_problems(num_experts, ep)
            raise ConfigError(
                f"{line}, and start a multiple of as many ranks in all (on one host --nproc-per-node; in a "
                "dry run --world)"
            )
        (line,) = ep_problems(num_experts, ep, world_size)
        raise ConfigError(f"{line}, or another model.num_experts" if world_size else line)
    return num_experts // ep


def check_expert_width(width: int, etp: int) -> None:
    """ConfigError for experts whose inner width ``etp`` does not divide."""
    if not divides(etp, width):
        raise ConfigError(*etp_problems(width, 0, etp))


def divides(degree: int, *numbers: int) -> bool:
    return degree > 0 and not any(number % degree for number in numbers)


def ep_problems(num_experts: int, ep: int, world_size: int = 0) -> list[str]:
    return divisor_problems("mesh.ep", ep, {"experts": num_experts}, also_of=world_size)


def etp_problems(width: int, bias_width: int, etp: int) -> list[str]:
    cut = {"columns of an expert's width": width, "hidden elements of the experts' bias": bias_width}
    return divisor_problems("mesh.etp", etp, cut)
