"""The static cache, and the kinds of memory of its layers."""
