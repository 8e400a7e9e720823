"""What experts can be divided by."""

from __future__ import annotations

from fsdmoe.core.errors import ConfigError
from fsdmoe.core.rules import divisor_problems


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


def check_clones_stay(ep: int, domain: int, world_size: int, *, key: str = "experts.flex.domain") -> None:
    """ConfigError for clones by flex where ranks of an EP group are in several NVLink domains.

    Args:
        ep: Neighbouring ranks that are one group.
        domain: Neighbouring ranks that reach each other's memory.
        world_size: All ranks.
        key: What says how many are in a domain.
    """
    if any(first // domain != (first + ep - 1) // domain for first in range(0, world_size, ep)):
        raise clones_apart(ep, f", of {domain} each ({key})", f"an ep that divides {domain}")


def clones_apart(ep: int, domains: str = "", smaller: str = "a smaller ep") -> ConfigError:
    """The refusal of clones by flex over several NVLink domains, with what is known of these."""
    return ConfigError(
        'experts.clones: with experts.dispatcher = "flex", expected the ranks of an EP group in one NVLink '
        f'domain, got ep {ep} over several{domains}; set experts.dispatcher = "all_to_all", or take {smaller}'
    )


def divides(degree: int, *numbers: int) -> bool:
    return degree > 0 and not any(number % degree for number in numbers)


def ep_problems(num_experts: int, ep: int, world_size: int = 0) -> list[str]:
    return divisor_problems("mesh.ep", ep, {"experts": num_experts}, also_of=world_size)


def etp_problems(width: int, bias_width: int, etp: int) -> list[str]:
    cut = {"columns of an expert's width": width, "hidden elements of the experts' bias": bias_width}
    return divisor_problems("mesh.etp", etp, cut)
