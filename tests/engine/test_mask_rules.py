"""Targets whose masks alone say what a query sees: windows that attention is not told, and chunks."""

import copy
from functools import cache, partial

import pytest
import torch
from case_counts import cases, num_cases
from graph_stand_ins import replay_on_cpu
from lossless import PROMPTS, GreedyTexts, oracle
from oracle import copy_of, random_eagle3, random_mtp
from targets import build_target, padded_prompts, tiny_target
from transformers import LlamaForCausalLM
from transformers.masking_utils import create_causal_mask

from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.hosting.equivalence import why_not_equivalent
from hf_specdec.patching.attention import ragged_attention
from hf_specdec.patching.mask_rules import MaskRule, rules_by_module, why_not_rules

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA4 = {
    "attention_chunk_size": 8,
    "intermediate_size_mlp": 64,
    "no_rope_layers": [1, 1, 1, 0],
    "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
    **MOE,
}
SETTINGS = {
    # A window that is smaller than the few tokens of the check, and one that is larger.
    "phimoe, small window": {"sliding_window": 5, **MOE},
    "phimoe, large window": {"sliding_window": 30, **MOE},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "sliding_window": 6,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "llama4_text": LLAMA4,
    "llama4_text, large chunk": LLAMA4 | {"attention_chunk_size": 27},
}


@cache
def target_of(name):
    return build_target(name.split(",")[0], **SETTINGS[name])


TEXTS = GreedyTexts(target_of, max_new_tokens=num_cases(24, 16))
ACROSS = (40, 9, 33)  # of rows on both sides of every window and chunk


@pytest.mark.core_for(lengths=[ACROSS])
@pytest.mark.parametrize(
    ("name", "lengths"),
    cases(
        every := [(name, tuple(one)) for name in SETTINGS for one in (PROMPTS[3], PROMPTS[1], ACROSS, (70, 16))],
        [one for at, one in enumerate(every) if one[1] == ACROSS or at // 4 == at % 4],
    ),
    ids=str,
)
def test_greedy_is_identical(name, lengths):
    for accuracy, num in cases([(0.0, 1), (0.6, 3), (1.0, 7)], [(0.6, 3)]):
        TEXTS.check(name, lengths, partial(oracle, accuracy=accuracy), num)
    TEXTS.check(name, lengths, oracle, prefill_chunk_size=7)


@pytest.mark.core_for(name=["phimoe, small window"])
@pytest.mark.parametrize("name", ["phimoe, small window", "llama4_text"])
def test_drafters(name):
    lengths = ACROSS
    TEXTS.check(name, lengths, lambda target, *_: random_eagle3(target))
    drafter = TEXTS.check(name, lengths, lambda target, *_: copy_of(target))
    assert drafter.stats.accepted == drafter.stats.drafted > 0, "a draft model has the rules of its masks, too"


@pytest.mark.core
def test_drafters_that_read_the_last_hidden_state():
    """`get_decoder()` of Llama 4 is the model with the head, whose output has none."""
    TEXTS.check("llama4_text", ACROSS, lambda target, *_: random_mtp(target), num_draft_tokens=2)
    drafter = copy_of(target_of("llama4_text"))
    assert drafter.unroll(torch.arange(4, 12)[None], None, 1)[0].shape == (1, 8, 32)


@pytest.mark.parametrize("name", ["llama4_text", "qwen2_moe"])
def test_text_that_continues_a_cache(name):
    TEXTS.check_continued_cache(name)


def test_replayed_graphs(monkeypatch):
    replay_on_cpu(monkeypatch)
    TEXTS.check_replayed("llama4_text", random_eagle3(target_of("llama4_text")), [[5, 3], [4, 5]])


@pytest.mark.core
def test_rules():
    rules = {name: dict(rules_by_module(target_of(name))) for name in SETTINGS}
    assert set(rules["phimoe, small window"].values()) == {MaskRule(window=5)}
    assert set(rules["phimoe, large window"].values()) == {MaskRule(window=30)}
    layers = target_of("qwen2_moe").model.layers
    assert rules["qwen2_moe"] == {layers[at].self_attn: MaskRule(window=6) for at in (1, 3)}
    layers = target_of("llama4_text").model.layers
    assert rules["llama4_text"] == {layers[at].self_attn: MaskRule(chunk=8) for at in range(3)}
    for stated in (build_target("mistral", sliding_window=5), build_target("llama")):
        assert rules_by_module(stated) == [] and why_not_rules(stated) is None


@pytest.mark.core
def test_flash_attention_is_given_no_masks(monkeypatch):
    """Windows that attention is not told are none to it."""
    target = build_target("phimoe", **SETTINGS["phimoe, small window"])
    names = [set(vars(target.model.layers[0].self_attn))]
    with ragged_attention(target):
        names.append(set(vars(target.model.layers[0].self_attn)) - names[0])
    monkeypatch.setitem(vars(target.config), "_attn_implementation_internal", "flash_attention_2")
    with ragged_attention(target):
        names.append(set(vars(target.model.layers[0].self_attn)) - names[0])
    assert names[1:] == [{"_hf_specdec_mask_rule"}, set()] and set(vars(target.model.layers[0].self_attn)) == names[0]


@pytest.mark.core
def test_masks_of_no_known_kind_are_refused():
    """A query sees every other key; the first tokens of a text do not show that."""

    class Holes(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            if attention_mask is not None and attention_mask.dim() == 2:
                attention_mask = create_causal_mask(
                    config=self.config,
                    inputs_embeds=self.get_input_embeddings()(input_ids),
                    attention_mask=attention_mask,
                    **{OUTPUT_NAME: kwargs.get(OUTPUT_NAME)},
                    and_mask_function=lambda batch, head, query, key: (query - key < 20) | ((query - key) % 2 == 0),
                )
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    torch.manual_seed(0)
    target = Holes(build_target("llama").config).eval()
    assert "the mask of attention 0 is of no kind that is known" in why_not_equivalent(target, "static")


@pytest.mark.core
def test_temperature_by_the_position():
    """Llama 4 scales queries by how many tokens the cache holds, from a length on."""
    target = build_target("llama4_text", **LLAMA4 | {"floor_scale": 48, "attn_temperature_tuning": True})
    inputs, short = padded_prompts([40]), padded_prompts([20])
    for prompts, engine in ((inputs, "stock"), (short, "static")):
        plain = TEXTS.greedy(target, prompts)
        drafter = oracle(target, prompts, plain)
        assert torch.equal(TEXTS.greedy(target, prompts, drafter, 3), plain)
        assert drafter.stats.engine == engine
        assert engine == "static" or "from 48 tokens on" in drafter.stats.reason


@pytest.mark.parametrize("change", ["window of layers", "order of layers"])
def test_layers_changed_between_calls(change):
    """Of a class whose masks are made by the configuration, whatever a layer states."""
    target, drafter = copy.deepcopy(tiny_target("gemma3")), None
    inputs = padded_prompts(PROMPTS[3])
    for _ in range(2):
        drafter = drafter or copy_of(target)
        plain = TEXTS.greedy(target, inputs)
        assert torch.equal(TEXTS.greedy(target, inputs, drafter, 3), plain) and drafter.stats.engine == "static"
        layers = target.model.layers
        if change == "window of layers":
            layers[0].self_attn.sliding_window = 3
        else:
            layers[0], layers[2] = layers[2], layers[0]
            for index, layer in enumerate(layers):
                layer.self_attn.layer_idx = index
