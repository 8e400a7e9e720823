"""The errors that users get. Everything else that is raised is a bug in fsdmoe or in torch."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """Nothing of ours is broken: the message says what is wrong and what to do."""

    exit_code = 1
    """Of a program that it ends."""


class ConfigError(UserError, ValueError):
    """Something the user wrote cannot be done.

    The message starts with the dotted key it is about, says what was expected and what was found, and ends
    with the fix: ``mesh.ep: expected a divisor of 8 experts, got 3; choose 1, 2, 4 or 8``. One error can hold
    several findings, a line each.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems: tuple[str, ...] = problems
        super().__init__("\n".join(problems))


def refuse(problems: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` with a line for each problem, if there are any."""
    if problems:
        raise ConfigError(*problems)


class LabelError(ConfigError, RuntimeError):
    """A label is outside of the model's vocabulary. Also a ``RuntimeError``: torch's own losses raise one."""
