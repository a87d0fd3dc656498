"""Acceptance length on SmolLM2 of drafts without a model: suffix decoding, and transformers' prompt lookup.

Answers are generated once, greedily. An answer tells which drafts are accepted, so all methods are counted on the same
answers, without the model: `python examples/suffix_acceptance.py --prompts 16 --new-tokens 160`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from smollm2 import load_smollm2
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hf_specdec import NoDrafter, SuffixDrafter
from hf_specdec.ops import suffix_drafts
from hf_specdec.prompt_sources import encode, load_prompts

PROMPTS = Path(__file__).parent / "prompts"


def answers(model, tokenizer, name: str, count: int, new_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Tokens of prompts, evenly spread over a file, and of their greedy answers."""
    lines = load_prompts(PROMPTS / f"{name}.jsonl")
    chosen = lines[:: max(len(lines) // count, 1)][:count]
    prompts = encode(tokenizer, chosen)["input_ids"]
    out = model.generate_batch(prompts, assistant_model=NoDrafter(model), do_sample=False, max_new_tokens=new_tokens)
    return list(zip(prompts, [one.generated_tokens for one in out.values()], strict=True))


def tokens_a_round(
    texts: list[tuple[list[int], list[int]]],
    draft: Callable[[list[int]], list[int]],
    observe: Callable[[torch.Tensor, list[int]], None] = lambda prompt, answer: None,
) -> float:
    """Tokens of `texts` by rounds of drafts, each of which is called with the text so far; the first is of no round."""
    tokens = rounds = 0
    for prompt, answer in texts:
        done = 1
        while done < len(answer):
            for one, true in zip([*draft(prompt + answer[:done]), None], answer[done:], strict=False):
                done += 1
                if one != true:
                    break
            rounds += 1
        tokens += len(answer) - 1
        observe(torch.tensor(prompt), answer)
    return tokens / rounds


def lookup(eos: int, k: int) -> Callable[[list[int]], list[int]]:
    """transformers' prompt lookup."""
    candidates = PromptLookupCandidateGenerator(torch.tensor([eos]), num_output_tokens=k, max_length=1 << 20)
    return lambda text: candidates.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()


def suffixes(drafter: SuffixDrafter, k: int) -> Callable[[list[int]], list[int]]:
    """What `drafter` drafts."""
    history = drafter._history
    return lambda text: suffix_drafts(torch.tensor([text]), torch.tensor([len(text)]), history, k)[0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", nargs="*", default=["chat", "code"])
    parser.add_argument("--prompts", type=int, default=16, help="of each file")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--k", type=int, nargs="*", default=[3, 7, 16])
    arguments = parser.parse_args()
    model, tokenizer = load_smollm2()
    print("| prompts | K | prompt lookup | suffix, no history | suffix |\n|---|---|---|---|---|")
    for name in arguments.files:
        texts = answers(model, tokenizer, name, arguments.prompts, arguments.new_tokens)
        for k in arguments.k:
            found = [tokens_a_round(texts, lookup(tokenizer.eos_token_id, k))]
            for options in ({"history_size": 0}, {}):
                drafter = SuffixDrafter(model, **options)
                found.append(tokens_a_round(texts, suffixes(drafter, k), drafter.observe))
            print(f"| {name} | {k} | {' | '.join(f'{one:.2f}' for one in found)} |", flush=True)


if __name__ == "__main__":
    main()
