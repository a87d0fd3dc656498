"""Loading from and pushing to a Hub, over the loopback interface with the real client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pard2_reference
import pytest
import torch
from dialects import PEAGLE, Spec, make_weights, tiny_target, write, write_draft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from hf_specdec import AutoDrafter
from hf_specdec.cli import main

SPEC = Spec()
TOKEN = "hf_loopback"


@pytest.fixture(scope="module")
def target():
    return tiny_target(SPEC, dtype=torch.float32)


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def checkpoint(folder: Path, seed: int = 1, dialect: str = "specforge", **options) -> Path:
    return write(dialect, folder, SPEC, make_weights(SPEC, seed), **options)


def head(drafter) -> torch.Tensor:
    return drafter.lm_head.weight


def expected_head(seed: int) -> torch.Tensor:
    return make_weights(SPEC, seed)["lm_head.weight"]


def test_revision_and_subfolder(hub, target, cache, tmp_path):
    hub.add("org/drafter", checkpoint(tmp_path / "one", seed=1))
    hub.add("org/drafter", checkpoint(tmp_path / "two", seed=2), revision="v2")
    hub.add("org/drafter", checkpoint(tmp_path / "three", seed=3, dialect="safeailab-bin"), prefix="deep/inside/")
    load = AutoDrafter.from_pretrained
    assert torch.equal(head(load("org/drafter", target, cache_dir=cache)), expected_head(1))
    assert torch.equal(head(load("org/drafter", target, cache_dir=cache, revision="v2")), expected_head(2))
    commit = hub.repos["org/drafter"].commit("v2")
    assert torch.equal(head(load("org/drafter", target, cache_dir=cache, revision=commit)), expected_head(2))
    inside = load("org/drafter", target, cache_dir=cache, subfolder="deep/inside")
    assert torch.equal(head(inside), expected_head(3))
    assert inside.config.name_or_path == "org/drafter/deep/inside"


def test_all_files_are_of_one_commit(hub, target, cache, tmp_path):
    """A push between two of our requests must not mix two checkpoints: all later files are asked for by commit."""
    repo = hub.add("org/drafter", checkpoint(tmp_path / "one"))
    AutoDrafter.from_pretrained("org/drafter", target, cache_dir=cache)
    weights = [request for request in hub.requests if "model.safetensors" in request]
    assert weights and all(f"/resolve/{repo.commit('main')}/" in request for request in weights)


def test_unknown_revision_and_repository(hub, target, cache, tmp_path):
    hub.add("org/drafter", checkpoint(tmp_path / "one"))
    with pytest.raises(OSError, match="v9"):
        AutoDrafter.from_pretrained("org/drafter", target, cache_dir=cache, revision="v9")
    with pytest.raises(OSError, match="org/absent"):
        AutoDrafter.from_pretrained("org/absent", target, cache_dir=cache)


def test_private_repository(hub, target, cache, tmp_path):
    hub.add("org/secret", checkpoint(tmp_path / "one"), token=TOKEN)
    with pytest.raises(OSError, match="org/secret"):
        AutoDrafter.from_pretrained("org/secret", target, cache_dir=cache, token=False)
    drafter = AutoDrafter.from_pretrained("org/secret", target, cache_dir=cache, token=TOKEN)
    assert torch.equal(head(drafter), expected_head(1))


@pytest.mark.parametrize("how", ["local_files_only", "HF_HUB_OFFLINE"])
def test_sharded_then_offline(how, hub, target, cache, tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "one", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    hub.add("org/sharded", folder)
    online = AutoDrafter.from_pretrained("org/sharded", target, cache_dir=cache)
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", how == "HF_HUB_OFFLINE")
    options = {"local_files_only": True} if how == "local_files_only" else {}
    offline = AutoDrafter.from_pretrained("org/sharded", target, cache_dir=cache, **options)
    assert hub.requests == []
    for name, tensor in online.state_dict().items():
        assert torch.equal(tensor, offline.state_dict()[name])


def test_offline_without_cache(hub, target, cache, tmp_path):
    hub.add("org/drafter", checkpoint(tmp_path / "one"))
    with pytest.raises(OSError, match="org/drafter"):
        AutoDrafter.from_pretrained("org/drafter", target, cache_dir=cache, local_files_only=True)


def test_interrupted_download(hub, target, cache, tmp_path):
    hub.add("org/drafter", checkpoint(tmp_path / "one"))
    hub.breaks_off.add("model.safetensors")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoDrafter.from_pretrained("org/drafter", target, cache_dir=cache)
    assert not list(cache.rglob("snapshots/*/model.safetensors"))
    hub.breaks_off.clear()
    drafter = AutoDrafter.from_pretrained("org/drafter", target, cache_dir=cache)
    assert torch.equal(head(drafter), expected_head(1))


def test_push_to_hub(hub, target, cache, tmp_path):
    drafter = AutoDrafter.from_pretrained(checkpoint(tmp_path / "one", dialect="speculators"), target)
    drafter.push_to_hub("me/pushed", token=TOKEN)
    assert {"config.json", "model.safetensors"} <= set(hub.repos["me/pushed"].revisions["main"])
    again = AutoDrafter.from_pretrained("me/pushed", target, cache_dir=cache)
    assert again.config.dialect == "speculators" and again.num_assistant_tokens == 3
    assert torch.equal(head(again), expected_head(1))


@pytest.mark.parametrize("chat_template", [None, "{{ messages[0].content }} 7"])
def test_inspect_with_self_check(chat_template, hub, tmp_path, capsys, monkeypatch):
    """Drafter, target and tokenizer from the Hub, the drafter from a subfolder of a revision."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    tiny_target(SPEC, dtype=torch.float32).save_pretrained(tmp_path / "target")
    vocabulary = {str(number): number for number in range(SPEC.vocab_size)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0", chat_template=chat_template)
    fast.save_pretrained(tmp_path / "target")
    hub.add("org/target", tmp_path / "target", token=TOKEN)
    hub.add("org/drafter", checkpoint(tmp_path / "one"), revision="v2", prefix="inside/", token=TOKEN)
    where = ["--revision", "v2", "--subfolder", "inside", "--token", TOKEN]
    assert main(["inspect", "org/drafter", "--target", "org/target", "--self-check", "--json", *where]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint"] == "org/drafter/inside" and report["target"]["fits"]
    # Three conventions of layer ids, two residuals, two feedbacks, one RoPE base, and SpecForge's norm applied or not.
    assert len(report["self_check"]["scores"]) == 24
    assert any(request.startswith("GET /api/models/org/target") for request in hub.requests)


def test_endpoint_variable(hub, cache, tmp_path):
    """In a process of its own, with the endpoint in the environment as users set it."""
    hub.add("org/drafter", checkpoint(tmp_path / "one"))
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "hf_specdec.cli", "inspect", "org/drafter"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "SpecForge" in done.stdout


@pytest.mark.core
def test_sharded_peagle(hub, target, cache, tmp_path):
    folder = write("amazon", tmp_path / "one", PEAGLE, make_weights(PEAGLE), max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    hub.add("org/peagle", folder)
    drafter = AutoDrafter.from_pretrained("org/peagle", target, cache_dir=cache)
    assert torch.equal(drafter.mask_hidden, make_weights(PEAGLE)["mask_hidden"])
    assert drafter.config.name_or_path == "org/peagle" and drafter.config.mask_token_id == PEAGLE.mask_token


def test_pard(hub, target, cache, tmp_path):
    """Sharded, in a subfolder of a revision; then pushed as an ordinary checkpoint, and offline from the cache."""
    folder = write_draft_model(tmp_path / "one", pard_token=7, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    hub.add("org/pard", folder, revision="v2", prefix="inside/")
    where = {"cache_dir": cache, "revision": "v2", "subfolder": "inside"}
    drafter = AutoDrafter.from_pretrained("org/pard", target, **where)
    assert drafter.config.mask_token_id == 7 and drafter.config.parallel_drafting
    assert drafter.config.name_or_path == "org/pard/inside"
    drafter.push_to_hub("me/pushed", token=TOKEN)
    assert {"config.json", "model.safetensors"} <= set(hub.repos["me/pushed"].revisions["main"])
    again = AutoDrafter.from_pretrained("me/pushed", target, cache_dir=cache)
    hub.requests.clear()
    offline = AutoDrafter.from_pretrained("org/pard", target, local_files_only=True, **where)
    assert hub.requests == []
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]) and torch.equal(tensor, offline.state_dict()[name])
    assert again.config.mask_token_id == 7 and again.config.dialect == "PARD"


@pytest.mark.core
def test_pard2(hub, target, cache, tmp_path):
    """The projection is fetched and pushed beside the model."""
    hub.add("org/pard2", pard2_reference.write(tmp_path / "one", bias=True), revision="v2", prefix="inside/")
    where = {"cache_dir": cache, "revision": "v2", "subfolder": "inside"}
    drafter = AutoDrafter.from_pretrained("org/pard2", target, **where)
    drafter.push_to_hub("me/pushed", token=TOKEN)
    again = AutoDrafter.from_pretrained("me/pushed", target, cache_dir=cache)
    hub.requests.clear()
    offline = AutoDrafter.from_pretrained("org/pard2", target, local_files_only=True, **where)
    assert hub.requests == [] and "target_proj.bias" in drafter.state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]) and torch.equal(tensor, offline.state_dict()[name])
