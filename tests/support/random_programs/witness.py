"""How much rounding alone moves a program's plain model."""

from __future__ import annotations

import torch

from tests.support.random_programs.draw import Program
from tests.support.random_programs.sides import PlainSide

HALF_A_STEP = 2.0**-9
"""By how much rounding to bfloat16 may change a number."""


class Witness(PlainSide):
    """The plain model once more, from weights that differ in their last bit: of float32, or of bfloat16 where
    the program rounds to that."""

    def __init__(self, program: Program, device: torch.device, tolerance: float) -> None:
        super().__init__(program, device, tolerance)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.params.values():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2.0 - 1.0
                signs = signs.to(device)
                if program.is_exact:
                    parameter.copy_(torch.nextafter(parameter, signs * torch.inf))
                else:
                    parameter.mul_(1 + HALF_A_STEP * signs)

    def follow(self, plain: PlainSide) -> None:
        """Have gradients where the plain model has some."""
        for name, parameter in self.params.items():
            if plain.params[name].grad is None:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def distance_to(self, plain: PlainSide) -> float:
        """Of weights and gradients, each on the scale it is compared on."""
        largest = 0.0
        weights = [(p, plain.params[name]) for name, p in self.params.items()]
        grads = [(a.grad, b.grad) for a, b in weights if a.grad is not None and b.grad is not None]
        for pairs in (weights, grads):
            peaks = [float(b.abs().max()) for _, b in pairs]
            for (a, b), peak in zip(pairs, peaks, strict=True):
                largest = max(largest, float((a - b).abs().max()) / (peak + 1e-2 * max(peaks) + 1e-6))
        return largest
