"""Experts whose products cannot be captured: no grouped kernel takes their shapes or dtype, and the loop in
its place reads on the host where each expert's rows end."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fsdmoe.core.errors import ConfigError
from fsdmoe.fsdp.plan import ParamPlan

_ROW_BYTES = 16
"""Rows of both operands of a grouped product are multiples of it."""


def check_expert_shapes(params: Iterable[ParamPlan], param_dtype: torch.dtype) -> None:
    """Refuse experts that are computed by a loop, before anything is captured. ``param_dtype``: of the values
    of those that are kept as codes.

    Raises:
        ConfigError: The first weight that no grouped kernel takes, by name.
    """
    for param in params:
        if param.placement.mesh != "expert" or len(param.local_shape) < 3:  # biases are added, not multiplied
            continue
        dtype = param.dtype if param.scaling is None else param_dtype
        if dtype != torch.bfloat16:
            raise ConfigError(
                "train.graphs: the rows of each expert are counted on the host for products that are not in "
                f'bfloat16; expected precision.param_dtype = "bfloat16", got {dtype} for {param.name}; '
                'set that, or train.graphs = "none"'
            )
        sizes = [size for size in param.local_shape[1:] if size * dtype.itemsize % _ROW_BYTES]
        if sizes:
            raise ConfigError(
                "train.graphs: the rows of each expert are counted on the host where a width is no multiple "
                f"of {_ROW_BYTES // dtype.itemsize}; expected hidden size and expert width to be "
                f"multiples of it, got {sizes[0]} in {param.name} "
                f'{list(param.local_shape)}; change the width, or set train.graphs = "none"'
            )
