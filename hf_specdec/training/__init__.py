"""Attention for training drafters."""
