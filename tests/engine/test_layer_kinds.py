"""A kind of layer memory from outside of the package: a layer that reads the mean of all inputs of a row so far.

transformers' cache holds the sum of a text. On a `RaggedCache` the sum up to a token is in the token's slot, so nothing
is rolled back: a block begins with the sum before its first token, and overwrites the sums of rejected drafts.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from lossless import oracle
from targets import PAD, VOCAB, padded_prompts
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, cache_utils

from hf_specdec.cache import layer_kinds
from hf_specdec.cache.layer_kinds import LayerKind, LayerMemory, Use, register
from hf_specdec.config import DraftModelConfig
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.host.caches import CACHE_NAMES, OUTPUT_NAME

LAYER_TYPE = "running_mean"
OPTIONS = {"max_new_tokens": 16, "do_sample": False}


class SumLayer:
    """A layer of transformers' cache: the sum `[B, H]` of the inputs so far; None before the first pass."""

    supports_early_init = is_compileable = is_croppable = is_initialized = False

    def __init__(self):
        self.total = None

    def sums(self, inputs, position_ids):
        """Sums up to each of the tokens of a pass, `[B, n, H]`: of `inputs`, likewise; `position_ids` `[B, n]`."""
        sums, columns = inputs.cumsum(dim=1), torch.arange(inputs.shape[1])
        # The text of a row begins `position_ids` columns before; columns before that are padding.
        first = (columns - position_ids)[..., None]
        skipped = sums.gather(1, (first - 1).clamp(min=0).expand_as(sums))
        before = 0 if self.total is None else self.total[:, None]
        sums = sums - torch.where(first > 0, skipped, 0) + torch.where(first < 0, before, 0)
        self.total = sums[:, -1]
        return sums


class RaggedSumLayer(LayerMemory):
    """Sums `[B, slots, H]` by slot."""

    def __init__(self, cache, kind):
        super().__init__(cache, kind)
        self.by_slot = None

    def allocate(self, like, batch):
        if self.by_slot is None:
            self.by_slot = like.new_zeros(batch, self._cache.slots, like.shape[-1])

    def sums(self, inputs, position_ids):
        self.allocate(inputs, len(inputs))
        slots, first = self._cache.positions, self._cache.block.begin
        before = self.by_slot.gather(1, (first - 1).clamp(min=0)[..., None].expand(-1, -1, inputs.shape[-1]))
        is_token = (slots < self._cache.dummy_slot)[..., None]
        sums = torch.where(first[..., None] > 0, before, 0) + torch.where(is_token, inputs, 0).cumsum(dim=1)
        self.by_slot[torch.arange(len(sums))[:, None], slots] = sums
        return sums

    def copy_rows(self, rows, source, taken, slots):
        self.allocate(source.by_slot, self._cache.batch)
        self.by_slot[rows, :slots] = source.by_slot[taken, :slots]

    def read_slots(self, layer, padding, columns, batch, device):
        self.allocate(layer.total.to(device), batch)
        for row, pad in enumerate(padding):
            self.by_slot[row, columns - pad - 1] = layer.total[row]

    def write_slots(self, cache, index, slots):
        cache.layers[index].total = self.by_slot[torch.arange(len(slots)), slots[:, -1]]


@dataclass(frozen=True)
class RunningMean(LayerKind):
    """Sums by slot, so the beginning of a text can be taken from another; the default is that nothing is allowed."""

    layer_types = frozenset({LAYER_TYPE})
    sources = (SumLayer,)
    obstacles = {use: why for use, why in LayerKind.obstacles.items() if use is not Use.PREFIX_REUSE}
    layer_class = RaggedSumLayer

    @classmethod
    def detect(cls, layer):
        return cls() if isinstance(layer, SumLayer) else None


class MeanBlock(nn.Module):
    """A decoder layer that adds a function of the mean of its inputs so far."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, position_ids=None, **kwargs):
        cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        layer = SumLayer() if cache is None else cache.layers[self.layer_idx]
        means = layer.sums(hidden_states, position_ids) / (position_ids[..., None] + 1)
        return hidden_states + torch.tanh(self.mix(means))


class MeanForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for index, layer_type in enumerate(config.layer_types):
            if layer_type == LAYER_TYPE:
                self.model.layers[index] = MeanBlock(config, index)
        self.post_init()


@pytest.fixture
def target(monkeypatch):
    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, LAYER_TYPE, SumLayer)
    monkeypatch.setattr(layer_kinds, "_registered", list(layer_kinds._registered))
    register(RunningMean)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, pad_token_id=PAD, **heads
    )
    config.layer_types = ["full_attention", LAYER_TYPE, "full_attention"]
    config.eos_token_id = None
    torch.manual_seed(0)
    model = MeanForCausalLM(config).eval()
    for block in model.model.layers[1:2]:
        nn.init.normal_(block.mix.weight, std=2.0)
    nn.init.normal_(model.get_input_embeddings().weight, std=0.3)
    return model


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_texts_are_those_of_plain_generation(target, accuracy):
    for lengths in ([9], [12, 1, 7]):
        inputs = padded_prompts(lengths)
        plain = target.generate(**inputs, **OPTIONS)
        assert len(plain.unique()) > 8, "texts tell sums apart"
        drafter = oracle(target, inputs, plain, accuracy=accuracy)
        drafter.engine = "static"
        for options in ({}, {"prefill_chunk_size": 5}):
            found = target.generate(**inputs, **OPTIONS, **options, assistant_model=drafter, num_assistant_tokens=3)
            assert torch.equal(found, plain)
        assert drafter.stats.drafted > 0 and (accuracy < 1 or drafter.stats.accepted == drafter.stats.drafted)


def test_sums_of_rejected_drafts_would_show(target, monkeypatch):
    inputs = padded_prompts([9, 4])
    drafter = oracle(target, inputs, target.generate(**inputs, **OPTIONS), accuracy=0.5)
    target.generate(**inputs, **OPTIONS, assistant_model=drafter)  # the class is checked

    def add_all(self, inputs, position_ids):
        self.allocate(inputs, len(inputs))
        self.by_slot[:, -1] += inputs.sum(dim=1)
        return self.by_slot[:, -1:] + inputs.cumsum(dim=1) - inputs.sum(dim=1, keepdim=True)

    monkeypatch.setattr(RaggedSumLayer, "sums", add_all)
    assert not torch.equal(
        target.generate(**inputs, **OPTIONS, assistant_model=drafter), target.generate(**inputs, **OPTIONS)
    )


@pytest.mark.core
def test_draft_models_caches_and_rows_that_come_and_go(target):
    """What else an engine does with the memory of a layer."""
    config = DraftModelConfig(model=LlamaConfig(vocab_size=VOCAB).to_dict(), vocab_size=VOCAB, mask_token_id=None)
    drafter, inputs = DraftModelDrafter(config, copy.deepcopy(target)).eval(), padded_prompts([9, 4])
    drafter.bind(target)
    first = target.generate(**inputs, **OPTIONS, return_dict_in_generate=True, assistant_model=drafter)
    assert drafter.stats.accepted == drafter.stats.drafted > 0 and drafter.stats.engine == "static"
    longer = {"input_ids": torch.cat([first.sequences, first.sequences[:, :3]], dim=1)}
    longer["attention_mask"] = torch.nn.functional.pad(
        inputs["attention_mask"], (0, OPTIONS["max_new_tokens"] + 3), value=1
    )
    plain = target.generate(**longer, **OPTIONS)
    held = {OUTPUT_NAME: first[OUTPUT_NAME]}
    assert torch.equal(target.generate(**longer, **OPTIONS, **held, assistant_model=drafter), plain)
    assert drafter.stats.engine == "static"
    rows = [row[mask.bool()].tolist() for row, mask in zip(*longer.values(), strict=True)] * 2
    out = target.generate_batch(rows, assistant_model=drafter, **OPTIONS)
    for row, found in zip(rows, out.values(), strict=True):
        alone = {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.int64)}
        assert found.generated_tokens == target.generate(**alone, **OPTIONS)[0, len(row) :].tolist()
