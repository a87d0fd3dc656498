"""Published checkpoints: files, families, dialects and tensor names."""
