"""Parts of `train_drafter.py` and `evaluate_drafter.py`."""
