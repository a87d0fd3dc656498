"""Changes that the static engine makes to a target, or a draft model, while it runs it, and undoes afterwards."""
