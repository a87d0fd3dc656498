"""What a call gives the target to read."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

TOKEN_DTYPES = (torch.int64, torch.int32)


def check_prompts(input_ids: torch.Tensor, mask: torch.Tensor | None, model_kwargs: dict[str, Any]) -> None:
    """Check shapes and dtypes of the prompts of a call.

    Args:
        input_ids: as prepared by `generate()`.
        mask: the attention mask, likewise, on the host.
        model_kwargs: inputs of the model, likewise.

    Raises:
        ValueError: they are not `[batch, length]` token ids, with an attention mask of the same shape or none.
    """
    if model_kwargs.get("inputs_embeds") is not None and input_ids.shape[-1] == 0:
        raise ValueError("The prompt was given as inputs_embeds without input_ids, but a drafter reads token ids.")
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}; expected [batch, length], at least one row of one token."
        )
    if input_ids.dtype not in TOKEN_DTYPES:
        raise ValueError(f"input_ids is {input_ids.dtype}; expected token ids, torch.int64 or torch.int32.")
    if mask is None:
        return
    cache = model_kwargs.get("past_key_values")
    # Behind a filled cache a mask may also cover what that holds: see `continuation.read_prompts`.
    is_filled = cache is not None and cache.get_seq_length() > 0
    shapes = (tuple(mask.shape[:1]), tuple(input_ids.shape[:1])) if is_filled else (mask.shape, input_ids.shape)
    if mask.dim() != 2 or shapes[0] != shapes[1]:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} and input_ids {list(input_ids.shape)}; expected the same."
        )
    others = mask[(mask != 0) & (mask != 1)]
    if len(others) > 0:
        raise ValueError(f"attention_mask holds {others[0].item()}; expected 0 for padding and 1 for tokens only.")


def check_tokens(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Check that `model` has the tokens of a prompt; on a GPU, one that it has not would end the process.

    Args:
        model: the target.
        input_ids: `[B, P]`, on the host.
        attention_mask: `[B, P or more]`, on the host; None if all are tokens.

    Raises:
        ValueError: naming one that it does not have.
    """
    weight = getattr(model.get_input_embeddings(), "weight", None)
    size = max(model.config.get_text_config().vocab_size, 0 if weight is None or weight.dim() != 2 else len(weight))
    tokens = input_ids if attention_mask is None else input_ids.where(attention_mask[:, -input_ids.shape[1] :] != 0, 0)
    lowest, highest = torch.stack(tokens.aminmax()).tolist()
    if lowest < 0 or highest >= size:
        raise ValueError(
            f"input_ids holds the token {lowest if lowest < 0 else highest}, but {type(model).__name__} has tokens 0 "
            f"to {size - 1}. Use the tokenizer of this model, and resize_token_embeddings() after adding tokens to it."
        )
