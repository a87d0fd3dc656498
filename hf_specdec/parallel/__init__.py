"""Targets that several processes run together (tensor parallelism)."""
