"""`num_assistant_tokens="auto"`: the choice of drafts for each round, by the costs of rounds and the acceptance."""
