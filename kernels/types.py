"""Types that the ops of a round take and return, and the streams of their random numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch


class DraftInputs(NamedTuple):
    """Inputs of a drafter's first forward pass in a round, `[B, W]` int64 each; made by `prepare_inputs`.

    Attributes:
        tokens: token ids to embed.
        slots: slot of the drafter's KV cache that a column writes; the dummy slot in padding columns.
        positions: position ids; 0 in padding columns.
        sources: index, among the K + 1 verified positions of the round, of the hidden state that a column takes; -1 in
            mask columns, which have a hidden state of their own, and in padding columns.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor


class RandomStream(IntEnum):
    """Purposes of random numbers; numbers of different streams are independent (see `uniform`).

    Attributes:
        ACCEPT: acceptance of draft tokens.
        TARGET: sampling of recovered and bonus tokens.
        DRAFT: sampling of draft tokens.
        SEED: seeds of the rows of a batch.
    """

    ACCEPT = 0
    TARGET = 1
    DRAFT = 2
    SEED = 3


# Tokens of a group, whose numbers in a race have a least one that is made by itself (`random_reference.race_times`).
RACE_GROUP = 64


class VerificationResult(NamedTuple):
    """Result of the verification of a round.

    Attributes:
        tokens: `[B, K + 1]` int64: the accepted draft tokens, then the recovered or bonus token; the rest is undefined.
            `NO_TOKEN` where tokens are drawn and the target's scores have no softmax: NaN, +inf, or -inf alone.
        accepted: `[B]` int64, number of accepted draft tokens, 0 to K.
        committed: `[B]` int64, number of leading `tokens` that the row commits: `accepted + 1`, less what lies after
            an end-of-sequence token or the length limit, and 0 for finished rows.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    committed: torch.Tensor


# Nodes of which a word of `Tree.ancestors` has a bit each, and the most words: a tree has fewer drafts than bits.
WORD_BITS, MOST_WORDS = 64, 2


class Tree(NamedTuple):
    """How N drafts follow each other: they are nodes 1 to N of a tree, parents first, with the last committed token as
    node 0, the root.

    Attributes:
        parents: `[B, N + 1]` int64; -1 of the root, and of nodes that are not used.
        depths: `[B, N + 1]` int64, 0 of the root.
        ancestors: `[B, N + 1, W]` int64: bit j % 64 of word j // 64 is set of node j itself and of its ancestors.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, num_nodes: int, device: torch.device) -> Tree:
        """Trees of the root alone, with room for `num_nodes` drafts."""
        parents = torch.full((batch, num_nodes + 1), -1, dtype=torch.int64, device=device)
        ancestors = torch.zeros(batch, num_nodes + 1, num_nodes // WORD_BITS + 1, dtype=torch.int64, device=device)
        ancestors[:, 0, 0] = 1
        return cls(parents, torch.zeros_like(parents), ancestors)


class Nodes(NamedTuple):
    """Where the nodes of a tree are in a row's text, which they do not follow as the tokens of a text do.

    Attributes:
        positions: `[B, n]` int64; the dummy slot of nodes that are not run.
        ancestors: `[B, n, W]` int64, see `Tree`.
    """

    positions: torch.Tensor
    ancestors: torch.Tensor


class Columns(NamedTuple):
    """What a pass over the nodes of a growing tree runs, those of its window before them; `[B, n]` int64 each.

    Attributes:
        tokens: to embed.
        parents: which column each follows; 0 of the first.
        ancestors: `[B, n, W]`, see `Tree`, of columns.
        places: positions of the tokens in their texts; the dummy slot of what is not run.
        slots: of a cache, which they write; the dummy slot of what writes nothing.
        positions: position ids; 0 of what is not run.
        hidden: `[B, n, H]`, hidden states that they read; None of a drafter that reads none.
    """

    tokens: torch.Tensor
    parents: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
    places: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    @property
    def nodes(self) -> Nodes:
        return Nodes(self.places, self.ancestors)


class Proposal(NamedTuple):
    """Draft tokens of one round: a chain, or the nodes of a tree but for its root.

    Attributes:
        tokens: `[B, K]` int64, in the target's vocabulary; `[B, N]` of a tree.
        probs: `[B, K, V_d]` float32, the distributions q that the tokens were sampled from, over the draft vocabulary;
            None for deterministic drafts, i.e. point masses. A row of NaN, of logits without a softmax, is none: its
            draft and those after it are not verified.
        draft_ids: `[vocab_size]` int64, index of each token in the draft vocabulary, -1 if it has none; None if the
            draft vocabulary is the first V_d tokens. It is the same in all rounds, and is never copied.
        tree: how the tokens follow each other; None of a chain, in which each one follows the one before.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None
    draft_ids: torch.Tensor | None = None
    tree: Tree | None = None


class RecurrenceRing(NamedTuple):
    """What a recurrence needs to pass a row's last tokens again: slot = position mod R, with R a power of two.

    Attributes:
        keys: `[B, R, Hk, K]` in the key's dtype, before normalisation.
        updates: `[B, R, H, V]` float32, after the product with beta.
        decays: `[B, R, H]`, `[B, R, H, K]` or `[B, R, H, V]` float32, as the decays of the tokens were given.
    """

    keys: torch.Tensor
    updates: torch.Tensor
    decays: torch.Tensor


# In the place of a token: there is none. In `VerificationResult.tokens` it is what a row says whose target gives no
# distribution to draw from.
NO_TOKEN = -1

# Of `suffix_drafts`: the longest match that is told from longer ones, and how many occurrences are looked at, those
# with the longest matches, and of equal ones the latest.
LONGEST_MATCH, MOST_OCCURRENCES = 16, 64
# Bits of a place among tokens; the length of its match is in those above.
PLACE_BITS = 40

# In `DecodeState.row_top_k`: more than any vocabulary has.
NO_TOP_K = 2**31 - 1


class SamplingSettings(NamedTuple):
    """How a row is sampled.

    Attributes:
        temperature: above 0.
        top_k: from how many of the most likely tokens it is drawn; 0 for greedy decoding, `NO_TOP_K` for all.
        top_p: in (0, 1], the share of probability of the most likely tokens that it is drawn from.
    """

    temperature: float = 1.0
    top_k: int = NO_TOP_K
    top_p: float = 1.0

    @property
    def filters(self) -> bool:
        """Whether it leaves tokens out, apart from greedy decoding."""
        return 0 < self.top_k < NO_TOP_K or self.top_p < 1


class LinearTiles(NamedTuple):
    """What a program of a linear layer computes.

    Attributes:
        rows: rows of the inputs.
        features: output features.
        depth: input features that it multiplies at a time.
        num_warps, num_stages: of its pipeline.
    """

    rows: int
    features: int
    depth: int
    num_warps: int
    num_stages: int


# Scales of 8 bits by which codes are multiplied before their products, exactly in bfloat16: a tile has several of them.
SCALES_OF_NUMBERS = (torch.float8_e4m3fn, torch.float8_e8m0fnu)
# Scales that have one outer scale in common, where scales are stored as numbers of codes.
SCALES_OF_OUTER = 256


class StoredWeight(NamedTuple):
    """A weight `[out, in]` as numbers of few bits, each times a scale; see `stored_weight_reference.dequantise`.

    A layer of a mixture of experts has a dimension of experts before all others; then `zeros` and `outer` are None.

    Attributes:
        values: `[out, in]` float8 (e4m3) or int8; or `[out, in / 2]` uint8, of which each holds two numbers of 4 bits,
            the first one in its low half, if `codes` does not say otherwise.
        scales: `[ceil(out / rows), ceil(in / group)]` in floating point, with `codes` also float8 (e4m3 or e8m0); or
            uint8, of which each stands for one of `scale_codes`.
        zeros: of the shape of `scales`, the numbers of 4 bits that stand for 0; None if that is 8.
        rows, group: output and input features of a block.
        rounds_inputs: whether the layer's inputs are rounded to the dtype of `values` before, each row's in groups of
            `group`; int8 only where that is all inputs.
        codes: what numbers of 4 bits stand for, a key of `stored_weight_reference.CODES`; None for integers without
            sign.
        outer: `[1]` in floating point, what scales are divided by; or with `scale_codes`, in float32, what they are
            multiplied by, one number for each 256 scales of the weight, row by row.
        scale_codes: `[256]` in float32.
        shift: in float32, what is added to such scales.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    rows: int
    group: int
    rounds_inputs: bool = False
    codes: str | None = None
    outer: torch.Tensor | None = None
    scale_codes: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Experts, if there are any, output and input features."""
        *sizes, width = self.values.shape
        return *sizes, width * (2 if self.values.dtype == torch.uint8 else 1)


class NormKind(NamedTuple):
    """How a norm over the last dimension differs from an RMSNorm in float32 whose result is cast at the end.

    Attributes:
        cast_first: rows are cast to the inputs' dtype before they are multiplied by the weight, in that dtype.
        offset: added to the weight in float32: 0, or 1 if weights are stored as differences from 1.
        centered: the mean is subtracted first, as in a LayerNorm.
    """

    cast_first: bool = False
    offset: float = 0.0
    centered: bool = False


class AnglesKind(NamedTuple):
    """How cosines and sines of a rotary embedding are laid out and scaled.

    Attributes:
        repeats: `"halves"` where each of R / 2 angles is in both halves, `"pairs"` where it comes twice in a row,
            `"once"` where there are R / 2 only.
        scaling: factor on cosines and sines.
    """

    repeats: str = "halves"
    scaling: float = 1.0


class RotaryKind(NamedTuple):
    """Which elements of a head a rotary embedding rotates in pairs, by which angles, and how it rounds.

    Of R rotated elements, pair j of R / 2 consists of elements j and j + R / 2 (halves) or 2j and 2j + 1 (interleaved).

    Attributes:
        inputs_interleaved, outputs_interleaved: of which elements pairs are read, and to which they are written.
        shared_angles: both elements of pair j are multiplied by number j of cosines and sines; else each by the number
            of its own place in the input.
        half_angles: there are R / 2 cosines and sines, not R; then they are shared.
        rounded: products are rounded to the heads' dtype before they are added; else only the sum is.
    """

    inputs_interleaved: bool = False
    outputs_interleaved: bool = False
    shared_angles: bool = False
    half_angles: bool = False
    rounded: bool = True
