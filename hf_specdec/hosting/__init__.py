"""The choice of a target's engine: whether the static engine computes what plain `generate()` does, and why not."""
