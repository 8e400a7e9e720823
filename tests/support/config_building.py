"""A configuration from a mapping and keywords, with its findings."""

from typing import Any

from fsdmoe.config import Config, build_config


def build(
    mapping: dict[str, Any] | None = None, world: int = 1, **overrides: str | None
) -> tuple[Config | None, list[str]]:
    problems: list[str] = []
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return build_config(mapping or {}, dotted, world, problems), problems
