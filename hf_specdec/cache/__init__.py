"""The static cache: kinds of layers' memory, each with all that the engine asks of it."""
