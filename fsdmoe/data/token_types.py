"""What every tokenizer shares: the type of token ids, and what a marker in a template looks like."""

from __future__ import annotations

import re
from typing import Any

import numpy.typing as npt

TokenArray = npt.NDArray[Any]

MARKER = re.compile(r"<[^<>{}\s]+>")
