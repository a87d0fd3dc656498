"""What is changed about a target, or a draft model, while an engine runs it."""
