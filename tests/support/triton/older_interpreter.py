"""What Triton's interpreter did wrong up to 3.6, which torch 2.11 comes with."""

from typing import Any

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def correct() -> None:
    """For this process: NumPy refuses two conversions, and a fused product and sum was rounded twice."""
    patch_tensor, all_ones = interpreter._patch_lang_tensor, InterpreterBuilder.get_all_ones_value

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def get_all_ones_value(self: Any, type: Any) -> Any:
        kind = interpreter._get_np_dtype(type)
        if not np.issubdtype(kind, np.unsignedinteger):
            return all_ones(self, type)
        return TensorHandle(np.full(1, np.iinfo(kind).max, dtype=kind), type.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        """In float64, which holds a product of float32 exactly."""
        product = np.multiply(x.data, y.data, dtype=np.float64)
        return TensorHandle((product + z.data).astype(z.data.dtype), z.dtype.scalar)

    interpreter._patch_lang_tensor = patch_with_index
    InterpreterBuilder.get_all_ones_value = get_all_ones_value
    if not hasattr(interpreter._interpreter, "fma_fp32"):
        InterpreterBuilder.create_fma = create_fma
