"""Draft models of classes that take other arguments than most."""

import pytest
import torch
from oracle import copy_of
from targets import build_target, padded_prompts


@pytest.mark.core
def test_a_draft_model_that_computes_all_logits():
    """Whisper's decoder has no `logits_to_keep`: of the logits of all tokens those of the last ones are read."""
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    target = build_target("whisper", **sizes, init_std=0.3, is_encoder_decoder=False, is_decoder=True)
    drafter = copy_of(target)
    options = {**padded_prompts([5, 5]), "do_sample": False, "max_new_tokens": 12}
    output = target.generate(**options, assistant_model=drafter, num_assistant_tokens=3)
    assert torch.equal(output, target.generate(**options))
    assert drafter.stats.engine == "static" and drafter.stats.acceptance_length > 3
