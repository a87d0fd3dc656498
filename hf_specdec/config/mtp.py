"""Configuration of MTP modules."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from .base import DrafterConfig, check_types

# Values of `MtpConfig.chaining`.
CHAININGS = ("modules", "target")


class MtpConfig(DrafterConfig):
    """Multi-token-prediction modules of a target (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    They are part of the target's own checkpoint, or trained for it; `for_target` makes a configuration of the latter.

    Args:
        block: settings of the modules' decoder layers: like the target's, with one layer for each module.
        num_modules: how many modules there are; module k % num_modules drafts token k of a round.
        hidden_size, rms_norm_eps, initializer_range: of the target.
        hidden_first: whether a module's projection reads `[hidden | embedding]` instead of `[embedding | hidden]`.
        norm_offset: whether the modules' norms scale by 1 + weight (Gemma's) instead of by the weight.
        norm_output: whether the next step reads a module's output after its final norm instead of before.
        own_embedding, own_head: whether each module has an embedding or a head of its own; otherwise the target's.
        zero_first_embedding: whether slot 0 reads zeros instead of an embedding, as vLLM runs some families.
        chaining: which hidden states modules after the first read, and so what their caches hold. `"modules"`: the
            outputs of the module before, as in training. `"target"`: the target's hidden states, as far as they are
            known. None: `default_chaining`.
    """

    model_type = "hf_specdec_mtp"
    family = "mtp"

    block: dict | None = None
    num_modules: int = 1
    hidden_size: int = 4096
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    hidden_first: bool = False
    norm_offset: bool = False
    norm_output: bool = True
    own_embedding: bool = False
    own_head: bool = False
    zero_first_embedding: bool = False
    chaining: str | None = None

    def __post_init__(self, **kwargs):
        check_types(self)
        if self.chaining is None:
            self.chaining = default_chaining(self.num_modules)
        if self.chaining not in CHAININGS:
            raise ValueError(f"chaining is {self.chaining!r}; expected one of {', '.join(map(repr, CHAININGS))}.")
        if self.parallel_drafting:
            raise ValueError("parallel_drafting is True, but MTP modules have no mask token; expected False.")
        super().__post_init__(**kwargs)

    @classmethod
    def for_target(cls, text: PreTrainedConfig, block: dict[str, Any], **settings: Any) -> MtpConfig:
        """The configuration of modules for a target.

        Args:
            text: the target's text configuration.
            block: settings of the decoder layers: `mtp_block_settings` of the target, or the same with other MLPs.
            settings: other fields.
        """
        return cls(
            block=block,
            num_modules=block["num_hidden_layers"],
            hidden_size=text.hidden_size,
            rms_norm_eps=getattr(text, "rms_norm_eps", cls.rms_norm_eps),
            initializer_range=getattr(text, "initializer_range", cls.initializer_range),
            vocab_size=text.vocab_size,
            **settings,
        )


def mtp_block_settings(text: PreTrainedConfig, num_modules: int) -> dict[str, Any]:
    """The settings of a decoder that has one layer for each of `num_modules` modules and is otherwise like `text`.

    A module's layer has full attention, and experts where the target has any, unless the configuration states
    otherwise (`mtp_layer_types`, `mtp_mlp_layer_types`).

    Raises:
        ValueError: expected `text` to have `num_hidden_layers`.
    """
    settings = text.to_dict()
    if "num_hidden_layers" not in settings:
        raise ValueError(
            f"Layers of model_type {text.model_type!r} cannot be those of MTP modules: its configuration has no "
            "num_hidden_layers."
        )
    changes: dict[str, Any] = {
        "num_hidden_layers": num_modules,
        "layer_types": getattr(text, "mtp_layer_types", None) or ["full_attention"] * num_modules,
        "mlp_layer_types": getattr(text, "mtp_mlp_layer_types", None) or ["sparse"] * num_modules,
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        # Neither an embedding nor a head is built.
        "vocab_size": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    # Per-layer settings are derived again from the layers' types; quantised modules are dequantised when they are read.
    for name in (
        "per_layer_config",
        "num_nextn_predict_layers",
        "num_mtp_layers",
        "architectures",
        "auto_map",
        "quantization_config",
    ):
        settings.pop(name, None)
    return settings | {name: value for name, value in changes.items() if name in settings}


def default_chaining(num_modules: int) -> str:
    """`MtpConfig.chaining` where a checkpoint does not state it, as serving engines run `num_modules` modules."""
    return "modules" if num_modules > 1 else "target"
