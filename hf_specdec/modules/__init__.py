"""Modules of models: what they are, which state they are in, and what is replaced in them during a call."""
