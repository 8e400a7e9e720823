"""A run's folder: its lock, the configuration it keeps, the facts shown at the start, and its samples."""
