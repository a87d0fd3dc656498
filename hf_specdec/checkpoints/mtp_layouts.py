"""Published layouts of MTP modules: the modules' tensors in a target's checkpoint, and how a family runs them.

Names and wiring follow the publishers' checkpoints and vLLM's readers (deepseek_mtp.py, glm4_moe_mtp.py,
step3p5_mtp.py, mimo_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py) and vllm-project/speculators (models/mtp).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

# Keys of the number of modules in config.json, in the order of look-up.
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")

# Names of a module's parts around its decoder layer: as published, and in the normal form.
_FRAME_NAMES = {
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "projection",
    "shared_head.norm": "final_norm",
    "shared_head.head": "lm_head",
    "shared_head.output": "lm_head",
    "embed_tokens": "embed_tokens",
    "token_layernorm": "embedding_norm",
    "hidden_layernorm": "hidden_norm",
    "input_proj": "projection",
    "final_layernorm": "final_norm",
    "pre_fc_norm_embedding": "embedding_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "fc": "projection",
    "norm": "final_norm",
}


class MtpLayout(NamedTuple):
    """Layout of the tensors of MTP modules. `where` describes it in messages. In `pattern` the group `index` is the
    module's number and `part` the name inside the module; all modules share a tensor without an index. With
    `is_appended` modules are numbered as layers after the target's last one."""

    where: str
    pattern: re.Pattern[str]
    is_appended: bool = False


APPENDED = MtpLayout(
    "layers after the last of num_hidden_layers",
    re.compile(r"(?:model\.)?(?:language_model\.)?layers\.(?P<index>\d+)\.(?:transformer\.)?(?P<part>.+)"),
    is_appended=True,
)
MTP_LAYERS = MtpLayout("mtp_layers", re.compile(r"(?:model\.)?mtp_layers\.(?P<index>\d+)\.(?P<part>.+)"))
QWEN = MtpLayout("mtp", re.compile(r"mtp\.(?:layers\.(?P<index>\d+)\.)?(?P<part>.+)"))

# Name of one expert's tensor, if experts are not stacked in one tensor.
_EXPERT = re.compile(r"\.experts\.(\d+)\.(.+)$")

# Names that only tensors of MTP modules have, in any model.
_MODULE_NAME = re.compile(r"(?:model\.)?mtp(?:_layers)?\.")


class MtpFamily(NamedTuple):
    """How a family publishes and runs its modules. `block` is transformers' model type of the decoder layers; the last
    four are fields of `MtpConfig`."""

    title: str
    layout: MtpLayout
    block: str
    hidden_first: bool = False
    norm_offset: bool = False
    norm_output: bool = True
    own_head: bool = False


_STEP = MtpFamily("Step-3.5", APPENDED, "step3p5", norm_offset=True, norm_output=False, own_head=True)
_QWEN35 = MtpFamily("Qwen3.5", QWEN, "qwen3_5_text", norm_offset=True)
_QWEN35_MOE = MtpFamily("Qwen3.5-MoE", QWEN, "qwen3_5_moe_text", norm_offset=True)

# By the model type of the target or of its text model.
FAMILIES = {
    "deepseek_v3": MtpFamily("DeepSeek-V3", APPENDED, "deepseek_v3"),
    "glm4_moe": MtpFamily("GLM-4.5", APPENDED, "glm4_moe"),
    "step3p5": _STEP,
    "step3p7": _STEP,
    # MiMo's remote code subclasses Qwen2; transformers has no model type mimo.
    "mimo": MtpFamily("MiMo-7B", MTP_LAYERS, "qwen2", hidden_first=True),
    "qwen3_next": MtpFamily("Qwen3-Next", QWEN, "qwen3_next", norm_offset=True),
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "qwen3_5_moe_text": _QWEN35_MOE,
}
# Model types of decoder layers in speculators' form, and whether their norms scale by 1 + weight.
_SPECULATORS_BLOCKS = {"qwen3": False, "qwen3_next": True, "qwen3_5_text": True, "qwen3_5_moe_text": True}


def holds_modules(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether config.json or one of the tensor `names` is that of MTP modules of any family."""
    return (
        is_speculators_mtp(config)
        or stated_count(config) is not None
        or bool(config.get("mtp_config") or module_names(config, names))
    )


def module_names(config: Mapping[str, Any], names: Collection[str]) -> set[str]:
    """The tensor `names` that belong to MTP modules of any family."""
    certain = {name for name in names if _MODULE_NAME.match(name)}
    return certain | {tensor.published for tensor in module_tensors(config, names)}


def has_shape_of(config: Mapping[str, Any], target: PreTrainedConfig) -> bool:
    """Whether the model type and sizes in config.json agree with `target`, the target's text configuration."""
    own, family = text_settings(config), find_family(config)
    types = {own.get("model_type"), config.get("model_type")} | ({family.block} if family is not None else set())
    is_known = target.model_type in types or (family is not None and FAMILIES.get(target.model_type) is family)
    sizes = {name: getattr(target, name, None) for name in ("hidden_size", "num_hidden_layers")}
    return is_known and all(own.get(name, size) == size for name, size in sizes.items())


def missing_experts(tensors: Collection[ModuleTensor]) -> list[str]:
    """Published names of missing tensors: every expert must have the same tensors."""
    known = {tensor.published for tensor in tensors}
    parts = [(tensor.published, _EXPERT.search(tensor.part)) for tensor in tensors]
    experts = [(name.removesuffix(match[0]), int(match[1]), match[2]) for name, match in parts if match]
    numbers = range(1 + max((number for _, number, _ in experts), default=-1))
    layers = {layer for layer, _, _ in experts}
    kinds = {kind for _, _, kind in experts}
    names = (f"{layer}.experts.{number}.{kind}" for layer in layers for number in numbers for kind in kinds)
    return [name for name in names if name not in known]


def is_speculators_mtp(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a module that vllm-project/speculators published on its own."""
    return config.get("speculators_model_type") == "mtp"


def is_apart(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether the checkpoint has only modules, without the target: from speculators, or from SGLang's export, which has
    `num_hidden_layers` 1 and numbers the module as layer 0 (sgl-project/sglang deepseek_weight_loader.py)."""
    if is_speculators_mtp(config):
        return True
    matches = (APPENDED.pattern.fullmatch(name) for name in names)
    return any(match["index"] == "0" and match["part"].startswith("eh_proj.") for match in matches if match)


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the layers."""
    return config.get("transformer_layer_config" if is_speculators_mtp(config) else "text_config") or config


def stated_count(config: Mapping[str, Any]) -> tuple[str, int] | None:
    """The key of the number of modules in config.json, and the number; None if there is none."""
    for source in (config, text_settings(config)):
        for key in COUNT_KEYS:
            if source.get(key):
                return key, source[key]
    return None


def find_family(config: Mapping[str, Any]) -> MtpFamily | None:
    """The family of the modules in a checkpoint with this config.json; None if it is not supported."""
    model_type = text_settings(config).get("model_type", config.get("model_type"))
    if is_speculators_mtp(config):
        if model_type not in _SPECULATORS_BLOCKS:
            return None
        return MtpFamily("speculators", MTP_LAYERS, model_type, norm_offset=_SPECULATORS_BLOCKS[model_type])
    return FAMILIES.get(model_type) or FAMILIES.get(config.get("model_type"))


class ModuleTensor(NamedTuple):
    """A tensor of module `index`, from 0, or None if all modules share it: its name in the files and in the module."""

    published: str
    index: int | None
    part: str

    def names(self, num_modules: int) -> Iterator[str]:
        """Its names in the normal form."""
        stem, _, kind = self.part.rpartition(".")
        for index in range(num_modules) if self.index is None else (self.index,):
            if stem in _FRAME_NAMES:
                yield f"frames.{index}.{_FRAME_NAMES[stem]}.{kind}"
            else:
                yield f"decoder.layers.{index}.{self.part}"


def needed_tensors(config: Mapping[str, Any], names: Collection[str], given: Mapping[str, Any]) -> list[ModuleTensor]:
    """`module_tensors` without copies of the target's embedding and head, unless by `given` overrides, or for the head
    by its family, each module has its own."""
    found, family = module_tensors(config, names), find_family(config)
    is_shared = {
        "embed_tokens": given.get("share_embedding", True),
        "lm_head": given.get("share_head", family is None or not family.own_head),
    }
    return [one for one in found if not is_shared.get(_FRAME_NAMES.get(one.part.rpartition(".")[0]))]


def module_tensors(config: Mapping[str, Any], names: Collection[str]) -> list[ModuleTensor]:
    """The tensors among `names` that belong to MTP modules of a supported family."""
    family = find_family(config)
    if family is None:
        return []
    first = 0
    if family.layout.is_appended and not is_apart(config, names):
        first = text_settings(config).get("num_hidden_layers", 0)
    found = [
        ModuleTensor(one[0], None if one["index"] is None else int(one["index"]) - first, one["part"])
        for one in map(family.layout.pattern.fullmatch, names)
        if one is not None
    ]
    return [tensor for tensor in found if tensor.index is None or tensor.index >= 0]
