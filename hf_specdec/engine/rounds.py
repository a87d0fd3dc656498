"""Rounds: draft, verify, commit.

`run_round` and `catch_up` run eagerly, compiled and captured; nothing in them reads a device value on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..drafters.base import MATCH, Drafter
from ..drafters.none import no_drafts
from ..kernels.types import NO_TOKEN, Proposal, VerificationResult
from ..ops import join_rows, token_logprobs, verify_block, verify_sampling, verify_tree
from ..sampling.processors import BlockProcessor
from ..state import DecodeState, set_rows
from .target import Target

# The accepted path of a tree, and the parents of the tree's nodes.
Walk = tuple[torch.Tensor, torch.Tensor]


class RoundOutput(NamedTuple):
    """The output of a round.

    Attributes:
        result: accepted and committed tokens.
        logprobs: `[B, K + 1]` float32 for each of `state.logprobs`: log-probabilities of the tokens of `result`.
        walk: of a tree: the path, `[B, K + 1]` int64, i.e. the node of the block after which each token of `result` was
            chosen, and its `parents` (see `Tree`). None of a chain, where each token follows the one before.
        scores, logits: `[B, n, V]` of the n tokens of the block: after and before the logits processors. None of a
            captured round, unless the caller gets them.
    """

    result: VerificationResult
    logprobs: tuple[torch.Tensor, ...] = ()
    walk: Walk | None = None
    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def along_path(self) -> RoundOutput:
        """The same output with `scores` and `logits` `[B, K + 1, V]` at the tokens of `result`."""
        scores = _along(self.walk, self.scores)
        logits = scores if self.logits is self.scores else _along(self.walk, self.logits)
        return self._replace(scores=scores, logits=logits)


def _along(walk: Walk | None, values: torch.Tensor | None) -> torch.Tensor | None:
    """`values` `[B, n, ...]` at the path `[B, m]` of `walk`; all of `values` if either is None."""
    if walk is None or values is None:
        return values
    path, _ = walk
    return values[torch.arange(len(path), device=path.device)[:, None], path]


def logprobs_of(
    state: DecodeState,
    result: VerificationResult,
    scores: torch.Tensor,
    logits: torch.Tensor,
    walk: Walk | None = None,
) -> tuple[torch.Tensor, ...]:
    """Log-probabilities `[B, n]` of the tokens `[B, n]` of `result`, for each of `state.logprobs`."""

    def of(values: torch.Tensor) -> torch.Tensor:
        return token_logprobs(_along(walk, values), result.tokens)

    if not state.logprobs:
        return ()
    if scores is logits:  # no processor has changed them
        return (of(logits),) * len(state.logprobs)
    read = {"processed": scores, "raw": logits}
    return tuple([of(read[name]) for name in state.logprobs])


def run_round(state: DecodeState, target: Target, drafter: Drafter, process: BlockProcessor) -> RoundOutput:
    """Run one round with K = `state.num_draft_tokens`, and N = `state.num_nodes` if it drafts a tree.

    The last round must not have had more drafts; otherwise `catch_up` comes first.
    """
    proposal, block, logits, hidden_states = draft_and_forward(state, target, drafter)
    return verify_and_commit(state, process(logits, block, state), logits, proposal, hidden_states)


def commit_first_token(
    state: DecodeState, process: BlockProcessor, rows: torch.Tensor | slice, known: torch.Tensor | None = None
) -> RoundOutput:
    """Commit the first new token of `rows`, from the logits that their prefill has left.

    Afterwards the state is as if a round had just committed the prompt's last token, as a draft, and this token.

    Args:
        rows: `[n]` int64, or a slice of all rows.
        known: `[n]` int64, the first tokens of `rows` that are known already; `NO_TOKEN` where one is to be drawn.

    Returns:
        the output of a round with one column.
    """
    proposal, logits, block = no_drafts(state), state.prompt_logits[:, None], state.last_tokens()
    scores = process(logits, block, state)
    result, _ = verify(scores, state, proposal)
    if known is not None:
        result.tokens[rows, 0] = torch.where(known == NO_TOKEN, result.tokens[rows, 0], known)
    if isinstance(rows, torch.Tensor):
        committed = torch.zeros_like(result.committed)
        committed[rows] = result.committed[rows]
        result = result._replace(committed=committed)
    result, kept = state.commit(result), state.result
    width = state.first_block_width
    kept.tokens[rows, :width] = torch.cat([block, result.tokens.clamp(min=0)], dim=1)[rows, -width:]
    set_rows(kept.accepted, rows, width - 1)
    kept.committed[rows] = result.committed[rows] * width
    state.block_width = max(state.block_width, width)
    return RoundOutput(result, logprobs_of(state, result, scores, logits), None, scores, logits)


def draft_and_forward(
    state: DecodeState, target: Target, drafter: Drafter
) -> tuple[Proposal, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """First half of a round: draft, and run the target over the block, i.e. the last committed token and the drafts.
    Returns the drafts; the block `[B, n]` int64, n = K + 1, or N + 1 for a tree; its logits `[B, n, V]`; and the parts
    of its auxiliary hidden states."""
    proposal = propose(state, drafter, *state.last_block(state.num_draft_tokens + 1))
    if proposal.tree is not None:
        block, slots, nodes = state.tree_block(proposal)
        return proposal, block, *target(state, block, slots, nodes=nodes)
    block, slots = state.block(proposal.tokens)
    return proposal, block, *target(state, block, slots)


def propose(state: DecodeState, drafter: Drafter, *last_block: Any) -> Proposal:
    """`Drafter.propose`, within `Drafter.draft_window_size` if the drafter has one."""
    if drafter.draft_window_size is None:
        return drafter.propose(state, *last_block)
    drafter.limit_attention(state, drafter.draft_window_size)
    proposal = drafter.propose(state, *last_block)
    drafter.limit_attention(state, None)
    return proposal


def verify_and_commit(
    state: DecodeState,
    scores: torch.Tensor,
    logits: torch.Tensor,
    proposal: Proposal,
    hidden_states: tuple[torch.Tensor, ...],
) -> RoundOutput:
    """Second half of a round: verify the drafts by `scores` `[B, n, V]`, the processed `logits`, and commit tokens.

    Keys, values and hidden states of a tree's accepted path are moved to where a chain would have left them.
    """
    result, path = verify(scores, state, proposal)
    result, walk = state.commit(result, keeps=True), None
    if path is not None:
        walk = path, proposal.tree.parents
        state.cache.move(path, state.lengths, result.committed)
    if hidden_states:
        join_rows(state.aux_hidden_states, hidden_states, path)
    return RoundOutput(result, logprobs_of(state, result, scores, logits, walk), walk, scores, logits)


def verify(
    scores: torch.Tensor, state: DecodeState, proposal: Proposal
) -> tuple[VerificationResult, torch.Tensor | None]:
    """Verify `proposal` by `scores` `[B, n, V]`. A tree, a greedy round and `MATCH` are verified by the target's own
    tokens (the most likely or the drawn ones), other chains by rejection sampling. Returns the result, with tokens
    `[B, K + 1]`, and the path `[B, K + 1]` of a tree (see `ops.verify_tree`), else None."""
    if proposal.tree is not None or not state.is_sampling or state.verification == MATCH:
        parents, depths, depth = None, None, proposal.tokens.shape[1]
        if proposal.tree is not None:
            parents, depths, depth = *proposal.tree[:2], state.num_draft_tokens
        scores, seeds = (scores.float(), state.seeds) if state.is_sampling else (scores, None)
        *result, path = verify_tree(scores, proposal.tokens, parents, depths, seeds, state.lengths, depth)
        return VerificationResult(*result), None if proposal.tree is None else path
    scores, drafts = scores.float(), proposal[:3]
    if state.verification == "block" and proposal.probs is not None:
        return verify_block(scores, *drafts, state.seeds, state.lengths, state.limits - state.lengths), None
    return verify_sampling(scores, *drafts, state.seeds, state.lengths), None


def catch_up(state: DecodeState, drafter: Drafter, width: int) -> None:
    """Let the drafter read the last block, of up to `width` tokens, so that a round with fewer drafts can follow.

    Afterwards the state is as if the last round had committed one token; the drafter reads that token again.
    """
    before = state.num_draft_tokens, state.num_nodes
    state.num_draft_tokens = state.num_nodes = 0
    try:
        propose(state, drafter, *state.last_block(width))
    finally:
        state.num_draft_tokens, state.num_nodes = before
    state.narrow_block()


class RoundReport:
    """The result of a round on its way to the host; the copy from a GPU is asynchronous.

    Args:
        output: of the round. The next round may overwrite its tensors.
        names: `DecodeState.logprobs`, the names of its log-probabilities.
        kept: names of `scores` and `logits` that the report keeps.
        num_rows: number of leading rows of these that it keeps; None for all.

    Attributes:
        logprobs: log-probabilities on the host by name, valid after `read`.
        records: the tensors in `kept`, see `RoundOutput`.
    """

    def __init__(
        self, output: RoundOutput, names: tuple[str, ...], kept: Sequence[str] = (), num_rows: int | None = None
    ):
        result, logprobs, walk, scores, logits = output
        read = {name: one for name, one in (("scores", scores), ("logits", logits)) if name in kept}
        copies = {id(one): one[:num_rows].clone() for one in read.values()}  # one where no processor has changed them
        self.records = {name: copies[id(one)] for name, one in read.items()}
        self._num_tokens = result.tokens.shape[1]
        parts = (result.tokens, result.accepted[:, None], result.committed[:, None], *(walk or ()))
        packed = torch.cat(parts, dim=1)
        if packed.is_cuda:
            # Without waiting: torch copies to pinned memory.
            self._packed, *logprobs = [one.to("cpu", non_blocking=True) for one in (packed, *logprobs)]
            self._arrived = torch.cuda.current_stream(packed.device).record_event()
        else:
            self._packed, logprobs, self._arrived = packed, [one.clone() for one in logprobs], None
        self.logprobs: dict[str, torch.Tensor] = dict(zip(names, logprobs, strict=True))

    def read(self) -> tuple[list[list[int]], list[int], list[int], list[list[int]] | None]:
        """The tokens of each row, its number of accepted drafts and of committed tokens; waits for the copy.

        The fourth result is None for chains. For a tree it counts, for each row and depth, the siblings rejected before
        the accepted draft, and at last the rejected children of the last accepted draft.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        end = self._num_tokens
        tokens, (accepted, committed) = self._packed[:, :end].tolist(), self._packed[:, end : end + 2].T.tolist()
        if self._packed.shape[1] == end + 2:
            return tokens, accepted, committed, None
        walks = self._packed[:, end + 2 :].tolist()
        rejected = [_rejected(one[:end], one[end:], count) for one, count in zip(walks, accepted, strict=True)]
        return tokens, accepted, committed, rejected


def _rejected(path: list[int], parents: list[int], accepted: int) -> list[int]:
    """The number of siblings before each accepted node of `path`, then that of the children of the last node."""
    found = [parents[:node].count(parent) for parent, node in itertools.pairwise(path[: accepted + 1])]
    return [*found, parents.count(path[accepted])]
