"""Which engine a target gets: whether the static one computes what plain `generate()` does, and why not."""
