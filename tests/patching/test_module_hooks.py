"""Forward hooks that treat each row of a batch in its own way, and ones that an engine must not take for the target."""

import functools
import types

import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from adapters import with_adapters
from lossless import greedy
from oracle import random_draft_model
from targets import new_target, padded_prompts

from hf_specdec import NoDrafter
from hf_specdec.engine import prefix_cache
from hf_specdec.hosting.equivalence import why_not_equivalent
from hf_specdec.modules import signature
from hf_specdec.modules.hidden_states import LAST_HIDDEN_STATE, AuxHiddenStateRecorder
from hf_specdec.modules.module_hooks import without_hooks

greedy = functools.partial(greedy, max_new_tokens=4)


def steered(target, batch):
    """`target` with a hook that adds another vector to the hidden states of each row."""
    vectors = torch.randn(batch, 1, target.config.hidden_size, generator=torch.Generator().manual_seed(1))
    target.model.layers[0].register_forward_hook(lambda module, args, output: output + vectors)
    return target


# Whether prompts could be packed, and whether rows with the same prompt could be prefilled once.
@pytest.mark.core_for(family=["llama"])
@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_hooks_with_something_for_each_row(family, monkeypatch):
    monkeypatch.setattr(prefix_cache, "FEWEST_SAVED", 1)
    target = steered(new_target(family), batch=3)
    drafter = random_draft_model(target)
    inputs = {name: tensor[[0, 1, 0]] for name, tensor in padded_prompts([9, 5]).items()}
    assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))
    assert drafter.stats.engine == "static"


@pytest.mark.core
def test_adapters_of_each_row():
    target = new_target("llama", num_layers=2)
    adapted, drafter = with_adapters(target), random_draft_model(target)
    inputs, adapters = padded_prompts([9, 5, 7]), {"adapter_names": ["b", "__base__", "a"]}
    plain = greedy(adapted, inputs, **adapters)
    assert torch.equal(greedy(adapted, inputs, drafter, 3, **adapters), plain)
    assert drafter.stats.engine == "static"


def test_hooks_are_tried_on_a_few_of_many_requests():
    target = new_target("llama", num_layers=2)
    drafter, prompts, rows = random_draft_model(target), padded_prompts([6] * 5)["input_ids"].tolist(), []
    target.model.layers[0].register_forward_hook(lambda module, args, output: (rows.append(len(output)), output * 2)[1])
    options = {"do_sample": False, "max_new_tokens": 4}
    found = target.generate_batch(prompts, assistant_model=drafter, **options)
    tried = rows[: next(at for at, count in enumerate(rows) if count > 2)]
    assert max(tried) == 2
    for number, prompt in enumerate(prompts):
        plain = target.generate(torch.tensor([prompt]), **options)[0, 6:].tolist()
        assert found[f"req_{number}"].generated_tokens == plain


@pytest.mark.core
def test_rows_of_the_stock_engine_are_not_separated():
    target = steered(new_target("llama", num_layers=2), batch=2)
    drafter = NoDrafter(target).configure(engine="stock")
    runs = r"runs on the stock engine \(forced by engine='stock'\), where the rows .* cannot run one after the other"
    with pytest.raises(ValueError, match=f"{runs}: modules of the target have forward hooks, which may treat each row"):
        greedy(target, padded_prompts([9, 5]), drafter)


def of_last_token(module, args, output):
    return torch.cat([output[:, :-1], -output[:, -1:]], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ["auto", "stock"])
def test_hooks_that_change_the_last_token_of_a_pass(engine, dtype):
    """Which is every new token in plain `generate()`, and the last one of a block of drafts."""
    target, inputs = new_target("llama", num_layers=2).to(dtype), padded_prompts([9])
    drafter = random_draft_model(target).configure(engine=engine)
    assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))
    handle = target.model.layers[1].register_forward_hook(of_last_token)
    with pytest.raises(ValueError, match="modules of the target have forward hooks, after which logits differ"):
        greedy(target, inputs, drafter, 3)
    handle.remove()
    assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))


@pytest.mark.parametrize("engine", ["auto", "stock"])
def test_hooks_that_tell_long_blocks_from_single_tokens(engine):
    """As activated LoRA does, by the part of the prompt that it begins at; or a hook that takes them for a prompt."""
    target, inputs = new_target("llama", num_layers=2), padded_prompts([9])
    drafter = random_draft_model(target).configure(engine=engine)
    target.model.layers[0].register_forward_hook(lambda _, args, output: output + (5 < output.shape[1] < 9))
    plain = greedy(target, inputs, max_new_tokens=6)
    assert torch.equal(greedy(target, inputs, drafter, 3, max_new_tokens=6), plain)
    with pytest.raises(ValueError, match="modules of the target have forward hooks, after which logits differ"):
        greedy(target, inputs, drafter, 6, max_new_tokens=6)
    # No block is as long, since no more tokens are left.
    assert torch.equal(greedy(target, inputs, drafter, 6, max_new_tokens=4), plain[:, :-2])


@pytest.mark.core
def test_hooks_of_a_model_that_trains_in_mixed_precision():
    """Its weights are in float32, its `forward`, as accelerate makes it, multiplies in bfloat16."""
    target, inputs = new_target("llama", num_layers=4), padded_prompts([5, 9, 3, 12])
    drafter = random_draft_model(target)
    forward = torch.autocast("cpu", torch.bfloat16)(type(target).forward)
    target.forward = types.MethodType(convert_outputs_to_fp32(forward), target)
    target.enable_input_require_grads()  # as for gradient checkpointing: a hook of the embedding
    greedy(target, inputs, drafter, 3)
    assert drafter.stats.engine == "static"
    target.model.layers[3].register_forward_hook(of_last_token)
    with pytest.raises(ValueError, match="modules of the target have forward hooks, after which logits differ"):
        greedy(target, inputs, drafter, 3)


@pytest.mark.parametrize("engine", ["static", "stock"])
def test_what_is_known_of_a_class_does_not_depend_on_hooks(engine, monkeypatch):
    monkeypatch.setattr(signature, "_facts", {})
    target = new_target("llama", num_layers=2)
    signature._facts.clear()
    heard, layer = [], target.model.layers[0]
    layer.register_forward_hook(lambda *_: heard.append(1))
    layer.self_attn.register_forward_pre_hook(lambda module, args, kwargs: 1 / 0, with_kwargs=True)
    assert why_not_equivalent(target, engine) is None and not heard
    assert len(layer._forward_hooks) == len(layer.self_attn._forward_pre_hooks) == 1


@pytest.mark.core
def test_an_error_of_the_target_is_not_kept(monkeypatch):
    """Nor are results for every `forward` that modules ever had."""
    monkeypatch.setattr(signature, "_facts", {})
    monkeypatch.setattr(signature, "MOST_KEPT", 8)
    target = new_target("llama", num_layers=1)
    norm = target.model.norm
    forward = norm.forward
    for number in range(12):
        norm.forward = lambda states, number=number: forward(states) if number else 1 / 0
        reason = why_not_equivalent(target, "static")
        assert (reason is None) == (number > 0)
        if number == 0:
            assert "plain generate() fails on a few tokens (ZeroDivisionError" in reason
            norm.forward.__defaults__ = (1,)
            assert why_not_equivalent(target, "static") is None
    assert len(signature._facts) <= 8


def test_models_without_their_hooks():
    target = new_target("llama", num_layers=2)
    assert without_hooks(target) is target
    attention, inputs = target.model.layers[0].self_attn, padded_prompts([9])
    attention.forward = attention.forward  # bound to the module
    expected = target(**inputs).logits
    steered(target, batch=1)
    other = without_hooks(target)
    assert other is not target and torch.equal(other(**inputs).logits, expected)
    assert list(map(id, other.parameters())) == list(map(id, target.parameters()))
    attention.forward = functools.partial(type(attention).forward, attention)
    assert without_hooks(target) is target


@pytest.mark.core
def test_pass_of_another_thread_while_hooks_are_registered():
    """Torch has the hooks then, but does not know yet which ones take keyword arguments."""
    target = new_target("llama", num_layers=3)
    inputs = padded_prompts([4])
    with AuxHiddenStateRecorder(target, [0, 2], last_hidden_state=True) as recorder:
        modules = [target.model, *target.model.layers]
        assert sum(len(module._forward_pre_hooks_with_kwargs) for module in modules) == 1
        for module in modules:
            module._forward_pre_hooks_with_kwargs.clear()
            module._forward_hooks_with_kwargs.clear()
        target(**inputs)
        assert recorder.recorded.keys() == {2, LAST_HIDDEN_STATE}
