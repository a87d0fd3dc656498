"""Random numbers of a call, and logits processors over blocks of draft tokens."""
