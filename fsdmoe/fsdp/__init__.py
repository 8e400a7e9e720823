"""Flat non-uniform sharding: parameters as ragged ranges of persistent flat buffers."""
