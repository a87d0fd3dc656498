"""`hf-specdec bench`: measures how fast a target generates with and without drafters, in one run."""
