"""Targets whose tokens have several positions each (M-RoPE): text runs as on any target, also after images."""

import pytest
import torch
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from oracle import copy_of, random_draft_model, random_eagle3
from targets import padded_prompts
from transformers import DynamicCache
from zoo_models import build

from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.patching.support import why_not_supported

OPTIONS = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture(scope="module")
def target():
    return build("Qwen2_5_VLForConditionalGeneration")


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "lengths"),
    cases(
        every := [(kind, one) for kind in (copy_of, random_draft_model, random_eagle3) for one in ((5,), (9, 2, 5))],
        [one for one in every if (one[0] is random_draft_model) == (len(one[1]) == 1)],
    ),
)
def test_text_runs_on_the_static_engine(target, kind, lengths):
    inputs = padded_prompts(lengths)
    plain = target.generate(**inputs, **OPTIONS)
    drafter = kind(target)
    assert torch.equal(target.generate(**inputs, **OPTIONS, assistant_model=drafter, num_assistant_tokens=3), plain)
    assert drafter.stats.engine == "static"


def test_graphs_are_kept_for_the_next_call(monkeypatch, target):
    """Every call of `generate()` sets `rope_deltas` of the model anew."""
    capture = replay_on_cpu(monkeypatch)
    drafter = random_eagle3(target)
    for lengths in ([5, 3], [4, 5], [2, 5]):
        inputs = padded_prompts(lengths)
        plain = target.generate(**inputs, **OPTIONS)
        assert torch.equal(target.generate(**inputs, **OPTIONS, assistant_model=drafter), plain)
        assert capture.count == 2 and len(drafter.sessions) == 1


@pytest.mark.core
def test_text_that_continues_a_cache_of_images(target):
    """Positions after an image are not those of the tokens; `generate()` adds the model's `rope_deltas` to them."""
    first, drafter, texts = padded_prompts([6]), random_draft_model(target), []
    for assistant in (None, drafter):
        cache = DynamicCache()
        out = target.generate(**first, **OPTIONS, **{OUTPUT_NAME: cache})
        target.model.rope_deltas = torch.tensor([[3]])  # as after an image of several rows
        longer = torch.cat([out, padded_prompts([4], seed=1)["input_ids"]], dim=1)
        options = {**OPTIONS, OUTPUT_NAME: cache, "assistant_model": assistant}
        texts.append(target.generate(longer, attention_mask=torch.ones_like(longer), **options))
    assert torch.equal(*texts)
    assert drafter.stats.engine == "static"

    ordinary = target.generate(**first, **OPTIONS, assistant_model=drafter)
    assert torch.equal(ordinary, target.generate(**first, **OPTIONS)) and drafter.stats.engine == "static"


@pytest.mark.core
def test_cross_attention_is_not_supported():
    """Its layers read an image, not positions; a cache that holds one cannot be read by position."""
    assert "cross-attention layers" in why_not_supported(build("MllamaForCausalLM"))
