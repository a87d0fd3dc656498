"""CUDA graphs: capture and replay, compilation, and bucket sizes."""
