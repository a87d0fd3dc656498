"""`hf-specdec bench`: measures how fast a target generates with and without drafters, in one run."""

from .command import add_bench

__all__ = ["add_bench"]
