"""Logits processors for rows of continuous batching, where a request may have its own processors."""

from __future__ import annotations

import logging
from collections.abc import Hashable

import torch
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor

from ..errors import first_line
from ..kernels.types import RowRules
from ..modules.patch import user_code
from ..ops import certain
from ..state import DecodeState
from .processors import BlockProcessor

logger = logging.getLogger(__name__)

# The module of transformers' own processors, which are defined for every text.
_DEFINED_EVERYWHERE = "transformers.generation.logits_process"


class RowsProcessor:
    """The `BlockProcessor` of rows that come and go, some of which have their own processors or `RowRules`.

    `RowRules` are in the state, for the processors that all rows share. The processors of a row replace these. They get
    the text of the row alone, as in `generate()` for its prompt: `input_ids` `[1, n]` and scores `[1, V]`, for one
    position of the block after the other, drafts included. They must be functions of their arguments. Positions past
    the row's length limit are left out. So are those after a draft that is ruled out or ends the row, unless all
    processors are transformers' own.

    Args:
        without_rules, with_rules: for all other rows, all positions at once; the latter, with the processors of
            `RowRules`, while some row has such rules.
        fails_alone: whether an error of a row's processors is recorded instead of raised.

    Attributes:
        row_sampling: see `BlockProcessor`.
        own: processors, or `RowRules`, of the rows that have their own, by row.
        failed: recorded errors, by row; the scores of such rows are meaningless.
    """

    def __init__(self, without_rules: BlockProcessor, with_rules: BlockProcessor, fails_alone: bool):
        self._without_rules, self._with_rules, self._fails_alone = without_rules, with_rules, fails_alone
        self.row_sampling = without_rules.row_sampling
        self.own: dict[int, LogitsProcessorList | RowRules] = {}
        self.failed: dict[int, str] = {}

    @property
    def shared(self) -> BlockProcessor:
        """The processor of the rows without their own processors, as long as `own` is the same."""
        has_rules = any(isinstance(one, RowRules) for one in self.own.values())
        return self._with_rules if has_rules else self._without_rules

    @property
    def _apart(self) -> dict[int, LogitsProcessorList]:
        return {row: one for row, one in self.own.items() if not isinstance(one, RowRules)}

    @property
    def key(self) -> Hashable | None:
        """See `BlockProcessor.key`; None while rows have their own processors."""
        return None if self._apart else self.shared.key

    @property
    def reads_text(self) -> bool:
        """See `BlockProcessor`; rows with their own processors count as rows whose text is read."""
        return bool(self._apart) or self.shared.reads_text

    def __call__(self, logits: torch.Tensor, block: torch.Tensor, state: DecodeState) -> torch.Tensor:
        """See `BlockProcessor.__call__`."""
        scores, own = self.shared(logits, block, state), self._apart
        if not own:
            return scores
        scores = scores.to(torch.float32, copy=True)
        numbers = [state.lengths, state.limits, state.row_top_k, state.finished.long()]
        for row, (length, limit, top_k, is_finished) in enumerate(torch.stack(numbers, dim=1).tolist()):
            if row in own and not is_finished:
                text, most = torch.cat([state.tokens[row, :length], block[row, 1:]]), limit - length
                try:
                    processed = _processed(own[row], logits[row, :most], text, length, state, row)
                except Exception as error:
                    if not self._fails_alone:
                        raise
                    logger.exception("The logits processors of a request have failed.")
                    self.failed[row] = f"{type(error).__name__}: {first_line(error)}"
                    continue
                # A greedy request in a batch that samples.
                scores[row, :most] = certain(processed) if state.is_sampling and top_k == 0 else processed
        return scores


def _processed(
    processors: LogitsProcessorList, logits: torch.Tensor, text: torch.Tensor, length: int, state: DecodeState, row: int
) -> torch.Tensor:
    """Processed `logits` `[n, V]` of positions of `row`, `[n, V]` float32; the first one follows `text[:length]`."""
    scores, is_everywhere = logits.to(torch.float32, copy=True), all(map(_is_defined_everywhere, processors))
    for step in range(len(scores)):
        with user_code():
            scores[step] = processors(text[None, : length + step], scores[step : step + 1].clone())[0]
        if not is_everywhere and step + 1 < len(scores):
            draft = text[length + step]
            is_ruled_out = scores[step, draft].isneginf()
            if not state.is_sampling:
                is_ruled_out &= scores[step].argmax() != draft
            if bool(is_ruled_out | (state.eos[row] == draft).any()):
                break
    return scores


def _is_defined_everywhere(processor: object) -> bool:
    return type(processor).__module__ == _DEFINED_EVERYWHERE and type(processor) is not PrefixConstrainedLogitsProcessor
