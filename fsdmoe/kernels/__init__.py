"""Fused operations behind one seam each, every one with a plain-torch reference beside it."""
