"""Triton kernels of a round, and their PyTorch references.

In a checkout this package's modules are the files of the folder `kernels` beside `hf_specdec`. A wheel has them in this
folder, without this file (`package-dir` in pyproject.toml).
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "kernels")]
