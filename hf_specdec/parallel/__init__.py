"""Tensor parallelism: targets that several ranks run together."""
