"""The methods of `GenerationMixin` that a call with a drafter goes through."""
