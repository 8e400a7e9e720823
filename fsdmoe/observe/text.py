"""Numbers in few characters, the same everywhere: console, summary, chart."""

_THOUSANDS = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
UNKNOWN = "n/a"


def short(value: float | None, digits: int = 3) -> str:
    """About ``digits`` significant digits and a suffix: 12345 -> 12.3k, 2500000 -> 2.5M."""
    if value is None:
        return UNKNOWN
    for size, suffix in _THOUSANDS:
        # A value that would be rounded up to 1000 of the smaller unit belongs to the larger one.
        if abs(float(f"{value:.{digits}g}")) >= size:
            return f"{value / size:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


def percent(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.1f}%"


def number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    """1:02:03 with hours, 2:03 without, 3d 04:05 with days."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
