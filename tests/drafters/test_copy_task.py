"""Drafters of blocks whose weights are made by hand for a target that counts: every draft is right, and none if a
position, a token or a hidden state is one off.

position, a token or a hidden state is one off.
drafter has one layer with one head, whose scores depend on the distance of query and key alone: it finds the context
position a given distance back, and drafts what the target says after the token there.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.config import DFlashConfig, DSparkConfig
from hf_specdec.drafters import DFlashDrafter, DSparkDrafter

COUNTED = 15
MASK = COUNTED  # never said
WIDTH = COUNTED + 1  # a dimension for each token, and one that all of them have
LENGTHS = [18, 33, 25]


def counting_target() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=MASK,
    )
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table = torch.eye(WIDTH)
        table[:, -1] = 1.0
        target.model.embed_tokens.weight.copy_(table)
        target.lm_head.weight.zero_()
        target.lm_head.weight[:COUNTED, :COUNTED] = torch.eye(COUNTED).roll(1, dims=0)
    target.generation_config.pad_token_id = MASK
    target.generation_config.eos_token_id = None
    return target


def finding_drafter(target: LlamaForCausalLM, distance: int, **options) -> DFlashDrafter:
    """A DFlash drafter that drafts what the target says after the token `distance` positions before a block's token."""
    config = DFlashConfig(
        hidden_size=WIDTH,
        intermediate_size=8,
        num_attention_heads=1,
        head_dim=WIDTH,
        vocab_size=WIDTH,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=[2],
        block_size=9,
        **options,
    )
    drafter = DFlashDrafter(config).eval()
    turned = -distance * drafter.rotary_emb.inv_freq
    attention = drafter.layers[0].self_attn
    with torch.no_grad():
        drafter.fc.weight.copy_(torch.eye(WIDTH))
        drafter.layers[0].mlp.down_proj.weight.zero_()
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.zero_()
        attention.q_proj.weight[:, -1] = torch.cat([turned.cos(), turned.sin()])
        attention.k_proj.weight[: WIDTH // 2, -1] = 1.0
        attention.q_norm.weight.fill_(20.0)
        attention.k_norm.weight.fill_(20.0)
        attention.v_proj.weight[:COUNTED, :COUNTED] = torch.eye(COUNTED)
        attention.o_proj.weight.copy_(100 * torch.eye(WIDTH))
    drafter.bind(target)
    return drafter


def chaining_drafter(target: LlamaForCausalLM, step: int, **options) -> DSparkDrafter:
    """A DSpark drafter that drafts the token `step` after the one before it, whatever the hidden states."""
    config = DSparkConfig(
        hidden_size=WIDTH,
        intermediate_size=8,
        num_attention_heads=1,
        head_dim=WIDTH,
        vocab_size=WIDTH,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=[2],
        block_size=9,
        markov_rank=WIDTH,
        **options,
    )
    torch.manual_seed(0)
    drafter = DSparkDrafter(config).eval()
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(WIDTH))
        drafter.markov_head.markov_w2.weight.zero_()
        drafter.markov_head.markov_w2.weight[:COUNTED, :COUNTED] = 100 * torch.eye(COUNTED).roll(step, dims=0)
    drafter.bind(target)
    return drafter


def acceptance(target, drafter, num_draft_tokens, engine="static") -> float:
    """Share of accepted drafts, of which the call has as many as fit, on counting prompts."""
    lengths = LENGTHS if engine == "static" else LENGTHS[:1]
    width = max(lengths)
    rows = [
        [MASK] * (width - length) + [(row + at) % COUNTED for at in range(length)] for row, length in enumerate(lengths)
    ]
    input_ids = torch.tensor(rows)
    inputs = {
        "input_ids": input_ids,
        "attention_mask": (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long(),
    }
    drafter.configure(engine=engine, num_assistant_tokens=num_draft_tokens)
    out = target.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=4 * (num_draft_tokens + 1))
    last = input_ids[:, -1:]
    assert torch.equal(out[:, width:], (last + 1 + torch.arange(out.shape[1] - width)) % COUNTED)
    return drafter.stats.accepted / drafter.stats.drafted


LAYERS = {
    "whole block": {"causal": False},
    "causal": {"causal": True},
    "windowed": {"layer_types": ["sliding_attention"], "sliding_window": COUNTED + 2, "causal": False},
    "windowed and causal": {"layer_types": ["sliding_attention"], "sliding_window": COUNTED + 2, "causal": True},
}


@pytest.mark.parametrize("engine", ["static", "stock"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("anchor_first", [False, True])
def test_every_draft_is_right(anchor_first, layers, engine):
    """A mask drafts the token at its own position, which the token `COUNTED` + 1 positions before it tells; a token of
    a block that begins with the anchor drafts the next one, which the token `COUNTED` positions before it tells."""
    target, distance = counting_target(), COUNTED if anchor_first else COUNTED + 1
    drafter = finding_drafter(target, distance, anchor_first=anchor_first, **LAYERS[layers])
    for num_draft_tokens in (1, 3, 8):
        assert acceptance(target, drafter, num_draft_tokens, engine) == 1.0


@pytest.mark.parametrize("anchor_first", [False, True])
@pytest.mark.parametrize("error", [-1, 1])
def test_no_draft_is_right_one_position_off(anchor_first, error):
    target, distance = counting_target(), COUNTED if anchor_first else COUNTED + 1
    drafter = finding_drafter(target, distance + error, anchor_first=anchor_first)
    assert acceptance(target, drafter, 3) == 0.0


@pytest.mark.parametrize("anchor_first", [False, True])
def test_no_draft_is_right_by_the_other_convention(anchor_first):
    target = counting_target()
    drafter = finding_drafter(target, COUNTED + 1 if anchor_first else COUNTED, anchor_first=anchor_first)
    assert acceptance(target, drafter, 3) == 0.0


def test_a_window_that_ends_before_the_position_hides_it():
    """The query's own position counts: a window of n shows n - 1 positions before it."""
    target = counting_target()
    for window, expected in ((COUNTED + 2, 1.0), (COUNTED + 1, 0.0)):
        drafter = finding_drafter(
            target, COUNTED + 1, layer_types=["sliding_attention"], sliding_window=window, causal=False
        )
        assert acceptance(target, drafter, 5) == expected


@pytest.mark.parametrize("anchor_first", [False, True])
@pytest.mark.parametrize("engine", ["static", "stock"])
def test_every_draft_of_a_chain_is_right(anchor_first, engine):
    """The first follows the anchor in both conventions."""
    target = counting_target()
    drafter = chaining_drafter(target, 1, anchor_first=anchor_first)
    for num_draft_tokens in (1, 3, 8):
        assert acceptance(target, drafter, num_draft_tokens, engine) == 1.0
    for step in (0, 2):
        assert acceptance(target, chaining_drafter(target, step, anchor_first=anchor_first), 3, engine) == 0.0
