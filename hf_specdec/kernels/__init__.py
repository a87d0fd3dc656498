"""Triton kernels of a round and their PyTorch references.

The files are in the folder `kernels` beside this package in a checkout; wheels have them here, without this file (see
`package-dir` in pyproject.toml).
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "kernels")]
