"""Loading a chat model and its tokenizer by the name given on the command line."""

from __future__ import annotations

import torch
from smollm2 import load_smollm2
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import loading


def load_target(name: str, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A chat model and its tokenizer: `smollm2`, a Hub id, a folder or a GGUF file. The model is frozen."""
    if name == "smollm2":
        model, tokenizer = load_smollm2(dtype=dtype, device=device)
        return model.requires_grad_(False), tokenizer
    return loading.load_target(name, dtype, device), loading.load_tokenizer(name)
