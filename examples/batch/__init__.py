"""What `generate_batch.py` is made of."""
