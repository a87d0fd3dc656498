"""Logits processors that also work in `generate()` without a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

from ..ops import invert_draft_vocabulary, over_vocabulary

__all__ = ["DraftVocabularyLogitsProcessor", "MaskTokenLogitsProcessor", "PenaltyLogitsProcessor", "RowTemperature"]


class DraftVocabularyLogitsProcessor(LogitsProcessor):
    """Maps scores over a draft vocabulary to scores over the target's; tokens outside of it get -inf.

    With it, a model whose head scores only part of its vocabulary, such as an EAGLE-3 drafter, generates the target's
    token ids in `generate()`.

    Args:
        target_ids: `[V_d]` int64, the target's token for each token of the draft vocabulary, all different.
        vocab_size: V of the target.

    Raises:
        ValueError: `target_ids` is not an int64 vector, is empty, has a token outside of 0 to V - 1, or has one twice.
    """

    def __init__(self, target_ids: torch.Tensor, vocab_size: int):
        if target_ids.dim() != 1 or target_ids.dtype != torch.int64:
            raise ValueError(
                f"target_ids is {target_ids.dtype} of shape {tuple(target_ids.shape)}; expected int64 of shape [V_d]."
            )
        if len(target_ids) == 0 or target_ids.min() < 0 or target_ids.max() >= vocab_size:
            raise ValueError(f"target_ids are not all tokens of a vocabulary of {vocab_size}; expected 0 to V - 1.")
        if len(target_ids.unique()) < len(target_ids):
            raise ValueError("target_ids name a token twice; expected a different one for each draft token.")
        self.size = len(target_ids)
        self.draft_ids = invert_draft_vocabulary(target_ids, vocab_size)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[..., V]` from `scores` `[..., V_d]`; ignores `input_ids`. Raises `ValueError` for other widths."""
        if scores.shape[-1] != self.size:
            raise ValueError(
                f"The scores are of {scores.shape[-1]} tokens, but the draft vocabulary has {self.size}; expected "
                "those of the draft head."
            )
        return over_vocabulary(scores, self.draft_ids.to(scores.device), len(self.draft_ids), fill=float("-inf"))


class MaskTokenLogitsProcessor(LogitsProcessor):
    """Sets the score of the mask token of a model trained for parallel drafting to -inf: it is never generated.

    Args:
        mask_token_id: the token's id.

    Raises:
        ValueError: `mask_token_id` is not an int of at least 0.
    """

    def __init__(self, mask_token_id: int):
        if not isinstance(mask_token_id, int) or mask_token_id < 0:
            raise ValueError(f"mask_token_id is {mask_token_id!r}; expected a token id, an int of at least 0.")
        self.mask_token_id = mask_token_id

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` `[..., V]` with -inf for the mask token; `input_ids` is not read."""
        is_mask = torch.arange(scores.shape[-1], device=scores.device) == self.mask_token_id
        return scores.masked_fill(is_mask, float("-inf"))


class PenaltyLogitsProcessor(LogitsProcessor):
    """Lowers the scores of tokens generated since the prompt, by the penalties of OpenAI's API.

    Args:
        prompt_length: number of tokens before the new ones.
        presence: subtracted once from the score of every token that was generated.
        frequency: subtracted as often as a token was generated.
    """

    def __init__(self, prompt_length: int, presence: float = 0.0, frequency: float = 0.0):
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` `[B, V]` after `input_ids` `[B, n]`, of which tokens from V on have no score."""
        new, size = input_ids[:, self.prompt_length :], scores.shape[1]
        counts = torch.zeros_like(scores).scatter_add_(1, new.clamp(max=size - 1), (new < size).to(scores.dtype))
        return torch.where(counts > 0, scores - self.presence - self.frequency * counts, scores)


class RowTemperature(LogitsProcessor):
    """Divides the scores of each row of the batch by the row's own temperature, besides `generate(temperature=)`.

    With a drafter, drafts are drawn at the row's temperature, too.

    Args:
        temperatures: one for each row of the batch (prompts times `num_return_sequences`); finite and above 0.

    Raises:
        ValueError: `temperatures` is not a vector of finite numbers above 0.
    """

    def __init__(self, temperatures: Sequence[float] | torch.Tensor):
        self.temperatures = torch.as_tensor(temperatures, dtype=torch.float32)
        is_valid = (self.temperatures > 0) & self.temperatures.isfinite()
        if self.temperatures.dim() != 1 or not is_valid.all():
            raise ValueError(f"temperatures is {temperatures!r}; expected a number above 0 for each row of the batch.")

    def check_rows(self, batch: int) -> torch.Tensor:
        """The temperatures, `[batch]` float32; raises `ValueError` if their number differs from `batch`."""
        if len(self.temperatures) != batch:
            raise ValueError(
                f"RowTemperature has {len(self.temperatures)} temperatures, but the call has {batch} rows (prompts "
                "times num_return_sequences); expected one for each."
            )
        return self.temperatures

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` `[B, V]` divided by the temperatures; ignores `input_ids`."""
        return scores / self.check_rows(len(scores)).to(scores.device)[:, None]


class RowSampling(LogitsProcessor):
    """`temperature`, `top_k` and `top_p` of each row, in the order of `generate()`; greedy decoding if `top_k` is 0.

    They are in the state of a generation (`DecodeState.row_temperatures` and others), since requests come and go;
    `BlockProcessor` applies them.
    """

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "RowSampling reads the rows of a continuous batch; generate() has temperature, top_k, top_p."
        )
