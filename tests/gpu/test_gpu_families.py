"""On a GPU: targets whose layers or positions are unlike Llama's generate what plain `generate()` generates."""

import copy

import pytest
import torch
import transformers
from assistants import ORDERED, assistant_drafter, gemma4_target, new_assistant
from oracle import OracleDrafter, copy_of, random_eagle3
from targets import HYBRIDS, WITHOUT_ATTENTION, padded_prompts
from targets import on_gpu as family_on_gpu
from torch.nn.functional import pad
from zoo import is_refusal
from zoo_models import MAX_NEW_TOKENS, build, class_names, generate, prompts, rows_of

from hf_specdec import NoDrafter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_DRAFT_TOKENS, ACCURACY = 4, 0.6
# By class, the engine that runs it.
CLASSES = {
    "Qwen2_5_VLForConditionalGeneration": "static",  # several positions a token
    "Qwen3VLForConditionalGeneration": "static",  # the same, with norms of queries and keys
    "GPT2LMHeadModel": "static",  # learned positions, layers of another name
    "GPTNeoXForCausalLM": "static",  # layers of another name
    "GPTJForCausalLM": "static",  # attention of its own, given a mask
}

# Classes of the static engine whose forward pass reads the device on the host, so that rounds run eagerly.
NOT_CAPTURED = {
    "AriaForConditionalGeneration",  # sizes of groups of experts
    "AriaTextForCausalLM",
    "ChameleonForConditionalGeneration",  # a list of image tokens as index
    "JetMoeForCausalLM",  # sizes of groups of experts
    "LongcatFlashForCausalLM",  # which experts are chosen
    "Step3p7ForConditionalGeneration",
    "XmodForCausalLM (is_decoder)",  # masks as indices
}


def on_gpu(name):
    if not hasattr(transformers, name.split()[0]):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return build(name).to("cuda")


def drafter_of(target, plain, lengths, is_compiled):
    """Scripted: right at 60 % of the places, for the continuations that end `plain` `[B, P + T]`."""
    answers = pad(plain[:, -MAX_NEW_TOKENS:], (0, 16), value=2)
    return OracleDrafter(target, answers, lengths, ACCURACY).configure(compile_rounds=is_compiled)


def check(target, inputs, is_compiled):
    """Two calls of a drafter, of which the second replays, generate the plain text; the statistics of both."""
    inputs = {name: tensor.to("cuda") for name, tensor in inputs.items()}
    plain = generate(target, inputs)
    drafter = drafter_of(target, plain, inputs["attention_mask"].sum(dim=1).tolist(), is_compiled)
    found = []
    for _ in range(2):
        drafted = generate(target, inputs, assistant_model=drafter, num_assistant_tokens=NUM_DRAFT_TOKENS)
        assert drafted.tolist() == plain.tolist(), (drafter.stats.engine, drafter.stats.execution)
        found.append(drafter.stats)
    return found


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_text_of_a_batch_and_of_one_prompt(name, is_compiled):
    target = on_gpu(name)
    execution = f"captured in one graph, {'compiled' if is_compiled else 'not compiled'}"
    for inputs in (rows_of(prompts(target))[0], prompts(target)):
        for stats in check(target, inputs, is_compiled):
            print(name, len(inputs["input_ids"]), stats.engine, stats.execution, round(stats.acceptance_length, 2))
            assert stats.engine == CLASSES[name]
            if stats.engine == "static":
                assert stats.execution == execution
            assert 1.3 < stats.acceptance_length < 4


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("family", [*HYBRIDS, "zamba", *WITHOUT_ATTENTION])
def test_recurrent_layers(family, is_compiled):
    """Drafts of a copy, whose own states are advanced by drafting, and of a random drafter; then other prompts."""
    target = family_on_gpu(family)
    for make in (random_eagle3, copy_of):
        drafter = make(target).configure(compile_rounds=is_compiled)
        for lengths in ([9, 3, 40], [5, 30, 1], [200]):
            inputs = {name: tensor.to("cuda") for name, tensor in padded_prompts(lengths).items()}
            plain = target.generate(**inputs, do_sample=False, max_new_tokens=24)
            out = target.generate(
                **inputs, do_sample=False, max_new_tokens=24, assistant_model=drafter, num_assistant_tokens=5
            )
            assert torch.equal(out, plain), lengths
            stats = drafter.stats
            assert stats.execution == f"captured in one graph, {'compiled' if is_compiled else 'not compiled'}"
            assert make is not copy_of or stats.accepted == stats.drafted


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("options", [{}, ORDERED], ids=["head", "ordered"])
def test_assistants_of_gemma_4(options, is_compiled):
    """Greedy texts are plain ones, drawn ones those of the seeds alone, also of rounds that are replayed."""
    target = copy.deepcopy(gemma4_target()).to("cuda")
    drafter = assistant_drafter(new_assistant(**options).to("cuda"), target).configure(compile_rounds=is_compiled)
    lengths = [2, 13, 7]
    inputs = {name: tensor.to("cuda") for name, tensor in padded_prompts(lengths).items()}

    def generate(rows: list[int], **options) -> torch.Tensor:
        width = max(lengths[row] for row in rows)
        some = {name: tensor[rows, -width:] for name, tensor in inputs.items()}
        out = target.generate(**some, max_new_tokens=24, assistant_model=drafter, **options)
        assert drafter.stats.execution == f"captured in one graph, {'compiled' if is_compiled else 'not compiled'}"
        return out[:, -24:]

    plain = target.generate(**inputs, max_new_tokens=24)[:, -24:]
    for num_drafts in (4, 4, 1):
        assert torch.equal(generate([0, 1, 2], num_assistant_tokens=num_drafts), plain)
    drawn = generate([0, 1, 2], do_sample=True, seeds=[1, 2, 3])
    assert torch.equal(drawn, generate([0, 1, 2], do_sample=True, seeds=[1, 2, 3])) and not torch.equal(drawn, plain)
    for row in range(3):
        assert torch.equal(generate([row], do_sample=True, seeds=[row + 1])[0], drawn[row])


def test_batch_invariant_calls_with_an_assistant_of_gemma_4():
    target = copy.deepcopy(gemma4_target()).to("cuda").bfloat16()
    drafter = assistant_drafter(new_assistant().to("cuda").bfloat16(), target).configure(batch_invariant=True)
    lengths = [2, 13, 7, 5]
    inputs = {name: tensor.to("cuda") for name, tensor in padded_prompts(lengths).items()}
    together = target.generate(**inputs, max_new_tokens=24, assistant_model=drafter)[:, -24:]
    for row, length in enumerate(lengths):
        some = {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
        alone = target.generate(
            **some, max_new_tokens=24, assistant_model=NoDrafter(target, batch_invariant=True), do_sample=False
        )
        assert torch.equal(alone[0, -24:], together[row])
    assert drafter.stats.batch_invariant


@pytest.mark.zoo
@pytest.mark.parametrize("name", class_names())
def test_all_classes_of_the_static_engine(name):
    try:
        target = on_gpu(name)
        generate(target, {name: tensor.to("cuda") for name, tensor in prompts(target).items()})
    except Exception as error:  # of classes that are not made to be built so, or that generate no text from text
        pytest.skip(f"{type(error).__name__}: {error}")
    try:
        found = check(target, prompts(target), is_compiled=False)
    except ValueError as error:
        if not is_refusal(error, generated=False):
            raise
        pytest.skip(str(error))
    execution = "eager: a round cannot be captured" if name in NOT_CAPTURED else "captured in one graph, not compiled"
    for stats in found:
        assert (stats.engine, stats.execution) == ("static", execution)
