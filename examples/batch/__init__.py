"""Parts of `generate_batch.py`."""
