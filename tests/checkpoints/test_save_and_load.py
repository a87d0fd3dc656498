"""Drafters are saved in one format, which loads back bit for bit."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from dialects import DIALECTS, PEAGLE, PEAGLE_DIALECTS, Spec, make_weights, tiny_target, write
from oracle import random_draft_model
from safetensors.torch import load_file

from hf_specdec import AutoDrafter
from hf_specdec.config import Eagle3Config, PEagleConfig
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.eagle3 import Eagle3Drafter, PEagleDrafter
from hf_specdec.drafters.registry import register_drafter

SPEC = Spec(norm_before_residual=True, num_layers=2, own_embedding=True)


@pytest.fixture(scope="module")
def target():
    return tiny_target(SPEC, dtype=torch.float32)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_save_and_load_round_trip(dialect, target, tmp_path):
    first = AutoDrafter.from_pretrained(write(dialect, tmp_path / "a", SPEC, make_weights(SPEC)), target)
    first.save_pretrained(tmp_path / "b")
    second = AutoDrafter.from_pretrained(tmp_path / "b", target)
    second.save_pretrained(tmp_path / "c")
    assert type(second) is Eagle3Drafter
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in second.state_dict().items())
    assert all(torch.equal(first.state_dict()[name], tensor) for name, tensor in saved.items())
    assert "layers.0.hidden_norm.weight" in saved and "layers.1.mlp.up_proj.weight" in saved
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["model_type"] == "hf_specdec_eagle3" and config["aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert second.config.dialect == first.config.dialect


def test_all_dialects_save_the_same(target, tmp_path):
    configs = []
    for dialect in DIALECTS:
        drafter = AutoDrafter.from_pretrained(write(dialect, tmp_path / dialect, SPEC, make_weights(SPEC)), target)
        drafter.save_pretrained(tmp_path / f"{dialect}-saved")
        config = json.loads((tmp_path / f"{dialect}-saved" / "config.json").read_text())
        own = ("dialect", "num_assistant_tokens", "target_name_or_path")
        configs.append({name: value for name, value in config.items() if name not in own})
    assert all(config == configs[0] for config in configs)


@pytest.mark.core
def test_weights_equal_to_the_targets_are_shared(target, tmp_path):
    spec = Spec(draft_vocab_size=128, maps_vocabulary=False, own_embedding=True)
    weights = make_weights(spec) | {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach(),
        "lm_head.weight": target.get_output_embeddings().weight.detach(),
    }
    folder = write("speculators", tmp_path / "a", spec, weights)
    drafter = AutoDrafter.from_pretrained(folder, target)
    assert drafter.embed_tokens is None and drafter.lm_head is None
    tokens = torch.tensor([[3, 5]])
    assert torch.equal(drafter.embed(tokens), target.get_input_embeddings()(tokens))
    drafter.save_pretrained(tmp_path / "b")
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(tmp_path / "b" / "model.safetensors").keys()
    assert AutoDrafter.from_pretrained(tmp_path / "b", target).lm_head is None

    kept = AutoDrafter.from_pretrained(folder, target, share_embedding=False, share_head=False)
    assert kept.embed_tokens is not None and kept.lm_head is not None


def test_sharing_can_be_forced(target, tmp_path):
    folder = write("speculators", tmp_path, SPEC, make_weights(SPEC))
    assert AutoDrafter.from_pretrained(folder, target).embed_tokens is not None
    drafter = AutoDrafter.from_pretrained(folder, target, share_embedding=True, share_head=True)
    assert drafter.embed_tokens is None and drafter.lm_head is None
    rows = target.get_output_embeddings().weight[drafter.target_ids]
    torch.testing.assert_close(drafter.logits(rows[:1]), rows[:1] @ rows.T)


def test_sharing_missing_weights_is_refused(target, tmp_path):
    spec = Spec()
    folder = write("specforge", tmp_path, spec, make_weights(spec))
    with pytest.raises(ValueError, match=r"share_embedding is False.*no tensor embed_tokens.weight"):
        AutoDrafter.from_pretrained(folder, target, share_embedding=False)
    AutoDrafter.from_pretrained(folder, target).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"share_embedding is False.*saved has none of its own"):
        AutoDrafter.from_pretrained(tmp_path / "saved", target, share_embedding=False)


def test_missing_head_is_shared(target, tmp_path):
    spec = Spec()
    weights = make_weights(spec)
    del weights["lm_head.weight"]
    drafter = AutoDrafter.from_pretrained(write("modelopt", tmp_path, spec, weights), target)
    rows = target.get_output_embeddings().weight[drafter.target_ids]
    torch.testing.assert_close(drafter.logits(rows[:1]), rows[:1] @ rows.T)


@pytest.mark.core
def test_dtype(tmp_path):
    target = tiny_target(SPEC, dtype=torch.bfloat16)
    folder = write("safeailab-bin", tmp_path, SPEC, make_weights(SPEC))
    drafter = AutoDrafter.from_pretrained(folder, target)
    assert drafter.dtype == torch.bfloat16 and drafter.d2t.dtype == torch.int64
    assert AutoDrafter.from_pretrained(folder, target, dtype=torch.float32).dtype == torch.float32
    assert AutoDrafter.from_pretrained(folder, target, dtype="float16").dtype == torch.float16


@pytest.mark.core
@pytest.mark.parametrize(("size", "file"), [("1GB", "model.fp16.safetensors"), ("20KB", "index.fp16.json")])
def test_variant(size, file, target, tmp_path):
    first = AutoDrafter.from_pretrained(write("speculators", tmp_path / "a", SPEC, make_weights(SPEC)), target)
    first.save_pretrained(tmp_path / "b", variant="fp16", max_shard_size=size)
    assert [one for one in (tmp_path / "b").iterdir() if one.name.endswith(file)]
    second = AutoDrafter.from_pretrained(tmp_path / "b", target, variant="fp16")
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())
    random_draft_model(target).save_pretrained(tmp_path / "c", variant="fp16", max_shard_size=size)
    assert AutoDrafter.from_pretrained(tmp_path / "c", target, variant="fp16").config.family == "draft model"
    with pytest.raises(
        OSError, match=r"no weight file; looked for model\.bf16\.safetensors, model\.safetensors\.index\.b"
    ):
        AutoDrafter.from_pretrained(tmp_path / "b", target, variant="bf16")


def test_devices_without_weights(target, tmp_path):
    folder = write("speculators", tmp_path, SPEC, make_weights(SPEC))
    for device_map in ("meta", torch.device("meta"), {"layers": "cpu", "": "meta"}):
        with pytest.raises(ValueError, match=r"meta.*, where weights have no values; expected devices with memory"):
            AutoDrafter.from_pretrained(folder, target, device_map=device_map)
    with pytest.raises(ValueError, match=r"by default the device of the target's last layer, is .*meta"):
        AutoDrafter.from_pretrained(folder, copy.deepcopy(target).to("meta"))


WRONG_KINDS = [
    ({"compile": 1}, "bool"),
    ({"share_head": "no"}, r"bool \| None"),
    ({"parallel_drafting": 0}, r"bool \| None"),
    ({"causal": "yes"}, r"bool \| list\[bool\] \| None"),
    ({"aux_hidden_state_layer_ids": 2}, r"list\[int\] \| None"),
    ({"mask_token_id": "4"}, r"int \| None"),
    ({"local_files_only": "yes"}, "bool"),
    ({"subfolder": 3}, "str"),
    ({"variant": 16}, r"str \| None"),
]


@pytest.mark.core_for(keywords=[{"share_head": "no"}])
@pytest.mark.parametrize(("keywords", "expected"), WRONG_KINDS)
def test_keywords_of_other_types(keywords, expected, target, tmp_path):
    """Before any file is read."""
    ((name, value),) = keywords.items()
    with pytest.raises(ValueError, match=f"^{name} is {value!r}; expected {expected}\\.$"):
        AutoDrafter.from_pretrained(tmp_path / "nothing", target, **keywords)


def test_settings_and_overrides(target, tmp_path):
    folder = write("speculators", tmp_path / "a", SPEC, make_weights(SPEC))
    drafter = AutoDrafter.from_pretrained(
        folder,
        target,
        num_assistant_tokens=7,
        draft_probs=False,
        engine="stock",
        compile=False,
        device_map="cpu",
        aux_hidden_state_layer_ids=[1, 3, 8],
        norm_before_residual=False,
        norm_output=True,
        rope_theta=5000,
    )
    assert (drafter.num_assistant_tokens, drafter.draft_probs, drafter.engine) == (7, False, "stock")
    config = drafter.config
    assert config.aux_hidden_state_layer_ids == drafter.aux_hidden_state_layer_ids == [1, 3, 8]
    assert (config.norm_before_residual, config.norm_output) == (False, True)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}

    drafter.save_pretrained(tmp_path / "b")
    again = AutoDrafter.from_pretrained(tmp_path / "b", target, aux_hidden_state_layer_ids=[2, 4, 6], rope_theta=7.0)
    assert again.config.aux_hidden_state_layer_ids == [2, 4, 6] and again.config.norm_output
    assert again.config.rope_parameters["rope_theta"] == 7.0


@pytest.mark.core
def test_field_names_of_earlier_versions(target, tmp_path):
    drafter = AutoDrafter.from_pretrained(write("speculators", tmp_path / "a", SPEC, make_weights(SPEC)), target)
    drafter.save_pretrained(tmp_path / "b")
    file = tmp_path / "b" / "config.json"
    config = json.loads(file.read_text())
    config |= {"taps": config.pop("aux_hidden_state_layer_ids"), "num_taps": config.pop("num_aux_hidden_states")}
    file.write_text(json.dumps(config))
    assert AutoDrafter.from_pretrained(tmp_path / "b", target).aux_hidden_state_layer_ids == [2, 4, 5]
    again = AutoDrafter.from_pretrained(tmp_path / "b", target, aux_hidden_state_layer_ids=[1, 3, 4])
    assert again.aux_hidden_state_layer_ids == again.config.aux_hidden_state_layer_ids == [1, 3, 4]


@pytest.mark.core
def test_registered_family_loads(target, tmp_path, monkeypatch):
    """A family that a user adds is found by its model_type and held to the same checks."""
    monkeypatch.setattr("hf_specdec.drafters.registry._registered", [])

    class OwnConfig(Eagle3Config):
        model_type = "someones_drafter"
        family = "own"

    @register_drafter
    class OwnDrafter(Eagle3Drafter):
        config_class = OwnConfig

    drafter = AutoDrafter.from_pretrained(write("modelopt", tmp_path / "a", SPEC, make_weights(SPEC)), target)
    own = OwnDrafter(OwnConfig.from_dict(drafter.config.to_dict() | {"model_type": "someones_drafter"}))
    own.load_state_dict(drafter.state_dict())
    own.save_pretrained(tmp_path / "b")
    loaded = AutoDrafter.from_pretrained(tmp_path / "b", target)
    assert type(loaded) is OwnDrafter and isinstance(loaded, Drafter) and loaded.is_bound


def test_narrow_drafter_without_embedding(tmp_path):
    spec = replace(SPEC, hidden_size=24, own_embedding=False)
    folder = write("specforge", tmp_path, spec, make_weights(spec))
    with pytest.raises(ValueError, match="no embedding of its own, and the target's is 32 wide"):
        AutoDrafter.from_pretrained(folder, tiny_target(spec))


# ---- P-EAGLE


@torch.no_grad()
def drafts(drafter, num_steps: int = 4) -> torch.Tensor:
    """`[num_steps, S, V]` logits of drafts from every position of one text.

    Weights mapped from a file lie at any address, on which the last bits of a matmul depend; those of a copy do not.
    """
    drafter = copy.deepcopy(drafter)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(PEAGLE.vocab_size, (1, 9), generator=generator)
    aux_hidden_states = torch.randn(1, 9, drafter.config.aux_hidden_size, generator=generator)
    return torch.cat(drafter(tokens, aux_hidden_states, num_steps))


@pytest.mark.core_for(dialect=["specforge-peagle"])
@pytest.mark.parametrize("dialect", PEAGLE_DIALECTS)
def test_peagle_round_trip(dialect, target, tmp_path):
    folder = write(dialect, tmp_path / "a", PEAGLE, make_weights(PEAGLE))
    first = AutoDrafter.from_pretrained(folder, target)
    first.save_pretrained(tmp_path / "b")
    second = AutoDrafter.from_pretrained(tmp_path / "b", target)
    second.save_pretrained(tmp_path / "c")
    assert type(second) is PEagleDrafter and torch.equal(drafts(first), drafts(second))
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == first.state_dict().keys() and "mask_hidden" in saved and "mask_state" not in saved
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["model_type"] == "hf_specdec_peagle" and config["mask_token_id"] == PEAGLE.mask_token
    assert second.num_assistant_tokens == first.num_assistant_tokens

    sequential = [
        AutoDrafter.from_pretrained(place, target, parallel_drafting=False) for place in (folder, tmp_path / "b")
    ]
    assert torch.equal(drafts(sequential[0]), drafts(sequential[1]))
    assert torch.equal(drafts(first)[0], drafts(sequential[0])[0])
    assert not torch.equal(drafts(first)[1], drafts(sequential[0])[1])
    other = [AutoDrafter.from_pretrained(place, target, mask_token_id=9) for place in (folder, tmp_path / "b")]
    assert torch.equal(drafts(other[0]), drafts(other[1])) and not torch.equal(drafts(other[0]), drafts(first))


def test_all_peagle_dialects_draft_the_same(target, tmp_path):
    spec = replace(PEAGLE, norm_before_residual=True)
    found = [
        drafts(AutoDrafter.from_pretrained(write(dialect, tmp_path / dialect, spec, make_weights(spec)), target))
        for dialect in PEAGLE_DIALECTS
    ]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.core
def test_rope_parameters_of_the_normal_form(target, tmp_path):
    folder = write("speculators", tmp_path / "a", SPEC, make_weights(SPEC))
    linear = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
    AutoDrafter.from_pretrained(folder, target, rope_parameters=linear).save_pretrained(tmp_path / "b")
    assert AutoDrafter.from_pretrained(tmp_path / "b", target).config.rope_parameters == linear
    plain = {"rope_type": "default", "rope_theta": 5.0}
    drafter = AutoDrafter.from_pretrained(tmp_path / "b", target, rope_parameters=plain)
    assert drafter.config.rope_parameters == plain
    angles = drafter.rotary_emb(torch.zeros(1), torch.tensor([[3]]))[0][0, 0, :2]
    torch.testing.assert_close(angles, torch.tensor([3.0, 3.0 * 5.0**-0.25]).cos())


@pytest.mark.core
def test_peagle_config_alone():
    """transformers makes one without arguments when it saves or shows another."""
    assert not PEagleConfig().parallel_drafting and "mask_token_id" in repr(PEagleConfig(mask_token_id=3))
    assert PEagleConfig(mask_token_id=3).parallel_drafting
    assert not PEagleConfig(mask_token_id=3, parallel_drafting=False).parallel_drafting
    with pytest.raises(ValueError, match="parallel_drafting is True, but mask_token_id is None"):
        PEagleConfig(parallel_drafting=True)
