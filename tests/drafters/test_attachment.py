"""Drafters that are attached to models: calls that name no drafter."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from adapters import with_adapters
from assistants import assistant_drafter, gemma4_target, new_assistant
from case_counts import cases
from chi_square import Cells, p_value
from graph_stand_ins import replay_on_cpu
from lossless import greedy
from model_state import traces
from oracle import RANDOM_DRAFTERS, random_eagle3
from targets import new_target, padded_prompts
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList, pipeline, set_seed
from word_tokenizer import word_tokenizer

from hf_specdec import NoDrafter
from hf_specdec.drafters.attachment import attachment_of
from hf_specdec.engine import lease
from hf_specdec.hosting import equivalence
from hf_specdec.modules.module_hooks import asks_for_gradients

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10]]
INPUTS = padded_prompts([9, 5, 3])
GREEDY = {"do_sample": False, "max_new_tokens": 10}


def attached(make=random_eagle3, **options):
    """A target, the attachment of a drafter, and the target's text of `INPUTS` without it."""
    target = new_target("llama")
    plain = target.generate(**INPUTS, **GREEDY)
    return target, make(target).attach(target, **options), plain


def texts(target, **options):
    # transformers' own engine would take most of the machine's memory.
    config = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=128)
    found = target.generate_batch(PROMPTS, continuous_batching_config=config, **GREEDY, **options)
    return [one.generated_tokens for one in found.values()]


@pytest.mark.parametrize("make", [random_eagle3, NoDrafter])
def test_calls_use_the_drafter(make):
    target, attachment, plain = attached(make)
    with attachment.paused():
        plain_texts = texts(target)
    before = traces(target)
    assert attachment.stats.calls == 0
    for mode in (False, True):
        target.train(mode)
        assert torch.equal(target.generate(**INPUTS, **GREEDY), plain)
        assert texts(target) == plain_texts
        assert target.training == mode
    assert attachment.stats.calls == 4 and attachment.stats.acceptance_length >= 1 and not attachment.refusals
    assert attachment.stats.committed == 2 * 9 * (len(plain) + len(PROMPTS))
    assert traces(target.eval()) == before
    attachment.detach()
    assert torch.equal(target.generate(**INPUTS, **GREEDY), plain) and attachment.stats.calls == 4


@pytest.mark.parametrize(
    "kind", cases([*RANDOM_DRAFTERS, "assistant"], ["p-eagle", "pard2", "draft-model", "dspark", "mtp", "assistant"])
)
def test_every_kind_of_drafter(kind):
    """In single calls and in bulk, of a target that learns between them."""
    if kind == "assistant":
        target = copy.deepcopy(gemma4_target())
        drafter = assistant_drafter(new_assistant(), target)
    else:
        target = new_target("llama")
        drafter = RANDOM_DRAFTERS[kind](target)
    attachment = drafter.attach(target, strict=True)
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*INPUTS.values(), strict=True)]
    for _ in range(2):
        with attachment.paused():
            plain = target.generate(**INPUTS, **GREEDY)
        assert torch.equal(target.generate(**INPUTS, **GREEDY), plain)
        found = target.generate_batch(prompts, **GREEDY)
        assert [one.generated_tokens for one in found.values()] == plain[:, INPUTS["input_ids"].shape[1] :].tolist()
        with torch.no_grad():
            target.lm_head.weight.mul_(torch.linspace(-1, 2, target.config.vocab_size)[:, None])
    assert attachment.stats.calls == 4 and attachment.stats.drafted


@pytest.mark.parametrize("mode", cases([True, False], [True]))
def test_drawn_texts_have_the_distribution_of_plain_ones(mode):
    """Of a model in training mode, too, as trainers call it: chi-square test of texts against the target's law."""
    target, attachment, _ = attached()
    prompt, number, length = torch.tensor([[3, 4, 5]]), 4096, 3
    cells = Cells(target, prompt, length, least=2e-3)
    target.train(mode)
    set_seed(0)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": length, "min_new_tokens": length}
    texts = torch.cat([target.generate(prompt.expand(512, -1), **options)[:, 3:] for _ in range(number // 512)])
    assert attachment.stats.calls == number // 512 and attachment.stats.drafted and not attachment.refusals
    assert p_value(cells.count(texts), cells.law) > 1e-3


@pytest.mark.core
def test_managers_and_pipelines_use_the_drafter():
    target, attachment, _ = attached(NoDrafter)
    with attachment.paused():
        plain = texts(target)
    target.train()
    with target.continuous_batching_context_manager(block=True) as manager:
        names = manager.add_requests(PROMPTS, max_new_tokens=10)
        assert [manager.get_result(name).generated_tokens for name in names] == plain
        with manager.pause():
            assert target.training, "it may be trained here"
            assert all(module.training for module in target.modules())
        name = manager.add_request(PROMPTS[0], max_new_tokens=10)
        assert manager.get_result(name).generated_tokens == plain[0]
    assert attachment.stats.calls == 1 and target.training
    words = word_tokenizer()
    words.pad_token = words.convert_ids_to_tokens(0)
    generate = pipeline("text-generation", model=target, tokenizer=words)
    generate(words.decode([3, 4, 5]), **GREEDY)
    assert attachment.stats.calls == 2


@pytest.mark.core
def test_modules_are_in_their_modes_after_a_call():
    target, attachment, plain = attached(NoDrafter)
    target.train()
    target.model.layers[1].eval()
    modes = [module.training for module in target.modules()]
    seen = []

    def failing(tokens, scores):
        seen.append(any(module.training for module in target.modules()))
        if len(seen) > 1:
            raise ValueError("of the caller")
        return scores

    with pytest.raises(ValueError, match="of the caller"):
        target.generate(**INPUTS, **GREEDY, logits_processor=LogitsProcessorList([failing]))
    assert not any(seen) and not attachment.refusals
    assert [module.training for module in target.modules()] == modes
    assert torch.equal(target.generate(**INPUTS, **GREEDY), plain)
    assert [module.training for module in target.modules()] == modes
    kept = attachment.drafter.attach(target, mode="keep")
    assert torch.equal(target.generate(**INPUTS, **GREEDY), plain)
    assert [module.training for module in target.modules()] == modes
    assert list(kept.refusals) == [
        "LlamaForCausalLM is in training mode, so its dropout is active; call model.eval() first."
    ]


REFUSED = [
    ({"num_beams": 2}, r"num_beams=N"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is N"),
    ({"guidance_scale": 1.5}, "keeps state"),
    ({"synced_gpus": True}, "synced_gpus is set"),
    (
        {"custom_generate": lambda model, input_ids, assistant_model="", **_: input_ids[:, len(assistant_model) :]},
        "custom_generate is '<lambda>', which transformers calls without a drafter",
    ),
]


@pytest.mark.core
@pytest.mark.parametrize(("options", "match"), REFUSED, ids=lambda one: "-".join(one) if one.__class__ is dict else "")
def test_what_cannot_run_with_drafts_runs_plainly(options, match, caplog):
    target, attachment, _ = attached()
    inputs = {name: tensor[:1] for name, tensor in INPUTS.items()}
    if "synced_gpus" in options:  # in one process it changes nothing, but asks for a process group
        with pytest.raises((ValueError, RuntimeError)):
            target.generate(**inputs, **GREEDY, **options)
    else:
        with attachment.paused():
            plain = target.generate(**inputs, **GREEDY, **options)
        for _ in range(2):
            assert torch.equal(target.generate(**inputs, **GREEDY, **options), plain)
    warnings = [one for one in caplog.messages if "runs without it" in one]
    assert attachment.stats.calls == 0
    ((reason, count),) = attachment.refusals.items()
    assert match in reason and count == 2 - ("synced_gpus" in options) and len(warnings) == 1
    strict = attachment.drafter.attach(target, strict=True)
    with pytest.raises(ValueError):
        target.generate(**inputs, **GREEDY, **options)
    strict.detach()


@pytest.mark.core
def test_bulk_calls_that_run_plainly():
    target, attachment, _ = attached()
    with attachment.paused():
        plain = texts(target)
    assert texts(target, prompt_lookup_num_tokens=3) == plain
    assert attachment.refusals.total() == 1 and attachment.stats.calls == 0


@pytest.mark.core
def test_a_call_that_is_refused_late_is_the_plain_one():
    """After a streamer was given the prompt, and what the call asks for was taken from its settings."""
    target, attachment, _ = attached()
    inputs, puts = {name: tensor[:1] for name, tensor in INPUTS.items()}, []
    streamer = SimpleNamespace(put=lambda tokens: puts.append(tokens.flatten().tolist()), end=lambda: puts.append(None))
    asked = {"guidance_scale": 1.5, "return_dict_in_generate": True, "output_attentions": True, "streamer": streamer}
    with attachment.paused():
        plain = target.generate(**inputs, **GREEDY, **asked)
    before, puts[:] = list(puts), []
    out = target.generate(**inputs, **GREEDY, **asked)
    assert puts == before and torch.equal(out.sequences, plain.sequences)
    assert len(out.attentions) == len(plain.attentions) and attachment.refusals.total() == 1


@pytest.mark.core
def test_calls_that_name_a_drafter_and_inner_calls_are_as_before():
    target, attachment, plain = attached(NoDrafter)
    calls = []

    def nested(tokens, scores):
        if not calls:
            calls.append(target.generate(**INPUTS, **GREEDY))
        return scores

    out = target.generate(**INPUTS, **GREEDY, logits_processor=LogitsProcessorList([nested]))
    assert torch.equal(out, plain) and torch.equal(calls[0], plain) and attachment.stats.calls == 1
    target.train()
    with pytest.raises(ValueError, match="is in training mode"):
        greedy(target, INPUTS, attachment.drafter)
    target.eval()
    drafter = random_eagle3(target)
    assert torch.equal(greedy(target, INPUTS, drafter, 3, max_new_tokens=10), plain)
    assert attachment.stats.calls == 1


def test_an_attachment_is_of_one_model(caplog):
    target, first, plain = attached(NoDrafter)
    twin = copy.deepcopy(target)
    assert torch.equal(twin.generate(**INPUTS, **GREEDY), plain) and first.stats.calls == 0
    second = first.drafter.attach(target)
    assert "had a drafter attached, which is replaced" in caplog.text
    first.detach()
    target.generate(**INPUTS, **GREEDY)
    assert second.stats.calls == 1 and first.stats.calls == 0
    second.detach()
    with first.drafter.attached(target) as third:
        target.generate(**INPUTS, **GREEDY)
    target.generate(**INPUTS, **GREEDY)
    assert third.stats.calls == 1
    with pytest.raises(ValueError, match="is bound to another target"):
        first.drafter.attach(twin)
    with pytest.raises(ValueError, match="has no transformers model inside"):
        first.drafter.attach(nn.Linear(2, 2))
    for options in ({"mode": "train"}, {"memory": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
            first.drafter.attach(target, **options)


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"model": "org/target"}, "str has no transformers model inside; expected one that generates"),
        ({"memory": "half"}, "memory is 'half'; expected float"),
        ({"memory": True}, "memory is True; expected float"),
        ({"memory": 1.5}, "memory is 1.5; expected a share of the device's memory, from 0 to 1"),
        ({"strict": "no"}, "strict is 'no'; expected bool"),
        ({"release_after_call": 1}, "release_after_call is 1; expected bool"),
        ({"mode": "train"}, 'mode is \'train\'; expected "eval" or "keep"'),
    ],
)
def test_wrong_arguments(options, match):
    target = new_target("llama")
    with pytest.raises(ValueError, match=match):
        random_eagle3(target).attach(**{"model": target, **options})
    assert attachment_of(target) is None


def test_models_around_the_target():
    target = new_target("llama")
    adapted, drafter = with_adapters(target), random_eagle3(target)
    wrapper = nn.Module()
    wrapper.module = adapted
    plain = greedy(adapted, INPUTS)
    with drafter.attached(wrapper) as attachment:
        assert torch.equal(greedy(adapted, INPUTS), plain)
    assert attachment.stats.calls == 1 and not attachment.refusals


@pytest.mark.core
def test_target_that_is_offloaded():
    """Its calls run plainly, and the drafter is not moved to where it would have no weights."""
    target = new_target("llama")
    plain, drafter = target.generate(**INPUTS, **GREEDY), random_eagle3(target)
    cpu_offload(target, execution_device="cpu")
    with drafter.attached(target) as attachment:
        assert torch.equal(target.generate(**INPUTS, **GREEDY), plain)
    assert attachment.refusals.total() == 1 and drafter.device.type == "cpu"


def test_cache_that_a_configuration_turns_off():
    target, attachment, plain = attached(NoDrafter)
    config = GenerationConfig(use_cache=False, **GREEDY)
    assert torch.equal(target.generate(**INPUTS, generation_config=config, pad_token_id=0), plain)
    assert attachment.stats.calls == 1 and config.use_cache is False


def test_threads_take_turns():
    target, attachment, plain = attached(NoDrafter)
    target.train()
    found = []
    threads = [threading.Thread(target=lambda: found.append(target.generate(**INPUTS, **GREEDY))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and all(torch.equal(one, plain) for one in found)
    assert all(module.training for module in target.modules()) and attachment.stats.calls == 3


def test_failed_requests_are_an_error(monkeypatch):
    target, attachment, _ = attached(NoDrafter)
    from hf_specdec.integration import dispatch

    def failing(request, requests, settings):
        requests[1].error = "There is no memory for it."
        attachment.drafter._last_stats = None

    monkeypatch.setattr(dispatch, "decode_continuously", failing)
    with pytest.raises(RuntimeError, match=r"The request of inputs\[1\] failed: There is no memory for it."):
        texts(target)
    assert not attachment.refusals


def test_gathered_weights_of_deepspeed():
    """`synced_gpus`, which transformers sets by a flag, is not asked where all weights are there."""
    target, _, plain = attached(NoDrafter, strict=True)
    for parameter in target.parameters():
        parameter.ds_status = SimpleNamespace(name="AVAILABLE")
    assert torch.equal(target.generate(**INPUTS, **GREEDY, synced_gpus=True), plain)
    next(target.parameters()).ds_status = SimpleNamespace(name="NOT_AVAILABLE")
    with pytest.raises(ValueError, match=r"synced_gpus is set: .* ds3_gather_for_generation"):
        target.generate(**INPUTS, **GREEDY, synced_gpus=True)


def trainer_step(target, optimizer, tokens):
    """A step as trainers make it, which turns gradient checkpointing on for it."""
    target.train()
    name = "activation" if hasattr(target, "activation_checkpointing_enable") else "gradient"  # before 5.24
    getattr(target, f"{name}_checkpointing_enable")({"use_reentrant": False})
    loss = target(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    getattr(target, f"{name}_checkpointing_disable")()


@pytest.mark.core_for(adapts=[False])
@pytest.mark.parametrize("adapts", [False, True])
def test_training_keeps_graphs(monkeypatch, adapts):
    """Gradient checkpointing, steps of fused optimizers, modes and attributes of the model capture nothing again."""
    replay, checks, seen = replay_on_cpu(monkeypatch), [], []
    target, attachment, _ = attached()
    model = with_adapters(target) if adapts else target
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    difference = equivalence._difference
    monkeypatch.setattr(equivalence, "_difference", lambda *args: (checks.append(1), difference(*args))[1])
    before = set()
    for step in range(5):
        target.train()
        attachment.drafter.train(step % 2 == 0)
        target.last_loss = float(step)
        target.generate = target.generate
        out = model.generate(**INPUTS, **GREEDY)
        assert not out.is_inference()
        with attachment.paused():
            target.eval()
            assert torch.equal(model.generate(**INPUTS, **GREEDY), out)
        before.add(tuple(out[0].tolist()))
        trainer_step(target, optimizer, out)
        seen.append((replay.count, len(checks)))
    assert len(before) > 1, "training changes the text"
    assert len(target.get_input_embeddings()._forward_hooks) == 5
    assert seen[0][0] > 0 and len(set(seen)) == 1
    assert attachment.stats.captures == replay.count and attachment.drafter.stats.execution.startswith("captured")


def test_attributes_that_a_pass_reads_are_told(monkeypatch):
    replay = replay_on_cpu(monkeypatch)
    target, _, _ = attached()
    counts = []
    for change in ({}, {"loss_of_trainer": 1.0}, {"loss_of_trainer": 2.0}, {"vocab_size": 95}):
        vars(target).update(change)
        target.generate(**INPUTS, **GREEDY)
        counts.append(replay.count)
    assert counts[0] == counts[1] == counts[2] < counts[3]


def test_hooks_that_ask_for_gradients():
    target = new_target("llama", num_layers=2)
    target.enable_input_require_grads()
    (hook,) = target.get_input_embeddings()._forward_hooks.values()
    assert asks_for_gradients(hook)
    assert not asks_for_gradients(lambda module, args, output: output.requires_grad_(True) * 2)
    assert not asks_for_gradients(lambda module, args, output: output.detach_())
    assert not asks_for_gradients(print)


def test_memory_that_sessions_keep(monkeypatch):
    """The least recently used sessions are freed beyond the share that was asked for."""
    replay_on_cpu(monkeypatch)
    taken = iter(range(0, 10**6, 100))  # each session takes 100 bytes
    monkeypatch.setattr(lease, "tensor_bytes", lambda device: next(taken))
    target, attachment, _ = attached()
    pool, kept = attachment.drafter.sessions, []
    monkeypatch.setattr("hf_specdec.drafters.attachment.total_bytes", lambda device: 500)
    for batch in (1, 2, 4):
        inputs = padded_prompts([5] * batch)
        target.generate(**inputs, **GREEDY)
        pool = attachment.drafter.sessions
        kept.append(sorted(len(session.state.tokens) for _, session in pool._idle))
    assert kept == [[1], [1, 2], [2, 4]]
    releasing = attachment.drafter.attach(target, release_after_call=True)
    target.generate(**inputs, **GREEDY)
    assert len(pool) == 0
    releasing.detach()


def test_a_manager_answers_with_the_weights_of_now():
    target, attachment, _ = attached(NoDrafter)
    optimizer = torch.optim.AdamW(target.parameters(), lr=1e-2, fused=True)
    with target.continuous_batching_context_manager(block=True) as manager:
        for _ in range(3):
            name = manager.add_request(PROMPTS[1], max_new_tokens=8)
            found = manager.get_result(name).generated_tokens
            with manager.pause():
                with attachment.paused():
                    plain = target.eval().generate(torch.tensor([PROMPTS[1]]), do_sample=False, max_new_tokens=8)
                assert found == plain[0, len(PROMPTS[1]) :].tolist()
                trainer_step(target, optimizer, INPUTS["input_ids"])
