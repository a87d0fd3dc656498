"""LoRA adapters of PEFT: one for each row, switched, trained, merged, added and deleted, on the static engine."""

import copy
import gc
import re
import threading
import warnings

import pytest
import torch
from assistants import assistant_drafter, gemma4_target, new_assistant
from case_counts import cases
from graph_stand_ins import replay_on_cpu, show_all_slots, tape_on_cpu
from oracle import RANDOM_DRAFTERS, SELDOM, random_eagle3
from targets import build_target, padded_prompts, set_policy, tiny_target
from torch import nn
from torch.nn.utils import prune
from transformers import ContinuousBatchingConfig, DynamicCache

from hf_specdec import NoDrafter, ops
from hf_specdec.engine import prefix_cache
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.modules.adapters import Adapters
from hf_specdec.modules.patch import runs_engine
from hf_specdec.modules.signature import Fingerprint, Signature

peft = pytest.importorskip("peft")
hotswap = pytest.importorskip("peft.utils.hotswap")

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NAMES = ["b", "__base__", "a"]
PROMPTS = padded_prompts([9, 1, 5])


@pytest.fixture
def tape(monkeypatch):
    return tape_on_cpu(monkeypatch)


def adapted_target(family="llama", names=("a", "b"), target=None, **options):
    """A target and PEFT's model of it, with random adapters of ranks 4, 8 and so on; the first is active."""
    target = copy.deepcopy(tiny_target(family)) if target is None else target
    torch.manual_seed(1)
    options = {"target_modules": EVERY, "init_lora_weights": False, **options}
    configs = {name: peft.LoraConfig(r=4 + 4 * place, **options) for place, name in enumerate(names)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' of what peft asks it
        adapted = peft.get_peft_model(target, configs[names[0]], adapter_name=names[0])
        for name in names[1:]:
            adapted.add_adapter(name, configs[name])
    adapted.set_adapter(names[0])
    return target, adapted.eval()


def say(adapted, drafter=None, inputs=PROMPTS, **options):
    others = {} if drafter is None else {"assistant_model": drafter}
    if drafter is not None and not isinstance(drafter, NoDrafter):
        others["num_assistant_tokens"] = 3
    return adapted.generate(**inputs, do_sample=False, **{"max_new_tokens": 8, **options}, **others).tolist()


def same(adapted, drafter, **options):
    """What a model says with the drafter, which is what it says without."""
    found = say(adapted, drafter, **options)
    assert found == say(adapted, **options)
    return found


@pytest.mark.core_for(kind=["eagle3"])
@pytest.mark.parametrize("kind", ["eagle3", "draft-model", "mtp-by-target", "none"])
def test_one_for_each_row(tape, kind):
    """Rows change their adapters, also to those that are active, without another capture."""
    target, adapted = adapted_target()
    drafter = NoDrafter(target) if kind == "none" else RANDOM_DRAFTERS[kind](target)
    mixed = same(adapted, drafter, adapter_names=NAMES)
    assert drafter.stats.engine == "static" and "captured" in drafter.stats.execution
    count = tape.count
    for names in (["a", "b", "__base__"], ["__base__"] * 3):
        assert same(adapted, drafter, adapter_names=names) != mixed
    assert same(adapted, drafter) == say(adapted, adapter_names=["a"] * 3)
    adapted.set_adapter("b")
    assert same(adapted, drafter)[0] == mixed[0]
    with adapted.disable_adapter():
        assert same(adapted, drafter)[1] == mixed[1]
        assert same(adapted, drafter, adapter_names=NAMES)[1] == mixed[1]  # PEFT's switch is above the names
    assert tape.count == count
    assert not any(module._forward_pre_hooks for module in target.modules())


@pytest.mark.parametrize(
    "kind",
    cases(
        [kind for kind in RANDOM_DRAFTERS if kind not in ("eagle3", "draft-model", "mtp-by-target")],
        [kind for kind in RANDOM_DRAFTERS if kind not in (*SELDOM, "eagle3", "draft-model", "mtp-by-target", "pard")],
    ),
)
def test_every_other_kind_of_drafter(kind):
    target, adapted = adapted_target()
    drafter = RANDOM_DRAFTERS[kind](target)
    assert same(adapted, drafter, adapter_names=NAMES) != same(adapted, drafter)
    assert drafter.stats.engine == "static" and drafter.stats.drafted


def test_of_a_target_whose_keys_drafters_read():
    target, adapted = adapted_target(target=copy.deepcopy(gemma4_target()))
    drafter = assistant_drafter(new_assistant(), target)
    assert same(adapted, drafter, adapter_names=NAMES) != same(adapted, drafter)
    assert drafter.stats.engine == "static" and drafter.stats.drafted


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "returned"])
def test_caches_of_rows_that_end_apart(is_given):
    """Columns after the end of a row are run at the end of the call, or when a returned cache is read."""
    target, adapted = adapted_target()
    drafter, caches = random_eagle3(target), []
    options = {"adapter_names": NAMES, "do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
    end = int(adapted.generate(**PROMPTS, **options).sequences[0, -8])
    for assistant in ({}, {"assistant_model": drafter}):
        given = {OUTPUT_NAME: DynamicCache(config=target.config)} if is_given else {}
        out = adapted.generate(**PROMPTS, **options, **assistant, **given, eos_token_id=end)
        caches.append(out[OUTPUT_NAME])
    mask = torch.nn.functional.pad(PROMPTS["attention_mask"], (0, out.sequences.shape[1]), value=1)
    for (keys, *_), (wanted, *_) in zip(*caches, strict=True):
        tokens = mask[:, None, : keys.shape[2], None]
        torch.testing.assert_close(keys * tokens, wanted * tokens, rtol=1e-4, atol=1e-4)
    assert not [one for one in target.modules() if one._forward_pre_hooks]


def test_rows_whose_drafts_are_trees(tape):
    """All nodes of a row have its adapters."""
    target, adapted = adapted_target()
    drafter = RANDOM_DRAFTERS["dflash"](target).configure(tree=10)
    assert same(adapted, drafter, adapter_names=NAMES) != same(adapted, drafter, adapter_names=["a"] * 3)
    assert drafter.stats.tree == 10 and "captured" in drafter.stats.execution


# By family: which layers have adapters. PEFT itself has none for each row on experts.
FAMILIES = {
    "qwen3": EVERY,
    "gemma3": EVERY,
    "qwen3-moe": ["q_proj", "o_proj"],
    "qwen3-next": ["q_proj", "o_proj", "in_proj_qkvz", "out_proj"],
    "gpt-oss": ["q_proj", "v_proj"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Windows, sinks, experts without adapters, layers with states, of which prompts are not packed."""
    target, adapted = adapted_target(family, target_modules=FAMILIES[family])
    drafter = random_eagle3(target)
    assert same(adapted, drafter, adapter_names=NAMES) != same(adapted, drafter)
    assert drafter.stats.engine == "static" and Signature(target).adapters.why_not_by_row is None


def test_of_transformers_own_adapters(tape):
    """`model.add_adapter()`, whose `generate()` takes no names without a drafter."""
    target = copy.deepcopy(tiny_target("llama"))
    torch.manual_seed(1)
    try:
        for name in ("a", "b"):
            config = peft.LoraConfig(r=4, target_modules=EVERY, init_lora_weights=False)
            target.add_adapter(config, adapter_name=name)
    except ValueError as error:
        pytest.skip(f"this transformers does not take this PEFT: {error}")
    drafter = random_eagle3(target)
    found = {}
    for name in ("a", "b"):
        target.set_adapter(name)
        found[name] = same(target, drafter)
    target.disable_adapters()
    found["__base__"] = same(target, drafter)
    target.enable_adapters()
    assert tape.count == 2
    mixed = say(target, drafter, adapter_names=NAMES)
    assert mixed == [found[name][row] for row, name in enumerate(NAMES)]


def test_training_is_seen_at_once(tape):
    target, adapted = adapted_target()
    drafter = random_eagle3(target)
    seen, count = [same(adapted, drafter)], tape.count
    optimizer = torch.optim.SGD((one for one in adapted.parameters() if one.requires_grad), lr=5.0)
    for _ in range(2):
        adapted.train()
        adapted(**PROMPTS, labels=PROMPTS["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        adapted.eval()
        seen.append(same(adapted, drafter))
        assert same(adapted, drafter, adapter_names=NAMES)[2] == seen[-1][2]
    assert tape.count == count and len(set(map(str, seen))) == 3


def test_adapters_that_come_and_go(tape):
    """A deleted one's memory is read by no graph; another one of its name is another one."""
    target, adapted = adapted_target()
    drafter = random_eagle3(target)
    before = same(adapted, drafter, adapter_names=NAMES)
    gone = [module.lora_A["b"].weight for module in target.modules() if hasattr(module, "lora_A")]
    adapted.delete_adapter("b")  # of layers that another one is on, too
    for weight in gone:
        weight.data.fill_(float("nan"))
    del gone
    gc.collect()
    assert same(adapted, drafter) == say(adapted)
    with pytest.raises(ValueError, match="non-existing adapter"):
        say(adapted, drafter, adapter_names=NAMES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.add_adapter("b", peft.LoraConfig(r=2, target_modules=["v_proj", "o_proj"], init_lora_weights=False))
    adapted.eval()
    after = same(adapted, drafter, adapter_names=NAMES)
    assert after[1:] == before[1:] and after[0] != before[0]
    merged = say(adapted)
    adapted.merge_adapter()
    assert same(adapted, drafter) == merged  # by PEFT's own layers
    assert "'a' is merged" in drafter.stats.execution
    adapted.unmerge_adapter()
    assert same(adapted, drafter, adapter_names=NAMES) == after
    assert adapted.unload() is target and not hasattr(target.model.layers[0].self_attn.q_proj, "base_layer")
    assert same(target, drafter)[1] == before[1]


@pytest.mark.filterwarnings("ignore")
def test_saved_and_loaded_after_a_call(tmp_path):
    """Base layers were fused: an adapter and the model that are saved are those that were there."""
    target, adapted = adapted_target()
    kept = {name: one.clone() for name, one in adapted.state_dict().items()}
    said = same(adapted, random_eagle3(target))
    assert all(torch.equal(one, kept[name]) for name, one in adapted.state_dict().items())
    adapted.save_pretrained(tmp_path, selected_adapters=["a"])
    again = peft.PeftModel.from_pretrained(copy.deepcopy(tiny_target("llama")), tmp_path / "a").eval()
    assert say(again) == said


# What PEFT's own layers run, by what is asked of LoRA: why.
NOT_PLAIN = {
    "dora": ({"use_dora": True}, "is a DoraLinearVariant, no plain LoRA"),
    "bias of adapters": ({"lora_bias": True}, r"has a bias \(lora_bias\)"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "on its language model head"),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "layers of the class .*Embedding"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_is_not_plain_is_run_by_peft(tape, kind):
    options, reason = NOT_PLAIN[kind]
    target = build_target("llama", attention_bias=True, mlp_bias=True) if kind == "bias of adapters" else None
    target, adapted = adapted_target(target=target, **options)
    drafter = random_eagle3(target)
    texts = {}
    for name in ("a", "b", "a"):
        adapted.set_adapter(name)
        found = say(adapted, drafter)
        assert texts.setdefault(name, found) == found == say(adapted)
    assert texts["a"] != texts["b"] and tape.count == 4
    assert re.search(reason, drafter.stats.execution)
    if kind != "dora":  # of which PEFT itself has none for each row
        same(adapted, drafter, adapter_names=NAMES)
        assert "modules have hooks" in drafter.stats.execution
    with pytest.raises(ValueError, match=reason):
        target.generate_batch([[5, 6]], assistant_model=drafter, adapter_names=["a"], max_new_tokens=3)


@pytest.mark.filterwarnings("ignore")
def test_pruned_adapters(tape):
    """torch's pruning computes the weight before each pass, so it is no parameter."""
    target, adapted = adapted_target()
    drafter, whole = random_eagle3(target), say(adapted)
    prune.random_unstructured(target.model.layers[0].self_attn.q_proj.lora_A["a"], "weight", amount=0.5)
    assert same(adapted, drafter) != whole
    assert "a part of an adapter is no plain linear layer, or has hooks" in drafter.stats.execution


@pytest.mark.filterwarnings("ignore")
def test_adapters_swapped_in_place(tape, tmp_path):
    """PEFT then has scales as tensors, into which it writes those of the adapter that comes."""
    target = copy.deepcopy(tiny_target("llama"))
    for alpha in (8, 64):
        adapted_target(names=("a",), lora_alpha=alpha)[1].save_pretrained(tmp_path / str(alpha))
    drafter, texts = random_eagle3(target), []
    adapted = peft.PeftModel.from_pretrained(target, tmp_path / "8" / "a", adapter_name="a")
    hotswap.prepare_model_for_compiled_hotswap(adapted, target_rank=8)
    adapted.eval()
    for alpha in (8, 64, 8):
        hotswap.hotswap_adapter(adapted, tmp_path / str(alpha) / "a", adapter_name="a")
        texts.append(same(adapted, drafter))
        reason = drafter.stats.execution
        assert same(adapted, drafter, adapter_names=["__base__", "a", "a"])[1:] == texts[-1][1:]
    assert texts[0] == texts[2] != texts[1] and "the scale of an adapter is a tensor" in reason


OTHERS = {"rsLoRA": {"use_rslora": True}, "dropout": {"lora_dropout": 0.5}, "ranks": {"rank_pattern": {"q_proj": 2}}}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS.keys())
def test_other_ranks_and_scales(options):
    target, adapted = adapted_target(**options)
    drafter = random_eagle3(target)
    same(adapted, drafter, adapter_names=NAMES)
    assert Signature(target).adapters.why_not_by_row is None


@pytest.mark.filterwarnings("ignore")
def test_modules_that_adapters_save_with_them(tape):
    """They are switched by PEFT, so each adapter has rounds of its own; rows of several run PEFT's hooks."""
    target, adapted = adapted_target(modules_to_save=["lm_head"])
    with torch.no_grad():
        target.lm_head.modules_to_save["b"].weight.mul_(-1)
    drafter = random_eagle3(target)
    found = [same(adapted, drafter)]
    adapted.set_adapter("b")
    found.append(same(adapted, drafter))
    assert found[0] != found[1] and tape.count == 4
    same(adapted, drafter, adapter_names=NAMES)
    assert "modules have hooks" in drafter.stats.execution


def test_dtypes_that_peft_chooses():
    """Adapters of a bfloat16 model are in float32; those of two dtypes are not stacked."""
    target, adapted = adapted_target(target=copy.deepcopy(tiny_target("llama")).bfloat16())
    assert {one.dtype for name, one in adapted.named_parameters() if "lora_" in name} == {torch.float32}
    drafter = NoDrafter(target)
    assert say(adapted, drafter, adapter_names=NAMES)
    assert drafter.stats.engine == "static" and Signature(target).adapters.why_not_by_row is None
    for module in target.modules():
        if hasattr(module, "lora_A"):
            module.lora_A["b"].to(torch.bfloat16)
    assert "differ in dtype" in Signature(target).adapters.why_not_by_row


def test_batch_invariant(monkeypatch):
    target, adapted = adapted_target()
    expected = say(adapted, adapter_names=NAMES)
    drafter = random_eagle3(target).configure(batch_invariant=True)
    set_policy(monkeypatch, "cpu", batch_invariant=True, layer_kernels=True)
    monkeypatch.setattr("hf_specdec.hosting.eligibility.why_not_batch_invariant", lambda model: None)
    assert say(adapted, drafter, adapter_names=NAMES) == expected
    assert "batch-invariant" in drafter.stats.execution


def test_compiled(monkeypatch):
    """One that is active is not compiled in."""
    target = copy.deepcopy(tiny_target("llama", num_layers=1))
    target, adapted = adapted_target(target=target, target_modules=["q_proj", "down_proj"])
    drafter = NoDrafter(target).configure(compile_rounds=True)
    replay_on_cpu(monkeypatch)
    show_all_slots(monkeypatch)
    set_policy(monkeypatch, "cpu", compiler="eager")
    for names in (NAMES, ["__base__", "a", "__base__"]):
        expected = say(adapted, adapter_names=names, max_new_tokens=3)
        assert say(adapted, drafter, adapter_names=names, max_new_tokens=3) == expected
    assert drafter.stats.execution == "captured in one graph, compiled"


def test_triton_kernels(monkeypatch):
    set_policy(monkeypatch, "cpu", triton=True, fused_linear=True)
    target, adapted = adapted_target(target=copy.deepcopy(tiny_target("llama", num_layers=1)))
    drafter = random_eagle3(target, aux_hidden_state_layer_ids=[0, 1])
    expected = say(adapted, adapter_names=NAMES, max_new_tokens=4)
    calls = []
    add = ops.add_low_rank
    monkeypatch.setattr(ops, "add_low_rank", lambda *args: (calls.append(len(args[-1])), add(*args))[1])
    assert say(adapted, drafter, adapter_names=NAMES, max_new_tokens=4) == expected
    alone = {name: one[:1] for name, one in padded_prompts([9]).items()}
    expected = say(adapted, inputs=alone, adapter_names=["b"], max_new_tokens=4)
    assert say(adapted, drafter, inputs=alone, adapter_names=["b"], max_new_tokens=4) == expected
    assert {1, 2, 3} == set(calls)  # of query, key and value at once, of gate and up, of others


@pytest.mark.parametrize("has_product", [True, False], ids=["own", "the layers'"])
def test_layers_are_updated_by_their_product(tape, monkeypatch, has_product):
    """Those of a few rows: query, key and value at once, gate and up with their activation."""
    policy = {"layer_kernels": True, "few_row_linear": True, "fused_linear": True, "transposed_linear": False}
    set_policy(monkeypatch, "cpu", **policy)
    target, adapted = adapted_target()
    drafter = random_eagle3(target)
    expected = say(adapted, adapter_names=NAMES)
    calls, ops_of = [], {name: getattr(ops, name) for name in ("adapted_linear", "add_low_rank", "gated_activation")}
    for name, one in ops_of.items():
        monkeypatch.setattr(ops, name, lambda *args, name=name, one=one: (calls.append((name, args)), one(*args))[1])
    monkeypatch.setattr(ops, "has_adapted_linear", lambda inputs, weight, rank: has_product and rank == 8)
    assert say(adapted, drafter, adapter_names=NAMES) == expected
    found = {(name, args[3], tuple(args[-1])) for name, args in calls if name == "adapted_linear"}
    hidden, inner = target.config.hidden_size, target.config.intermediate_size
    heads = [target.model.layers[0].self_attn.get_submodule(f"{one}_proj").out_features for one in "qkv"]
    whole = {(None, tuple(heads)), (None, (hidden,)), ("silu", (inner, inner))}
    assert found == ({("adapted_linear", *one) for one in whole} if has_product else set())
    others = {name for name, _ in calls} - {"adapted_linear"}
    assert others <= ({"gated_activation"} if has_product else {"add_low_rank", "gated_activation"})
    assert has_product or "add_low_rank" in others


def test_layers_with_hooks_are_updated_after_them(monkeypatch):
    """By a product of their own neither base layers with hooks nor gated MLPs with one at a layer are computed."""
    policy = {"layer_kernels": True, "few_row_linear": True, "fused_linear": True, "transposed_linear": False}
    set_policy(monkeypatch, "cpu", **policy)
    target, adapted = adapted_target()
    mlp = target.model.layers[1].mlp
    for layer in (mlp.gate_proj, mlp.down_proj.base_layer):
        layer.register_forward_hook(lambda module, args, out: 2 * out)
    monkeypatch.setattr(ops, "has_adapted_linear", lambda inputs, weight, rank: True)
    assert same(adapted, NoDrafter(target), adapter_names=NAMES)


@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_equal_prompts_of_different_adapters_share_nothing(family, monkeypatch):
    monkeypatch.setattr(prefix_cache, "FEWEST_SAVED", 1)
    target, adapted = adapted_target(family, target_modules=["o_proj", "out_proj", "q_proj"])
    drafter = random_eagle3(target)
    prompt = torch.randint(3, 90, (1, 70), generator=torch.Generator().manual_seed(3))
    inputs = {"input_ids": prompt.repeat(4, 1), "attention_mask": torch.ones(4, 70, dtype=torch.int64)}
    found = same(adapted, drafter, inputs=inputs, adapter_names=["a", "b", "a", "__base__"])
    assert found[0] == found[2] and len(set(map(str, found))) == 3


def test_generate_batch():
    target, adapted = adapted_target()
    drafter = random_eagle3(target)
    prompts = [[5, 6, 7, 8], [9, 4], [5, 6, 7, 8], list(range(3, 80)), list(range(3, 80))]
    names = ["a", "b", "__base__", "b", "a"]
    found = adapted.generate_batch(
        prompts, assistant_model=drafter, adapter_names=names, do_sample=False, max_new_tokens=6
    )
    for number, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        inputs = {"input_ids": torch.tensor([prompt])}
        expected = say(adapted, inputs=inputs, adapter_names=[name], max_new_tokens=6)[0][len(prompt) :]
        assert found[f"req_{number}"].generated_tokens == expected
    with pytest.raises(ValueError, match="adapter_names has 2 names for 5 rows"):
        adapted.generate_batch(prompts, assistant_model=drafter, adapter_names=["a", "b"], max_new_tokens=3)
    with pytest.raises(ValueError, match="no LoRA adapter 'c'; expected one of 'a', 'b', '__base__'"):
        adapted.generate_batch(prompts, assistant_model=drafter, adapter_names=["c"] * 5, max_new_tokens=3)


@pytest.mark.core
def test_requests_of_a_manager(tape):
    """Also what they reuse of each other: rows with the same text and other adapters are not the same."""
    target, adapted = adapted_target()
    drafter, prompt = random_eagle3(target).configure(3, compile_rounds=False), list(range(3, 80))

    def plain(name):
        inputs = {"input_ids": torch.tensor([prompt])}
        return say(adapted, inputs=inputs, adapter_names=[name], max_new_tokens=6)[0][len(prompt) :]

    expected = {name: plain(name) for name in ("a", "b", "__base__")}
    assert len(set(map(str, expected.values()))) == 3
    manager = target.init_continuous_batching(
        assistant_model=drafter,
        do_sample=False,
        max_new_tokens=6,
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=4),
    )
    manager.start()
    try:
        ids = {}
        for name in ("a", "b", "__base__", None, "b"):
            options = {} if name is None else {"adapter_name": name}
            ids[manager.add_request(prompt, **options)] = name or "a"
        for request_id, name in ids.items():
            assert manager.get_result(request_id, timeout=120).generated_tokens == expected[name], name
        with pytest.raises(ValueError, match="no LoRA adapter 'c'"):
            manager.add_request(prompt, adapter_name="c")
        with manager.pause():
            waiting = manager.add_request(prompt, adapter_name="b")
            adapted.delete_adapter("b")
            other = manager.add_request(prompt, adapter_name="a")
        assert "no LoRA adapter 'b'" in manager.get_result(waiting, timeout=120).error
        assert manager.get_result(other, timeout=120).generated_tokens == expected["a"]
    finally:
        manager.stop()


def test_names_that_are_wrong():
    target, adapted = adapted_target()
    drafter = random_eagle3(target)
    with pytest.raises(ValueError, match="adapter_names has 2 names for 3 rows; expected one for each row"):
        say(adapted, drafter, adapter_names=["a", "b"])
    with pytest.raises(ValueError, match=r"adapter_names is \['c', 'a', 'a'\], but: There is no LoRA adapter 'c'"):
        say(target, drafter, adapter_names=["c", "a", "a"])
    other = tiny_target("llama")
    with pytest.raises(ValueError, match="There is no LoRA adapter 'a'; expected one of '__base__'"):
        say(other, random_eagle3(other), adapter_names=["a"] * 3)
    assert same(adapted, drafter, adapter_names=NAMES)


def test_other_threads_run_peft():
    """While an engine runs, a forward pass of another thread computes with the adapter that is active."""
    target, adapted = adapted_target()
    expected = adapted(**PROMPTS).logits
    found = []

    class Looking(nn.Module):
        def forward(self, hidden):
            if runs_engine() and not found:
                thread = threading.Thread(target=lambda: found.append(adapted(**PROMPTS).logits))
                thread.start()
                thread.join()
            return nn.functional.silu(hidden)

    drafter = random_eagle3(target)
    target.model.layers[1].mlp.act_fn = Looking()
    say(target, drafter, adapter_names=NAMES)
    torch.testing.assert_close(found[0], expected)


def test_what_is_active_is_told_unless_rows_have_their_own():
    target, adapted = adapted_target()
    cpu = torch.device("cpu")

    def fingerprints():
        signature = Signature(target)
        return Fingerprint.of(cpu, signature), Fingerprint.of(cpu, signature, by_row=signature)

    told, by_row = fingerprints()
    adapted.set_adapter("b")
    assert fingerprints()[0] != told and fingerprints()[1] == by_row
    target.model.layers[0].mlp.up_proj.set_adapter("a")
    adapters = Signature(target).adapters
    assert "in some layers than in others" in adapters.why_not_by_row and adapters.active == 0
    assert Adapters.of([nn.Linear(2, 2)]) == Adapters()
