"""Checkpoints of drafters of blocks in every layout: how config.json is interpreted, loading and saving, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import DFLASH, DFLASH2, DOMINO, DSPARK, DSPINE, LAYOUTS, Block, make_weights, specforge_config, write
from dialects import PLAIN, tiny_target
from dialects import make_weights as make_eagle_weights
from dialects import write as write_eagle
from safetensors.torch import load_file
from transformers import LlamaConfig

from hf_specdec import AutoDrafter
from hf_specdec.auto import NormalizedCheckpoint, read_checkpoint
from hf_specdec.checkpoints.checkpoint import open_checkpoint
from hf_specdec.config import (
    DFlash2Config,
    DFlashConfig,
    DominoConfig,
    DSparkConfig,
    DSpineConfig,
    default_block_layer_ids,
)

EVERY = [(layout, number) for layout, specs in LAYOUTS.items() for number in range(len(specs))]
DIALECTS = {
    "z-lab": "z-lab",
    "speculators-dflash": "speculators",
    "modelopt-dflash": "NVIDIA ModelOpt",
    "deepspec-dflash": "DeepSpec",
    "muse": "transformers",
    "jetspec": "JetSpec",
    "deepspec": "DeepSpec",
    "specforge": "SpecForge",
    "specforge-nested": "SpecForge",
    "z-lab-2": "z-lab",
    "speculators-dflash2": "speculators",
    "specforge-domino": "SpecForge",
    "specforge-dspine": "SpecForge",
    "modelopt-domino": "NVIDIA ModelOpt",
    "modelopt": "NVIDIA ModelOpt",
    "speculators": "speculators",
}
WINDOWED = Block(windows=(None, 4), causal=(False, True))


def read(
    folder: Path,
    layout: str,
    spec: Block,
    weights: dict[str, torch.Tensor] | None = None,
    with_target: bool = True,
    overrides: dict[str, Any] | None = None,
    **changes: Any,
) -> NormalizedCheckpoint:
    """Write a checkpoint with `changes` to its config.json and read it."""
    write(layout, folder, spec, make_weights(spec) if weights is None else weights, **changes)
    target = LlamaConfig(hidden_size=32, vocab_size=128, num_hidden_layers=8) if with_target else None
    return read_checkpoint(open_checkpoint(folder), target, overrides)


def decision(found: NormalizedCheckpoint, name: str):
    (one,) = [decision for decision in found.decisions if decision.name == name]
    return one


@pytest.fixture(scope="module")
def target():
    return tiny_target(PLAIN)


def config_class_of(spec: Block) -> type[DFlashConfig]:
    if spec.transfer:
        return DSpineConfig
    if spec.top_k:
        return DFlash2Config
    if spec.gru:
        return DominoConfig
    return DFlashConfig if spec.markov is None else DSparkConfig


@pytest.mark.parametrize(("layout", "number"), EVERY)
def test_every_layout_is_read(layout, number, tmp_path):
    spec = LAYOUTS[layout][number]
    found = read(tmp_path, layout, spec)
    config = found.config
    assert type(config) is config_class_of(spec)
    assert config.dialect == DIALECTS[layout] and config.parallel_drafting
    assert config.block_size == spec.block_size and config.mask_token_id == spec.mask_token
    assert config.anchor_first == spec.anchor_first and not decision(found, "anchor_first").doubtful
    assert config.causal == list(spec.causal) and config.layer_types == spec.layer_types
    assert config.depth == config.num_assistant_tokens == spec.depth
    assert config.aux_hidden_state_layer_ids == [2, 4, 5] and config.num_aux_hidden_states == 3
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": spec.rope_theta}
    assert (config.own_embedding, config.own_head) == (spec.own_embedding, spec.own_head)
    assert (config.vocab_size, config.draft_vocab_size) == (spec.vocab_size, spec.draft_vocab_size)
    if spec.window is not None:
        assert config.sliding_window == spec.window
    if spec.markov is not None:
        assert (config.markov_rank, config.markov_type) == (spec.rank, spec.markov)
    if spec.gru:
        settings = (config.gru_hidden_dim, config.emb_dim, config.pure_draft_prefix_len)
        assert settings == (spec.gru, spec.emb, spec.prefix)
    if spec.transfer:
        settings = (config.transfer_rank, config.message_size, config.selector_top_k)
        assert settings == (spec.transfer, spec.message, spec.top_k)
    elif spec.top_k:
        assert (config.conv_kernel_size, config.conv_group_size) == (spec.taps, spec.group)
        assert (config.selector_rank, config.selector_top_k) == (spec.rank, spec.top_k)


@pytest.mark.core_for(layout=["z-lab", "z-lab-2", "specforge-domino", "speculators", "muse"])
@pytest.mark.parametrize(("layout", "number"), EVERY)
def test_round_trip(layout, number, target, tmp_path):
    spec = LAYOUTS[layout][number]
    weights = make_weights(spec)
    first = AutoDrafter.from_pretrained(write(layout, tmp_path / "a", spec, weights), target)
    first.save_pretrained(tmp_path / "b")
    second = AutoDrafter.from_pretrained(tmp_path / "b", target)
    second.save_pretrained(tmp_path / "c")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert type(second) is type(first) and saved.keys() == first.state_dict().keys()
    used = weights.keys() - {"t2d"}
    assert saved.keys() == used
    assert all(torch.equal(saved[name], weights[name].to(saved[name].dtype)) for name in used)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


def test_copies_of_the_target_are_shared(tmp_path):
    """As DeepSpec publishes: its own copies of the target's embedding and head, which are dropped."""
    spec, target = LAYOUTS["deepspec"][0], tiny_target(PLAIN, dtype=torch.float32)
    weights = make_weights(spec) | {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach(),
        "lm_head.weight": target.get_output_embeddings().weight.detach(),
    }
    folder = write("deepspec", tmp_path, spec, weights)
    drafter = AutoDrafter.from_pretrained(folder, target)
    assert drafter.embed_tokens is None and drafter.lm_head is None
    kept = AutoDrafter.from_pretrained(folder, target, share_embedding=False, share_head=False)
    assert kept.embed_tokens is not None and kept.lm_head is not None


def test_own_weights_are_kept(target, tmp_path):
    """A head of its own over fewer tokens is not the target's."""
    spec = LAYOUTS["speculators"][0]
    folder = write("speculators", tmp_path, spec, make_weights(spec))
    drafter = AutoDrafter.from_pretrained(folder, target)
    assert drafter.embed_tokens is None and torch.equal(
        drafter.lm_head.weight, make_weights(spec)["lm_head.weight"].double()
    )
    assert AutoDrafter.from_pretrained(folder, target, share_head=True).lm_head is None


@pytest.mark.parametrize(
    ("changes", "spec", "expected", "doubtful"),
    [
        ({}, WINDOWED, [False, True], True),
        ({}, DFLASH, [False, False], False),
        ({"is_causal": True}, DFLASH, [True, True], False),
        ({"is_causal": False}, WINDOWED, [False, False], False),
    ],
)
def test_causality_of_zlab(changes, spec, expected, doubtful, tmp_path):
    found = read(tmp_path, "z-lab", spec, **changes)
    assert found.config.causal == expected and decision(found, "causal").doubtful == doubtful


@pytest.mark.parametrize(("layout", "spec"), [("z-lab", WINDOWED), ("deepspec", LAYOUTS["deepspec"][0])])
def test_causality_of_queries(layout, spec, tmp_path):
    """`dflash_query_causal`, in files of DSpark that begin with a DFlash drafter."""
    for stated in (True, False):
        found = read(tmp_path / str(stated), layout, spec, dflash_query_causal=stated)
        assert found.config.causal == [stated] * 2 and not decision(found, "causal").doubtful
    assert read(tmp_path / "c", layout, spec, dflash_query_causal=True, is_causal=False).config.causal == [False] * 2


def test_unknown_keys_of_dflash_config_are_said(target, tmp_path, caplog):
    nested = {"mask_token_id": 5, "target_layer_ids": [1, 3, 4], "depth_mixing": 0.5, "another": False}
    folder = write("z-lab", tmp_path, DFLASH, make_weights(DFLASH), dflash_config=nested)
    AutoDrafter.from_pretrained(folder, target)
    (said,) = [one for one in caplog.messages if "leaves open how" in one]
    assert "depth_mixing = 0.5" in said and "another" not in said and "by keyword" not in said


def test_causality_inside_dflash_config(tmp_path):
    nested = {"mask_token_id": 5, "target_layer_ids": [1, 3, 4], "causal": True}
    assert read(tmp_path / "a", "z-lab", DFLASH, dflash_config=nested).config.causal == [True, True]
    assert read(tmp_path / "b", "z-lab", DFLASH, dflash_config=nested, is_causal=False).config.causal == [False] * 2
    assert read(tmp_path / "c", "jetspec", DFLASH, dflash_config=nested | {"causal_head": False}).config.causal


@pytest.mark.parametrize(
    ("stated", "expected", "doubtful"),
    [(True, [False] * 2, False), (False, [False, True], False), (..., [False] * 2, True)],
)
def test_causality_of_speculators(stated, expected, doubtful, tmp_path):
    """Full layers see the whole block in any case; exports from before the key see it in all."""
    found = read(tmp_path, "speculators-dflash", WINDOWED, sliding_window_non_causal=stated)
    assert found.config.causal == expected and decision(found, "causal").doubtful == doubtful


def test_causality_is_overridden(target, tmp_path):
    folder = write("z-lab", tmp_path / "a", WINDOWED, make_weights(WINDOWED))
    drafter = AutoDrafter.from_pretrained(folder, target, causal=False)
    assert drafter.config.causal == [False, False]
    drafter.save_pretrained(tmp_path / "b")
    assert AutoDrafter.from_pretrained(tmp_path / "b", target).config.causal == [False, False]
    assert AutoDrafter.from_pretrained(tmp_path / "b", target, causal=[True, False]).config.causal == [True, False]
    with pytest.raises(ValueError, match="expected True or False for each of the 2 draft layers"):
        AutoDrafter.from_pretrained(folder, target, causal=[True])


def test_windows_by_transformers_rule(tmp_path):
    """Without `layer_types`, layers from number `max_window_layers` on are windowed."""
    weights = make_weights(WINDOWED)
    found = read(tmp_path / "a", "z-lab", WINDOWED, weights, layer_types=..., max_window_layers=1)
    assert found.config.layer_types == ["full_attention", "sliding_attention"] and found.config.sliding_window == 4
    found = read(tmp_path / "b", "z-lab", WINDOWED, weights, layer_types=..., use_sliding_window=False)
    assert found.config.layer_types == ["full_attention"] * 2
    with pytest.raises(ValueError, match="layer_types has windowed layers, but use_sliding_window is false"):
        read(tmp_path / "c", "z-lab", WINDOWED, weights, use_sliding_window=False)


@pytest.mark.parametrize(
    ("depth", "expected"), [(16, False), (17, True), (3, False)], ids=["one less", "the block", "another"]
)
def test_speculators_dspark_from_before_sample_from_anchor(depth, expected, tmp_path):
    spec = LAYOUTS["speculators"][0]
    methods = {"proposal_methods": [{"speculative_tokens": depth}], "verifier": {}}
    found = read(tmp_path, "speculators", spec, sample_from_anchor=..., speculators_config=methods)
    assert found.config.anchor_first == expected and decision(found, "anchor_first").doubtful
    assert found.config.num_assistant_tokens == depth


def test_anchor_first_is_overridden(target, tmp_path):
    folder = write("z-lab", tmp_path / "a", DFLASH, make_weights(DFLASH))
    drafter = AutoDrafter.from_pretrained(folder, target, anchor_first=True)
    assert drafter.config.anchor_first and drafter.num_assistant_tokens == 17
    drafter.save_pretrained(tmp_path / "b")
    drafter = AutoDrafter.from_pretrained(tmp_path / "b", target, anchor_first=False)
    assert not drafter.config.anchor_first and drafter.num_assistant_tokens == 16


@pytest.mark.parametrize(
    ("layout", "changes", "expected", "doubtful"),
    [
        ("deepspec", {"architectures": ["LingDSparkModel"]}, True, True),
        ("deepspec", {"architectures": ["Lfm2DSparkDraftModel"]}, True, True),
        ("deepspec", {"architectures": ["Qwen3OmniDSparkModel"]}, True, True),
        ("deepspec", {"architectures": ["AnotherDraftModel"]}, True, True),
        ("deepspec", {"sample_from_anchor": False}, False, False),
        ("deepspec", {"dspark_bonus_anchor": True}, False, False),
        ("deepspec", {"dspark_bonus_anchor": False, "architectures": ["LingDSparkModel"]}, True, False),
        ("deepspec-dflash", {"architectures": ["LingDSparkModel"]}, True, True),
        ("specforge", {"sample_from_anchor": False}, False, False),
        ("specforge", {"shift_label": False}, False, False),
    ],
)
def test_anchor_first_is_read_from_keys_before_names(layout, changes, expected, doubtful, tmp_path):
    """A stated key decides; without one, DSpark of whatever class drafts from the anchor on, if not speculators'."""
    found = read(tmp_path, layout, LAYOUTS[layout][0], **changes)
    assert found.config.anchor_first == expected and decision(found, "anchor_first").doubtful == doubtful


def test_anchor_first_of_an_unknown_class_is_said(target, tmp_path, caplog):
    spec = LAYOUTS["deepspec"][0]
    folder = write("deepspec", tmp_path, spec, make_weights(spec), architectures=["LingDSparkModel"])
    assert AutoDrafter.from_pretrained(folder, target).config.anchor_first
    said = next(one for one in caplog.messages if "leaves open how" in one)
    assert "anchor_first = True" in said and "--target TARGET --self-check`, and pass what it reports by key" in said


def test_keys_about_the_anchor_that_contradict_each_other(target, tmp_path):
    spec = LAYOUTS["deepspec"][0]
    changes = {"sample_from_anchor": True, "dspark_bonus_anchor": True}
    folder = write("deepspec", tmp_path, spec, make_weights(spec), **changes)
    with pytest.raises(ValueError, match="sample_from_anchor is true, dspark_bonus_anchor is true in its"):
        AutoDrafter.from_pretrained(folder, target)
    assert AutoDrafter.from_pretrained(folder, target, anchor_first=True).config.anchor_first


@pytest.mark.parametrize(("layout", "rule"), [("deepspec", "anchor on"), ("speculators", "sample_from_anchor")])
def test_dspark_without_a_markov_head(layout, rule, target, tmp_path):
    """`markov_rank: 0`: DFlash that drafts from the anchor on; a confidence head may be there."""
    spec = Block(anchor_first=True, own_embedding=True, own_head=True)
    weights = make_weights(spec) | {
        "confidence_head.proj.weight": torch.ones(1, spec.hidden_size),
        "confidence_head.proj.bias": torch.ones(1),
    }
    changes = {"markov_rank": 0, "enable_confidence_head": True, "confidence_head_with_markov": False}
    changes |= {"speculators_model_type": "dspark"} if layout == "speculators" else {}
    folder = write(layout, tmp_path, spec, weights, **changes)
    found = read_checkpoint(open_checkpoint(folder), target.config)
    assert type(found.config) is DFlashConfig and rule in decision(found, "anchor_first").rule
    drafter = AutoDrafter.from_pretrained(folder, target)
    assert drafter.config.anchor_first and drafter.num_assistant_tokens == spec.block_size


@pytest.mark.parametrize("heads", [2, 4])
def test_attention_modes_of_specforge(heads, target, tmp_path):
    """As many heads of keys as of queries, or fewer: the layers' settings and tensors say which."""
    spec = Block(anchor_first=True, markov="vanilla", num_kv_heads=heads)
    nested = specforge_config(spec)["dflash_config"]
    for mode in ("mha", "GQA"):
        folder = write(
            "specforge", tmp_path / mode, spec, make_weights(spec), dflash_config=nested | {"attention_mode": mode}
        )
        assert AutoDrafter.from_pretrained(folder, target).config.num_key_value_heads == heads


def test_convention_is_not_read_from_a_name(tmp_path):
    """DeepSpec's `dflash_*` are of its DSpark class and draft from the anchor on."""
    folder = tmp_path / "dflash_qwen3_4b_block7"
    assert read(folder, "deepspec-dflash", LAYOUTS["deepspec-dflash"][0]).config.anchor_first


@pytest.mark.parametrize(
    ("num_layers", "count", "outputs"),
    [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (48, 1, [24]), (28, 5, [1, 7, 13, 19, 25])],
)
def test_default_layer_ids(num_layers, count, outputs):
    """z-lab's examples, and a half that is rounded to even."""
    assert default_block_layer_ids(num_layers, count) == [output + 1 for output in outputs]


def test_layer_ids(target, tmp_path):
    nested = {"mask_token_id": 5}
    weights = make_weights(Block(layer_ids=(2, 6)))
    found = read(tmp_path / "a", "z-lab", DFLASH, weights, dflash_config=nested)
    assert found.config.aux_hidden_state_layer_ids == [2, 6]
    found = read(
        tmp_path / "b", "z-lab", DFLASH, weights, with_target=False, dflash_config=nested, num_target_layers=...
    )
    assert found.config.aux_hidden_state_layer_ids is None
    drafter = AutoDrafter.from_pretrained(tmp_path / "b", target)
    assert drafter.aux_hidden_state_layer_ids == [2, 6]
    found = read(tmp_path / "c", "deepspec-dflash", LAYOUTS["deepspec-dflash"][0], target_layer_ids=[-1, 3, 7])
    assert found.config.aux_hidden_state_layer_ids == [0, 4, 8]
    for ids in ([4, 3, 1], [1, 1, 3]):
        with pytest.raises(ValueError, match="which do not ascend"):
            read(tmp_path / "d", "z-lab", DFLASH, dflash_config=nested | {"target_layer_ids": ids})
    with pytest.raises(ValueError, match="expected a list of layer numbers"):
        read(tmp_path / "d", "z-lab", DFLASH, dflash_config=nested | {"target_layer_ids": [-2, 1, 3]})
    with pytest.raises(ValueError, match="has 8 layers, so ids 0 to 8"):
        AutoDrafter.from_pretrained(tmp_path / "c", target, aux_hidden_state_layer_ids=[2, 4, 9])


def test_block_size_inside_dflash_config(tmp_path):
    nested = {"mask_token_id": 5, "target_layer_ids": [1, 3, 4], "block_size": 8}
    assert read(tmp_path / "a", "z-lab", DFLASH, dflash_config=nested).config.block_size == 8
    with pytest.raises(ValueError, match="block_size None"):
        read(tmp_path / "b", "z-lab", DFLASH, block_size=...)
    with pytest.raises(ValueError, match="block_size is 1; expected 2 to"):
        read(tmp_path / "c", "z-lab", DFLASH, block_size=1)


def test_mask_token(tmp_path):
    nested = {"target_layer_ids": [1, 3, 4]}
    with pytest.raises(ValueError, match=r"names no mask token; looked for dflash_config\.mask_token_id"):
        read(tmp_path / "a", "z-lab", DFLASH, dflash_config=nested)
    found = read(tmp_path / "b", "z-lab", DFLASH, dflash_config=nested, overrides={"mask_token_id": 7})
    assert found.config.mask_token_id == 7
    with pytest.raises(ValueError, match="one of the 128 tokens"):
        read(tmp_path / "c", "z-lab", DFLASH, dflash_config=nested | {"mask_token_id": 128})


@pytest.mark.parametrize(
    ("layout", "spec", "changes", "message"),
    [
        ("z-lab", DFLASH, {"use_gemma_norm": True}, "use_gemma_norm True"),
        ("z-lab", DFLASH, {"micro_block_size": 4}, "micro_block_size 4 .*expected no such key"),
        ("deepspec", LAYOUTS["deepspec"][0], {"log_snr_conditioning": True}, "log_snr_conditioning True"),
        ("deepspec", LAYOUTS["deepspec"][0], {"enable_qwen35_gated_q_proj": True}, "gated_q_proj True"),
        ("z-lab", DFLASH, {"rope_is_neox_style": False}, "rope_is_neox_style False"),
        ("z-lab", DFLASH, {"hidden_act": "swigluoai"}, "hidden_act 'swigluoai'"),
        ("specforge", DSPARK, {"dflash_config": {"mask_token_id": 5, "markov_rank": 7}}, "markov_w1.weight is"),
        ("modelopt", DSPARK, {"is_causal": None, "num_hidden_layers": 3}, "num_hidden_layers is 3"),
        (
            "speculators-dflash2",
            DFLASH2,
            {"conv_kernel_size": 3},
            r"base_kernel is \[2, 2, 32\], expected \[2, 3, 32\]",
        ),
        (
            "speculators-dflash2",
            DFLASH2,
            {"conv_kernel_size": 18},
            "conv_kernel_size is 18; expected at most block_size",
        ),
        ("speculators-dflash2", DFLASH2, {"conv_group_size": 5}, "expected a divisor of hidden_size 32"),
        ("speculators-dflash2", DFLASH2, {"selector_rank": 7}, "codebook is"),
        ("speculators-dflash2", DFLASH2, {"selector_top_k": 129}, "expected at most 128 tokens"),
        ("speculators-dflash2", DFLASH2, {"draft_vocab_size": 40}, "select among all 128 tokens"),
        ("specforge-dspine", DSPINE, {"shift_label": True}, "anchor_first is True; expected False"),
        ("specforge-dspine", DSPINE, {"dspine_config": {"top_k": 129}}, "expected at most 128 tokens"),
        ("specforge-dspine", DSPINE, {"dspine_config": {"transfer_rank": 12}}, "transfer_codes is"),
        (
            "modelopt-domino",
            DOMINO,
            {"dflash_config": {"mask_token_id": 5, "projector_type": "domino", "gru_hidden_dim": 9}},
            "prefix_gru.weight_hh_l0 is",
        ),
    ],
)
def test_what_is_not_supported_or_contradicts_itself(layout, spec, changes, message, tmp_path):
    nested = changes.get("dflash_config")
    if nested is not None:
        changes = {"dflash_config": {"target_layer_ids": [1, 3, 4], "projector_type": "dspark"} | nested}
    with pytest.raises(ValueError, match=message):
        read(tmp_path, layout, spec, **changes)


@pytest.mark.parametrize(
    ("layout", "spec", "part"),
    [
        ("z-lab-2", DFLASH2, "candidate_selector.predecessor_codebook"),
        ("z-lab-2", DFLASH2, "layers.0.attention_conv.base_kernel"),
        ("z-lab-2", DFLASH2, "layers.1.mlp_conv.kernel_projection.weight"),
        ("specforge-domino", DOMINO, "prefix_gru.weight_hh_l0"),
        ("specforge-domino", DOMINO, "embed_proj.2.weight"),
        ("specforge-dspine", DSPINE, "transfer_codes"),
        ("specforge-dspine", DSPINE, "injection.writes.1.weight"),
    ],
)
def test_heads_and_convolutions_without_a_tensor(layout, spec, part, tmp_path):
    weights = {name: value for name, value in make_weights(spec).items() if name != part}
    with pytest.raises(ValueError, match=re.escape(part)):
        read(tmp_path, layout, spec, weights)


def test_what_dflash2_and_domino_leave_open(tmp_path):
    found = read(
        tmp_path / "a", "speculators-dflash2", DFLASH2, conv_group_size=..., conv_kernel_size=..., selector_rank=...
    )
    assert (found.config.conv_group_size, found.config.selector_rank) == (8, 6)
    found = read(tmp_path / "b", "speculators-dflash2", DFLASH2, selector_top_k=...)
    assert found.config.selector_top_k == 16 and decision(found, "selector_top_k").doubtful
    nested = {"mask_token_id": 5, "target_layer_ids": [1, 3, 4], "projector_type": "causal_v5"}
    found = read(tmp_path / "c", "specforge-domino", DOMINO, dflash_config=nested)
    assert (found.config.gru_hidden_dim, found.config.emb_dim) == (10, 7)
    assert found.config.pure_draft_prefix_len == 0 and decision(found, "pure_draft_prefix_len").doubtful
    assert not found.config.anchor_first and decision(found, "anchor_first").doubtful


@pytest.mark.parametrize("is_ready", [True, False])
def test_codes_of_dspine_that_were_not_made(is_ready, target, tmp_path):
    weights = make_weights(DSPINE) | {"transfer_ready": torch.tensor(is_ready)}
    folder = write("specforge-dspine", tmp_path, DSPINE, weights, dspine_config={})
    if is_ready:
        assert AutoDrafter.from_pretrained(folder, target).config.selector_top_k == 16
    else:
        with pytest.raises(ValueError, match="transfer_ready false: its transfer_codes were not made"):
            AutoDrafter.from_pretrained(folder, target)


def test_codebooks_of_a_saved_zlab_model(target, tmp_path):
    """Its module has them in embeddings."""
    weights = make_weights(DFLASH2)
    renamed = {f"{name}.weight" if name.endswith("codebook") else name: value for name, value in weights.items()}
    first = AutoDrafter.from_pretrained(write("z-lab-2", tmp_path / "a", DFLASH2, weights), target)
    second = AutoDrafter.from_pretrained(write("z-lab-2", tmp_path / "b", DFLASH2, renamed), target)
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())


def test_markov_head_without_tensors(tmp_path):
    weights = {name: value for name, value in make_weights(DSPARK).items() if "markov" not in name}
    with pytest.raises(ValueError, match=r"no matrix markov_head\.markov_w1\.weight"):
        read(tmp_path, "specforge", DSPARK, weights)


@pytest.mark.parametrize("missing", ["hidden_norm.weight", "layers.1.self_attn.k_norm.weight", "fc.weight"])
def test_missing_tensors_are_named(missing, tmp_path):
    weights = make_weights(DFLASH)
    del weights[missing]
    with pytest.raises(ValueError, match=missing):
        read(tmp_path, "z-lab", DFLASH, weights)


def test_tensors_without_a_use_are_refused(tmp_path):
    extra = {"mask_hidden": torch.zeros(1, 1, 96)}
    with pytest.raises(ValueError, match="unexpected tensors: mask_hidden"):
        read(tmp_path, "z-lab", DFLASH, make_weights(DFLASH) | extra)


def test_keywords_of_other_families(target, tmp_path):
    folder = write("z-lab", tmp_path / "a", DFLASH, make_weights(DFLASH))
    with pytest.raises(ValueError, match="is a drafter of the family dflash: it takes no `norm_output=`"):
        AutoDrafter.from_pretrained(folder, target, norm_output=True)
    with pytest.raises(ValueError, match="is a drafter of the family dflash: it takes no `parallel_drafting=`"):
        AutoDrafter.from_pretrained(folder, target, parallel_drafting=False)
    eagle = write_eagle("speculators", tmp_path / "b", PLAIN, make_eagle_weights(PLAIN))
    with pytest.raises(ValueError, match=r"is an EAGLE-3 drafter, .*: it takes no `anchor_first=`, `causal=`"):
        AutoDrafter.from_pretrained(eagle, target, anchor_first=True, causal=True)


@pytest.mark.parametrize(
    ("layout", "depth"),
    [("z-lab", 16), ("z-lab-2", 16), ("specforge", 16), ("specforge-domino", 16), ("deepspec-dflash", 17)],
)
def test_no_more_drafts_than_in_training(layout, depth, target, tmp_path):
    spec = LAYOUTS[layout][0]
    folder = write(layout, tmp_path, spec, make_weights(spec))
    drafter = AutoDrafter.from_pretrained(folder, target, num_assistant_tokens=depth)
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=4)
    message = f"num_assistant_tokens is {depth + 1}, but this d.* drafter was trained to draft {depth} tokens a block"
    with pytest.raises(ValueError, match=message):
        target.generate(**inputs, assistant_model=drafter, num_assistant_tokens=depth + 1, max_new_tokens=4)
    with pytest.raises(ValueError, match=message):
        drafter.configure(num_assistant_tokens=depth + 1)
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(folder, target, num_assistant_tokens=depth + 1)
    assert drafter.num_assistant_tokens == depth


@pytest.mark.core
def test_configs_alone():
    """transformers makes one without arguments when it saves or shows another."""
    for config_class in (DFlashConfig, DFlash2Config, DominoConfig, DSparkConfig):
        assert "mask_token_id" in repr(config_class(mask_token_id=3))
        with pytest.raises(ValueError, match="mask_token_id is None"):
            config_class()
    assert DFlashConfig(mask_token_id=3, block_size=8).num_assistant_tokens == 7
    assert DSparkConfig(mask_token_id=3, block_size=8).num_assistant_tokens == 8
    with pytest.raises(ValueError, match="parallel_drafting is False"):
        DFlashConfig(mask_token_id=3, parallel_drafting=False)
    with pytest.raises(ValueError, match="markov_type is 'novel'"):
        DSparkConfig(mask_token_id=3, markov_type="novel")


def test_normal_form_is_complete(target, tmp_path):
    spec = LAYOUTS["z-lab"][2]
    drafter = AutoDrafter.from_pretrained(write("z-lab", tmp_path / "a", spec, make_weights(spec)), target)
    drafter.save_pretrained(tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["model_type"] == "hf_specdec_dflash" and config["causal"] == [True, True]
    assert (config["embedding_scale"], config["logit_softcap"]) == (0.5, 3.0) and config["output_bias"]
