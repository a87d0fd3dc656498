"""MTP modules on disk: what is read of a target's checkpoint, how it is read, what is refused, what is saved."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from lossless import greedy
from mtp import MTP_FAMILIES, draft, last_hidden_states, publish
from safetensors.torch import load_file, save_file
from targets import padded_prompts, tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.auto import read_checkpoint
from hf_specdec.bench.models import random_drafter
from hf_specdec.cache.key_layers import attention_layers
from hf_specdec.cache.ragged_cache import RaggedCache
from hf_specdec.checkpoints import weight_files
from hf_specdec.checkpoints.checkpoint import open_checkpoint
from hf_specdec.checkpoints.mtp_layouts import FAMILIES
from hf_specdec.cli import main
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.mtp import MtpDrafter
from hf_specdec.kernels.types import Columns


class CountingFile:
    """`safe_open` that keeps count of the bytes of the tensors it hands out."""

    def __init__(self, opened, count):
        self._opened, self._count = opened, count

    def __enter__(self):
        self._file = self._opened.__enter__()
        return self

    def __exit__(self, *exception):
        return self._opened.__exit__(*exception)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def get_tensor(self, name):
        tensor = self._file.get_tensor(name)
        self._count.append((name, tensor.nbytes))
        return tensor


@pytest.fixture
def bytes_read(monkeypatch):
    """Names and bytes of the tensors that are read from now on."""
    count, safe_open = [], weight_files.safe_open
    monkeypatch.setattr(weight_files, "safe_open", lambda *args, **kw: CountingFile(safe_open(*args, **kw), count))
    return count


def module_shards(folder, num_layers=3):
    """The index of a DeepSeek-like checkpoint: shards that hold tensors of modules, and all shards."""
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    copies = ("shared_head.head.weight", "embed_tokens.weight")
    modules = {
        name
        for name in places
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= num_layers and not name.endswith(copies)
    }
    return modules, {places[name] for name in modules}, set(places.values())


@pytest.mark.parametrize("sharded", [True, False])
def test_only_the_modules_are_read(tmp_path, bytes_read, sharded):
    at = publish("deepseek-v3", tmp_path / "target", 3, max_shard_size="8KB" if sharded else None)
    size = sum(tensor.nbytes for file in at.folder.glob("*.safetensors") for tensor in load_file(file).values())
    if sharded:
        names, needed, shards = module_shards(at.folder)
        assert 2 < len(needed) < len(shards) - 2
        for shard in shards - needed:
            (at.folder / shard).unlink()
    drafter = AutoDrafter.from_pretrained(at.folder, at.target)
    assert drafter.config.num_modules == 3
    held = sum(tensor.nbytes for tensor in drafter.state_dict().values())
    total = sum(size for _, size in bytes_read)
    assert total == held and total < size / 1.8
    if sharded:
        assert {name for name, _ in bytes_read} == names and len(bytes_read) == len(names)


def test_only_the_shards_of_modules_are_fetched(hub, tmp_path):
    at = publish("step-3.5", tmp_path / "target", 3, max_shard_size="8KB")
    hub.add("org/target", at.folder)
    places = json.loads((at.folder / "model.safetensors.index.json").read_text())["weight_map"]
    prefixes = tuple(f"model.layers.{layer}." for layer in (3, 4, 5))
    needed = {shard for name, shard in places.items() if name.startswith(prefixes)}
    drafter = AutoDrafter.from_pretrained("org/target", at.target, cache_dir=tmp_path / "cache")
    fetched = {request.rpartition("/")[2] for request in hub.requests if "-of-" in request}
    assert fetched == needed and len(needed) < len(set(places.values()))
    assert drafter.config.name_or_path == "org/target"


@pytest.mark.core
@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_config_of_every_family(family, tmp_path):
    """Each reading is a switch: with another value of it the drafts are other ones."""
    num_modules = 1 if family == "speculators" else 2
    at = publish(family, tmp_path / "checkpoint", num_modules)
    kind, target = at.family, at.target.double()
    drafter = AutoDrafter.from_pretrained(at.folder, target)
    found = drafter.config
    assert (found.num_modules, found.hidden_first, found.norm_offset) == (num_modules, kind.hidden_first, kind.offset)
    assert (found.norm_output, found.own_head, found.own_embedding) == (kind.post_norm, kind.own_head, False)
    assert found.num_assistant_tokens == (3 if num_modules == 1 else num_modules)

    text = padded_prompts([12], seed=3)["input_ids"][0]
    hidden = last_hidden_states(target, text[:-1])

    def logits(drafter):
        """`[10, V]` of module 1, or of module 0 again, on what module 0 hands on."""
        outputs, tokens = hidden[None], text
        for index in range(2):
            tokens = tokens[1:]
            state = Scratch()
            columns = Columns(tokens[None, :10], slots=state.slots, hidden=outputs[:, :10])
            normed, outputs = drafter.run(state, index % num_modules, columns)
        return drafter.logits(index % num_modules, normed)

    plain = logits(drafter)
    changes = [
        {"hidden_first": not kind.hidden_first},
        {"norm_offset": not kind.offset},
        {"norm_output": not kind.post_norm},
        {"zero_first_embedding": True},
    ]
    if kind.own_head:
        changes.append({"share_head": True})
    for change in changes:
        other = AutoDrafter.from_pretrained(at.folder, target, **change)
        assert not torch.allclose(logits(other), plain), change
        assert all(getattr(other.config, name, value) == value for name, value in change.items())


@pytest.mark.core
def test_per_layer_lists_with_entries_for_modules(tmp_path):
    """Step's lists of settings by layer have entries for the modules, of which transformers drops some."""
    at = publish("step-3.5", tmp_path / "checkpoint", 3)
    config = json.loads((at.folder / "config.json").read_text())
    config["text_config"]["swiglu_limits"] = [None, None, 5.0, 0.0, 7.0, 0.0]
    (at.folder / "config.json").write_text(json.dumps(config))
    drafter = AutoDrafter.from_pretrained(at.folder, at.target)
    assert drafter.decoder.config.swiglu_limits == [0.0, 7.0, 0.0]
    assert [layer.self_attn.num_heads for layer in drafter.decoder.layers] == [6, 6, 6]
    assert [layer.self_attn.sliding_window for layer in drafter.decoder.layers] == [7, 7, 7]


class Scratch:
    """As much of a `DecodeState` as one pass over slots 0 to 9 needs."""

    def __init__(self):
        self.slots = torch.arange(10)[None]
        self.live = 10
        self.memory = self
        self.cache, self.later_caches = RaggedCache(attention_layers(2), 16, torch.tensor([10])), []

    def position_ids(self, slots, sections=False):
        return slots


@pytest.mark.core
def test_copied_modules_can_be_used(tmp_path, bytes_read):
    """DeepSeek's modules carry copies of the target's embedding and head: their use makes no difference."""
    at = publish("deepseek-v3", tmp_path / "target", 2)
    target, inputs = at.target, padded_prompts([1, 9, 4])
    shared = AutoDrafter.from_pretrained(at.folder, target)
    assert not any("embed_tokens" in name or "head.weight" in name for name, _ in bytes_read)
    own = AutoDrafter.from_pretrained(at.folder, target, share_head=False, share_embedding=False)
    assert own.config.own_head and own.config.own_embedding and own.frames[1].lm_head is not None
    assert torch.equal(own.frames[1].lm_head.weight, target.lm_head.weight)
    own.save_pretrained(tmp_path / "saved")
    again = AutoDrafter.from_pretrained(tmp_path / "saved", target)
    assert not again.config.own_head and not again.config.own_embedding and again.frames[1].lm_head is None
    drafted = [greedy(target, inputs, drafter, 4) is not None and drafter.stats for drafter in (shared, own)]
    assert drafted[0].accepted_per_position == drafted[1].accepted_per_position


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_normal_form(family, tmp_path):
    """What is saved loads again, and drafts the same."""
    num_modules = 1 if family == "speculators" else 2
    at = publish(family, tmp_path / "checkpoint", num_modules)
    drafter = AutoDrafter.from_pretrained(at.folder, at.target, zero_first_embedding=True)
    drafter.save_pretrained(tmp_path / "saved")
    again = AutoDrafter.from_pretrained(tmp_path / "saved", at.target)
    varying = {"_name_or_path": None, "block": None}
    assert again.config.to_dict() | varying == drafter.config.to_dict() | varying
    assert again.decoder.config.to_dict() == drafter.decoder.config.to_dict()
    theirs = drafter.state_dict()
    assert theirs.keys() == again.state_dict().keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.state_dict().items())
    rotary = [dict(one.decoder.rotary_emb.named_buffers()) for one in (drafter, again)]
    assert rotary[0] and all(torch.equal(buffer, rotary[1][name]) for name, buffer in rotary[0].items())
    changed = AutoDrafter.from_pretrained(tmp_path / "saved", at.target, chaining="target", share_head=True)
    assert changed.config.chaining == "target"
    assert not changed.config.own_head and all(frame.lm_head is None for frame in changed.frames)


def refuse(folder, target, *parts, **options):
    with pytest.raises(ValueError) as error:
        AutoDrafter.from_pretrained(folder, target, **options)
    for part in (str(folder), *parts):
        assert part in str(error.value), str(error.value)


def without(folder, *names):
    """Take tensors out of a checkpoint of one file."""
    tensors = load_file(folder / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.core
def test_refused_checkpoints(tmp_path):
    at = publish("glm-4.5", tmp_path / "target", 2)
    folder, target = at.folder, at.target
    config = json.loads((folder / "config.json").read_text())

    def rewrite(**changes):
        (folder / "config.json").write_text(json.dumps(config | changes))

    refuse(
        folder, target, "holds MTP modules", "takes no `aux_hidden_state_layer_ids=`", aux_hidden_state_layer_ids=[1]
    )
    refuse(folder, target, "takes no `parallel_drafting=`", parallel_drafting=True)
    with pytest.raises(ValueError, match=r"chaining is 'both'; expected one of 'modules', 'target'"):
        AutoDrafter.from_pretrained(folder, target, chaining="both")
    with pytest.raises(ValueError, match=r"hidden_size 32, but .* has hidden_size 48"):
        wide = publish("mimo", tmp_path / "other").target
        wide.config.hidden_size = 48
        AutoDrafter.from_pretrained(folder, wide, chaining="modules")
    rewrite(num_nextn_predict_layers=3)
    refuse(folder, target, "3 MTP module(s)", "num_nextn_predict_layers", "modules [0, 1]")
    rewrite(num_nextn_predict_layers=1)
    refuse(folder, target, "1 MTP module(s)", "modules [0, 1]")
    rewrite(model_type="mimo_of_tomorrow")
    refuse(folder, target, "MTP modules", "model type that is not supported", "deepseek_v3")
    rewrite(hidden_size="many")
    refuse(folder, target, "config.json", "describes no model")
    rewrite()
    missing = "model.layers.4.mlp.experts.1.up_proj.weight"
    without(folder, missing)
    refuse(folder, target, f"missing tensors: {missing}.")
    tensors = load_file(folder / "model.safetensors")
    whole = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.4.mlp.experts")}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    refuse(folder, target, "missing tensors", "decoder.layers.1.mlp.experts.gate_up_proj")
    save_file(tensors | {missing: torch.zeros(16, 32)}, folder / "model.safetensors", metadata={"format": "pt"})
    AutoDrafter.from_pretrained(folder, target)
    without(folder, "model.layers.3.enorm.weight")
    refuse(folder, target, "missing tensors", "frames.0.embedding_norm.weight")
    tensors = load_file(folder / "model.safetensors")
    scale = {"model.layers.3.eh_proj.weight_scale_inv": torch.ones(1)}
    save_file(tensors | scale, folder / "model.safetensors", metadata={"format": "pt"})
    refuse(folder, target, "quantised", "eh_proj.weight_scale_inv")
    unknown = {"model.layers.3.extra.weight": torch.ones(1), "model.layers.3.enorm.weight": torch.ones(7)}
    save_file(tensors | unknown, folder / "model.safetensors", metadata={"format": "pt"})
    refuse(folder, target, "unexpected tensors: decoder.layers.0.extra.weight", "is [7], expected [32]")
    without(folder, *[name for name in tensors | unknown if name.startswith(("model.layers.3.", "model.layers.4."))])
    refuse(folder, target, "hold no tensors of them", "num_nextn_predict_layers to 0")


@pytest.mark.parametrize("family", ["deepseek-v3", "glm-4.5"])
@pytest.mark.parametrize("sharded", [False, True])
def test_draft_model_of_another_target(family, sharded, tmp_path, caplog):
    """The modules of a model are for that model; for another target it is a draft model, and they are left out."""
    at = publish(family, tmp_path / "small", 2, max_shard_size="8KB" if sharded else None)
    target = tiny_target("llama")
    with caplog.at_level("INFO", logger="hf_specdec"):
        drafter = AutoDrafter.from_pretrained(at.folder, target)
    assert type(drafter) is DraftModelDrafter
    assert "the MTP modules in its weights are for; they are left out" in caplog.text
    inputs = padded_prompts([9, 5])
    plain = greedy(target, inputs)
    assert torch.equal(greedy(target, inputs, assistant_model=drafter), plain)
    own = drafter.model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in at.target.state_dict().items())
    assert isinstance(AutoDrafter.from_pretrained(at.folder, at.target), MtpDrafter)


@pytest.mark.core
@pytest.mark.parametrize("family", ["deepseek-v3", "glm-4.5"])
def test_draft_model_without_its_modules(family, tmp_path):
    """As transformers saves such a model: config.json tells of modules that the weights do not hold."""
    at = publish(family, tmp_path / "published", 2)
    at.target.config.num_nextn_predict_layers = 2
    at.target.save_pretrained(tmp_path / "small")
    target = tiny_target("llama")
    assert json.loads((tmp_path / "small" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    found = read_checkpoint(open_checkpoint(tmp_path / "small"), target.config)
    assert found.family is DraftModelDrafter
    assert "its weights hold none" in next(one.rule for one in found.decisions if one.name == "family")
    drafter = AutoDrafter.from_pretrained(tmp_path / "small", target)
    inputs = padded_prompts([9, 5])
    assert torch.equal(greedy(target, inputs, assistant_model=drafter), greedy(target, inputs))
    # For a target of the same shape it is more likely that the modules were meant.
    refuse(tmp_path / "small", at.target, "hold no tensors of them", "num_nextn_predict_layers to 0")
    refuse(tmp_path / "small", target, "hold no tensors of them", chaining="target")


@pytest.mark.core
def test_rope_by_layer_type_of_speculators(tmp_path):
    """Its trainer takes the RoPE of the target's sliding layers."""
    at = publish("speculators", tmp_path / "checkpoint")
    config = json.loads((at.folder / "config.json").read_text())
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    ropes["full_attention"] = {"rope_type": "default", "rope_theta": 1e6}
    config["transformer_layer_config"]["rope_parameters"] = ropes
    (at.folder / "config.json").write_text(json.dumps(config))
    drafter = AutoDrafter.from_pretrained(at.folder, at.target)
    assert drafter.decoder.config.rope_parameters == ropes["sliding_attention"]


def test_inspect_tells_draft_models_from_modules(tmp_path, capsys):
    at = publish("glm-4.5", tmp_path / "small", 2)
    tiny_target("llama").config.save_pretrained(tmp_path / "other")
    for arguments, family in (
        ([], "mtp (GLM-4.5)"),
        (["--target", str(at.folder)], "mtp (GLM-4.5)"),
        (["--target", str(tmp_path / "other")], "draft model (transformers)"),
    ):
        assert main(["inspect", str(at.folder), *arguments]) == 0
        assert family in capsys.readouterr().out
    without(at.folder, *[name for name in load_file(at.folder / "model.safetensors") if ".layers.3." in name])
    without(at.folder, *[name for name in load_file(at.folder / "model.safetensors") if ".layers.4." in name])
    assert main(["inspect", str(at.folder)]) == 0
    assert "draft model (transformers)" in capsys.readouterr().out


def test_layers_that_transformers_does_not_have(tmp_path, monkeypatch):
    at = publish("mimo", tmp_path / "target")
    monkeypatch.setitem(FAMILIES, "mimo", FAMILIES["mimo"]._replace(block="mimo_of_tomorrow"))
    refuse(at.folder, at.target, "model_type 'mimo'", "(mimo_of_tomorrow)", "does not have; a newer one may")


@pytest.mark.core
def test_inspect(tmp_path, capsys):
    at = publish("step-3.5", tmp_path / "target", 3)
    assert main(["inspect", str(at.folder), "--target", str(at.folder)]) == 0
    out = capsys.readouterr().out
    for part in (
        "mtp (Step-3.5)",
        "3 draft tokens a round",
        "modules      3, caches chained by modules",
        "model        step3p5",
        "share_head = False: each module has a trained head",
        "norm_output = False: as vLLM",
        "model.layers.5.transformer.shared_head.output.weight",
        ": fits",
    ):
        assert part in out, out
    assert "model.layers.2." not in out
    assert main(["inspect", str(at.folder), "--target", str(at.folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["modules"] == 3 and report["target"]["fits"] is True
    names = [name for name in report["tensors"] if "self_attn.q_proj.weight" in name]
    assert len(names) == 3
    assert report["parameters"] == sum(math.prod(tensor["shape"]) for tensor in report["tensors"].values())
    other = copy.deepcopy(at.target.config)
    other.text_config.vocab_size = 100
    other.save_pretrained(tmp_path / "other")
    assert main(["inspect", str(at.folder), "--target", str(tmp_path / "other"), "--json"]) == 0
    assert "vocabulary of 96 tokens" in json.loads(capsys.readouterr().out)["target"]["reason"]
    assert main(["inspect", str(at.folder), "--target", str(at.folder), "--self-check"]) != 0
    assert "EAGLE-3" in capsys.readouterr().err


def test_random_weights_of_a_config(tmp_path):
    """The benchmark makes modules of config.json alone."""
    for family, num_modules in (("deepseek-v3", 2), ("mimo", 1), ("speculators", 1)):
        at = publish(family, tmp_path / family, num_modules)
        (at.folder / "model.safetensors").unlink()
        drafter = random_drafter(str(at.folder), at.target)
        assert drafter.config.num_modules == num_modules
        greedy(at.target, padded_prompts([4, 2]), drafter, 2)
        assert drafter.stats.engine == "static"


def test_default_chaining(tmp_path):
    """Several modules are chained as in training, a single one as serving engines run it."""
    for num_modules, chaining in ((1, "target"), (2, "modules")):
        at = publish("mimo", tmp_path / str(num_modules), num_modules)
        drafter = AutoDrafter.from_pretrained(at.folder, at.target)
        assert drafter.config.chaining == chaining
    text, target = padded_prompts([12], seed=3)["input_ids"][0], at.target.double()
    chained, refreshed = (draft(at, target, text, 2, how)[1] for how in ("modules", "target"))
    torch.testing.assert_close(chained[0], refreshed[0])
    assert not torch.allclose(chained[1], refreshed[1])
