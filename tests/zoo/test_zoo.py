"""Classes of transformers of every kind: their text is plain `generate()`'s, or the call is refused."""

import inspect
import sys

import pytest
import transformers
import zoo
import zoo_columns
import zoo_configs
import zoo_models
import zoo_sources
from case_counts import cases, tries_all
from model_state import unchecked
from transformers import AutoConfig
from transformers.integrations import sdpa_attention

# What must run on the static engine, a class of each kind; `-m zoo` runs all.
STATIC = [
    "Gemma2ForCausalLM",  # windows in every other layer, soft-capping
    "LlavaForConditionalGeneration",  # image and text
    "Gemma3ForConditionalGeneration",  # image and text, windows
    "GPT2LMHeadModel",  # learned positions, layers of another name
    "DeepseekV32ForCausalLM",  # attention to tokens that an indexer chooses
    "Gemma3nForCausalLM",  # layers that read the keys of others
    "Llama4ForCausalLM",  # chunks
    "ModernBertDecoderForCausalLM",  # a head that is called its decoder
    "PhimoeForCausalLM",  # a window in the mask only
    "Qwen2MoeForCausalLM",  # a window in the mask of some layers only
    "Qwen3VLForConditionalGeneration",  # image and text, several positions a token
]
# What must be right on some engine, or be refused.
SAFE = [
    "BertLMHeadModel",  # an encoder
    "DeepseekV2ForCausalLM",  # rotation of complex numbers
    "DogeForCausalLM",  # a mask of its own
    "LongcatFlashForCausalLM",  # two attentions a layer
    "MiniMaxForCausalLM",  # a cache of its own
    "MoshiForCausalLM",  # a window in the mask only
    "OPTForCausalLM",  # learned positions
    "PaliGemmaForConditionalGeneration",  # a prompt that is bidirectional
    "RwkvForCausalLM",  # recurrent
    "WhisperForCausalLM",  # half of an encoder-decoder
    "T5Gemma2ForConditionalGeneration",  # an encoder-decoder
]
# Of which tests/engine has tests: test_indexers.py, test_shared_keys.py and test_mask_rules.py.
TESTED = [
    "DeepseekV32ForCausalLM",
    "Gemma3nForCausalLM",
    "Llama4ForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2MoeForCausalLM",
]
# Of those, kinds of which no other test is `core`.
STATIC_CORE = [
    "Gemma2ForCausalLM",
    "LlavaForConditionalGeneration",
    "GPT2LMHeadModel",
    "Qwen3VLForConditionalGeneration",
]
SAFE_CORE = [
    "MiniMaxForCausalLM",
    "MoshiForCausalLM",
    "PaliGemmaForConditionalGeneration",
    "RwkvForCausalLM",
    "T5Gemma2ForConditionalGeneration",
]


def check(outcome: zoo.Outcome) -> None:
    assert outcome.outcome in (zoo.RIGHT, zoo.REFUSED), "\n".join([outcome.error, *outcome.notes])
    wrong = {name: pair for name, pair in outcome.columns.items() if pair and pair[0] not in (zoo.RIGHT, zoo.REFUSED)}
    assert not wrong, wrong


def run(name: str) -> zoo.Outcome:
    if not hasattr(transformers, name.split()[0]):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return zoo.run(name, brief=not tries_all)


@pytest.mark.core_for(name=STATIC_CORE)
@pytest.mark.parametrize("name", cases(STATIC, [name for name in STATIC if name not in TESTED]))
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


@pytest.mark.core_for(name=["DogeForCausalLM"])
@pytest.mark.parametrize(
    ("name", "seeds", "bulk", "trees"),
    [
        ("Gemma2ForCausalLM", zoo.RIGHT, zoo.RIGHT, zoo.RIGHT),
        ("DogeForCausalLM", zoo.RIGHT, zoo.REFUSED, zoo.REFUSED),
        ("BltForCausalLM", zoo.REFUSED, zoo.REFUSED, zoo.REFUSED),  # its cache has no list of layers
    ],
)
def test_columns(name, seeds, bulk, trees):
    """Seeds, a continued cache, bulk calls and trees; there is no image to try."""
    found = zoo_columns.columns_of(zoo_models.build(name), name)
    assert list(found) == list(zoo_columns.COLUMNS) and found["image"] is None
    assert found["seeds"][0] == seeds and found["generate_batch()"][0] == bulk
    assert found["trees"][0] == trees, found["trees"]
    assert found["cache continued"] is None or found["cache continued"][0] in (zoo.RIGHT, zoo.REFUSED)


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "Gemma3nForCausalLM", "Qwen3VLForConditionalGeneration"])
def test_trees(name):
    """Of sinks, keys of other layers, several positions a token."""
    assert zoo_columns.check_trees(zoo_models.build(name)) == ""


def test_columns_tell_wrong_texts_and_crashes(monkeypatch):
    model, sample = zoo_models.build("LlamaForCausalLM"), zoo_columns.sample
    monkeypatch.setattr(
        zoo_columns, "sample", lambda model, given, seeds: sample(model, given, [len(seeds)] * len(seeds))
    )
    found = zoo_columns.outcome_of(lambda: zoo_columns.check_seeds(model))
    assert found == (zoo.WRONG, "row 0 says something else alone")
    assert zoo_columns.outcome_of(lambda: 1 // 0)[0] == zoo.CRASH


def test_encoders_stand_in_the_table_once():
    names = zoo_models.class_names()
    kept = [one.name for one in zoo.merged([zoo.Outcome(name) for name in names])]
    encoders = [name for name in names if name.endswith(zoo_models.AS_DECODER)]
    assert len(kept) == len(set(kept)) == len(names) - len(encoders) and encoders
    assert set(kept) == {name.removesuffix(f" {zoo_models.AS_DECODER}") for name in names}


def test_configurations_of_other_tests(monkeypatch, tmp_path):
    """`--source`: of a checkout, whatever packages its tests import; ours where it has none."""
    folder = tmp_path / "tests" / "models" / "llama"
    folder.mkdir(parents=True)
    for part in (tmp_path / "tests", tmp_path / "tests" / "models", folder):
        (part / "__init__.py").write_text("")
    (folder / "test_modeling_llama.py").write_text(THEIRS)
    monkeypatch.setattr(zoo_sources, "_used", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        monkeypatch.delitem(sys.modules, name)
    zoo_sources.find.cache_clear()
    with pytest.raises(ValueError, match="has no folder tests/models"):
        zoo_sources.use(tmp_path / "tests")
    zoo_sources.use(tmp_path)
    try:
        model = zoo_models.build("LlamaForCausalLM")
        assert zoo_models.is_sourced("LlamaForCausalLM") and model.config.hidden_size == 24
        assert int(zoo_models.prompts(model)["input_ids"].max()) < 60
        assert not zoo_models.is_sourced("MistralForCausalLM")
        assert zoo_models.build("MistralForCausalLM").config.vocab_size == zoo_configs.VOCAB
        assert zoo.run("LlamaForCausalLM", brief=True).source == zoo_models.THEIRS
    finally:
        zoo_sources.find.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "a_package_of_nobody")]:
            del sys.modules[name]


THEIRS = """
import unittest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from a_package_of_nobody.decorators import parameterized

class LlamaModelTester:
    def prepare_config_and_inputs_for_common(self):
        config = LlamaConfig(
            vocab_size=60, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4
        )
        config.pad_token_id = 0
        return config, {"input_ids": torch.ones(3, 5, dtype=torch.int64), "labels": torch.ones(3)}

class LlamaModelTest(unittest.TestCase):
    all_model_classes = None
    def setUp(self):
        self.model_tester, self.all_model_classes = LlamaModelTester(), (LlamaForCausalLM,)
    def _prepare_for_class(self, inputs, model_class):
        return inputs
    @parameterized.expand([1, 2])
    def test_it(self, number):
        raise AssertionError
"""


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
