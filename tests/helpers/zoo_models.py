"""Tiny random models of every causal and image-text class of transformers, and prompts for them."""

from __future__ import annotations

import copy

import torch
import transformers
import zoo_sources
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from zoo_configs import FIRST_PROMPT_ID, LAST_PROMPT_ID, VOCAB, tiny_config

from hf_specdec.patching.mask_rules import ordinary_tokens
from hf_specdec.patching.support import cache_windows, stated_positions

# The longer prompt outgrows every window, the shorter one does so with its continuation.
PROMPT_LENGTHS = (13, 6)
MAX_NEW_TOKENS = 20
LONGEST_WINDOW = 200
THEIRS = "transformers"
# Parameters of the largest model that is run.
LARGEST_MODEL = 80_000_000
# Ways to make a random model generate varied tokens, the first that does is taken: what weights of two and more
# dimensions are scaled to, and whether embeddings and head stay one matrix where a family has it so.
LIVELINESS = ((0.3, True), (0.3, False), (0.12, True), (0.12, False), (0.06, False))
SHARED_STD = 0.03
ENOUGH_VARIETY = 6

# Classes that are encoders unless their configuration makes them decoders, and the suffix of their names then.
ENCODERS = (
    "BertLMHeadModel",
    "BertGenerationDecoder",
    "BigBirdForCausalLM",
    "CamembertForCausalLM",
    "Data2VecTextForCausalLM",
    "ElectraForCausalLM",
    "ErnieForCausalLM",
    "MegatronBertForCausalLM",
    "RemBertForCausalLM",
    "RoCBertForCausalLM",
    "RoFormerForCausalLM",
    "RobertaForCausalLM",
    "RobertaPreLayerNormForCausalLM",
    "XLMRobertaForCausalLM",
    "XLMRobertaXLForCausalLM",
    "XmodForCausalLM",
)
AS_DECODER = "(is_decoder)"


def is_sourced(name: str) -> bool:
    """Whether a checkout of transformers' tests has a configuration of the class `name`."""
    try:
        return zoo_sources.is_used() and zoo_sources.find(name.partition(" ")[0]) is not None
    except Exception:  # whatever the code of tests raises
        return False


def class_names() -> list[str]:
    """The classes of both mappings, each once, followed by the encoders as decoders."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    names = list(dict.fromkeys(name for mapping in mappings for name in mapping.values()))
    return names + [f"{name} {AS_DECODER}" for name in ENCODERS if name in names]


def build(name: str) -> PreTrainedModel:
    """A tiny random model of the class `name`, in float32 and evaluation mode, that generates varied tokens.

    Raises:
        Exception: whatever transformers raises of a class that cannot be built.
    """
    best, most = None, -2
    for weight_std, tied in LIVELINESS:
        model = instantiate(name, weight_std, tied)
        variety = variety_of(model)
        if variety > most:
            best, most = model, variety
        if most >= ENOUGH_VARIETY or variety < 0:
            break
    return best


def instantiate(name: str, weight_std: float, tied: bool, seed: int = 0) -> PreTrainedModel:
    """A tiny random model of the class `name`, one of `class_names()`; see `LIVELINESS`."""
    class_name, _, variant = name.partition(" ")
    model_class = getattr(transformers, class_name)
    extra = {"is_decoder": True} if variant == AS_DECODER else {}
    model, failure = None, None
    for kind in (*([THEIRS] if is_sourced(name) else ()), True, False):
        try:
            if kind == THEIRS:
                config = copy.deepcopy(zoo_sources.find(class_name).config)
                vars(config).update(extra)
            else:
                config = tiny_config(model_class.config_class, kind, tied, extra)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class._from_config(config).parameters())
            if size > LARGEST_MODEL:
                raise ValueError(f"it has {size} parameters when shrunk")
            torch.manual_seed(seed)
            model = model_class._from_config(config, dtype=torch.float32)
            break
        except Exception as error:  # whatever configurations and models raise about sizes that do not fit
            failure = failure or error
    if model is None:
        raise failure
    enliven(model, weight_std)
    generation = model.generation_config
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    generation.pad_token_id = pad if isinstance(pad, int) and 0 <= pad < FIRST_PROMPT_ID else 0
    generation.eos_token_id = None
    generation.bos_token_id = 1
    return model.eval()


@torch.no_grad()
def enliven(model: PreTrainedModel, weight_std: float) -> None:
    """Scale random weights to `weight_std`, and draw biases and sinks that are initialised to zero.

    A tied embedding and head stays small, or every token would be followed by itself; so do biases of the scores. A
    padding token that is not that of prompts is drawn, too: its embedding is zero, and for a zero embedding an indexer
    scores all tokens the same.
    """
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:  # an encoder's
        embedding = None
    head = getattr(model.get_output_embeddings(), "weight", None)
    shared = head if head is getattr(embedding, "weight", None) else None
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.numel() < 2:
            continue
        spread = float(parameter.std())
        if parameter is shared:
            parameter.mul_(SHARED_STD / spread)
        elif parameter.dim() >= 2 and 0 < spread < weight_std:
            parameter.mul_(weight_std / spread)
        elif name.endswith(("bias", "sinks")) and len(parameter) != VOCAB and float(parameter.abs().max()) == 0:
            parameter.normal_(std=weight_std)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias") and float(buffer.abs().max()) == 0:
            buffer.normal_(std=weight_std)
    padding = getattr(embedding, "padding_idx", None)
    if padding is not None and padding >= FIRST_PROMPT_ID:
        embedding.weight[padding].normal_(std=float(embedding.weight.std()))


def variety_of(model: PreTrainedModel) -> int:
    """The number of different tokens in the longer prompt's continuation; -1 if there is none."""
    try:
        text = generate(model, rows_of(prompts(model))[0])
        return len(set(text[0, -MAX_NEW_TOKENS:].tolist()))
    except Exception:  # what plain generate() raises is noted when it is compared
        return -1


def prompts(model: PreTrainedModel, seed: int = 1) -> dict[str, torch.Tensor]:
    """Two left-padded prompts of unequal length: `input_ids` and `attention_mask` `[2, 13]`, or more columns."""
    generator, lengths = torch.Generator().manual_seed(seed), prompt_lengths(model)
    width = max(lengths)
    input_ids = torch.full((len(lengths), width), model.generation_config.pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    ordinary = torch.arange(FIRST_PROMPT_ID, LAST_PROMPT_ID + 1)
    if zoo_sources.is_used():  # the vocabulary need not be ours
        ordinary = torch.tensor(ordinary_tokens(model, 64))
    for row, length in enumerate(lengths):
        tokens = ordinary[torch.randint(len(ordinary), (length,), generator=generator)]
        input_ids[row, width - length :], attention_mask[row, width - length :] = tokens, 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def prompt_lengths(model: PreTrainedModel) -> tuple[int, ...]:
    """`PROMPT_LENGTHS`, the first one beyond every short window that `model` states, within its positions."""
    longest, shortest = PROMPT_LENGTHS
    if zoo_sources.is_used():
        window = max((size for size in cache_windows(model) if size and size < LONGEST_WINDOW), default=0)
        positions = (stated_positions(model) or 512) - MAX_NEW_TOKENS - 1
        longest = max(longest, min(window + 7, positions))
    return longest, shortest


def rows_of(inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each prompt by itself, without padding."""
    rows = []
    for row in range(len(inputs["input_ids"])):
        keep = inputs["attention_mask"][row].bool()
        rows.append({name: value[row : row + 1, keep] for name, value in inputs.items()})
    return rows


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options) -> torch.Tensor:
    """`[B, P + T]`: the output of greedy `generate()`."""
    with torch.no_grad():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, **options)
    return getattr(output, "sequences", output)
