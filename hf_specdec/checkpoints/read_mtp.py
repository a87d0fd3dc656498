"""Reader of MTP modules, in their target's checkpoint or published on their own, into the normal form `MtpConfig`."""

from __future__ import annotations

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..config import MtpConfig, default_chaining, mtp_block_settings
from .checkpoint import Checkpoint
from .dialects import speculators_depth, speculators_target
from .interpretation import Decisions
from .mtp_layouts import MtpFamily, find_family, is_speculators_mtp, module_tensors, stated_count, text_settings
from .rope import rope_by_layer_type

# Draft tokens a round of a single module, if config.json does not state for how many it was trained.
SINGLE_MODULE_DEPTH = 3


def read_mtp(checkpoint: Checkpoint, target: PreTrainedConfig | None, decisions: Decisions) -> MtpConfig:
    """Read the MTP modules of a target's checkpoint, or a module published on its own, of any supported family.

    Arguments and errors are those of `LayersReader.read`; `bind` checks whether the target fits.
    """
    config, decide = checkpoint.config, decisions.decide
    family, num_modules = find_family(config), _count_modules(checkpoint)
    text = _text_config(checkpoint, family, decisions)
    rule = f"as {family.title} publishes and runs them"
    output_rule = rule if family.norm_output else "as vLLM; transformers hands on the stream after the final norm"
    heads = "each module has a trained head" if family.own_head else "the modules have copies of the target's, or none"
    copies = "the modules have copies of the target's"
    block, num_layers = mtp_block_settings(text, num_modules), text.num_hidden_layers
    # Lists with an entry for each layer and each module: keep the modules' entries.
    for name, value in text_settings(config).items():
        if name in block and isinstance(value, list) and len(value) == num_layers + num_modules:
            block[name] = value[num_layers:]
    return MtpConfig.for_target(
        text,
        block,
        hidden_first=decide("hidden_first", family.hidden_first, rule),
        norm_offset=decide("norm_offset", family.norm_offset, rule),
        norm_output=decide("norm_output", family.norm_output, output_rule),
        own_embedding=not decide("share_embedding", True, copies),
        own_head=not decide("share_head", not family.own_head, heads),
        chaining=decide("chaining", default_chaining(num_modules), f"{num_modules} module(s)"),
        zero_first_embedding=decide("zero_first_embedding", False, "as in training; vLLM zeroes it for some families"),
        num_assistant_tokens=speculators_depth(config) or (num_modules if num_modules > 1 else SINGLE_MODULE_DEPTH),
        dialect=family.title,
        target_name_or_path=speculators_target(config),
    )


def _count_modules(checkpoint: Checkpoint) -> int:
    """The number of modules in the checkpoint. Raises `ValueError` unless config.json and tensors agree."""
    config, family = checkpoint.config, find_family(checkpoint.config)
    key, count = stated_count(config) or ("no key", None)
    if checkpoint.tensors is None:
        return count or 1
    found = {tensor.index for tensor in module_tensors(config, checkpoint.tensors)} - {None}
    if not found:
        raise ValueError(
            f"{checkpoint.name} has {count or 'some'} MTP module(s) by its config.json ({key}), but its weights hold "
            f"no tensors of them ({family.layout.where}): they were left out when it was exported. Use the original "
            f"checkpoint; or, if it is to draft as a whole model, set {key} to 0 in its config.json."
        )
    if found != set(range(count or len(found))):
        raise ValueError(
            f"{checkpoint.name} contradicts itself: it has {count or 'no stated number of'} MTP module(s) by its "
            f"config.json ({key}), but its weights hold the modules {sorted(found)} ({family.layout.where})."
        )
    if is_speculators_mtp(config) and len(found) != 1:
        raise ValueError(f"{checkpoint.name} holds {len(found)} MTP modules; expected 1 in speculators' form.")
    return len(found)


def _text_config(checkpoint: Checkpoint, family: MtpFamily, decisions: Decisions) -> PreTrainedConfig:
    """transformers' configuration of a text model with the modules' decoder layers."""
    settings = dict(checkpoint.config)
    if is_speculators_mtp(settings):
        settings = dict(text_settings(settings))
        rope = rope_by_layer_type(settings.get("rope_parameters") or {}).get("sliding_attention")
        if rope is not None:
            settings["rope_parameters"] = rope
            rule = "speculators' layers all have the RoPE of the target's sliding ones"
            decisions.decide("rope_parameters", rope, rule)
    model_type = settings.pop("model_type", None)
    # transformers has a family's own model type or its block's: for MiMo-7B only the latter.
    known = model_type if model_type in CONFIG_MAPPING else family.block
    if known not in CONFIG_MAPPING:
        raise ValueError(
            f"{checkpoint.name} has MTP modules of model_type {model_type!r}, whose decoder layers ({family.block}) "
            f"transformers {transformers.__version__} does not have; a newer one may."
        )
    return CONFIG_MAPPING[known].from_dict(settings).get_text_config()
