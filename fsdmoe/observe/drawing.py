"""A run draws where matplotlib is installed, and goes on without pictures where it is not."""

import logging
from types import ModuleType

logger = logging.getLogger(__name__)


def charts_for(picture: str) -> ModuleType | None:
    """:mod:`fsdmoe.observe.charts`, a second to import; none, with a warning, without the extra."""
    try:
        from fsdmoe.observe import charts
    except ImportError as error:
        logger.warning("%s is not drawn: %s", picture, error)
        return None
    return charts
