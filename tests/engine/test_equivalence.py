"""Targets with their own masks, windows, caches or inputs: an engine that generates the same, or an error."""

import copy
import functools

import pytest
import torch
import transformers
from lossless import continuations, greedy
from oracle import OracleDrafter, copy_of, random_draft_model, random_eagle3
from targets import PAD, VOCAB, build_target, new_target, padded_prompts, tiny_target
from torch import nn
from transformers import LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from zoo_configs import tiny_config
from zoo_models import enliven

from hf_specdec.host.caches import OUTPUT_NAME, given_cache
from hf_specdec.hosting import equivalence
from hf_specdec.modules import signature
from hf_specdec.stock import compared_texts

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
STATE_SPACE = {"mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_d_conv": 4, "mamba_expand": 2}


def check(target, lengths, engine, reason, new=24):
    """Texts with scripted drafts and with a draft model are plain `generate()`'s, of a padded batch and of its rows."""
    inputs = padded_prompts(lengths)
    rows = [
        {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()} for row, length in enumerate(lengths)
    ]
    batches = [inputs]
    if engine == "stock":
        batches = [inputs, *rows]
        parts = [{name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in range(len(lengths))]
        texts = [target.generate(**given, do_sample=False, max_new_tokens=new) for given in (inputs, *parts)]
        if not torch.equal(texts[0], torch.cat(texts[1:])):  # as of Doge in transformers 5.17
            with pytest.raises(
                ValueError, match="a row has other logits in a padded batch than alone in plain generate"
            ):
                target.generate(**inputs, assistant_model=random_draft_model(target))
            batches = rows
    for given in batches:
        plain = target.generate(**given, do_sample=False, max_new_tokens=new)
        answers, own = continuations(given, plain), given["attention_mask"].sum(1).tolist()
        for drafter in (OracleDrafter(target, answers, own, accuracy=0.6), random_draft_model(target)):
            out = target.generate(
                **given, do_sample=False, max_new_tokens=new, assistant_model=drafter, num_assistant_tokens=3
            )
            assert torch.equal(out, plain)
            assert drafter.stats.engine == engine and reason in drafter.stats.reason


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "llama"])
def test_what_a_rounding_changes_is_no_difference(monkeypatch, name):
    """In bfloat16 a rounding may route tokens to other experts, though batches of other sizes show nothing of it."""
    limits, limit_of_rounding = [], equivalence.limit_of_rounding

    def unknown(eps):
        target = new_target(name).bfloat16()
        target.config.rms_norm_eps = eps  # of a configuration, for which no outcome is known
        return target

    def noted(*args):
        limits.append(limit_of_rounding(*args))
        return limits[-1]

    target, other = unknown(1e-3), unknown(1e-4)  # the helper checks its family, with the limits as they are
    monkeypatch.setattr(equivalence, "limit_of_rounding", noted)
    monkeypatch.setattr(equivalence, "limit_of", lambda *_: -1.0)
    assert equivalence.why_not_equivalent(target, "static") is None
    assert limits and all(0 < one <= compared_texts.LARGEST_LIMIT for one in limits)
    assert name != "llama" or max(limits) < compared_texts.LARGEST_LIMIT / 2
    embedding = target.get_input_embeddings()
    assert not embedding._forward_hooks and torch.equal(embedding(torch.tensor([3])), embedding.weight[3:4])
    compute = equivalence._difference
    monkeypatch.setattr(equivalence, "_difference", lambda *args: compute(*args) + 1.01 * max(limits))
    assert "differ there from plain generate()'s by" in equivalence.why_not_equivalent(other, "static")


UNSOUND = {
    # A mask made of the values.
    "doge": ("doge", {}, "fails there on a few tokens"),
    "doge, with a window of its cache": ("doge", {"sliding_window": 7}, "fails there on a few tokens"),
}


@pytest.mark.core_for(case=["doge"])
@pytest.mark.parametrize("case", UNSOUND)
def test_targets_with_custom_masks_run_on_the_stock_engine(case):
    model_type, options, reason = UNSOUND[case]
    check(build_target(model_type, **options), [40, 33], "stock", reason)


def test_sliding_windows_in_attention_arguments_run_on_the_static_engine():
    for window in (5, 30):
        check(build_target("mistral", sliding_window=window), [40, 33], "static", "")


def with_narrow_cache(class_name, window):
    """A target whose configuration has a window that its cache heeds and its attention does not."""
    model_class = getattr(transformers, class_name)
    config = tiny_config(model_class.config_class)
    config.get_text_config(decoder=True).sliding_window = window
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    enliven(model, 0.3)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    return model


@pytest.mark.core
@pytest.mark.parametrize("class_name", ["Qwen3VLMoeForConditionalGeneration", "MoshiForCausalLM"])
def test_texts_that_outgrow_a_cache_but_not_attention_are_refused(class_name):
    """Plain `generate()` reads keys there that depend on how many tokens were run at once; shorter texts are right."""
    target, inputs = with_narrow_cache(class_name, window=40), padded_prompts([20, 12])
    drafter = random_draft_model(target)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=21)
    answers = torch.nn.functional.pad(continuations(inputs, plain), (0, 8))
    oracle = OracleDrafter(target, answers, [20, 12], accuracy=0.6)
    for one in (drafter, oracle):
        text = target.generate(
            **inputs, do_sample=False, max_new_tokens=21, assistant_model=one, num_assistant_tokens=3
        )
        assert torch.equal(text, plain) and one.stats.engine == "static"
    for engine in ("auto", "stock"):
        with pytest.raises(ValueError, match="cache keeps 40 keys of layers whose attention would read more"):
            target.generate(
                **inputs, do_sample=False, max_new_tokens=22, assistant_model=drafter.configure(engine=engine)
            )
    with pytest.raises(ValueError, match="a text of any length depends on how many tokens are run at once"):
        target.generate_batch([[5, 6, 7]], assistant_model=drafter.configure(engine="auto"))


class LooksAhead(LlamaAttention):
    """Attention that adds what follows a token, as far as it is in the same pass."""

    def forward(self, hidden_states, **kwargs):
        out, weights = super().forward(hidden_states, **kwargs)
        return out + hidden_states.mean(dim=1, keepdim=True), weights


def test_a_subclass_is_checked_too():
    """The same class and configuration as a sound model, whose module somebody replaced: of a class of its own."""

    class Ahead(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.layers[1].self_attn = LooksAhead(config, 1)

    torch.manual_seed(0)
    target = Ahead(tiny_target("llama").config).eval()
    inputs = padded_prompts([9])
    with pytest.raises(ValueError, match=r"neither on the static engine .* nor in transformers' own") as error:
        target.generate(**inputs, assistant_model=random_draft_model(target), max_new_tokens=8)
    assert "\n" not in str(error.value)


class Negated(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = -out.logits
        return out


@pytest.mark.parametrize("place", ["instance", "class"])
def test_forward_that_hands_its_arguments_on(place):
    """It names no cache and no logits that are to be kept, of which packed prompts need one of each."""
    target = copy.deepcopy(tiny_target("llama"))
    if place == "class":
        target.__class__ = Negated
    else:
        forward = target.forward

        def negate(*args, **kwargs):
            out = forward(*args, **kwargs)
            out.logits = -out.logits
            return out

        target.forward = negate
    inputs = padded_prompts([9, 9])
    drafter = random_draft_model(tiny_target("llama"))
    drafter.bind(target)
    plain = greedy(target, inputs)
    assert torch.equal(greedy(target, inputs, drafter, 3), plain) and drafter.stats.engine == "static"
    assert not torch.equal(plain, greedy(tiny_target("llama"), inputs))


class OfRows(nn.Embedding):
    def forward(self, tokens):
        rows = torch.arange(len(tokens))[:, None, None]
        return super().forward(tokens) * (1 + rows)


@pytest.mark.parametrize("engine", ["auto", "stock"])
def test_something_for_each_row(engine):
    """Which a prompt does not get where prompts are packed in one row, or rows run one after the other."""
    target = copy.deepcopy(tiny_target("llama"))
    target.model.embed_tokens.__class__ = OfRows
    drafter, inputs = random_draft_model(target).configure(engine=engine), padded_prompts([9, 9, 9])
    if engine == "stock":
        with pytest.raises(ValueError, match="a row has other logits in a batch than alone in plain generate"):
            greedy(target, inputs, drafter, 3)
    else:
        assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))


@pytest.mark.core
@pytest.mark.parametrize("model_type", ["jamba", "mamba", "recurrent_gemma"])
def test_unsupported_targets_are_refused_before_generation(model_type):
    options = {
        "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, **STATE_SPACE, **MOE, "num_experts": 4},
        "mamba": {"state_size": 8, "time_step_rank": 4},
        "recurrent_gemma": {"lru_width": 32, "num_hidden_layers": 3},
    }[model_type]
    # In passes over several tokens, with which transformers verifies drafts, Mamba-1 forgets what was before.
    engines = ["stock"] if model_type in ("jamba", "mamba") else ["auto", "stock"]
    target, generated = build_target(model_type, **options), []

    class Streamer:
        def put(self, tokens):
            generated.append(tokens)

        end = generated.clear

    inputs = padded_prompts([9])
    for engine in engines:
        generated.clear()
        drafter = random_draft_model(target).configure(engine=engine)
        with pytest.raises(ValueError, match="Generate without assistant_model") as error:
            target.generate(**inputs, assistant_model=drafter, max_new_tokens=8, do_sample=False, streamer=Streamer())
        assert "\n" not in str(error.value)
        assert len(generated) <= 1, "tokens were streamed besides the prompt"
    assert target.generate(**inputs, max_new_tokens=8, do_sample=False).shape == (1, 17)


@pytest.mark.parametrize(("family", "has_noise"), [("qwen3-moe", False), ("mamba2", True)])
def test_a_first_call_under_autocast_says_nothing_of_later_ones(monkeypatch, family, has_noise):
    """It is compared in its own precision, and the static engine runs it as it runs those without autocast."""
    target, inputs = tiny_target(family), padded_prompts([5, 9])
    monkeypatch.setattr(signature, "_facts", {})
    drafter = random_eagle3(target)
    for is_cast in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            plain, generated = (
                target.generate(**inputs, do_sample=False, max_new_tokens=8, **options)
                for options in ({}, {"assistant_model": drafter})
            )
        assert drafter.stats.engine == "static"
        assert (is_cast and has_noise) or torch.equal(generated, plain)


def test_a_class_is_checked_once(monkeypatch):
    monkeypatch.setattr(signature, "_facts", {})
    runs, forward = [], Qwen2Model.forward

    @functools.wraps(forward)
    def counted(*args, **kwargs):
        runs.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(Qwen2Model, "forward", counted)
    for seed in range(2):
        target = build_target("qwen2", seed=seed, num_hidden_layers=2, rms_norm_eps=1.5e-6)
        drafter = random_draft_model(target)
        for _ in range(2):
            before = len(runs)
            target.generate(**padded_prompts([9, 4]), assistant_model=drafter, max_new_tokens=1, do_sample=False)
            runs.append(-(len(runs) - before))
    counts = [-count for count in runs if count < 0]
    assert counts[1] == counts[2] == counts[3] < counts[0] < 60
    checks = [key for facts in signature._facts.values() for key in facts if isinstance(key[0], tuple)]
    assert len(checks) == 1


class OwnAttention(nn.Module):
    """Attention outside of transformers' interface, with scores three times as large, in the place of `module`."""

    def __init__(self, module):
        super().__init__()
        self.own = module

    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        own, shape = self.own, (*hidden_states.shape[:2], -1, self.own.head_dim)
        layers = (own.q_proj, own.k_proj, own.v_proj)
        query, key, value = (layer(hidden_states).view(shape).transpose(1, 2) for layer in layers)
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        if (cache := given_cache(kwargs)) is not None:
            key, value = cache.update(key, value, own.layer_idx)
        is_causal = attention_mask is None and query.shape[2] > 1
        options = {"is_causal": is_causal, "scale": 3 * own.scaling, "enable_gqa": True}
        out = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, **options)
        return own.o_proj(out.transpose(1, 2).reshape(*shape[:2], -1)), None


def larger(attention):
    """An attention function with scores three times as large."""
    return lambda *args, scaling, **options: attention(*args, scaling=3 * scaling, **options)


def put_attention(kind, target, patch):
    """Let `target` run other attention than its class does."""
    layers, sdpa = [layer.self_attn for layer in target.model.layers], ALL_ATTENTION_FUNCTIONS["sdpa"]
    if kind == "implementation":
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "larger", larger(sdpa))
        masks = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
        patch.setitem(masks, "larger", masks["sdpa"])
        target.set_attn_implementation("larger")
    elif kind == "function":
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", larger(sdpa))
    elif kind == "eager function":
        target.set_attn_implementation("eager")
        eager = modeling_llama.eager_attention_forward
        patch.setattr(modeling_llama, "eager_attention_forward", larger(eager))
    elif kind == "modules":
        for layer in target.model.layers:
            layer.self_attn = OwnAttention(layer.self_attn)
    elif kind == "forward of modules":
        for layer in layers:
            layer.forward = OwnAttention(layer).forward
    else:
        own = [OwnAttention(layer) for layer in layers]
        patch.setattr(LlamaAttention, "forward", lambda self, *args, **kwargs: own[self.layer_idx](*args, **kwargs))


@pytest.mark.core_for(kind=["function", "modules"])
@pytest.mark.parametrize(
    "kind", ["implementation", "function", "eager function", "modules", "forward of modules", "class"]
)
def test_attention_that_was_put_in_place_after_a_call(kind, monkeypatch):
    """What is known of a class does not hold for it, and of a class with it not for the class itself."""
    target = new_target("llama", num_layers=2)
    drafter, inputs = random_eagle3(target, aux_hidden_state_layer_ids=[0, 1, 2]), padded_prompts([9, 5])
    plain = greedy(target, inputs, max_new_tokens=4)
    assert torch.equal(greedy(target, inputs, drafter, max_new_tokens=4), plain)
    with monkeypatch.context() as patch:
        put_attention(kind, target, patch)
        expected = greedy(target, inputs, max_new_tokens=4)
        assert not torch.equal(expected, plain)
        assert torch.equal(greedy(target, inputs, drafter, max_new_tokens=4), expected)
        assert drafter.stats.engine == "stock"
    target = new_target("llama", num_layers=2)
    drafter = random_eagle3(target, aux_hidden_state_layer_ids=[0, 1, 2])
    assert torch.equal(greedy(target, inputs, drafter, max_new_tokens=4), plain)
    assert drafter.stats.engine == "static"


@pytest.mark.core
def test_equivalence_check_has_no_side_effects(monkeypatch):
    uses_cudnn, generate = [], compared_texts.generate_greedily

    def observed(*args, **options):
        uses_cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
        return generate(*args, **options)

    monkeypatch.setattr(compared_texts, "generate_greedily", observed)
    target = build_target("gemma3_text", sliding_window=6, query_pre_attn_scalar=8)
    target.generation_config.update(repetition_penalty=1.2, cache_implementation="static", max_length=77, num_beams=1)
    config, settings = copy.deepcopy(target.config.to_dict()), copy.deepcopy(target.generation_config.to_dict())
    state, names = torch.get_rng_state(), set(vars(target))
    assert equivalence.why_not_equivalent(target, "static") is None
    assert equivalence.why_not_equivalent(target, "stock") is None
    assert torch.equal(torch.get_rng_state(), state) and set(vars(target)) == names
    assert target.config.to_dict() == config and target.generation_config.to_dict() == settings
    assert set(uses_cudnn) == {False} and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("place", ["instance", "class"])
def test_custom_prepare_inputs_runs_on_the_stock_engine(place):
    """A function that is harmless runs on the stock engine; one that changes what the model reads is not ignored."""

    class Own(LlamaForCausalLM):
        shift = 0

        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
            inputs["input_ids"] = (inputs["input_ids"] + self.shift) % VOCAB
            return inputs

    torch.manual_seed(0)
    target = (Own if place == "class" else LlamaForCausalLM)(tiny_target("llama").config).eval()
    if place == "instance":
        prepare = target.prepare_inputs_for_generation

        def prepare_shifted(input_ids, **kwargs):
            inputs = prepare(input_ids, **kwargs)
            inputs["input_ids"] = (inputs["input_ids"] + target.shift) % VOCAB
            return inputs

        target.prepare_inputs_for_generation = prepare_shifted
    target.generation_config.pad_token_id, target.generation_config.eos_token_id = PAD, None
    inputs = padded_prompts([9])
    generated = []
    for shift in (0, 5):
        target.shift = shift
        plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
        drafter = random_draft_model(target)
        out = target.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=drafter)
        assert torch.equal(out, plain) and drafter.stats.engine == "stock"
        assert "inputs are prepared by a function that is not transformers' own" in drafter.stats.reason
        generated.append(plain)
    assert not torch.equal(*generated)


# peft 0.21 asks for an attribute that transformers 5.23 deprecates.
with_peft = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


def tuned(kind):
    peft = pytest.importorskip("peft")
    target = copy.deepcopy(tiny_target("llama"))
    options = {"task_type": "CAUSAL_LM"}
    torch.manual_seed(0)
    config = {
        "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=5, **options),
        "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=5, encoder_hidden_size=16, **options),
        "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=5, **options),
        "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, **options),
    }[kind]()
    return target, peft.get_peft_model(target, config).eval()


@with_peft
@pytest.mark.core_for(kind=["prefix tuning"])
@pytest.mark.parametrize("kind", ["prompt tuning", "p-tuning", "prefix tuning"])
def test_virtual_tokens_are_not_ignored(kind):
    target, model = tuned(kind)
    inputs = padded_prompts([9])
    free = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    drafter = random_draft_model(target)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    if kind == "prefix tuning" and OUTPUT_NAME == "cache" and torch.equal(plain, free):
        pytest.skip("PEFT passes a prefix as past_key_values, which this transformers ignores")
    assert not torch.equal(plain, free), "the virtual tokens changed nothing, so nothing is shown"
    with pytest.raises(ValueError, match=r"neither on the static engine .*not transformers' own"):
        model.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=drafter)
    # The model itself, which PEFT has given its own function back, is an ordinary one again.
    out = target.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=drafter)
    assert torch.equal(out, free) and drafter.stats.engine == "static"


@with_peft
@pytest.mark.core
def test_low_rank_adapters_run_on_the_static_engine():
    target, model = tuned("lora")
    inputs = padded_prompts([9, 4])
    drafter = copy_of(tiny_target("llama"), noise=0.02)
    drafter.bind(target)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    out = model.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=drafter)
    assert torch.equal(out, plain) and drafter.stats.engine == "static"
    with model.disable_adapter():
        plain_off = target.generate(**inputs, do_sample=False, max_new_tokens=12)
        out = target.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=drafter)
    assert torch.equal(out, plain_off) and not torch.equal(plain, plain_off)


# Targets with a table of positions, and their own settings; CTRL's table is not learned.
TABLES = {"opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "gpt2": {}, "ctrl": {"dff": 48}}


@pytest.mark.core_for(lengths=[[20, 3]], model_type=["ctrl"])
@pytest.mark.parametrize("lengths", [[20, 3], [32, 7]], ids=str)
@pytest.mark.parametrize("model_type", TABLES)
def test_texts_that_fill_the_position_table(model_type, lengths):
    """The last token of a text has no position, so a table of 32 is enough for 33 tokens."""
    target = build_target(model_type, max_position_embeddings=32, **TABLES[model_type])
    inputs, new = padded_prompts(lengths), 33 - max(lengths)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=new)
    for drafter in (copy_of(target, noise=0.02), random_draft_model(target)):
        for num_drafts in (1, 3, 16):
            out = target.generate(
                **inputs, do_sample=False, max_new_tokens=new, assistant_model=drafter, num_assistant_tokens=num_drafts
            )
            assert torch.equal(out, plain) and drafter.stats.engine == "static"


@pytest.mark.core
@pytest.mark.parametrize("model_type", TABLES)
def test_texts_beyond_the_position_table(model_type):
    target = build_target(model_type, max_position_embeddings=32, **TABLES[model_type])
    inputs = padded_prompts([20, 3])
    drafter = copy_of(target, noise=0.02)
    free = target.generate(**inputs, do_sample=False, max_new_tokens=13)
    with pytest.raises(ValueError, match=r"Row 0 of the batch .* after 13 new ones, .* no positions for more"):
        target.generate(**inputs, do_sample=False, max_new_tokens=60, assistant_model=drafter)
    with pytest.raises(ValueError, match=r"A prompt has 40 tokens, but \w+ has 32 positions"):
        target.generate(**padded_prompts([40]), do_sample=False, max_new_tokens=1, assistant_model=drafter)
    # Whose rows end in time is not asked for less.
    ends = {"eos_token_id": sorted({int(free[0, 22]), int(free[1, 25])}), "pad_token_id": PAD}
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=13, **ends)
    out = target.generate(**inputs, do_sample=False, max_new_tokens=60, **ends, assistant_model=drafter)
    assert torch.equal(out, plain[:, : out.shape[1]]) and (plain[:, out.shape[1] :] == PAD).all()


@pytest.mark.core
def test_draft_models_with_fewer_positions_than_the_text():
    target = tiny_target("llama")
    inputs = padded_prompts([30])
    small = build_target("opt", max_position_embeddings=16, ffn_dim=48, word_embed_proj_dim=32)
    drafter = copy_of(small)
    drafter.bind(target)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert torch.equal(target.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_model=drafter), plain)


class Streams(LlamaForCausalLM):
    """A target whose layers hand on several streams, or the last token alone from some layer on."""

    def __init__(self, config, last_only):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.register_forward_hook(
                lambda module, args, out, index=index: out[:, -1:] if last_only and index == 1 else out
            )
        if not last_only:
            self.model.layers[0].register_forward_hook(lambda module, args, out: out[None].expand(2, -1, -1, -1))
            self.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0][0], *args[1:]))


@pytest.mark.core
@pytest.mark.parametrize("last_only", [False, True])
def test_unsupported_hidden_states_are_refused_at_bind(last_only):
    torch.manual_seed(0)
    target = Streams(tiny_target("llama").config, last_only).eval()
    hooks = [len(layer._forward_hooks) for layer in target.model.layers]
    shape = r"\[1, 1, 32\] at layer id 2" if last_only else r"\[2, 1, 3, 32\] at layer id 1"
    with pytest.raises(ValueError, match=rf"over 3 tokens its layers return {shape}; expected \[1, 3, 32\]") as error:
        random_eagle3(target)
    assert "\n" not in str(error.value)
    assert [len(layer._forward_hooks) for layer in target.model.layers] == hooks, "the check left a hook"
