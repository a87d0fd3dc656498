"""Speculative decoding for transformers' own `generate()`."""
