"""A process with a copy of the memory of this one, which need not import anything again."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import torch


def start_forked(function: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start `function`, which uses no GPU, in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(function, *arguments), daemon=True)
    process.start()
    return process


def _run(function: Callable[..., object], *arguments: object) -> None:
    torch.set_num_threads(1)  # there are no others in the copy
    function(*arguments)
