"""Classes of transformers of every kind: their text is plain `generate()`'s, or the call is refused."""

import inspect

import pytest
import transformers
import zoo
import zoo_models
from case_counts import tries_all
from model_state import unchecked
from transformers import AutoConfig
from transformers.integrations import sdpa_attention

pytestmark = pytest.mark.core_for()

# What must run on the static engine, a class of each kind.
STATIC = [
    "LlamaForCausalLM",  # dense
    "MistralForCausalLM",  # windows in every layer
    "Gemma2ForCausalLM",  # windows in every other layer, soft-capping
    "GptOssForCausalLM",  # sinks
    "Qwen3MoeForCausalLM",  # experts
    "DeepseekV3ForCausalLM",  # latent attention, experts in groups
    "LlavaForConditionalGeneration",  # image and text
    "Gemma3ForConditionalGeneration",  # image and text, windows
    "GPT2LMHeadModel",  # learned positions, layers of another name
    "DeepseekV32ForCausalLM",  # attention to tokens that an indexer chooses
    "Gemma3nForCausalLM",  # layers that read the keys of others
    "Llama4ForCausalLM",  # chunks
    "PhimoeForCausalLM",  # a window in the mask only
    "Qwen2MoeForCausalLM",  # a window in the mask of some layers only
    "Qwen3VLForConditionalGeneration",  # image and text, several positions a token
]
# What must be right on some engine, or be refused.
SAFE = [
    "BertLMHeadModel",  # an encoder
    "BertLMHeadModel (is_decoder)",
    "DeepseekV2ForCausalLM",  # rotation of complex numbers
    "DogeForCausalLM",  # a mask of its own
    "JambaForCausalLM",  # state-space layers among others
    "LongcatFlashForCausalLM",  # two attentions a layer
    "MambaForCausalLM",  # state space only
    "MiniMaxForCausalLM",  # a cache of its own
    "MoshiForCausalLM",  # a window in the mask only
    "OPTForCausalLM",  # learned positions
    "PaliGemmaForConditionalGeneration",  # a prompt that is bidirectional
    "Qwen3NextForCausalLM",  # linear attention
    "RwkvForCausalLM",  # recurrent
    "WhisperForCausalLM",  # half of an encoder-decoder
    "T5Gemma2ForConditionalGeneration",  # an encoder-decoder
]
# Of those, kinds of which no other test is `core`.
STATIC_CORE = [
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",
    "LlavaForConditionalGeneration",
    "GPT2LMHeadModel",
    "Qwen3VLForConditionalGeneration",
]
SAFE_CORE = [
    "BertLMHeadModel",
    "DogeForCausalLM",
    "LongcatFlashForCausalLM",
    "MiniMaxForCausalLM",
    "MoshiForCausalLM",
    "PaliGemmaForConditionalGeneration",
    "RwkvForCausalLM",
    "WhisperForCausalLM",
    "T5Gemma2ForConditionalGeneration",
]


def check(outcome: zoo.Outcome) -> None:
    assert outcome.outcome in (zoo.RIGHT, zoo.REFUSED), "\n".join([outcome.error, *outcome.notes])


def run(name: str) -> zoo.Outcome:
    if not hasattr(transformers, name.split()[0]):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return zoo.run(name, brief=not tries_all)


@pytest.mark.core_for(name=STATIC_CORE)
@pytest.mark.parametrize("name", STATIC)
def test_static(name):
    outcome = run(name)
    check(outcome)
    # `sdpa` of transformers 5.17 drops the soft cap, so its output is not the static engine's.
    drops_softcap = name == "Gemma2ForCausalLM" and "softcap" not in inspect.getsource(sdpa_attention)
    assert (outcome.engine, outcome.notes) == ("stock" if drops_softcap else "static", [])


@pytest.mark.core_for(name=SAFE_CORE)
@pytest.mark.parametrize("name", SAFE)
def test_safe(name):
    check(run(name))


@pytest.mark.zoo
@pytest.mark.parametrize("name", zoo_models.class_names())
def test_all(name):
    outcome = zoo.run(name)
    if outcome.outcome in (zoo.NOT_BUILT, zoo.NO_TEXT):
        pytest.skip(outcome.error)
    check(outcome)


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM"])
def test_windows_are_shorter_than_prompts(name):
    window = zoo_models.build(name).config.get_text_config().sliding_window
    assert 0 < window < max(zoo_models.PROMPT_LENGTHS)


def test_experts_are_more_than_are_chosen():
    text = zoo_models.build("Qwen3MoeForCausalLM").config
    assert 1 < text.num_experts_per_tok < text.num_experts


def test_wrong_outputs_are_detected():
    """A target that forgets its first tokens when it is asked with a drafter."""
    model = zoo_models.build("LlamaForCausalLM")
    inputs = zoo_models.prompts(model)
    text = zoo_models.generate(model, inputs)
    wrong = text.clone()
    wrong[1, -3] = (wrong[1, -3] + 1) % AutoConfig.for_model("llama").vocab_size
    drafter = zoo.OracleDrafter(model, text[:, -zoo_models.MAX_NEW_TOKENS :], list(zoo_models.PROMPT_LENGTHS))
    assert zoo.call(model, inputs, text, lambda: drafter).outcome == zoo.RIGHT
    seen = zoo.call(model, inputs, wrong, lambda: drafter)
    assert (seen.outcome, seen.error[:4]) == (zoo.WRONG, "1 of")


def test_errors_inside_a_call_are_crashes():
    model = zoo_models.build("LlamaForCausalLM")
    inputs = zoo_models.prompts(model)

    def fail(*args):
        raise ValueError("deep inside")

    handle = model.model.layers[1].register_forward_pre_hook(unchecked(fail))
    seen = zoo.call(model, inputs, inputs["input_ids"], lambda: zoo.random_draft_model(model))
    handle.remove()
    assert (seen.outcome, seen.error[:23]) == (zoo.CRASH, "ValueError: deep inside")
