"""What to say of quantised operands."""

from collections.abc import Mapping
from typing import Any


def clipping(operands: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str | None:
    """A warning where values were too large for their scales: which operand lost most, and how many did."""
    clipped = [
        (figures["overflow"], f"{role} of {name}", figures["amax"])
        for name, roles in operands.items()
        for role, figures in roles.items()
        if figures["overflow"] > 0
    ]
    if not clipped:
        return None
    share, name, amax = max(clipped)
    others = f" and of {len(clipped) - 1} other operands" if len(clipped) > 1 else ""
    return (
        f"{share:.2g} of the {name}{others} is clipped: magnitudes up to {amax:.3g} are larger than those of "
        "earlier steps, which delayed scales follow from"
    )
