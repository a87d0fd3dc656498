"""Triton kernels of a round, and their PyTorch references.

In a checkout the modules of this package are in the folder `kernels` beside `hf_specdec`. In a wheel they are in this
folder, without this file (`package-dir` in pyproject.toml).
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "kernels")]
