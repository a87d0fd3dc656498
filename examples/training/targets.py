"""Loading a chat model and its tokenizer by the name given on the command line."""

from __future__ import annotations

import torch
from smollm2 import load_smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load_target(name: str, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A chat model and its tokenizer: `smollm2`, a Hub id or a folder. The model is frozen."""
    if name == "smollm2":
        model, tokenizer = load_smollm2(dtype=dtype, device=device)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(name)
    return model.requires_grad_(False), tokenizer
