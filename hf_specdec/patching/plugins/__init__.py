"""Layers and inputs of few models, registered as parts that the engine asks for by interface only."""
