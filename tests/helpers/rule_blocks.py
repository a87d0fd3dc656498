"""A block of padded rows of several lengths: its scores by rules, and those that transformers' processors give."""

import torch
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from hf_specdec import Drafter, DrafterConfig
from hf_specdec.cache.key_layers import attention_layers
from hf_specdec.sampling.logits import PenaltyLogitsProcessor
from hf_specdec.sampling.processors import BlockProcessor
from hf_specdec.state import Shape


def _ignores_padding():
    """Whether transformers' penalty can leave out the padding of rows, as since 5.23, and takes tokens without a score,
    as since 5.18."""
    try:
        RepetitionPenaltyLogitsProcessor(1.5, torch.tensor([0]))
    except ValueError:
        return False
    return True


IGNORES_PADDING = _ignores_padding()
# Tokens without a score are in texts, too, where transformers' processors take them.
SCORED, PAD, WIDTH = 60, 3, 9
VOCAB = 64 if IGNORES_PADDING else SCORED
PADDING = [0, 2, 5, 0]
ENDS = [5, 9, 14, 61]


def min_length(columns, ends=ENDS, device="cpu"):
    return MinLengthLogitsProcessor(columns, ends, device)


def min_new(count, skipped=WIDTH, ends=ENDS, device="cpu"):
    return MinNewTokensLengthLogitsProcessor(skipped, count, ends, device)


def penalty(value=1.8, ignored=None):
    return RepetitionPenaltyLogitsProcessor(value, ignored)


def of_new(presence=0.0, frequency=0.0):
    return PenaltyLogitsProcessor(WIDTH, presence, frequency)


LISTS = {
    "penalty": lambda on: [penalty()],
    "reward": lambda on: [penalty(0.7)],
    **({"penalty without padding": lambda on: [penalty(1.05, torch.tensor(PADDING))]} if IGNORES_PADDING else {}),
    "length": lambda on: [min_length(13, device=on)],
    "new": lambda on: [min_new(3, device=on)],
    "new and length": lambda on: [min_new(3, device=on), min_length(12, device=on)],
    "length and new": lambda on: [MinPLogitsWarper(0.02), min_length(11, device=on), min_new(4, device=on)],
    "presence": lambda on: [of_new(presence=1.3)],
    "frequency": lambda on: [of_new(frequency=0.7)],
    "rewards": lambda on: [of_new(-0.3, -0.9), TemperatureLogitsWarper(0.7)],
    "every rule": lambda on: [penalty(1.3), min_length(14, device=on), of_new(1.1, 0.3), MinPLogitsWarper(0.01)],
    "all": lambda on: [penalty(1.3), min_length(14, device=on), TemperatureLogitsWarper(0.7), MinPLogitsWarper(0.01)],
    "after others": lambda on: [TemperatureLogitsWarper(0.7), min_length(14, device=on), penalty(1.3)],
}


class Silent(Drafter):
    """Keeps no state and proposes nothing."""


class RuleBlock:
    """Rows after 4, 1, 2 and 0 new tokens, and 4 drafts each, which repeat one another and the text."""

    def __init__(self, device="cpu"):
        generator = torch.Generator().manual_seed(0)
        self.device, self.prompts = device, torch.randint(4, VOCAB, (4, WIDTH), generator=generator)
        for row, pad in enumerate(PADDING):
            self.prompts[row, :pad] = PAD
        self.new = [torch.randint(4, VOCAB, (count,), generator=generator) for count in (4, 1, 2, 0)]
        self.drafts = torch.randint(4, VOCAB, (4, 4), generator=generator)
        self.drafts[:, 2], self.drafts[0, 3] = self.drafts[:, 0], self.prompts[0, 4]
        self.drafts[0, 1], self.drafts[1, 1] = self.new[0][1], self.new[1][0]
        self.logits = 4 * torch.randn(4, 5, SCORED, generator=generator)
        self.logits[1, :, ::7], self.logits[2, :, 1::7], self.logits[3, :, ::5] = 0.0, -0.0, float("-inf")
        self.logits[0, 2, 4:20:3], self.logits[0, 3, 4:20:3] = float("nan"), float("inf")
        self.logits[:, :, PAD] = torch.tensor([2.0, -2.0, 3.0, -3.0])[:, None]

    def found(self, processors, rules=None):
        """What a round computes, with these `RowRules` instead of those of `processors`."""
        device = torch.device(self.device)
        drafter = Silent(DrafterConfig(vocab_size=VOCAB)).to(device)
        state = drafter.new_state(Shape(4, 32, 4, True, False, 8), layers=attention_layers(1), device=device)
        texts = [torch.cat([row[pad:], new]) for row, pad, new in zip(self.prompts, PADDING, self.new, strict=True)]
        state.tokens.random_(4, VOCAB)  # as earlier texts of the rows leave them
        lengths = [WIDTH - pad for pad in PADDING]
        state.admit(range(4), texts, [20] * 4, [0] * 4, [ENDS] * 4, prompt_lengths=lengths)
        process = BlockProcessor(LogitsProcessorList(processors), self.prompts.to(device), PADDING, ends=ENDS)
        assert process.key is not None and len(process.row_rules) == 4
        state.set_row_rules(range(4), process.row_rules if rules is None else rules)
        if process.row_sampling is not None:
            state.set_row_sampling(range(4), [process.row_sampling] * 4)
        block, _ = state.block(self.drafts.to(device))
        return process(self.logits.to(device), block, state).cpu()

    def expected(self, processors):
        """What `processors` compute one position after the other."""
        scores = torch.empty_like(self.logits)
        for row, new in enumerate(self.new):
            for step in range(5):
                text = torch.cat([self.prompts[row], new, self.drafts[row, :step]]).repeat(4, 1).to(self.device)
                given = self.logits[row, step].repeat(4, 1).to(self.device)
                scores[row, step] = LogitsProcessorList(processors)(text, given)[row].cpu()
        return scores


def same_bits(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def check_bits(name, device="cpu"):
    block, processors = RuleBlock(device), LISTS[name](device)
    expected = block.expected(processors)
    assert not same_bits(expected, block.logits)
    assert same_bits(block.found(processors), expected)
