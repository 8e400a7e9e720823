"""Tensor parallelism with sequence parallelism: heads, columns, vocabulary and tokens split over ranks."""
