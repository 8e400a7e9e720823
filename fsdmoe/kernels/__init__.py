"""Fused operations, each behind one function that takes plain torch where no kernel can run."""
