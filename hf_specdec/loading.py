"""Loading of targets and tokenizers by name, shared by `hf-specdec bench` and the examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .checkpoints.checkpoint import check_folder
from .patching.stored_checkpoints import stored_options

GGUF_SUFFIX = ".gguf"


def load_target(name: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a target for inference (see `prepare_target`) from a folder, a Hub repository or a GGUF file. AWQ, GPTQ and
    MXFP4 stay as in the file, a GGUF file is dequantised. Raises `OSError` if there is no such target."""
    options: dict[str, Any] = {"dtype": dtype}
    arguments = from_pretrained_arguments(name)
    if Path(name).suffix == GGUF_SUFFIX:
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        options |= stored_options(PreTrainedConfig.get_config_dict(name)[0])
    return prepare_target(AutoModelForCausalLM.from_pretrained(**arguments, **options).to(device))


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the target `name`, a folder, Hub repository or GGUF file."""
    return AutoTokenizer.from_pretrained(**from_pretrained_arguments(name))


def from_pretrained_arguments(name: str) -> dict[str, str]:
    """Arguments of `from_pretrained` for the folder, Hub repository or GGUF file `name`; raises `OSError` if there is
    no such folder or file."""
    path = Path(name)
    if path.suffix == GGUF_SUFFIX:
        if not path.is_file():
            raise FileNotFoundError(f"There is no GGUF file at {path}.")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    check_folder(name)
    return {"pretrained_model_name_or_path": name}


def prepare_target(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze `model`, set it to evaluation mode and reduce its generation config to its special tokens.

    Without the generation config of its checkpoint, decoding is greedy unless the options of a call say otherwise.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=own.eos_token_id, bos_token_id=own.bos_token_id, pad_token_id=own.pad_token_id
    )
    return model.requires_grad_(False).eval()


def set_end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, eos_token: str | None, ignore_eos: bool
) -> None:
    """Set the end-of-sequence and padding tokens in the generation config of `model`.

    `eos_token` becomes the only end-of-sequence token, also of the tokenizer; None keeps those of the config. With
    `ignore_eos` there are none. Raises `ValueError` if the tokenizer does not know `eos_token`.
    """
    settings = model.generation_config
    if eos_token is not None:
        known = {} if tokenizer is None else tokenizer.get_vocab()
        if eos_token not in known:
            raise ValueError(f"--eos-token is {eos_token!r}, which is no token of the target's tokenizer.")
        tokenizer.eos_token = tokenizer.pad_token = eos_token
        settings.eos_token_id = settings.pad_token_id = known[eos_token]
    if settings.pad_token_id is None:
        ends = settings.eos_token_id
        settings.pad_token_id = (ends[0] if isinstance(ends, list) else ends) or 0
    if ignore_eos:
        settings.eos_token_id = None


def usable_device(name: str | None) -> torch.device:
    """The device called `name`, by default a GPU if there is one. Raises `ValueError` if torch cannot use it."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:  # torch's exception depends on its build
        raise ValueError(f"--device is {name!r}, which torch cannot use here: {str(error).splitlines()[0]}") from error
    return device
