"""The files that make the folder of a trained drafter a Hub repository: model card and `custom_generate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hf_specdec.prompt_sources import HUB_PREFIX

HUB_SOURCE = Path(__file__).parent / "hub" / "generate.py"

CARD = """---
base_model: {base_model}
base_model_relation: {relation}
library_name: hf-specdec
license: apache-2.0
pipeline_tag: text-generation
tags:
- speculative-decoding
- {family}
- drafter
- custom_generate
---

# {repo_id}

{method} drafter for
[{base_model}](https://huggingface.co/{base_model}): it drafts tokens that the model then verifies, so
`generate()` gives the same greedy text in fewer passes. {parameters:.1f} M parameters; {made_of}
{weights}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_specdec import AutoDrafter

model = AutoModelForCausalLM.from_pretrained("{base_model}")
tokenizer = AutoTokenizer.from_pretrained("{base_model}")
drafter = AutoDrafter.from_pretrained("{repo_id}", target=model)

inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Why is the sky blue?"}}],
    add_generation_prompt=True, return_tensors="pt", return_dict=True,
)
output = model.generate(**inputs, assistant_model=drafter, max_new_tokens=128)
print(tokenizer.decode(output[0]), drafter.stats)
```

Or without importing anything, where `hf-specdec` is installed:

```python
output = model.generate(**inputs, custom_generate="{repo_id}", trust_remote_code=True, max_new_tokens=128)
```

## Acceptance

{acceptance}
{remarks}
## Training

{prompts}; answers: each at a temperature drawn from
{answer_temperatures}, at most {max_answer_tokens} tokens, loops cut. {long_prompts}Prompts similar to the measured
ones were dropped: {held_out_overlap:,}. Data: {data_tokens:.1f} M tokens.

{chains} with weights {step_decay}^step; {loss} against the target's
distribution over {vocabulary}. {greedy}{masks}{samples}{rounds}{replayed}{shortened}{began}\
{steps:,} steps in {minutes:.0f} minutes,
{tokens_seen:.0f} M tokens seen; {optimizer}, peak learning rate {lr}, cosine schedule.

Top-1 agreement with the target on held-out documents of the same kind, by step, after correct drafts of greedy text:

| step | {step_names} |
|---|{step_rule}|
| agreement | {step_shares} |
"""

BLOCK_OF = """{layers} layers;
embedding and head are the target's. It drafts a block of up to {num_steps} tokens in one pass (mask token
{mask_token_id})."""

FAMILIES = {
    "eagle3": {
        "relation": "adapter",
        "method": "An [EAGLE-3](https://arxiv.org/abs/2503.01840)",
        "made_of": """embedding and head are the
target's.""",
    },
    "p-eagle": {
        "relation": "adapter",
        "method": "A [P-EAGLE](https://arxiv.org/abs/2602.01469)",
        "made_of": """embedding and head are the
target's. It drafts all tokens of a round in one pass, at mask tokens (id {mask_token_id}).""",
    },
    "pard": {
        "relation": "finetune",
        "method": "A [PARD](https://arxiv.org/abs/2504.18583)",
        "made_of": """a causal
language model whose {layers} layers began as copies of some of the target's. It drafts all tokens of a round in one
pass, at mask tokens (id {mask_token_id}).""",
    },
    "pard2": {
        "relation": "finetune",
        "method": "A [PARD-2](https://arxiv.org/abs/2605.08632)",
        "made_of": """a causal
language model whose {layers} layers began as copies of some of the target's; it reads hidden states of the target, too.
It drafts all tokens of a round in one pass, at mask tokens (id {mask_token_id}).""",
    },
    "dflash": {
        "relation": "adapter",
        "method": "A [DFlash](https://arxiv.org/abs/2602.06036)",
        "made_of": BLOCK_OF,
    },
    "dspark": {
        "relation": "adapter",
        "method": "A [DSpark](https://arxiv.org/abs/2607.05147)",
        "made_of": BLOCK_OF,
    },
    "mtp": {
        "relation": "adapter",
        "method": "A multi-token-prediction ([MTP](https://arxiv.org/abs/2412.19437))",
        "made_of": """{layers} module(s),
each a decoder layer like the target's; embedding and head are the target's. Module k drafts token k of a round, and
rounds of more tokens begin with the first module again.""",
    },
}

VOCABULARY = """the draft vocabulary of {draft_vocab_size:,} tokens, which covers {coverage:.2%} of the tokens of the
answers"""

UNROLLED = "Training-time test over {num_steps} steps"
BLOCKS = "Blocks of {num_steps} drafts after up to {anchors} random tokens of each answer,"

MASKS = "Steps after the first read the mask token. "

SAMPLES = """Step s
ran on {depth_ratio}^s of the documents; places after the end of a greedy chain of right drafts weighed
{survival_floor}, others 1. """
ROUNDS = """Chains
that greedy decoding would not begin weighed {round_floor} of that. """
LOSSES = {
    "cross-entropy": "cross-entropy",
    "dspark": "DSpark's loss, 0.1 of the cross-entropy and 0.9 of the L1 distance,",
}
REPLAYED = """Of the blocks {replay_share:.0%}
began where the round after them would. """
SHORT_BLOCKS = """Blocks of {short_share:.0%}
of the batches had fewer drafts. """
BLOCK_SAMPLES = """Drafts after the end
of a greedy chain of right ones weighed {survival_floor}, others 1. """

OWN_PROMPTS = """The target wrote its own prompts and answers; no data set was used. Prompts: {prompts:,} ({made})"""
GIVEN_PROMPTS = """The target answered {given_prompts:,} prompts of {sources}"""
OWN_BESIDE_GIVEN = """, and {prompts:,} of its own ({made})"""
WRITTEN = """openings of many kinds,
completed by the target at temperature {prompt_temperature}"""
COMPOSED = """; {composed_prompts:,} of them composed of templates"""

LONG_PROMPTS = """{long_prompts:,} more prompts
are long, up to {max_document_tokens:,} tokens with the answer: documents made of the target's texts with an
instruction, and chats of several turns. """

GREEDY = """Of each distribution {greedy_share:.0%} was moved
to the most likely token. """

BEGAN = """Training began
with the weights of `{init_from}`. """

IN_8_BITS = """Its matrices are stored
as integers of 8 bits with a scale for each row.
"""

NO_WEIGHTS = """
No weights are included. To train them, in a checkout of `hf-specdec`:

```bash
accelerate launch examples/train_drafter.py --target {base_model} --out {out} \\
    {arguments}
```

Then load the folder `{out}` instead of `{repo_id}`.
"""

# Arguments with which a training run can be repeated; those that are None are left out.
REPEATED = (
    *("family", "init_from", "layers", "draft_vocab_size", "intermediate_size", "key_value_heads", "aux_layers"),
    *("mask_token_id", "markov_rank"),
    *(
        "num_steps",
        "anchors",
        "step_decay",
        "depth_ratio",
        "survival_floor",
        "round_floor",
        "replay_share",
        "short_share",
        "loss",
        "greedy_share",
        "tokens_per_batch",
        "max_length",
        "optimizer",
        "lr",
        "weight_decay",
    ),
    *("minutes", "steps"),
)

OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for the matrices of layers, AdamW for all else"}

MEASURED = """Greedy, {max_new_tokens} new tokens, {dtype}, prompts that training never saw. Acceptance length: tokens
committed a round, drafts and the target's own. Texts that degenerate {degenerate_rule}.

{tables}"""


def write_card(folder: Path) -> None:
    """(Re)write README.md and `custom_generate/` of `folder` from its training.json and, if there, acceptance.json.

    If there is a remarks.md, its text follows the acceptance.
    """
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    arguments, data, last = training["arguments"], training["data"], training["curve"][-1]
    shares = last["held_out"]["acceptance"]
    details = {"mask_token_id": None, "depth_ratio": 1.0, "survival_floor": 1.0, **arguments, **training}
    family = arguments.get("family", "eagle3")
    in_blocks = arguments.get("anchors") is not None
    weighs_rounds = arguments.get("round_floor") not in (None, 1.0)
    is_sampled = (details["depth_ratio"], details["survival_floor"]) != (1.0, 1.0)
    text = CARD.format(
        family=family,
        **{key: value.format(**details) for key, value in FAMILIES[family].items()},
        base_model=training["target"],
        repo_id=arguments["repo_id"],
        parameters=training["parameters"] / 1e6,
        weights=about_weights(folder, training),
        acceptance=acceptance_section(folder / "acceptance.json"),
        remarks=f"\n{remarks.read_text(encoding='utf-8')}" if (remarks := folder / "remarks.md").exists() else "",
        prompts=prompts_sentence(arguments, data),
        answer_temperatures=", ".join(map(str, arguments["answer_temperatures"])),
        max_answer_tokens=arguments["max_answer_tokens"],
        long_prompts=LONG_PROMPTS.format(**{**data, **arguments}) if data.get("long_prompts") else "",
        held_out_overlap=data["held_out_overlap"],
        data_tokens=data["tokens"] / 1e6,
        step_decay=arguments["step_decay"],
        vocabulary="its whole vocabulary" if arguments["draft_vocab_size"] is None else VOCABULARY.format(**details),
        chains=(BLOCKS if in_blocks else UNROLLED).format(**details),
        loss=LOSSES[arguments.get("loss", "cross-entropy")],
        masks=MASKS if details["mask_token_id"] is not None and not in_blocks else "",
        samples=(BLOCK_SAMPLES if in_blocks else SAMPLES).format(**details) if is_sampled else "",
        rounds=ROUNDS.format(**details) if weighs_rounds else "",
        replayed=REPLAYED.format(**arguments) if arguments.get("replay_share") else "",
        shortened=SHORT_BLOCKS.format(**arguments) if arguments.get("short_share") else "",
        greedy=GREEDY.format(**arguments) if arguments.get("greedy_share") else "",
        began=BEGAN.format(init_from=Path(arguments["init_from"]).name) if arguments.get("init_from") else "",
        steps=last["step"],
        minutes=last["seconds"] / 60,
        tokens_seen=last["tokens"] / 1e6,
        optimizer=OPTIMIZERS[arguments.get("optimizer", "adamw")],
        lr=arguments["lr"],
        step_names=" | ".join(str(step + 1) for step in range(len(shares))),
        step_rule="|".join(["---"] * len(shares)),
        step_shares=" | ".join(f"{share:.2f}" for share in shares),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    write_custom_generate(folder, arguments["repo_id"])


def write_custom_generate(folder: Path, repo_id: str) -> None:
    """(Re)write `custom_generate/` of `folder`, with the drafter `repo_id` as default."""
    custom = folder / "custom_generate"
    custom.mkdir(exist_ok=True)
    source = HUB_SOURCE.read_text(encoding="utf-8").replace("REPO_ID", repo_id)
    (custom / "generate.py").write_text(source, encoding="utf-8")
    (custom / "requirements.txt").write_text("hf-specdec\n", encoding="utf-8")


def prompts_sentence(arguments: dict, data: dict) -> str:
    """Where the prompts of the training data are from."""
    sources = arguments.get("prompts", ())
    sources = ", ".join(f"`{source if source.startswith(HUB_PREFIX) else Path(source).name}`" for source in sources)
    given = {"given_prompts": 0, "composed_prompts": 0, "sources": sources, **arguments, **data}
    given["made"] = (WRITTEN + (COMPOSED if given["composed_prompts"] else "")).format(**given)
    if not given["given_prompts"]:
        return OWN_PROMPTS.format(**given)
    return (GIVEN_PROMPTS + (OWN_BESIDE_GIVEN if given["prompts"] else "")).format(**given)


def about_weights(folder: Path, training: dict) -> str:
    """How the weights in `folder` are stored, if not in bfloat16, or how to train missing ones."""
    if not any(folder.glob("*.safetensors")):
        return missing_weights(training)
    return IN_8_BITS if training["arguments"].get("weight_bits") == 8 else ""


def missing_weights(training: dict) -> str:
    """The section of the card of a drafter without weights: how to train them."""
    arguments = training["arguments"]
    given = {key: arguments.get(key) for key in REPEATED if arguments.get(key) is not None}
    repo_id = arguments["repo_id"]
    return NO_WEIGHTS.format(
        base_model=training["target"],
        repo_id=repo_id,
        out=repo_id.split("/")[-1],
        arguments=" ".join(f"--{key.replace('_', '-')} {value}" for key, value in given.items()),
    )


def acceptance_section(path: Path) -> str:
    """The measured tables in markdown, from the JSON of `evaluate_drafter.py`."""
    if not path.exists():
        return "Not measured; `examples/evaluate_drafter.py` fills this section."
    measured = json.loads(path.read_text(encoding="utf-8"))
    tables = [prompts_table(name, result) for name, result in measured["prompts"].items()]
    if "prompt_lengths" in measured:
        tables.append(lengths_table(measured["prompt_lengths"]))
    return MEASURED.format(
        max_new_tokens=measured["max_new_tokens"],
        dtype=measured["dtype"],
        degenerate_rule=measured["degenerate_rule"],
        tables="\n\n".join(tables),
    )


def prompts_table(name: str, result: dict) -> str:
    lines = [
        f"{name}: {result['count']} prompts, {result['degenerate']} of them with texts that degenerate.",
        "",
        "| K | acceptance length | accepted at position 1, 2, … |",
        "|---|---|---|",
    ]
    for num_drafts, groups in result["by_k"].items():
        every = groups["all"]
        shares = " ".join(f"{share:.2f}" for share in every["per_position"])
        lines.append(f"| {num_drafts} | {every['acceptance_length']:.2f} | {shares} |")
    return "\n".join(lines)


def lengths_table(results: dict) -> str:
    """Acceptance length over the length of the prompt, from `prompt_lengths` of `evaluate_drafter.py`'s JSON."""
    names = list(next(iter(results.values()))["by_k"])
    lines = [
        "Acceptance length by the length of the prompt in tokens, all of these prompts:",
        "",
        f"| prompt | prompts | {' | '.join(f'K = {name}' for name in names)} |",
        f"|{'---|' * (len(names) + 2)}",
    ]
    for length, result in results.items():
        found = [f"{result['by_k'][name]['all']['acceptance_length']:.2f}" for name in names]
        lines.append(f"| {length} | {result['count']} | {' | '.join(found)} |")
    return "\n".join(lines)


if __name__ == "__main__":  # python examples/training/card.py FOLDER ...
    for name in sys.argv[1:]:
        write_card(Path(name))
