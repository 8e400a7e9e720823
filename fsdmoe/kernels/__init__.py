"""Fused operations, each behind one function, with a plain-torch reference next to it."""
