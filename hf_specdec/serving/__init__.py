"""Continuous batching with a drafter, and `hf-specdec serve`: the manager, its requests and results, the server."""
