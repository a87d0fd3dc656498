"""The drafters of `model_cards/` and the prompts that they are tested on."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


DRAFTERS = sorted({path.parent for path in (ROOT / "model_cards").glob("*/*.safetensors")})


def chat_batches(tokenizer, num_prompts: int, batch_size: int):
    lines = (ROOT / "examples" / "prompts" / "chat.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    chosen = prompts[:: len(prompts) // num_prompts][:num_prompts]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in chosen
    ]
    for start in range(0, num_prompts, batch_size):
        yield tokenizer(
            texts[start : start + batch_size],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        )
