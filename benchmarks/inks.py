"""How pictures of the pages look, in light and in dark: on no background of their own, text as text."""

from __future__ import annotations

from typing import Any

INK = {"light": "#22262b", "dark": "#e3e6ea"}


def style_of(mode: str, name: str) -> dict[str, Any]:
    """matplotlib's settings. ``name``: what makes ids in the file the same each time it is drawn."""
    keys = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    return dict.fromkeys(keys, INK[mode]) | {
        "svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
        "axes.spines.right": False,
    }  # fmt: skip
