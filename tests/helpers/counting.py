"""A target that counts, and drafters with hand-made weights for it.

The target generates token t + 1 after token t, modulo `COUNTED`, so a text repeats itself every `COUNTED` positions.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.config import DFlashConfig, Pard2Config
from hf_specdec.drafters import DFlash2Drafter, DFlashDrafter, DominoDrafter, DSparkDrafter, Pard2Drafter

COUNTED = 15
MASK = COUNTED  # never generated
WIDTH = COUNTED + 1  # a dimension for each token, and one that all of them have


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
    """A DFlash drafter that drafts the target's token after the token `distance` positions before a block's token."""
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


CHAINING = {
    "dspark": (DSparkDrafter, {"markov_rank": WIDTH}),
    "dflash2": (DFlash2Drafter, {"selector_rank": WIDTH, "selector_top_k": WIDTH}),
    "domino": (DominoDrafter, {"gru_hidden_dim": WIDTH, "emb_dim": WIDTH, "pure_draft_prefix_len": 0}),
}


def chaining_drafter(target: LlamaForCausalLM, step: int, family: str = "dspark", **options) -> DFlashDrafter:
    """A drafter that adds `step` to the token before, whatever else it reads."""
    family_class, settings = CHAINING[family]
    config = family_class.config_class(
        hidden_size=WIDTH,
        intermediate_size=8,
        num_attention_heads=1,
        head_dim=WIDTH,
        vocab_size=WIDTH,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=[2],
        block_size=9,
        **settings,
        **options,
    )
    torch.manual_seed(0)
    drafter = family_class(config).eval()
    table, next_token = torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)
    next_token[:COUNTED, :COUNTED] = 100 * torch.eye(COUNTED).roll(step, dims=0)
    with torch.no_grad():
        if family == "dspark":
            drafter.markov_head.markov_w1.weight.copy_(table)
            drafter.markov_head.markov_w2.weight.copy_(next_token)
        elif family == "dflash2":
            drafter.layers[0].self_attn.o_proj.weight.zero_()
            drafter.layers[0].mlp.down_proj.weight.zero_()
            selector = drafter.candidate_selector
            selector.hidden_projection.weight.zero_()
            selector.hidden_projection.weight[:, -1] = 1.0  # which all tokens have
            selector.predecessor_codebook.copy_(table)
            selector.successor_codebook.copy_(next_token)
        else:
            gru = drafter.prefix_gru
            gru.weight_ih_l0.zero_()
            gru.weight_hh_l0.zero_()
            gru.weight_ih_l0[WIDTH : 2 * WIDTH, -1] = -100.0  # the state is forgotten
            gru.weight_ih_l0[2 * WIDTH :] = table
            drafter.embed_proj[0].weight.zero_()
            drafter.embed_proj[0].weight[:, WIDTH:] = table
            drafter.embed_proj[2].weight.copy_(next_token)
    drafter.bind(target)
    return drafter


def feature_drafter(target: LlamaForCausalLM, step: int) -> Pard2Drafter:
    """A PARD-2 drafter that finds the slot `COUNTED` positions back, and drafts the token `step` after the one whose
    hidden states that slot has. Of tokens it knows nothing."""
    own = LlamaConfig(
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    config = Pard2Config(
        model=own.to_dict(),
        vocab_size=WIDTH,
        mask_token_id=MASK,
        hidden_state_ids=[-1, 2],
        target_hidden_size=WIDTH,
        hidden_state_scale=0.5,
    )
    drafter = Pard2Drafter(config).eval()
    model = drafter.model
    attention = model.model.layers[0].self_attn
    turned = -COUNTED * model.model.rotary_emb.inv_freq
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, -1] = (
            10.0  # which hidden states change little, so that all keys weigh the same
        )
        drafter.target_proj.weight.zero_()
        drafter.target_proj.weight[:COUNTED, WIDTH : WIDTH + COUNTED] = 2 * torch.eye(COUNTED)
        model.model.layers[0].mlp.down_proj.weight.zero_()
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.weight.zero_()
        attention.q_proj.weight[:, -1] = 20 * torch.cat([turned.cos(), turned.sin()])
        attention.k_proj.weight[: WIDTH // 2, -1] = 20.0
        attention.v_proj.weight[:COUNTED, :COUNTED] = torch.eye(COUNTED)
        attention.o_proj.weight.copy_(100 * torch.eye(WIDTH))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:COUNTED, :COUNTED] = torch.eye(COUNTED).roll(step, dims=0)
    drafter.bind(target)
    return drafter
