"""`hf-specdec inspect`: what a checkpoint is, and whether it is read as it was trained."""
