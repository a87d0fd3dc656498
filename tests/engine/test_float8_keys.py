"""Keys and values as float8: texts are those of `generate()` on a cache that rounds them, however they are made."""

import functools
from types import SimpleNamespace

import bulk
import pytest
import torch
from assistants import assistant_drafter, gemma4_target, new_assistant
from case_counts import cases
from graph_stand_ins import replay_on_cpu, tape_on_cpu
from lossless import PROMPTS, greedy
from oracle import RANDOM_DRAFTERS, SELDOM, copy_of, random_eagle3
from targets import HYBRIDS, STATIC_FAMILIES, build_target, padded_prompts, set_policy, tiny_target
from transformers import ContinuousBatchingConfig, DynamicCache

from hf_specdec import AutoDrafter, NoDrafter, ops
from hf_specdec.auto_k.auto_drafts import RoundTimes
from hf_specdec.auto_k.round_costs import CostTable, find_table
from hf_specdec.cache.key_layers import RaggedLayer, attention_layers
from hf_specdec.drafters.base import Drafter
from hf_specdec.engine import lease, prefix_cache
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.hosting import eligibility
from hf_specdec.kernels.float8_reference import FLOAT8, dequantise, quantise
from hf_specdec.memory import virtual_memory
from hf_specdec.state import RoundShape

NEW = 12
KINDS = {**RANDOM_DRAFTERS, "copy": functools.partial(copy_of, noise=0.02), "none": NoDrafter}
FEW = ("eagle3", "mtp", "copy", "none")
# Families with attention beside recurrent layers.
ATTENDING = [family for family in HYBRIDS if family not in STATIC_FAMILIES and "mamba" not in family]


class RoundedCache(DynamicCache):
    """A cache of transformers that rounds what it stores."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(*(dequantise(*quantise(one)) for one in (key_states, value_states)), *args, **kwargs)


def rounded(target, inputs, **options):
    """What plain `generate()` returns with such a cache."""
    cache = RoundedCache(config=target.config.get_text_config())
    return greedy(target, inputs, **{OUTPUT_NAME: cache, "max_new_tokens": NEW, **options})


@functools.cache
def alone(family, prompt):
    target = tiny_target(family)
    ids = torch.tensor([prompt])
    return rounded(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0, len(prompt) :].tolist()


def of_float8(kind, target):
    return KINDS[kind](target).configure(kv_cache_dtype="fp8")


def tokens(count, seed):
    return torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


BEGINNING = tokens(40, 0)
REQUESTS = [BEGINNING + tokens(count, count) for count in (5, 1, 9, 7)] + [tokens(11, 50), BEGINNING]


in_rows = functools.partial(bulk.in_rows, max_new_tokens=NEW)


@pytest.mark.parametrize("family", [*STATIC_FAMILIES, *cases(ATTENDING, ATTENDING[:2])])
def test_texts_of_every_family(family):
    """Windows, sinks, latents of multi-head latent attention, and attention beside recurrent layers."""
    target, inputs = tiny_target(family), padded_prompts(PROMPTS[3])
    expected = rounded(target, inputs)
    for kind in ("none", "copy"):
        drafter = of_float8(kind, target)
        assert torch.equal(greedy(target, inputs, drafter, 3, max_new_tokens=NEW), expected)
        assert "keys and values as float8" in drafter.stats.execution
    assert drafter.stats.accepted > 0


@pytest.mark.core_for(kind=["eagle3"])
@pytest.mark.parametrize("kind", cases([kind for kind in KINDS if kind not in SELDOM], [*FEW, "dflash", "draft-model"]))
def test_texts_with_every_drafter(kind):
    """Together, alone, in continuous batching, and with beginnings that are reused."""
    target = tiny_target("llama")
    drafter, inputs = of_float8(kind, target), padded_prompts(PROMPTS[3])
    expected = rounded(target, inputs)
    assert torch.equal(greedy(target, inputs, drafter, 4, max_new_tokens=NEW), expected)
    for row, length in enumerate(PROMPTS[3]):
        one = {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
        assert torch.equal(greedy(target, one, drafter, 4, max_new_tokens=NEW)[0, -NEW:], expected[row, -NEW:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "BLOCK", 4)
        patch.setattr(prefix_cache, "FEWEST_SAVED", 4)
        assert in_rows(target, drafter, REQUESTS, 2) == [alone("llama", tuple(one)) for one in REQUESTS]
    assert drafter.stats.cached_tokens > 3 * 20 or drafter.prefix_margin(4) is None


@pytest.mark.parametrize("kind", cases([kind for kind in KINDS if kind != "none"], FEW[:3]))
def test_what_drafters_keep_is_float8(kind):
    """Of all drafters with keys and values of their own."""
    target, states = tiny_target("llama"), []
    drafter, new_state = of_float8(kind, target), Drafter.new_state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafter, "new_state", lambda *args: states.append(new_state(*args)) or states[-1])
        greedy(target, padded_prompts([5, 3]), drafter, 3)
    used = [layer.slot_buffers for cache in states[-1].caches for layer in cache.layers]
    used = [buffers for buffers in used if buffers]
    assert len(used) > target.config.num_hidden_layers
    for keys, values, scales in used:
        assert keys.dtype == values.dtype == FLOAT8 and scales.shape == (*keys.shape[:3], 2)
        assert scales.dtype == torch.float32


def test_a_manager():
    target = tiny_target("llama")
    drafter = of_float8("copy", target)
    config = ContinuousBatchingConfig(max_requests_per_batch=3)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "assistant_model": drafter}
    with target.continuous_batching_context_manager(continuous_batching_config=config, **options) as manager:
        names = [manager.add_request(prompt) for prompt in REQUESTS]
        found = [manager.get_result(name, timeout=60) for name in names]
    assert [one.generated_tokens for one in found] == [alone("llama", tuple(one)) for one in REQUESTS]


@pytest.mark.parametrize("stand_in", cases([replay_on_cpu, tape_on_cpu], [tape_on_cpu]))
def test_captured_rounds(monkeypatch, stand_in):
    """What is captured is replayed in later calls; other settings of the same drafter have sessions of their own."""
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    graphs, drafter = stand_in(monkeypatch), of_float8("copy", target)
    plain, expected = greedy(target, inputs, max_new_tokens=NEW), rounded(target, inputs)
    assert not torch.equal(plain, expected)
    for dtype, text in (("fp8", expected), ("fp8", expected), ("auto", plain), ("fp8", expected)):
        drafter.configure(kv_cache_dtype=dtype)
        assert torch.equal(greedy(target, inputs, drafter, 3, max_new_tokens=NEW), text)
    assert graphs.count > 0 and "not compiled, keys and values as float8" in drafter.stats.execution


@pytest.mark.parametrize("family", cases(["llama", "gemma3"], ["gemma3"]))
def test_layer_kernels_and_batch_invariant_calls(monkeypatch, family):
    """Rotated keys are rounded by the op that rotates them."""
    set_policy(monkeypatch, "cpu", batch_invariant=True, layer_kernels=True)
    monkeypatch.setattr("hf_specdec.hosting.eligibility.why_not_batch_invariant", lambda model: None)
    target, inputs, stored = tiny_target(family), padded_prompts(PROMPTS[3]), []
    store = ops.rotate_and_store
    monkeypatch.setattr(ops, "rotate_and_store", lambda *args: stored.append(args[-1]) or store(*args))
    expected = rounded(target, inputs)
    for is_invariant in (False, True):
        drafter = of_float8("copy", target).configure(batch_invariant=is_invariant)
        assert torch.equal(greedy(target, inputs, drafter, 3, max_new_tokens=NEW), expected)
        assert stored and all(scales is not None for scales in stored)
        stored.clear()


def test_kernels(monkeypatch):
    """In Triton's interpreter: writing, prefills that are packed, and rounds."""
    set_policy(monkeypatch, "cpu", triton=True, layer_kernels=True)
    target, inputs = tiny_target("llama"), padded_prompts([7, 3])
    expected = rounded(target, inputs, max_new_tokens=3)
    drafter = of_float8("copy", target)
    assert torch.equal(greedy(target, inputs, drafter, 1, max_new_tokens=3), expected)


def test_keys_that_others_read():
    """Gemma 4: layers without keys of their own, and an assistant, read those of earlier layers."""
    target, inputs = gemma4_target(), padded_prompts(PROMPTS[3])
    drafter = assistant_drafter(new_assistant(), target).configure(kv_cache_dtype="fp8")
    assert torch.equal(greedy(target, inputs, drafter, 3, max_new_tokens=NEW), rounded(target, inputs))


def test_attention_that_reads_keys_by_itself(monkeypatch):
    """Code between the cache and attention is given tensors, and gets what is stored, dequantised."""
    target, inputs, seen, update = tiny_target("llama"), padded_prompts(PROMPTS[3]), set(), RaggedLayer.update

    def doubled(self, *args, **kwargs):
        keys, values = update(self, *args, **kwargs)
        seen.add((keys.dtype, self.keys.dtype))
        return keys * 2 / 2, values.clone()

    monkeypatch.setattr(RaggedLayer, "update", doubled)
    drafter = of_float8("copy", target)
    assert torch.equal(greedy(target, inputs, drafter, 3, max_new_tokens=NEW), rounded(target, inputs))
    assert seen == {(torch.float32, FLOAT8)}


def test_memory(monkeypatch):
    """Of bfloat16, float8 with its scales takes half: 2 bytes of scales for 64 or more elements."""
    target = build_target("llama", head_dim=64).to(torch.bfloat16)
    sizes, found, find_layout = {}, [], lease.find_layout
    monkeypatch.setattr(lease, "find_layout", lambda *args: found.append(find_layout(*args)) or found[-1])
    for dtype in ("auto", "fp8"):
        drafter = NoDrafter(target, kv_cache_dtype=dtype)
        before = virtual_memory.committed_bytes(torch.device("cpu"))
        virtual_memory.reset_peak_committed_bytes(torch.device("cpu"))
        in_rows(target, drafter, [tokens(200, 1), tokens(150, 2)], 2)
        most = virtual_memory.peak_committed_bytes(torch.device("cpu")) - before
        sizes[dtype] = found[-1].token_bytes, most
        drafter.release()
    config = target.config
    numbers = config.num_hidden_layers * config.num_key_value_heads * 64 * 2
    assert sizes["auto"][0] == numbers * 2
    # Scales of two heads, 8 bytes, are placed at a multiple of 16.
    assert sizes["fp8"][0] == numbers + config.num_hidden_layers * 16
    assert sizes["fp8"][1] < 0.6 * sizes["auto"][1]


def test_caches_that_are_continued():
    """They get what was stored, in the model's dtype, and are rounded when they are read: which changes it no more."""
    target, prompt = tiny_target("llama"), torch.tensor([tokens(20, 3)])
    whole = rounded(target, {"input_ids": prompt}, max_new_tokens=2 * NEW)
    for kind in ("eagle3", "none"):
        drafter = of_float8(kind, target)
        first = greedy(target, {"input_ids": prompt}, drafter, 3, max_new_tokens=NEW, return_dict_in_generate=True)
        cache = first[OUTPUT_NAME]
        keys = cache.layers[0].keys
        assert keys.dtype == torch.float32 and torch.equal(dequantise(*quantise(keys)), keys)
        options = {OUTPUT_NAME: cache, "max_new_tokens": NEW}
        assert torch.equal(greedy(target, {"input_ids": first.sequences}, drafter, 3, **options), whole)


def test_calls_that_are_faster_without_the_drafter(monkeypatch):
    """They store keys as those with it do, and times of one are not those of the other."""
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    known = {RoundShape(0): 1e4, RoundShape(1): 5e4, RoundShape(3): 9e4}  # more than rounds take
    monkeypatch.setattr(CostTable, "times", lambda table, shape: RoundTimes(known))
    drafter = of_float8("eagle3", target)
    for dtype, expected in (("fp8", rounded(target, inputs)), ("auto", greedy(target, inputs, max_new_tokens=NEW))):
        drafter.configure(kv_cache_dtype=dtype)
        assert torch.equal(greedy(target, inputs, drafter, "auto", max_new_tokens=NEW), expected)
        assert {*drafter.stats.rounds_by_k} == {0}
    tables = [find_table(target, drafter.configure(kv_cache_dtype=dtype), False) for dtype in ("auto", "fp8", "auto")]
    assert tables[0] is tables[2] is not tables[1]


def test_drawn_texts_do_not_depend_on_the_batch():
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    drafter = of_float8("copy", target)
    draws = {"do_sample": True, "temperature": 1.2, "max_new_tokens": NEW, "assistant_model": drafter}
    together = target.generate(**inputs, **draws, seeds=[5, 6, 7])
    for row, (length, seed) in enumerate(zip(PROMPTS[3], (5, 6, 7), strict=True)):
        one = {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
        assert torch.equal(target.generate(**one, **draws, seeds=[seed])[0, -NEW:], together[row, -NEW:])


def test_what_is_refused():
    target, inputs = tiny_target("llama"), padded_prompts([5, 3])
    drafter = random_eagle3(target)
    for wrong in ("fp8_e5m2", torch.float8_e4m3fn, True, "float8"):
        with pytest.raises(ValueError, match=r'kv_cache_dtype is .*; expected "auto" or "fp8"'):
            drafter.configure(kv_cache_dtype=wrong)
    assert drafter.kv_cache_dtype == "auto" and NoDrafter(target).key_dtype is None
    drafter.configure(kv_cache_dtype="fp8", engine="stock")
    with pytest.raises(ValueError, match=r'"fp8", but the call runs on the stock engine .*expected the static engine'):
        greedy(target, inputs, drafter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eligibility, "cache_layers", lambda model: attention_layers(1))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        model = SimpleNamespace(device=torch.device("cuda", 0))
        old = SimpleNamespace(model=model, drafter=drafter, num_nodes=0)
        with pytest.raises(ValueError, match=r"a GPU of compute capability 8\.0; expected 8\.9 or later"):
            eligibility.check_configured(old, "static")
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        eligibility.check_configured(old, "static")
    mamba = tiny_target("mamba2")
    with pytest.raises(
        ValueError, match="Mamba2ForCausalLM stores no keys and values; expected a target with attention"
    ):
        greedy(mamba, inputs, NoDrafter(mamba, kv_cache_dtype="fp8"))


def test_given_as_other_settings_are(tmp_path):
    target = tiny_target("llama")
    random_eagle3(target).save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path, target, kv_cache_dtype="fp8")
    assert loaded.kv_cache_dtype == "fp8" and loaded.key_dtype == ops.FLOAT8 and not loaded.compiles_rounds
    assert loaded.configure(kv_cache_dtype="auto").key_dtype is None and loaded.compiles_rounds == loaded.compile_rounds
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int8'"):
        AutoDrafter.from_pretrained(tmp_path, target, kv_cache_dtype="int8")
