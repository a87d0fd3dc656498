"""Assistants of Gemma 4 draft what transformers' own generator of candidates drafts; texts are the target's."""

import copy
import inspect

import pytest
import torch
from assistants import ORDERED, TEXT, assistant_drafter, gemma4_target, new_assistant
from bulk import check_rows, prompts_of
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from lossless import MAX_NEW_TOKENS, PROMPTS, continuations, greedy
from targets import VOCAB, build_target, padded_prompts
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    DynamicCache,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from word_tokenizer import word_tokenizer

from hf_specdec import AutoDrafter, NoDrafter
from hf_specdec.cli import main
from hf_specdec.drafters import CacheReaderDrafter
from hf_specdec.host.caches import OUTPUT_NAME

LENGTHS = [2, 13, 7]
IS_OLD = "input_ids" in inspect.signature(SinglePositionMultiTokenCandidateGenerator).parameters


def recorded(drafter, monkeypatch):
    """What `propose` is called with and returns, of the rows that are not finished: length and drafts."""
    rounds, propose = [], drafter.propose

    def record(state, *args):
        proposal = propose(state, *args)
        rounds.append((state.lengths.tolist(), state.finished.tolist(), proposal.tokens.tolist()))
        return proposal

    monkeypatch.setattr(drafter, "propose", record)
    return rounds


def drafts_of_transformers(target, assistant, text, num_draft_tokens):
    """What transformers drafts after `text` `[1, n]`, of which the target has run all but the last token."""
    assistant.generation_config.num_assistant_tokens = num_draft_tokens
    config = copy.deepcopy(target.generation_config)
    config.max_length = 1000
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant_model=assistant,
        target_model_input_embeddings=target.get_input_embeddings(),
        generation_config=config,
        **({"input_ids": text, "model_kwargs": {}, "eos_token_id": -1} if IS_OLD else {}),
    )
    with torch.no_grad():
        outputs = target(
            text[:, :-1], use_cache=True, output_hidden_states=True, return_shared_kv_states=True, return_dict=True
        )
    found, _ = generator.get_candidates(
        text,
        model_kwargs={"attention_mask": torch.ones_like(text)},
        model_outputs=outputs,
        is_first_iteration=False,
        n_last_matches=text.shape[1] - 2,
    )
    return found[0, text.shape[1] :].tolist()


@pytest.mark.core_for(lengths=[[20]])
@pytest.mark.parametrize("options", [{}, ORDERED], ids=["head", "ordered"])
@pytest.mark.parametrize("lengths", [LENGTHS, [20]], ids=str)
def test_drafts_are_those_of_transformers(monkeypatch, lengths, options):
    """In every round of a padded batch, before and beyond the window, after rounds that accept none, some or all."""
    target, assistant = gemma4_target(), new_assistant(**options)
    inputs, plain = padded_prompts(lengths), None
    plain = greedy(target, inputs)
    for num in cases([1, 3, 7], [3]):
        drafter = assistant_drafter(assistant, target)
        rounds = recorded(drafter, monkeypatch)
        assert torch.equal(greedy(target, inputs, drafter, num), plain) and drafter.stats.engine == "static"
        count = 0
        for reached, finished, drafts in rounds:
            for row, length in enumerate(reached):
                if not finished[row]:
                    pad = plain.shape[1] - MAX_NEW_TOKENS - lengths[row]
                    text = plain[row : row + 1, pad : pad + length]
                    assert drafts[row] == drafts_of_transformers(target, assistant, text, num), (row, length)
                    count += 1
        assert count >= MAX_NEW_TOKENS * len(lengths) / (num + 1)


@pytest.mark.parametrize("num_nodes", [4, 40])
def test_trees(monkeypatch, num_nodes):
    """Their likeliest chain, as far as it goes, is what transformers drafts; texts are those without drafts."""
    target, assistant = gemma4_target(), new_assistant()
    inputs = padded_prompts(LENGTHS)
    plain, drafter, count = greedy(target, inputs), assistant_drafter(assistant, target), 0
    rounds, propose = [], drafter.propose

    def record(state, *args):
        proposal = propose(state, *args)
        rounds.append((state.lengths.tolist(), proposal.tokens.tolist(), proposal.tree.parents.tolist()))
        return proposal

    monkeypatch.setattr(drafter, "propose", record)
    drafter.configure(tree=num_nodes)
    assert torch.equal(greedy(target, inputs, drafter, 4), plain) and drafter.stats.tree == num_nodes
    for reached, drafts, parents in rounds[::2]:
        for row, length in enumerate(reached):
            pad = plain.shape[1] - MAX_NEW_TOKENS - LENGTHS[row]
            text = plain[row : row + 1, pad : pad + length]
            node, chain = 0, []
            while node in parents[row]:  # children come in the order of their probabilities
                node = parents[row].index(node)
                chain.append(drafts[row][node - 1])
            if text.shape[1] == length < LENGTHS[row] + MAX_NEW_TOKENS:
                assert chain == drafts_of_transformers(target, assistant, text, 4)[: len(chain)]
                count += len(chain)
    assert count > MAX_NEW_TOKENS
    seeds = {"do_sample": True, "seeds": [1, 2, 3], "max_new_tokens": 8}
    expected = target.generate(**inputs, **seeds, assistant_model=NoDrafter(target))
    assert torch.equal(target.generate(**inputs, **seeds, assistant_model=drafter), expected)


def test_accepted_drafts(monkeypatch):
    """A head that knows which token follows, so that rounds accept all, some or none of their drafts."""
    target = gemma4_target()
    inputs = padded_prompts(LENGTHS)
    plain = greedy(target, inputs)
    answers, lengths = continuations(inputs, plain), torch.tensor(LENGTHS)
    assistant = new_assistant()
    drafter = assistant_drafter(assistant, target)
    own = CacheReaderDrafter.logits
    step = []

    def hinted(self, normed):
        logits = own(self, normed).clone()
        at = (step[0] - lengths)[:, None] + (len(step) - 1)
        step.append(None)
        right = answers.gather(1, at.clamp(0, answers.shape[1] - 1))
        is_told = (at + right) % 3 > 0
        return torch.where(is_told[..., None] & torch.nn.functional.one_hot(right, VOCAB).bool(), 1e4, logits)

    monkeypatch.setattr(CacheReaderDrafter, "logits", hinted)
    rounds, propose = [], drafter.propose

    def record(state, hidden, result):
        step[:] = [state.lengths.clone()]
        proposal = propose(state, hidden, result)
        rounds.append((state.lengths.tolist(), state.finished.tolist(), proposal.tokens.tolist()))
        return proposal

    monkeypatch.setattr(drafter, "propose", record)
    assert torch.equal(greedy(target, inputs, drafter, 3), plain)
    assert 0.3 < drafter.stats.accepted / drafter.stats.drafted < 0.95
    for reached, finished, drafts in rounds:
        for row, length in enumerate(reached):
            if not finished[row]:  # the first draft that is not told, after those that are right
                pad = plain.shape[1] - MAX_NEW_TOKENS - LENGTHS[row]
                text = plain[row : row + 1, pad : pad + length]
                at = length - LENGTHS[row]
                if (at + int(answers[row, at])) % 3 == 0:
                    assert drafts[row][:1] == drafts_of_transformers(target, assistant, text, 1)


@pytest.mark.core_for(sampling=[False])
@pytest.mark.parametrize("kind", ["gemma4_text", "keys as values"])
@pytest.mark.parametrize("sampling", [False, True])
def test_texts(kind, sampling):
    target = gemma4_target(kind)
    drafter = assistant_drafter(new_assistant(), target)
    inputs = padded_prompts(PROMPTS[3])
    if not sampling:
        for num in cases([1, 3, 7], [3]):
            for options in ({}, {"prefill_chunk_size": 5}):
                assert torch.equal(greedy(target, inputs, drafter, num, **options), greedy(target, inputs))
        return
    options = {"do_sample": True, "temperature": 1.3, "max_new_tokens": 12, "seeds": 7}
    drafter.configure(draft_probs=True)
    texts = [target.generate(**inputs, assistant_model=drafter, num_assistant_tokens=3, **options) for _ in range(2)]
    assert torch.equal(*texts), "drafts depend on the text alone"
    alone = {name: value[1:2, -PROMPTS[3][1] :] for name, value in inputs.items()}
    assert drafter.stats.engine == "static" and alone["input_ids"].shape[1] == PROMPTS[3][1]


def test_prompts_of_one_token():
    """Nothing of which could be read in the first round, whatever the buffers hold of earlier calls."""
    target = gemma4_target()
    drafter = assistant_drafter(new_assistant(), target)
    for inputs in (padded_prompts([1]), padded_prompts([9, 1])):
        assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))


def test_replayed_graphs(monkeypatch):
    capture = replay_on_cpu(monkeypatch)
    target = gemma4_target()
    drafter = assistant_drafter(new_assistant(**ORDERED), target)
    for lengths in ([5, 3], [4, 5], [9, 2]):
        inputs = padded_prompts(lengths)
        assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))
    assert capture.count > 0


def test_auto_k_and_rows_that_come_and_go():
    target = gemma4_target()
    drafter = assistant_drafter(new_assistant(), target)
    inputs = padded_prompts(PROMPTS[3])
    assert torch.equal(greedy(target, inputs, drafter, "auto"), greedy(target, inputs))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 6, "eos_token_id": [5, 9, 14, 60]},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, scores, **others: ids[:, -1] % 7 == 3])},
        {"stop_strings": ["d"]},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_generate(options):
    target, words = gemma4_target(), word_tokenizer()
    drafter = assistant_drafter(new_assistant(), target)
    options = options | ({"tokenizer": words} if "stop_strings" in options else {})
    plain, found = (greedy(target, padded_prompts(PROMPTS[3]), *one, **options) for one in ((), (drafter, 3)))
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, plain)
    else:
        assert torch.equal(found.sequences, plain.sequences)
        torch.testing.assert_close(found.scores, plain.scores)
    assert drafter.stats.engine == "static" and drafter.stats.drafted


def test_streamers_and_pipelines():
    target, words = gemma4_target(), word_tokenizer()
    drafter = assistant_drafter(new_assistant(), target)
    common = {"task": "text-generation", "model": target, "tokenizer": words}
    options = {"max_new_tokens": 10, "do_sample": False, "return_full_text": False}
    plain, fast = pipeline(**common), pipeline(**common, assistant_model=drafter)
    streamer = TextIteratorStreamer(words, skip_prompt=True)
    (text,) = plain("abcd", **options)
    assert fast("abcd", **options, streamer=streamer) == [text] and "".join(streamer) == text["generated_text"]
    assert drafter.stats.engine == "static"


@pytest.mark.core
@pytest.mark.parametrize("model_type", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_checkpoints_load_as_published(tmp_path, model_type):
    target, assistant = gemma4_target(), new_assistant(model_type=model_type, **ORDERED)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.save_pretrained(tmp_path / "assistant")
    drafter = AutoDrafter.from_pretrained(tmp_path / "assistant", target=target)
    assert isinstance(drafter, CacheReaderDrafter) and drafter.num_assistant_tokens == 4
    inputs = padded_prompts(PROMPTS[3])
    expected = assistant_drafter(assistant, target)
    for one in (drafter, expected):
        assert torch.equal(greedy(target, inputs, one, 3), greedy(target, inputs))
    assert (drafter.stats.rounds, drafter.stats.accepted) == (expected.stats.rounds, expected.stats.accepted)
    drafter.save_pretrained(tmp_path / "again")
    again = AutoDrafter.from_pretrained(tmp_path / "again", target=target)
    assert again.num_assistant_tokens == 4
    for (name, weight), other in zip(
        drafter.model.state_dict().items(), again.model.state_dict().values(), strict=True
    ):
        assert torch.equal(weight, other), name


@pytest.mark.core
def test_conditional_generation():
    """The target's text model is inside of one that reads images."""
    config = AutoConfig.for_model(
        "gemma4",
        text_config={**gemma4_target().config.to_dict()},
        vision_config={"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2},
        audio_config=None,
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
        audio_token_id=VOCAB - 3,
        boi_token_id=VOCAB - 4,
        eoi_token_id=VOCAB - 5,
    )
    torch.manual_seed(0)
    target = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    target.generation_config.pad_token_id, target.generation_config.eos_token_id = 0, None
    drafter = assistant_drafter(new_assistant(), target)
    inputs = padded_prompts([9, 4])
    assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))
    assert drafter.stats.engine == "static"


def test_refusals(tmp_path):
    assistant = new_assistant()
    with pytest.raises(ValueError, match=r"hidden_size 32, but .* has hidden_size 48"):
        assistant_drafter(assistant, build_target("gemma4_text", **TEXT, hidden_size=48))
    with pytest.raises(ValueError, match="reads keys and values of layers of type full_attention, sliding_attention"):
        assistant_drafter(assistant, build_target("llama"))
    with pytest.raises(ValueError, match=r"query heads of 16 in its full_attention layers, but layer 2"):
        assistant_drafter(assistant, build_target("gemma4_text", **TEXT | {"global_head_dim": 24}))
    target = gemma4_target()
    drafter = assistant_drafter(assistant, target).configure(engine="stock")
    with pytest.raises(ValueError, match="reads the keys and values of Gemma4ForCausalLM on the static engine only"):
        greedy(target, padded_prompts([5]), drafter, 3)
    assistant.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"is a drafter of the family Gemma 4 assistant: it takes no `mask_token_id=`. Drop that"
    ):
        AutoDrafter.from_pretrained(tmp_path, target=target, mask_token_id=3)


def test_an_assistant_that_is_not_wrapped_is_left_to_transformers():
    target, inputs = gemma4_target(), padded_prompts([9])
    assistant = new_assistant()
    assistant.generation_config.num_assistant_tokens = 3
    assert torch.equal(greedy(target, inputs, assistant, 3), greedy(target, inputs))


def test_inspect(tmp_path, capsys):
    new_assistant(**ORDERED).save_pretrained(tmp_path / "assistant")
    for name, target in (("target", gemma4_target()), ("llama", build_target("llama", hidden_size=64))):
        target.config.save_pretrained(tmp_path / name)
        assert main(["inspect", str(tmp_path / "assistant"), "--target", str(tmp_path / name)]) == 0
        report = capsys.readouterr().out
        assert "family       Gemma 4 assistant (transformers)" in report and "model        gemma4_assistant" in report
        assert ("fits" if name == "target" else "was made for a target with hidden_size 32, but") in report
    assert "model.layers.2.self_attn.q_proj.weight" in report and "pre_projection.weight" in report
    assert main(["inspect", str(tmp_path / "assistant"), "--target", str(tmp_path / "target"), "--self-check"]) == 1
    assert "--self-check scores EAGLE-3" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_that_come_and_go(rows):
    target = gemma4_target()
    drafter = assistant_drafter(new_assistant(), target)
    check_rows(target, drafter, prompts_of((5, 12, 3, 9, 2)), rows=rows)


@pytest.mark.core
def test_text_that_continues_a_cache():
    target, texts = gemma4_target(), []
    drafter = assistant_drafter(new_assistant(), target)
    first = padded_prompts([20, 12])
    for assistant in (None, drafter):
        cache = DynamicCache(config=target.config)
        out = greedy(target, first, assistant, 3, max_new_tokens=6, **{OUTPUT_NAME: cache})
        longer = torch.cat([out, padded_prompts([4, 4], seed=1)["input_ids"]], dim=1)
        mask = torch.cat([first["attention_mask"], torch.ones(2, 10, dtype=torch.int64)], dim=1)
        inputs = {"input_ids": longer, "attention_mask": mask}
        kept = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
        texts.append(greedy(target, inputs, assistant, 3, **{OUTPUT_NAME: cache}, **kept))
    assert torch.equal(texts[0].sequences, texts[1].sequences) and drafter.stats.engine == "static"
    for plain, ours in zip(texts[0].scores, texts[1].scores, strict=True):
        assert torch.allclose(plain, ours, atol=1e-4)
