"""Argument and result types of the ops of a round, and the streams of their random numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch


class DraftInputs(NamedTuple):
    """Inputs of a drafter's first pass in a round, `[B, W]` int64 each, and the places of the steps after it; made by
    `prepare_inputs`.

    Attributes:
        tokens: token ids to embed.
        slots: the slot of the drafter's KV cache that a column writes; the dummy slot in padding columns.
        positions: position ids; 0 in padding columns.
        sources: index of the hidden state that a column reads among the round's K + 1 verified positions; -1 in mask
            columns, which have a hidden state of their own, and in padding columns.
        step_slots, step_positions: `[S, B, 1]` int64, the slots that S further steps write, see `next_slots`, and their
            position ids; 0 for the dummy slot.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor
    step_slots: torch.Tensor
    step_positions: torch.Tensor


class RandomStream(IntEnum):
    """Purposes of random numbers. Numbers of different streams are independent (see `uniform`).

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


# Tokens of a group of `random_reference.race_times`, where the least number of a group is drawn first.
RACE_GROUP = 64


class VerificationResult(NamedTuple):
    """Result of the verification of a round.

    Attributes:
        tokens: `[B, K + 1]` int64: the accepted draft tokens, then the recovered or bonus token; the rest is undefined.
            When sampling, `NO_TOKEN` where the target's scores have no softmax: NaN, +inf, or only -inf.
        accepted: `[B]` int64, number of accepted draft tokens, 0 to K.
        committed: `[B]` int64, number of leading `tokens` that the row commits: `accepted + 1`, less the tokens after
            an end-of-sequence token or the length limit; 0 for finished rows.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    committed: torch.Tensor


# Bits of a word of `Tree.ancestors`, one for each node, and the most words: a tree has fewer drafts than bits.
WORD_BITS, MOST_WORDS = 64, 2


class Tree(NamedTuple):
    """A tree of N drafts: nodes 1 to N, each parent before its children. Node 0, the root, is the last committed
    token.

    Attributes:
        parents: `[B, N + 1]` int64; -1 for the root and for unused nodes.
        depths: `[B, N + 1]` int64; 0 for the root.
        ancestors: `[B, N + 1, W]` int64: bit j % 64 of word j // 64 is set if node j is an ancestor or the node itself.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, num_nodes: int, device: torch.device) -> Tree:
        """Trees that have only a root, with room for `num_nodes` drafts."""
        parents = torch.full((batch, num_nodes + 1), -1, dtype=torch.int64, device=device)
        ancestors = torch.zeros(batch, num_nodes + 1, num_nodes // WORD_BITS + 1, dtype=torch.int64, device=device)
        ancestors[:, 0, 0] = 1
        return cls(parents, torch.zeros_like(parents), ancestors)


class Nodes(NamedTuple):
    """The places of n tree nodes in a row's text. Their order is no order of a text.

    Attributes:
        positions: `[B, n]` int64; the dummy slot for nodes that are not run.
        ancestors: `[B, n, W]` int64, see `Tree`.
    """

    positions: torch.Tensor
    ancestors: torch.Tensor


class Columns(NamedTuple):
    """The columns of a drafter's pass, `[B, n]` int64 each: tokens of a text, or a growing tree's window and nodes.

    Attributes:
        tokens: token ids to embed.
        parents: the column that each column follows; 0 for the first. None without a tree, as the next two.
        ancestors: `[B, n, W]`, the ancestors of each column among the columns, see `Tree`.
        places: positions of the tokens in their texts; the dummy slot for columns that are not run.
        slots: cache slots that the columns write; the dummy slot for columns that write nothing.
        positions: position ids; 0 for columns that are not run.
        hidden: `[B, n, H]`, hidden states that the columns read; None for a drafter that reads none.
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
    """Draft tokens of one round: a chain, or the nodes of a tree without its root.

    Attributes:
        tokens: `[B, K]` int64 for a chain, `[B, N]` for a tree, in the target's vocabulary.
        probs: `[B, K, V_d]` float32, the distributions q over the draft vocabulary that the tokens were sampled from;
            None for deterministic drafts, i.e. point masses. A row of NaN comes from logits without a softmax: its
            draft and the drafts after it are not verified.
        draft_ids: `[vocab_size]` int64, index of each token in the draft vocabulary, or -1; None if the draft
            vocabulary is the first V_d tokens. It is the same in all rounds and is never copied.
        tree: the tree of the tokens; None for a chain.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None
    draft_ids: torch.Tensor | None = None
    tree: Tree | None = None


class RecurrenceRing(NamedTuple):
    """Values from which a recurrence can replay a row's last tokens: slot = position mod R, R a power of two.

    Attributes:
        keys: `[B, R, Hk, K]` in the key's dtype, before normalisation.
        updates: `[B, R, H, V]` float32, after the product with beta.
        decays: `[B, R, H]`, `[B, R, H, K]` or `[B, R, H, V]` float32, in the form in which decays are given.
    """

    keys: torch.Tensor
    updates: torch.Tensor
    decays: torch.Tensor


# Placeholder for no token. In `VerificationResult.tokens` it marks a row whose target has no distribution to draw from.
NO_TOKEN = -1

# In `suffix_drafts`: matches are counted up to this length, and at most so many occurrences are used, those with the
# longest matches and among equal ones the latest.
LONGEST_MATCH, MOST_OCCURRENCES = 16, 64
# Number of low bits for a place among tokens; the bits above have the length of its match.
PLACE_BITS = 40

# For `DecodeState.row_top_k`: above the size of any vocabulary.
NO_TOP_K = 2**31 - 1


class SamplingSettings(NamedTuple):
    """Sampling settings of a row.

    Attributes:
        temperature: above 0.
        top_k: the number of most likely tokens to draw from; 0 for greedy decoding, `NO_TOP_K` for all.
        top_p: in (0, 1], the probability mass of the most likely tokens to draw from.
    """

    temperature: float = 1.0
    top_k: int = NO_TOP_K
    top_p: float = 1.0


class RowRules(NamedTuple):
    """How the scores of a row follow from its text.

    Attributes:
        min_length: number of tokens, prompt included, before which the tokens that end the row get -inf.
        padding_token: a token that the repetition penalty counts as seen besides those of the text; `NO_TOKEN` for
            none.
        repetition_penalty: factor on the scores of tokens that were seen, if they are below 0, else divisor; 1 for
            none.
        presence_penalty: subtracted once from the scores of tokens generated since the prompt; 0 for none.
        frequency_penalty: subtracted as often as a token was generated since the prompt; 0 for none.
    """

    min_length: int = 0
    padding_token: int = NO_TOKEN
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class LinearTiles(NamedTuple):
    """The tile of a program of a linear layer.

    Attributes:
        rows: number of rows of the inputs.
        features: number of output features.
        depth: number of input features that are multiplied at a time.
        num_warps, num_stages: the program's warps and pipeline stages.
    """

    rows: int
    features: int
    depth: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Arguments of a launch."""
        tile = {"ROWS": self.rows, "FEATURES": self.features, "DEPTH": self.depth}
        return tile | {"num_warps": self.num_warps, "num_stages": self.num_stages}


# Dtypes of 8-bit scales that multiply codes before the products, exactly in bfloat16: a tile has several of them.
SCALES_OF_NUMBERS = (torch.float8_e4m3fn, torch.float8_e8m0fnu)
# Number of scales with a common outer scale, where scales are stored as codes.
SCALES_OF_OUTER = 256


class StoredWeight(NamedTuple):
    """A quantised weight `[out, in]`: numbers of few bits times scales; see `stored_weight_reference.dequantise`.

    A mixture of experts has a leading dimension of experts in each tensor; then `zeros` and `outer` are None.

    Attributes:
        values: `[out, in]` float8 (e4m3) or int8; or `[out, in / 2]` uint8, each with two 4-bit numbers, the first one
            in the low half unless `codes` is "nf4".
        scales: `[ceil(out / rows), ceil(in / group)]` in floating point, with `codes` also float8 (e4m3 or e8m0), with
            float8 values also e8m0; or uint8 indices into `scale_codes`.
        zeros: of the shape of `scales`, the zero points of 4-bit numbers; None if all are 8.
        rows, group: number of output and input features of a block with one scale.
        rounds_inputs: whether the layer's inputs are rounded to the dtype of `values` first, each row in groups of
            `group`; for int8 a group is the whole row.
        codes: the values of 4-bit numbers, a key of `stored_weight_reference.CODES`; None for unsigned integers.
        outer: `[1]` in floating point, a divisor of all scales; or, with `scale_codes`, float32 factors of scales, one
            for each 256 scales of the weight, row by row.
        scale_codes: `[256]` float32.
        shift: float32, added to scales from `scale_codes`.
        order: `[in]` int64, the input features that the columns of the other parts are for; None if as they are.
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
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of experts if there are any, of output features and of input features."""
        *sizes, width = self.values.shape
        return *sizes, width * (2 if self.values.dtype == torch.uint8 else 1)


class NormKind(NamedTuple):
    """The differences of a norm over the last dimension from an RMSNorm in float32 that casts its result at the end.

    Attributes:
        cast_first: whether rows are cast to the inputs' dtype before the product with the weight, in that dtype.
        offset: added to the weight in float32: 0, or 1 if weights are stored as differences from 1.
        centered: whether the mean is subtracted first, as in a LayerNorm.
    """

    cast_first: bool = False
    offset: float = 0.0
    centered: bool = False


class ClampedGate(NamedTuple):
    """How a gated activation of experts differs from `activation(gate) * up`.

    Attributes:
        limit: the gate is clamped to at most this, and `up` to at most this magnitude.
        alpha: the activation is `gate * sigmoid(alpha * gate)`, rounded after each operation; None for that by name.
        offset: added to `up` once it is clamped.
    """

    limit: float
    alpha: float | None = None
    offset: float = 0.0


class RouterKind(NamedTuple):
    """How a router of a mixture of experts computes scores and weights.

    Attributes:
        scores: `"softmax"` or `"sigmoid"` of the logits; with `"chosen"` scores are logits, and weights the softmax of
            those that are chosen.
        normalises: whether weights are divided by their sum plus `eps`.
        scaling: of the weights, at last.
    """

    scores: str
    normalises: bool = False
    eps: float = 0.0
    scaling: float = 1.0


class AnglesKind(NamedTuple):
    """The layout and scale of the cosines and sines of a rotary embedding.

    Attributes:
        repeats: `"halves"` if each of R / 2 angles is in both halves, `"pairs"` if it comes twice in a row, `"once"` if
            there are only R / 2.
        scaling: factor on cosines and sines.
    """

    repeats: str = "halves"
    scaling: float = 1.0


class RotaryKind(NamedTuple):
    """The pairs of elements of a head that a rotary embedding rotates, their angles, and the rounding.

    Of R rotated elements, pair j of R / 2 has elements j and j + R / 2 (halves) or 2j and 2j + 1 (interleaved).

    Attributes:
        inputs_interleaved, outputs_interleaved: whether pairs are read, and written, interleaved instead of in halves.
        shared_angles: whether cosine and sine j are those of both elements of pair j; if not, each element has the
            cosine and sine of its own place in the input.
        half_angles: whether there are R / 2 cosines and sines, not R; they are then shared.
        rounded: whether products are rounded to the heads' dtype before they are added; if not, only the sum is.
    """

    inputs_interleaved: bool = False
    outputs_interleaved: bool = False
    shared_angles: bool = False
    half_angles: bool = False
    rounded: bool = True
