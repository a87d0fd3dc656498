"""CUDA graphs: what they are captured in, compiled pieces between them, and the sizes that they are captured for."""
