"""The families of drafters, one `Family` each, in one list."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from ..checkpoints import detection
from ..checkpoints.checkpoint import Checkpoint, Selection
from ..checkpoints.detection import Published, check_not_refused
from ..checkpoints.interpretation import Decisions, without_none
from ..checkpoints.mtp_layouts import needed_tensors
from ..checkpoints.read_blocks import DFlash2Reader, DFlashReader, DominoReader, DSparkReader, DSpineReader
from ..checkpoints.read_eagle import Eagle3Reader, PEagleReader
from ..checkpoints.read_models import read_cache_reader, read_draft_model, read_pard2
from ..checkpoints.read_mtp import read_mtp
from ..config import DrafterConfig
from .base import Drafter
from .cache_reader import CacheReaderDrafter
from .dflash import DFlashDrafter
from .dflash2 import DFlash2Drafter
from .domino import DominoDrafter
from .draft_model import DraftModelDrafter
from .dspark import DSparkDrafter
from .dspine import DSpineDrafter
from .eagle3 import Eagle3Drafter, PEagleDrafter
from .mtp import MtpDrafter
from .none import WeightlessDrafter
from .pard2 import Pard2Drafter
from .suffix import SuffixDrafter


def _module_tensors(found: Published) -> Collection[str]:
    return [tensor.published for tensor in needed_tensors(found.config, found.tensors, found.given)]


@dataclass(frozen=True)
class Family:
    """A family of drafters.

    Attributes:
        drafter: the family's class. Its `config_class` is the normal form of a checkpoint, which `save_pretrained`
            writes.
        detect: whether a published checkpoint is of the family; None if only the normal form is published. Families
            are tried in the order of the list.
        read: reads config.json, and the shapes of the tensors if there are any, into the normal form. It is given the
            target's text configuration, or None, and the caller's `Decisions`.
        select: the names of the checkpoint's tensors that are needed.
    """

    drafter: type[Drafter]
    detect: Callable[[Published], bool] | None = None
    read: Callable[[Checkpoint, PreTrainedConfig | None, Decisions], DrafterConfig] | None = None
    select: Callable[[Published], Collection[str]] = lambda found: found.tensors


FAMILIES = [
    Family(Pard2Drafter, detection.is_pard2, read_pard2),
    Family(DominoDrafter, detection.is_domino, DominoReader.read),
    Family(DFlash2Drafter, detection.is_dflash2, DFlash2Reader.read),
    Family(DSpineDrafter, detection.is_dspine, DSpineReader.read),
    Family(DSparkDrafter, detection.is_dspark, DSparkReader.read),
    Family(DFlashDrafter, detection.is_block_drafter, DFlashReader.read),
    Family(CacheReaderDrafter, detection.is_cache_reader, read_cache_reader),
    Family(PEagleDrafter, detection.is_peagle, PEagleReader.read),
    Family(Eagle3Drafter, detection.is_eagle3, Eagle3Reader.read),
    Family(MtpDrafter, detection.is_mtp, read_mtp, _module_tensors),
    Family(DraftModelDrafter, detection.is_language_model, read_draft_model),
    Family(SuffixDrafter),
]
_registered: list[Family] = []  # families of other packages, which are tried first


def register_drafter(
    cls: type[Drafter] | None = None,
    *,
    detect: Callable[[Published], bool] | None = None,
    read: Callable[[Checkpoint, PreTrainedConfig | None, Decisions], DrafterConfig] | None = None,
) -> Any:
    """Class decorator: register a `Drafter` subclass for `AutoDrafter`, under the `model_type` of its config class.

    `@register_drafter` is enough for checkpoints that `save_pretrained` wrote. Published checkpoints also need `detect`
    and `read`, see `Family`. Registered families are tried before the families of this package.

    Raises:
        TypeError: `cls` is no `Drafter` subclass, or its `config_class` no `DrafterConfig` subclass.
        ValueError: another class has the model type, or only one of `detect` and `read` was given.
    """
    if (detect is None) != (read is None):
        raise ValueError("register_drafter was given one of detect and read; expected both, or none.")
    if cls is None:
        return partial(register_drafter, detect=detect, read=read)
    config_class = getattr(cls, "config_class", None)
    if not (isinstance(cls, type) and issubclass(cls, Drafter)):
        raise TypeError(f"register_drafter got {cls!r}; expected a subclass of hf_specdec.Drafter.")
    if not (isinstance(config_class, type) and issubclass(config_class, DrafterConfig)):
        raise TypeError(f"{cls.__name__}.config_class is {config_class!r}; expected a subclass of DrafterConfig.")
    taken = registered_drafters().get(config_class.model_type)
    if taken not in (None, cls):
        raise ValueError(
            f"The model type {config_class.model_type!r} of {cls.__name__} is already registered for {taken.__name__}."
        )
    if taken is None:
        _registered.append(Family(cls, detect, read))
    return cls


def registered_drafters() -> dict[str, type[Drafter]]:
    """Registered drafter classes by the `model_type` of their configs."""
    return {family.drafter.config_class.model_type: family.drafter for family in (*FAMILIES, *_registered)}


def find_family(found: Published) -> Family:
    """The family of a published checkpoint. If it is not supported, raises `ValueError`, which names the family found,
    or the keys that were looked for."""
    model_type = found.config.get("model_type") or ""
    for family in _registered:
        if family.detect is not None and family.detect(found):
            return family
    if model_type.startswith(DrafterConfig.model_type):
        raise ValueError(
            f"{found.name} is of the family {model_type!r}, which is not registered: it was saved by a newer "
            "hf_specdec, or its class was not passed to register_drafter."
        )
    check_not_refused(found)
    for family in FAMILIES:
        if family.detect is not None and family.detect(found):
            return family
    raise ValueError(
        f"{found.name} is a checkpoint of no known drafter dialect. Looked in config.json for a model_type of "
        "hf_specdec, speculators_model_type (speculators), eagle_config (NVIDIA ModelOpt, SpecForge), an Eagle3 "
        "architecture (SpecForge), draft_vocab_size (SafeAILab), ptd_token_id (Amazon), dflash_config or block_size "
        "(DFlash and DSpark), num_nextn_predict_layers and its like (MTP), a ForCausalLM architecture (draft models, "
        f"PARD); found model_type {found.config.get('model_type')!r}, architectures "
        f"{found.config.get('architectures')!r} and the keys {sorted(found.config)}."
    )


def needed_by(target: PreTrainedConfig | None, overrides: Mapping[str, Any]) -> Selection:
    """A `Selection` of the tensors that a drafter needs, given the target's configuration and `Overrides`."""
    text = None if target is None else target.get_text_config()

    def select(name: str, config: Mapping[str, Any], names: Collection[str]) -> Collection[str]:
        if config.get("model_type") in registered_drafters():
            return names
        found = Published(name, config, names, text, without_none(overrides))
        return find_family(found).select(found)

    return select


def has_no_weights(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a drafter is of a family without weights. Raises `ValueError`, which names the family, if it is
    refused."""
    check_not_refused(Published(name, config))
    return issubclass(registered_drafters().get(config.get("model_type"), Drafter), WeightlessDrafter)
