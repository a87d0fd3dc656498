"""Compare texts and logits of one prompt over drafters, numbers of drafts, batches and processes, bit for bit.

    python examples/batch_invariance.py --prompts 100 --new-tokens 256 --processes 2 --output batch_invariance.json

Targets have random weights, in shapes of Llama, Qwen3-MoE, Gemma 3 (sliding windows) and gpt-oss (sinks, experts); a
folder or repository may be named instead. Drafters are none, random EAGLE-3 and P-EAGLE drafters, and a draft model: a
copy of the target with noise on its weights, many of whose drafts are accepted. `--default` also runs without
`batch_invariant`, where texts differ. The exit status is 1 if a batch-invariant text or logit differs.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec import Drafter, NoDrafter
from hf_specdec.config import DraftModelConfig, Eagle3Config, PEagleConfig
from hf_specdec.drafters import DraftModelDrafter, Eagle3Drafter, PEagleDrafter

_COMMON = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    # Wider than usual, so that logits of random weights are far apart and texts do not repeat a token.
    "initializer_range": 0.05,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 128, "num_attention_heads": 8},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 48, "layer_types": _WINDOWS, "query_pre_attn_scalar": 64},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 1024,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
# Share by which the weights of the draft model differ from the target's.
NOISE = 0.02


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--families", nargs="+", default=list(FAMILIES), help="of random weights, or folders and repositories")
    add("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    add("-k", type=int, nargs="+", default=[1, 3, 7], help="numbers of drafts")
    add("--batch-sizes", type=int, nargs="+", default=[1, 3, 8, 32])
    add("--prompts", type=int, default=32)
    add("--prompt-length", type=int, default=200, help="of the longest prompt; the others are shorter")
    add("--new-tokens", type=int, default=64)
    add("--processes", type=int, default=1)
    add("--default", action="store_true", help="also count texts that differ without batch_invariant")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--device", default="cuda")
    add("--output", type=Path, help="JSON file for the outcome")
    add("--texts", type=Path, help="only write the texts without drafter, of the first family, to this JSON file")
    return parser.parse_args(arguments)


def load(family: str, arguments: argparse.Namespace) -> PreTrainedModel:
    dtype = getattr(torch, arguments.dtype)
    if family not in FAMILIES:
        return AutoModelForCausalLM.from_pretrained(family, dtype=dtype).to(arguments.device).eval()
    options = {**_COMMON, **FAMILIES[family]}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(arguments.device).eval()


def random_prompts(target: PreTrainedModel, arguments: argparse.Namespace) -> list[torch.Tensor]:
    """Prompts of 1 to `--prompt-length` tokens; some have a common prefix."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = target.config.get_text_config().vocab_size
    lengths = torch.linspace(1, arguments.prompt_length, arguments.prompts).round().int()
    lengths = lengths[torch.randperm(len(lengths), generator=generator)].tolist()
    beginning = torch.randint(3, vocabulary, (arguments.prompt_length,), generator=generator)
    prompts = [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]
    for prompt in prompts[::3]:
        prompt[: len(prompt) // 2] = beginning[: len(prompt) // 2]
    return [prompt.to(arguments.device) for prompt in prompts]


def eagle_options(target: PreTrainedModel) -> dict[str, Any]:
    text = target.config.get_text_config()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return {
        **{name: getattr(text, name) for name in names if getattr(text, name, None) is not None},
        "target_hidden_size": text.hidden_size,
        "draft_vocab_size": text.vocab_size,
        "aux_hidden_state_layer_ids": [1, text.num_hidden_layers // 2, text.num_hidden_layers],
    }


def draft_model(target: PreTrainedModel) -> Drafter:
    config = target.config
    vocab_size = config.get_text_config().vocab_size
    settings = DraftModelConfig(model=config.to_dict(), vocab_size=vocab_size, mask_token_id=None)
    model = copy.deepcopy(target)
    generator = torch.Generator(target.device).manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        parameter.data *= (1 + NOISE * noise).to(parameter.dtype)
    return DraftModelDrafter(settings, model)


DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "none": NoDrafter,
    "eagle3": lambda target: Eagle3Drafter(Eagle3Config(**eagle_options(target))),
    "p-eagle": lambda target: PEagleDrafter(PEagleConfig(**eagle_options(target), mask_token_id=2)),
    "draft-model": draft_model,
}


def new_drafter(name: str, target: PreTrainedModel) -> Drafter:
    torch.manual_seed(0)
    drafter = DRAFTERS[name](target)
    if name != "none":
        drafter = drafter.to(target.device, target.dtype).eval()
        drafter.bind(target)
    return drafter


def generate(
    target: PreTrainedModel, drafter: Drafter, prompts: list[torch.Tensor], batch: int, new_tokens: int, **options: Any
) -> list[Any]:
    """The outputs of `generate()` of left-padded batches of the prompts."""
    outputs = []
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        width = max(map(len, some))
        ids = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in some])
        mask = torch.stack([torch.arange(width, device=ids.device) >= width - len(prompt) for prompt in some])
        sampling = {"do_sample": False} | options
        outputs.append(
            target.generate(
                input_ids=ids,
                attention_mask=mask.long(),
                assistant_model=drafter,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
                **sampling,
            )
        )
    return outputs


def texts_of(outputs: list[torch.Tensor], new_tokens: int) -> list[list[int]]:
    return [row for output in outputs for row in output[:, -new_tokens:].tolist()]


def texts_continuous(
    target: PreTrainedModel, drafter: Drafter, prompts: list[torch.Tensor], rows: int, new_tokens: int
) -> list[list[int]]:
    """Texts by continuous batching, where prompts are prefilled beside rounds of others."""
    from transformers import ContinuousBatchingConfig

    outputs = target.generate_batch(
        [prompt.tolist() for prompt in prompts],
        assistant_model=drafter,
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=rows),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        progress_bar=False,
    )
    return [outputs[f"req_{index}"].generated_tokens for index in range(len(prompts))]


def logits_by_prompt(
    target: PreTrainedModel, drafter: Drafter, prompts: list[torch.Tensor], batch: int, new_tokens: int
) -> list[torch.Tensor]:
    """`[new tokens, V]` of every prompt."""
    asked = {"return_dict_in_generate": True, "output_logits": True}
    outputs = generate(target, drafter, prompts, batch, new_tokens, **asked)
    return [row for output in outputs for row in torch.stack(output.logits, dim=1)]


def count_differences(found: list[Any], expected: list[Any]) -> int:
    same = torch.equal if isinstance(expected[0], torch.Tensor) else lambda one, other: one == other
    return sum(not same(one, other) for one, other in zip(found, expected, strict=True))


def compare_family(family: str, arguments: argparse.Namespace, is_invariant: bool) -> dict[str, Any]:
    """How many prompts of `family` have another text, or other logits, than alone and without a drafter."""
    target = load(family, arguments)
    prompts, new_tokens = random_prompts(target, arguments), arguments.new_tokens
    alone = NoDrafter(target, batch_invariant=is_invariant)
    expected = texts_of(generate(target, alone, prompts, 1, new_tokens), new_tokens)
    rows, accepted = {}, {}
    for name in arguments.drafters:
        drafter = new_drafter(name, target).configure(batch_invariant=is_invariant)
        for k in arguments.k if name != "none" else [0]:
            options = {"num_assistant_tokens": k} if k else {}
            for batch in arguments.batch_sizes:
                found = texts_of(generate(target, drafter, prompts, batch, new_tokens, **options), new_tokens)
                rows[f"{name}, K = {k}, batch {batch}"] = count_differences(found, expected)
            accepted[f"{name}, K = {k}"] = round(drafter.stats.acceptance_length, 2)
        drafter.release()
    last, most = arguments.batch_sizes[-1], max(arguments.k)
    found = texts_continuous(target, drafter, prompts, last, new_tokens)
    rows[f"{arguments.drafters[-1]}, continuous, {last} rows"] = count_differences(found, expected)
    drafter.configure(num_assistant_tokens=most if arguments.drafters[-1] != "none" else None)
    few = prompts[: max(arguments.batch_sizes)]
    logits = [logits_by_prompt(target, one, few, batch, new_tokens) for one, batch in ((alone, 1), (drafter, last))]
    rows[f"logits of {arguments.drafters[-1]}, K = {most}, batch {last}"] = count_differences(*logits)
    text = json.dumps(expected).encode()
    return {"different": rows, "tokens a round": accepted, "digest": hashlib.sha256(text).hexdigest()}


def digest_of_process(family: str, arguments: argparse.Namespace) -> str:
    """The digest of the texts without a drafter that another process generates."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        names = ("prompts", "prompt_length", "new_tokens", "dtype", "device")
        options = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]
        subprocess.run([sys.executable, __file__, "--families", family, "--texts", str(file), *options], check=True)
        return hashlib.sha256(file.read_bytes()).hexdigest()


def write_texts(family: str, arguments: argparse.Namespace) -> None:
    target = load(family, arguments)
    # Other batch sizes than those of the texts that are compared.
    outputs = generate(
        target, NoDrafter(target, batch_invariant=True), random_prompts(target, arguments), 5, arguments.new_tokens
    )
    arguments.texts.write_text(json.dumps(texts_of(outputs, arguments.new_tokens)))


def main(arguments: argparse.Namespace) -> int:
    if arguments.texts is not None:
        write_texts(arguments.families[0], arguments)
        return 0
    outcome: dict[str, Any] = {}
    for family in arguments.families:
        outcome[family] = one = compare_family(family, arguments, is_invariant=True)
        for number in range(1, arguments.processes):
            is_other = digest_of_process(family, arguments) != one["digest"]
            one["different"][f"process {number + 1}"] = arguments.prompts * is_other
        if arguments.default:
            one["different without batch_invariant"] = compare_family(family, arguments, is_invariant=False)[
                "different"
            ]
        wrong = {name: count for name, count in one["different"].items() if count}
        print(
            f"{family}: of {arguments.prompts} prompts differ: {wrong or 'none'}; {one['tokens a round']}", flush=True
        )
        if arguments.default:
            print(f"{family}, without batch_invariant: {one['different without batch_invariant']}", flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(outcome, indent=1))
    return int(any(count for one in outcome.values() for count in one["different"].values()))


if __name__ == "__main__":
    sys.exit(main(parse_arguments()))
