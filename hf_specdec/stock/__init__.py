"""The stock engine: drafters in transformers' own assisted generation, row by row."""
