"""One thread a worker: several workers with a thread for every core each would only get in each other's way."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
