"""Calls: their prompts and requests, what they keep and return, and the caches that they continue."""
