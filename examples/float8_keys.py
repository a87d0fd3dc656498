"""How much keys and values as float8 (`kv_cache_dtype="fp8"`) change what SmolLM2 says, on a CPU.

The target continues prompts of examples/prompts/ greedily. Then it runs prompt and answer once more, on a cache that
rounds keys and values as the engine does. The logits of every token of the answer are compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from smollm2 import load_smollm2
from transformers import DynamicCache

from hf_specdec import NoDrafter
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.ops import dequantise, quantise
from hf_specdec.prompt_sources import encode, load_prompts

PROMPTS = Path(__file__).parent / "prompts"


class RoundedCache(DynamicCache):
    """A cache of transformers that rounds keys and values to float8 and back."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        rounded = (dequantise(*quantise(states)) for states in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", nargs="+", default=["chat", "chat", "chat", "code", "code", "code", "long", "long"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    model, tokenizer = load_smollm2()
    rounding = NoDrafter(model, kv_cache_dtype="fp8")
    logits, is_same_text, sizes = [], [], []
    for number, name in enumerate(arguments.files):
        prompt = load_prompts(PROMPTS / f"{name}.jsonl")[arguments.files[:number].count(name)]
        inputs = encode(tokenizer, [prompt], return_tensors="pt")
        options = {"do_sample": False, "max_new_tokens": arguments.max_new_tokens}
        text = model.generate(**inputs, **options)
        is_same_text.append(torch.equal(model.generate(**inputs, **options, assistant_model=rounding), text))
        first = inputs["input_ids"].shape[1] - 1
        with torch.no_grad():
            exact = model(text).logits[0, first:-1]
            rounded = model(text, **{OUTPUT_NAME: RoundedCache(config=model.config)}).logits[0, first:-1]
        logits.append((exact, rounded))
        sizes.append(first + 1)
    exact, rounded = map(torch.cat, zip(*logits, strict=True))
    change = (rounded - exact).abs()
    stays = (rounded.argmax(dim=-1) == exact.argmax(dim=-1)).float()
    print(f"{len(exact)} tokens after {len(sizes)} prompts of {min(sizes)} to {max(sizes)} tokens")
    print(f"change of logits: mean {change.mean():.3f}, maximum {change.max():.2f}; their spread is {exact.std():.2f}")
    print(f"greedy tokens that stay: {100 * stays.mean():.1f} %; texts: {sum(is_same_text)} of {len(is_same_text)}")


if __name__ == "__main__":
    main()
