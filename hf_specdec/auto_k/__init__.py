"""`num_assistant_tokens="auto"`: how many drafts each round has, by what rounds cost and what is accepted."""
