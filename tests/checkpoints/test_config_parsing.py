"""How a config.json is interpreted: stated values, rules, uncertain decisions."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects import PEAGLE, PEAGLE_DIALECTS, Spec, make_weights, tiny_target, write
from transformers import GptOssConfig, LlamaConfig

from hf_specdec.auto import AutoDrafter, NormalizedCheckpoint, read_checkpoint
from hf_specdec.checkpoints.checkpoint import open_checkpoint
from hf_specdec.checkpoints.dialects import detect_dialect

SPEC = Spec()
NESTED = "eagle_aux_hidden_state_layer_ids"


def target_config(num_layers: int = 8) -> LlamaConfig:
    return LlamaConfig(hidden_size=32, vocab_size=128, num_hidden_layers=num_layers)


def read(
    folder: Path,
    dialect: str,
    spec: Spec = SPEC,
    weights: dict[str, torch.Tensor] | None = None,
    num_layers: int | None = 8,
    overrides: dict[str, Any] | None = None,
    **changes: Any,
) -> NormalizedCheckpoint:
    """Write a checkpoint with `changes` to its config.json and read it."""
    write(dialect, folder, spec, make_weights(spec) if weights is None else weights, **changes)
    target = None if num_layers is None else target_config(num_layers)
    return read_checkpoint(open_checkpoint(folder), target, overrides)


def decision(found: NormalizedCheckpoint, name: str):
    (one,) = [decision for decision in found.decisions if decision.name == name]
    return one


@pytest.mark.parametrize(
    ("config", "dialect"),
    [
        ({"draft_vocab_size": 1, "architectures": ["LlamaForCausalLM"]}, "SafeAILab"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "SpecForge"),
        ({"eagle_config": {NESTED: [1, 2, 3], "use_aux_hidden_state": True}}, "SpecForge"),
        ({"eagle_config": {NESTED: [1, 2, 3], "next_layer_regular": True}}, "NVIDIA ModelOpt"),
        ({"eagle_config": {"layer_ids": [1, 2, 3]}}, "NVIDIA ModelOpt"),
        ({"speculators_model_type": "eagle3"}, "speculators"),
        ({"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}, "speculators"),
        ({"architectures": ["PEagleDraftModel"], "ptd_token_id": 3}, "SpecForge"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 3}, "Amazon"),
        ({"eagle_config": {NESTED: [1, 2, 3], "use_aux_hidden_state": True}, "ptd_token_id": 3}, "Amazon"),
        ({"architectures": ["LlamaEagle3DraftModel"], "mask_token_id": 3}, "NeMo Automodel"),
        ({"architectures": ["LlamaPEagleDraftModel"]}, "NeMo Automodel"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True}, "NeMo Automodel"),
    ],
)
def test_dialect(config, dialect):
    assert detect_dialect(config) == dialect


@pytest.mark.parametrize(
    ("num_layers", "ids", "aux_hidden_state_layer_ids"),
    [
        (8, [1, 3, 4], [2, 4, 5]),
        (8, [4, 1, 3], [2, 4, 5]),
        (8, [2, 4, 5], [2, 4, 5]),
        (8, [1, 3, 5], [2, 4, 6]),
        (8, [0, 1, 3], [0, 1, 3]),
        (36, [24, 30, 36], [24, 30, 36]),
        (9, [1, 3, 5], [2, 4, 6]),
    ],
)
@pytest.mark.parametrize("key", [NESTED, "layer_ids", "aux_hidden_state_layer_ids"])
def test_nested_ids(num_layers, ids, aux_hidden_state_layer_ids, key, tmp_path):
    """Outputs of layers where they begin with 1, else inputs: SGLang's rule."""
    nested = {key: ids, "use_aux_hidden_state": True}
    found = read(tmp_path, "modelopt", num_layers=num_layers, eagle_config=nested)
    assert found.config.aux_hidden_state_layer_ids == aux_hidden_state_layer_ids
    made = decision(found, "aux_hidden_state_layer_ids")
    counted = "begins with 1, so it counts outputs" if min(ids) == 1 else "counts inputs of layers"
    assert made.doubtful and f"{key} in eagle_config" in made.rule and counted in made.rule


def test_nested_layer_ids_that_count_layer_inputs(tmp_path):
    nested = {NESTED: [1, 3, 4], "use_aux_hidden_state": True}
    folder = write("modelopt", tmp_path, SPEC, make_weights(SPEC), eagle_config=nested)
    target = GptOssConfig(hidden_size=32, vocab_size=128, num_hidden_layers=8)
    found = read_checkpoint(open_checkpoint(folder), target)
    assert found.config.aux_hidden_state_layer_ids == [1, 3, 4]
    assert (
        decision(found, "aux_hidden_state_layer_ids").doubtful
        and "drafters for gpt_oss" in decision(found, "aux_hidden_state_layer_ids").rule
    )


def test_ids_under_another_key(tmp_path):
    """Their name in speculators' DFlash; without it, the default layer ids would be taken."""
    found = read(tmp_path / "a", "speculators", **{NESTED: ...}, aux_hidden_state_layer_ids=[1, 3, 6])
    assert found.config.aux_hidden_state_layer_ids == [1, 3, 6]
    assert (
        "aux_hidden_state_layer_ids at top level counts inputs of layers"
        in decision(found, "aux_hidden_state_layer_ids").rule
    )
    found = read(tmp_path / "b", "speculators", aux_hidden_state_layer_ids=list(SPEC.aux_hidden_state_layer_ids))
    assert found.config.aux_hidden_state_layer_ids == list(SPEC.aux_hidden_state_layer_ids)
    with pytest.raises(
        ValueError,
        match=r"contradicts itself about the layers whose hidden states it reads.*Pass `aux_hidden_state_layer_ids=`",
    ):
        read(tmp_path / "c", "speculators", aux_hidden_state_layer_ids=[1, 3, 6])
    found = read(
        tmp_path / "c",
        "speculators",
        overrides={"aux_hidden_state_layer_ids": [1, 3, 6]},
        aux_hidden_state_layer_ids=[1, 3, 6],
    )
    assert found.config.aux_hidden_state_layer_ids == [1, 3, 6]


def test_top_level_layer_ids_count_layer_inputs(tmp_path):
    found = read(tmp_path, "speculators", eagle_aux_hidden_state_layer_ids=[4, 1, 3, 3])
    assert (
        found.config.aux_hidden_state_layer_ids == [1, 3, 4]
        and not decision(found, "aux_hidden_state_layer_ids").doubtful
    )


@pytest.mark.parametrize("dialect", ["safeailab", "specforge", "speculators", "modelopt"])
def test_default_layer_ids(dialect, tmp_path):
    changes = {"eagle_config": {"next_layer_regular": True}} if dialect == "modelopt" else {"eagle_config": ...}
    found = read(tmp_path, dialect, num_layers=36, **{NESTED: ...}, **changes)
    assert found.config.aux_hidden_state_layer_ids == [2, 18, 33]


def test_layer_ids_without_target(tmp_path):
    assert read(tmp_path / "a", "safeailab", num_layers=None).config.aux_hidden_state_layer_ids is None
    found = read(tmp_path / "b", "specforge", num_layers=None)
    assert (
        found.config.aux_hidden_state_layer_ids == [2, 4, 5] and decision(found, "aux_hidden_state_layer_ids").doubtful
    )


def test_four_layer_target_has_two_default_layer_ids(tmp_path):
    spec = replace(SPEC, target_layers=4, aux_hidden_state_layer_ids=(1, 2))
    target = tiny_target(spec, dtype=torch.float32)
    drafter = AutoDrafter.from_pretrained(write("safeailab", tmp_path, spec, make_weights(spec)), target)
    assert drafter.aux_hidden_state_layer_ids == [1, 2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": ...}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 500000}, {"rope_type": "default", "rope_theta": 500000.0}),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        ({"rope_theta": ..., "rope_scaling": {"rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        ),
        ({"rope_theta": 1e4, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e4}),
    ],
)
def test_rope(changes, expected, tmp_path):
    found = read(tmp_path, "safeailab", **changes)
    assert found.config.rope_parameters == expected
    assert not decision(found, "rope_theta").doubtful


def test_contradicting_rope_is_uncertain(tmp_path):
    found = read(tmp_path, "specforge", rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert found.config.rope_parameters["rope_theta"] == 1e6
    assert decision(found, "rope_theta").doubtful


BY_LAYER_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}


@pytest.mark.parametrize("dialect", ["speculators", "speculators-peagle"])
def test_rope_by_layer_type(dialect, tmp_path):
    """speculators trains its draft layers with the RoPE of the target's sliding layers."""
    spec = PEAGLE if dialect == "speculators-peagle" else SPEC
    write(dialect, tmp_path, spec, make_weights(spec))
    layer = open_checkpoint(tmp_path).config["transformer_layer_config"]
    layer.pop("rope_theta", None)
    found = read(tmp_path, dialect, spec, transformer_layer_config=layer | {"rope_parameters": BY_LAYER_TYPE})
    assert found.config.rope_parameters == BY_LAYER_TYPE["sliding_attention"]
    assert "speculators' draft layers all have the sliding one's" in decision(found, "rope_parameters").rule


def test_rope_by_layer_type_of_others(tmp_path):
    """No other publisher's trainer is known to take one of several."""
    with pytest.raises(ValueError, match=r"by type of layer \(full_attention, sliding_attention\).*rope_parameters="):
        read(tmp_path / "a", "specforge", rope_theta=..., rope_parameters=BY_LAYER_TYPE)
    same = {kind: {"rope_type": "default", "rope_theta": 5e5} for kind in BY_LAYER_TYPE}
    found = read(tmp_path / "b", "specforge", rope_theta=..., rope_parameters=same)
    assert found.config.rope_parameters == same["full_attention"]
    given = {"rope_type": "default", "rope_theta": 7.0}
    overrides = {"rope_parameters": given}
    found = read(tmp_path / "c", "specforge", overrides=overrides, rope_theta=..., rope_parameters=BY_LAYER_TYPE)
    assert found.config.rope_parameters == given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": BY_LAYER_TYPE["full_attention"], "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "itself",
        ),
        ({"rope_parameters": "plain"}, "rope_parameters 'plain'; expected an object"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "expected 4 finite ones"),
        ({"rope_theta": 0}, "rope_theta 0 in its config.json; expected more than 0"),
    ],
    ids=["two", "string", "partial", "zero"],
)
def test_rope_that_cannot_be_applied(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, "specforge", **changes)


def test_rope_inside_transformer_layer_config(tmp_path):
    layer = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    layer |= {"num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 128, "rope_theta": 1e6}
    found = read(tmp_path, "speculators", transformer_layer_config=layer)
    assert found.config.rope_parameters["rope_theta"] == 1e6
    assert found.config.rms_norm_eps == LlamaConfig().rms_norm_eps
    assert found.config.head_dim == 8


def test_speculators_keys_left_out_are_class_defaults(tmp_path):
    """Qwen3's class default of head_dim is 128, whatever hidden_size / heads is."""
    spec = replace(SPEC, qk_norm=True, head_dim=128)
    found = read(tmp_path, "speculators", spec)
    assert "head_dim" not in open_checkpoint(tmp_path).config["transformer_layer_config"]
    assert found.config.head_dim == 128 and found.config.qk_norm


@pytest.mark.parametrize(
    ("dialect", "stated", "expected", "doubtful"),
    [
        ("safeailab", ..., False, False),
        ("specforge", ..., False, False),
        ("modelopt", ..., False, False),
        ("modelopt", True, True, False),
        ("speculators", False, False, False),
        ("speculators", ..., True, True),
    ],
)
def test_norm_before_residual(dialect, stated, expected, doubtful, tmp_path):
    found = read(tmp_path, dialect, norm_before_residual=stated)
    assert found.config.norm_before_residual is expected
    assert decision(found, "norm_before_residual").doubtful is doubtful


@pytest.mark.parametrize(
    ("dialect", "fc_norm", "stated", "expected", "doubtful"),
    [
        ("speculators", False, True, True, False),
        ("safeailab", False, ..., False, False),
        ("specforge", False, ..., False, False),
        ("specforge", False, True, False, True),
        ("specforge", True, True, True, True),
        ("specforge", True, ..., False, False),
    ],
)
def test_norm_output(dialect, fc_norm, stated, expected, doubtful, tmp_path):
    found = read(tmp_path, dialect, replace(SPEC, fc_norm=fc_norm), norm_output=stated)
    assert found.config.norm_output is expected
    assert decision(found, "norm_output").doubtful is doubtful
    assert found.config.final_norm


def test_final_norm(tmp_path):
    weights = make_weights(SPEC)
    found = read(tmp_path / "a", "specforge", norm_output=False)
    assert found.config.final_norm and decision(found, "final_norm").doubtful
    found = read(tmp_path / "b", "specforge", norm_output=False, overrides={"final_norm": False})
    assert not found.config.final_norm
    del weights["norm.weight"]
    nested = {NESTED: [1, 3, 4], "use_last_layernorm": False}
    assert not read(tmp_path / "c", "modelopt", weights=weights, eagle_config=nested).config.final_norm
    nested["use_last_layernorm"] = None
    assert not read(tmp_path / "d", "modelopt", weights=weights, eagle_config=nested).config.final_norm


def test_norm_before_fc_inside_eagle_config(tmp_path):
    spec = replace(SPEC, norm_before_fc=True)
    assert read(tmp_path, "modelopt", spec).config.norm_before_fc
    assert "norm_before_fc" not in open_checkpoint(tmp_path).config


def test_head_that_reads_the_last_hidden_state(tmp_path):
    weights = make_weights(SPEC)
    del weights["fc.weight"]
    nested = {"use_aux_hidden_state": False, "next_layer_regular": True}
    folder = write("modelopt", tmp_path, SPEC, weights, eagle_config=nested)
    drafter = AutoDrafter.from_pretrained(folder, tiny_target(SPEC))
    assert drafter.reads_last_hidden_state and drafter.aux_hidden_state_layer_ids == [] and drafter.fc is None


def test_biases(tmp_path):
    weights = make_weights(SPEC)
    for name in ("q", "k", "v"):
        rows = weights[f"layers.0.self_attn.{name}_proj.weight"].shape[0]
        weights[f"layers.0.self_attn.{name}_proj.bias"] = torch.zeros(rows)
    weights["fc.bias"] = torch.zeros(SPEC.hidden_size)
    config = read(tmp_path, "safeailab", weights=weights, attention_bias=True, bias=True).config
    assert config.attention_bias and config.fc_bias and not config.mlp_bias


def test_sliding_window(tmp_path):
    found = read(tmp_path / "a", "safeailab", layer_types=["sliding_attention"], sliding_window=16)
    assert found.config.layer_types == ["sliding_attention"] and found.config.sliding_window == 16
    assert read(tmp_path / "b", "safeailab", sliding_window=16).config.sliding_window is None
    with pytest.raises(ValueError, match="sliding_window None"):
        read(tmp_path / "c", "safeailab", layer_types=["sliding_attention"])
    with pytest.raises(ValueError, match="each of its 1 draft layers"):
        read(tmp_path / "d", "safeailab", layer_types=["full_attention"] * 2)


def test_sizes_from_shapes(tmp_path):
    """What config.json leaves out is read off the tensors."""
    spec = replace(SPEC, hidden_size=24, head_dim=6, own_embedding=True)
    found = read(tmp_path, "specforge", spec, draft_vocab_size=..., target_hidden_size=..., num_hidden_layers=...)
    config = found.config
    assert (config.draft_vocab_size, config.target_hidden_size, config.num_hidden_layers) == (40, 32, 1)


def test_ignored_tensors_and_prefix(tmp_path):
    """`model.` is NeMo's prefix; masks, RoPE tables and the trainer's copy of the target are never read."""
    weights = {f"model.{name}": tensor for name, tensor in make_weights(SPEC).items()}
    weights |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "verifier_norm.weight": torch.ones(32)}
    folder = write("speculators", tmp_path, SPEC, weights)
    drafter = AutoDrafter.from_pretrained(folder, tiny_target(SPEC))
    assert torch.equal(drafter.fc.weight, weights["model.fc.weight"].double())


def test_mask_with_a_prefix(tmp_path):
    """Automodel's first P-EAGLE models kept it beside the layers."""
    weights = make_weights(PEAGLE)
    weights["model.mask_hidden"] = weights.pop("mask_hidden")
    folder = write("automodel", tmp_path, PEAGLE, weights)
    drafter = AutoDrafter.from_pretrained(folder, tiny_target(PEAGLE, dtype=torch.float32))
    assert torch.equal(drafter.mask_hidden, weights["model.mask_hidden"])


@pytest.mark.parametrize("table", ["zero", "identity", "absent"])
def test_full_vocabulary_needs_no_table(table, tmp_path):
    spec = replace(SPEC, draft_vocab_size=SPEC.vocab_size, maps_vocabulary=False)
    tables = {"zero": torch.zeros(128, dtype=torch.int64), "identity": torch.arange(128)}
    extra = {} if table == "absent" else {"d2t": tables[table], "t2d": torch.ones(128, dtype=torch.bool)}
    folder = write("specforge", tmp_path, spec, make_weights(spec) | extra)
    drafter = AutoDrafter.from_pretrained(folder, tiny_target(spec))
    assert drafter.target_ids is None


def test_decisions_are_logged_once(tmp_path, caplog):
    folder = write("speculators", tmp_path, SPEC, make_weights(SPEC), norm_before_residual=...)
    with caplog.at_level(logging.INFO, logger="hf_specdec"):
        AutoDrafter.from_pretrained(folder, tiny_target(SPEC))
    records = [record for record in caplog.records if record.name.startswith("hf_specdec")]
    assert [record.levelname for record in records] == ["INFO", "WARNING"]
    for name in (
        "aux_hidden_state_layer_ids",
        "norm_before_residual",
        "norm_output",
        "rope_theta",
        "share_embedding",
        "share_head",
    ):
        assert f"{name} = " in records[0].getMessage()
    warning = records[1].getMessage()
    assert "norm_before_residual = True" in warning and "--self-check" in warning and "rope_theta" not in warning


def test_no_warning_without_uncertain_decisions(tmp_path, caplog):
    folder = write("safeailab-bin", tmp_path, SPEC, make_weights(SPEC))
    with caplog.at_level(logging.WARNING):
        AutoDrafter.from_pretrained(folder, tiny_target(SPEC))
    assert not caplog.records


def test_long_positions_are_not_clamped(tmp_path):
    """SafeAILab's configs have max_position_embeddings 2048, which is the size of a cache of theirs."""
    folder = write("safeailab", tmp_path, SPEC, make_weights(SPEC), max_position_embeddings=4)
    drafter = AutoDrafter.from_pretrained(folder, tiny_target(SPEC))
    cos, _ = drafter.rotary_emb(torch.zeros(1), torch.tensor([[3, 4, 5000]]))
    torch.testing.assert_close(cos[0, :, 0], torch.tensor([3.0, 4.0, 5000.0]).cos())


def test_logit_scale(tmp_path):
    target = tiny_target(SPEC)
    plain = AutoDrafter.from_pretrained(write("safeailab", tmp_path / "a", SPEC, make_weights(SPEC)), target)
    folder = write("safeailab", tmp_path / "b", SPEC, make_weights(SPEC), logit_scale=0.25)
    scaled = AutoDrafter.from_pretrained(folder, target)
    hidden = torch.randn(3, SPEC.hidden_size, dtype=torch.float64)
    assert torch.equal(scaled.logits(hidden), plain.logits(hidden) * 0.25)


def test_tied_embeddings_are_never_tied(tmp_path):
    """Head and embedding have as many rows as draft and target vocabulary, whatever tie_word_embeddings is."""
    weights = make_weights(replace(SPEC, own_embedding=True))
    folder = write("safeailab", tmp_path, SPEC, weights, tie_word_embeddings=True)
    drafter = AutoDrafter.from_pretrained(folder, tiny_target(SPEC, dtype=torch.float32))
    assert torch.equal(drafter.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(drafter.embed_tokens.weight, weights["embed_tokens.weight"])


# ---- P-EAGLE


@pytest.mark.parametrize("dialect", PEAGLE_DIALECTS)
def test_peagle(dialect, tmp_path):
    found = read(tmp_path, dialect, PEAGLE)
    config = found.config
    assert config.family == "p-eagle" and config.parallel_drafting
    assert config.mask_token_id == PEAGLE.mask_token and not decision(found, "mask_token_id").doubtful
    assert config.aux_hidden_state_layer_ids == [2, 4, 5] and config.num_hidden_layers == PEAGLE.num_layers
    assert config.own_embedding and config.draft_vocab_size == PEAGLE.vocab_size
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert not config.norm_before_residual and config.final_norm
    assert config.mask_hidden_shape == ([1, 96] if dialect == "automodel" else [1, 1, 96])
    assert config.num_assistant_tokens == {"speculators-peagle": 3, "automodel": 6}.get(dialect, 8)


@pytest.mark.parametrize("dialect", PEAGLE_DIALECTS)
def test_peagle_residual_is_raw_unless_stated(dialect, tmp_path):
    found = read(tmp_path / "a", dialect, PEAGLE, norm_before_residual=...)
    assert not found.config.norm_before_residual and not decision(found, "norm_before_residual").doubtful
    assert read(tmp_path / "b", dialect, PEAGLE, norm_before_residual=True).config.norm_before_residual


def test_deepspec(tmp_path):
    """Five hidden states, listed at top level as outputs of layers; a head and an embedding of its own."""
    spec = Spec(
        qk_norm=True,
        aux_hidden_state_layer_ids=(2, 3, 4, 5, 6),
        draft_vocab_size=128,
        maps_vocabulary=False,
        own_embedding=True,
    )
    found = read(tmp_path, "deepspec", spec)
    config = found.config
    assert (config.family, config.dialect) == ("eagle3", "DeepSpec")
    assert config.aux_hidden_state_layer_ids == [2, 3, 4, 5, 6] and config.num_aux_hidden_states == 5
    assert not decision(found, "aux_hidden_state_layer_ids").doubtful
    assert config.num_assistant_tokens == 7 and config.qk_norm and config.own_head and config.own_embedding
    assert not config.norm_output and not config.norm_before_residual


def test_amazon_layer_ids_count_layer_outputs(tmp_path):
    """As published for gpt-oss-20b, which has 24 layers."""
    nested = {NESTED: [1, 11, 20], "use_aux_hidden_state": True}
    assert read(
        tmp_path / "a", "amazon", PEAGLE, num_layers=24, eagle_config=nested
    ).config.aux_hidden_state_layer_ids == [2, 12, 21]
    assert read(tmp_path / "b", "amazon-nested", PEAGLE, num_layers=24).config.aux_hidden_state_layer_ids == [2, 12, 21]


@pytest.mark.parametrize(
    ("keys", "token"),
    [
        ({"ptd_token_id": 9, "pard_token": 8}, 8),
        ({"pard_token": 8, "dspark_noise_token_id": 7}, 7),
        ({"dspark_noise_token_id": 7, "mask_token_id": 6}, 6),
        ({"mask_token_id": 6, "dflash_config": {"mask_token_id": 4}}, 4),
        ({"mask_token_id": None, "dflash_config": {}, "pard_token": None, "ptd_token_id": "9"}, 9),
    ],
)
def test_order_of_mask_tokens(keys, token, tmp_path):
    found = read(tmp_path, "specforge-peagle", PEAGLE, **({"mask_token_id": ...} | keys))
    assert found.config.mask_token_id == token
    assert decision(found, "mask_token_id").rule.endswith("of config.json")


def test_missing_mask_token(tmp_path):
    """As in SpecForge's configs/qwen3-8b-peagle.json."""
    with pytest.raises(
        ValueError, match=r"names no mask token.*dflash_config.mask_token_id.*ptd_token_id.*mask_token_id=`"
    ):
        read(tmp_path / "a", "specforge-peagle", PEAGLE, mask_token_id=...)
    overrides = {"mask_token_id": 11}
    found = read(tmp_path / "b", "specforge-peagle", PEAGLE, overrides=overrides, mask_token_id=...)
    assert found.config.mask_token_id == 11 and decision(found, "mask_token_id").rule == "given by the caller"
    overrides = {"parallel_drafting": False}
    found = read(tmp_path / "c", "specforge-peagle", PEAGLE, overrides=overrides, mask_token_id=...)
    assert found.config.mask_token_id is None and not found.config.parallel_drafting


@pytest.mark.parametrize("token", [-1, 128, "none", 2.5, True])
def test_mask_token_outside_the_vocabulary(token, tmp_path):
    with pytest.raises(ValueError, match=r"mask token .* expected one of the 128 tokens that it embeds"):
        read(tmp_path, "amazon", PEAGLE, ptd_token_id=token)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_specforge_peagle_is_trained_without_rope_scaling(tmp_path):
    found = read(tmp_path / "a", "specforge-peagle", PEAGLE)
    assert found.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert decision(found, "rope_parameters").doubtful
    found = read(tmp_path / "b", "specforge-peagle", PEAGLE, overrides={"rope_parameters": LLAMA3})
    assert found.config.rope_parameters == LLAMA3 and not decision(found, "rope_parameters").doubtful
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    assert read(tmp_path / "c", "amazon", PEAGLE, rope_scaling=scaling).config.rope_parameters == LLAMA3
    found = read(tmp_path / "d", "specforge-peagle", PEAGLE, rope_scaling=None)
    assert not [one for one in found.decisions if one.name == "rope_parameters"]


@pytest.mark.parametrize("dialect", ["safeailab", "speculators"])
def test_rope_parameters_by_keyword(dialect, tmp_path):
    assert read(tmp_path / "a", dialect, overrides={"rope_parameters": LLAMA3}).config.rope_parameters == LLAMA3
    for wrong in ({"rope_type": "default"}, [1.0]):
        with pytest.raises(ValueError, match="expected all RoPE parameters"):
            read(tmp_path / "b", dialect, overrides={"rope_parameters": wrong})
    with pytest.raises(ValueError, match="rope_theta and rope_parameters are both given"):
        read(tmp_path / "c", dialect, overrides={"rope_parameters": LLAMA3, "rope_theta": 1.0})
    for wrong in ("1e6", True, 0, float("inf")):
        with pytest.raises(ValueError, match=f"rope_theta is {wrong!r}; expected a finite number above 0"):
            read(tmp_path / "e", dialect, overrides={"rope_theta": wrong})
    unknown = LLAMA3 | {"rope_type": "spiral"}
    with pytest.raises(ValueError, match=r"rope_parameters .*spiral.* cannot apply"):
        read(tmp_path / "d", dialect, overrides={"rope_parameters": unknown})


def test_peagle_norms(tmp_path):
    found = read(tmp_path / "a", "speculators-peagle", replace(PEAGLE, fc_norm=True, norm_output=True))
    assert found.config.fc_norm and found.config.norm_output
    assert "vLLM leaves it out" in decision(found, "fc_norm").rule
    found = read(tmp_path / "b", "specforge-peagle", PEAGLE, norm_output=False)
    assert found.config.final_norm and not decision(found, "final_norm").doubtful
    found = read(tmp_path / "c", "specforge-peagle", PEAGLE, norm_output=True)
    assert not found.config.norm_output and not decision(found, "norm_output").doubtful


def test_mask_hidden_goes_through_fc_as_hidden_states_do(tmp_path):
    spec = replace(PEAGLE, norm_before_fc=True)
    weights = make_weights(spec)
    drafter = AutoDrafter.from_pretrained(write("amazon", tmp_path / "a", spec, weights), tiny_target(spec))
    mask = weights["mask_hidden"].double().flatten()
    normed = mask / (mask.pow(2).mean() + spec.eps).sqrt() * weights["input_norm.weight"].double()
    torch.testing.assert_close(drafter.mask_state, weights["fc.weight"].double() @ normed, rtol=1e-5, atol=1e-5)

    raw = make_weights(PEAGLE) | {"mask_hidden": torch.randn(1, 1, PEAGLE.hidden_size)}
    del raw["fc.weight"]
    nested = {"use_aux_hidden_state": False}
    folder = write("amazon", tmp_path / "b", PEAGLE, raw, eagle_config=nested)
    drafter = AutoDrafter.from_pretrained(folder, tiny_target(PEAGLE))
    assert drafter.reads_last_hidden_state and torch.equal(drafter.mask_state, raw["mask_hidden"].double().flatten())


def test_peagle_embedding_is_not_shared(tmp_path):
    """It was trained, so it is kept; without one the target's is borrowed."""
    target = tiny_target(PEAGLE)
    weights = make_weights(PEAGLE)
    drafter = AutoDrafter.from_pretrained(write("amazon", tmp_path / "a", PEAGLE, weights), target)
    assert torch.equal(drafter.embed_tokens.weight, weights["embed_tokens.weight"].double())
    spec = replace(PEAGLE, own_embedding=False)
    drafter = AutoDrafter.from_pretrained(write("amazon", tmp_path / "b", spec, make_weights(spec)), target)
    tokens = torch.tensor([3, PEAGLE.mask_token])
    assert torch.equal(drafter.embed(tokens), target.get_input_embeddings()(tokens))
