"""The type of token ids, which all tokenizers share."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

TokenArray = npt.NDArray[Any]
