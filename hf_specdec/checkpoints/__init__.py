"""Checkpoints as they are published: files, families, dialects and tensor names."""
