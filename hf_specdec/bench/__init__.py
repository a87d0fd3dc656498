"""`hf-specdec bench`: how fast a target generates with drafters and without, measured in one run."""

from .command import add_bench

__all__ = ["add_bench"]
