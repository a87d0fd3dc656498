"""Drafter configurations: the one normal form that every published dialect is read into and that is saved."""

from __future__ import annotations

import functools
import inspect
import numbers
from typing import Any, get_args, get_origin

from transformers import AutoConfig, PreTrainedConfig

DEFAULT_ROPE_THETA = 10000.0

# Draft tokens a round. Buffers and the work of a round grow with it; serving engines stop far earlier.
MOST_ASSISTANT_TOKENS = 1024

# Values of `MtpConfig.chaining`.
CHAININGS = ("modules", "target")


def default_aux_layer_ids(num_layers: int) -> list[int]:
    """Boundaries tapped by EAGLE-3 when a checkpoint names none: 2, n // 2 and n - 3, ascending, without repeats.

    Boundary `b` is the residual stream that enters layer `b` (0-based) of a target with `num_layers` layers.
    """
    return sorted({min(max(layer_id, 0), num_layers) for layer_id in (2, num_layers // 2, num_layers - 3)})


def _token_of_target(name: str) -> property:
    """The target's special token `name`, read from its configuration; that of the file, if any, while unbound."""

    def read(self: DrafterConfig):
        if self.target is None:
            return vars(self).get(name)
        return getattr(self.target.get_text_config(), name, None)

    def write(self: DrafterConfig, value) -> None:
        vars(self)[name] = value

    return property(read, write)


class DrafterConfig(PreTrainedConfig):
    """What every drafter has, whatever its family.

    Args:
        vocab_size: size of the target's vocabulary; `generate()` compares it with the target's.
        draft_vocab_size: number of tokens the draft head scores; at most `vocab_size`.
        num_assistant_tokens: draft tokens a round (K) unless `generate()` is told otherwise.
        dialect: publisher whose layout the checkpoint was read from; `"hf_specdec"` for our own.
        target_name_or_path: name of the target the drafter was trained for, if the checkpoint says.
        parallel_drafting: whether all K tokens are drafted in one pass, the last K - 1 of them at mask tokens.
        mask_token_id: the token that such a pass embeds where it has no token yet.

    Attributes:
        target: configuration of the target that the drafter is bound to; None before. It is not saved.
        bos_token_id, eos_token_id, pad_token_id: of the target, which pipelines compare with an assistant's. Not saved.
    """

    # A slot is no part of what transformers compares and saves, which is the instance's `__dict__`.
    __slots__ = ("target",)

    model_type = "hf_specdec"
    family = "base"

    vocab_size: int = 32000
    draft_vocab_size: int | None = None
    num_assistant_tokens: int = 5
    dialect: str = "hf_specdec"
    target_name_or_path: str | None = None
    parallel_drafting: bool = False
    mask_token_id: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        check_types(self)
        self.target: PreTrainedConfig | None = None
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; expected 1 to vocab_size = {self.vocab_size}."
            )
        check_num_assistant_tokens(self.num_assistant_tokens)
        self._check_mask_token()
        super().__post_init__(**kwargs)

    bos_token_id = _token_of_target("bos_token_id")
    eos_token_id = _token_of_target("eos_token_id")
    pad_token_id = _token_of_target("pad_token_id")

    @property
    def num_embeddings(self) -> int:
        """Tokens that the drafter can embed."""
        return self.vocab_size

    def _get_generation_parameters(self) -> dict:
        """What transformers would not have in a saved configuration; `num_assistant_tokens` is a field of this one.

        Older versions find that out by building a configuration without arguments, which not every family has.
        """
        return {}

    def _check_mask_token(self) -> None:
        if self.mask_token_id is None:
            if self.parallel_drafting:
                raise ValueError(
                    "parallel_drafting is True, but mask_token_id is None; expected the id of the mask token."
                )
        elif not 0 <= self.mask_token_id < self.num_embeddings:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}; expected one of the {self.num_embeddings} tokens that the "
                "drafter embeds."
            )


# Fields of `Eagle3Config` that configurations saved by earlier versions have under another name.
_EARLIER_NAMES = {"aux_hidden_state_layer_ids": "taps", "num_aux_hidden_states": "num_taps"}


class Eagle3Config(DrafterConfig):
    """EAGLE-3 drafter (arXiv 2503.01840): decoder layers over tapped hidden states of the target.

    Args:
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
            hidden_act, rms_norm_eps, attention_bias, mlp_bias: the draft layers, named as in `LlamaConfig`.
        qk_norm: Qwen3-style RMSNorm on every query and key head.
        rope_parameters: RoPE in transformers 5's form, `{"rope_type": ..., "rope_theta": ...}`.
        max_position_embeddings: read by some RoPE types; never clamps a position.
        sliding_window: window of the layers that `layer_types` calls `"sliding_attention"`.
        layer_types: one of `"full_attention"`, `"sliding_attention"` a layer; all full when None.
        target_hidden_size: width of a tap.
        taps: tapped boundaries in ascending order (see `default_taps`); the boundary after the last layer is the
            stream *before* the final norm. None: `default_taps` of the target, settled by `bind`.
        use_aux_hidden_state: False for heads that read the target's last hidden state, after the final norm, and
            have no `fc`.
        norm_before_residual: the first layer's residual is the normed hidden state instead of the raw one.
        norm_before_fc: one RMSNorm over the concatenated taps before `fc`.
        fc_norm: one RMSNorm a tap before `fc`.
        fc_bias: bias on `fc`.
        norm_output: the hidden state fed back to the next draft step is taken after the final norm (EAGLE 3.1).
        final_norm: whether a norm precedes the draft head.
        logit_scale: factor on the draft logits.
        own_embedding, own_head: whether the checkpoint holds an embedding and a head; otherwise `bind` borrows the
            target's. A borrowed head is restricted to the draft vocabulary.
    """

    model_type = "hf_specdec_eagle3"
    family = "eagle3"

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 1
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_parameters: dict | None = None
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    initializer_range: float = 0.02

    target_hidden_size: int | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    use_aux_hidden_state: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    fc_bias: bool = False
    norm_output: bool = False
    final_norm: bool = True
    logit_scale: float = 1.0
    own_embedding: bool = True
    own_head: bool = True
    num_aux_hidden_states: int | None = None

    def __post_init__(self, **kwargs):
        for name, earlier in _EARLIER_NAMES.items():
            if earlier in kwargs:
                setattr(self, name, kwargs.pop(earlier))
        check_types(self)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA}
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        self._check_windows()
        if self.use_aux_hidden_state and self.aux_hidden_state_layer_ids == []:
            raise ValueError(
                "aux_hidden_state_layer_ids is []; expected at least one layer id, or None for the default ones."
            )
        if self.aux_hidden_state_layer_ids is not None:
            self.aux_hidden_state_layer_ids = sorted(set(self.aux_hidden_state_layer_ids))
            self.num_aux_hidden_states = len(self.aux_hidden_state_layer_ids)
        elif self.num_aux_hidden_states is None:
            self.num_aux_hidden_states = 3
        if not self.use_aux_hidden_state and self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"use_aux_hidden_state is False, so the drafter reads the target's hidden states as they are, but "
                f"hidden_size is {self.hidden_size} and target_hidden_size is {self.target_hidden_size}."
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both set; a checkpoint has at most one of them.")
        super().__post_init__(**kwargs)

    def _check_windows(self) -> None:
        types, window = self.layer_types, self.sliding_window
        if len(types) != self.num_hidden_layers or not set(types) <= {"full_attention", "sliding_attention"}:
            raise ValueError(
                f'layer_types is {types}; expected "full_attention" or "sliding_attention" for each of the '
                f"{self.num_hidden_layers} draft layers."
            )
        if "sliding_attention" in types and (window is None or window < 1):
            raise ValueError(f"layer_types is {types}, but sliding_window is {window}; expected a size.")

    @property
    def aux_hidden_size(self) -> int:
        """Width of what the drafter reads at one position: all taps side by side, or one hidden state."""
        return (self.num_aux_hidden_states if self.use_aux_hidden_state else 1) * self.target_hidden_size


class PEagleConfig(Eagle3Config):
    """P-EAGLE drafter (arXiv 2602.01469): EAGLE-3 that drafts all K tokens in one pass.

    The K - 1 places that have no token yet embed `mask_token_id` and read a learned hidden state.

    Args:
        parallel_drafting: True if there is a mask token, when None.
        mask_hidden_shape: of the tensor `mask_hidden`, which stands in for a position's taps; publishers differ in
            the number of leading ones. `[1, 1, tap_width]` when None.
    """

    model_type = "hf_specdec_peagle"
    family = "p-eagle"
    has_no_defaults_at_init = True  # There is no mask token to default to.

    parallel_drafting: bool | None = None
    mask_hidden_shape: list[int] | None = None

    def __post_init__(self, **kwargs):
        check_types(self)
        if self.parallel_drafting is None:
            self.parallel_drafting = self.mask_token_id is not None
        super().__post_init__(**kwargs)
        if self.mask_hidden_shape is None:
            self.mask_hidden_shape = [1, 1, self.aux_hidden_size]


class DraftModelConfig(DrafterConfig):
    """A causal language model as drafter, sequential (arXiv 2211.17192) or parallel (PARD, arXiv 2504.18583).

    Args:
        model: the model's own configuration.
    """

    model_type = "hf_specdec_draft_model"
    family = "draft model"

    model: dict | None = None

    @property
    def own(self) -> PreTrainedConfig:
        """The model's own configuration."""
        return AutoConfig.for_model(**(self.model or {}))

    @property
    def num_embeddings(self) -> int:
        return self.vocab_size if self.model is None else self.own.get_text_config().vocab_size


class MtpConfig(DrafterConfig):
    """Multi-token-prediction modules of a target (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    They are inside the target's own checkpoint, or were trained for it: `drafters.mtp.config_for` makes their settings.

    Args:
        block: configuration of the modules' decoder layers: like the target's, with one layer a module.
        num_modules: how many modules there are; module k % num_modules drafts token k of a round.
        hidden_size, rms_norm_eps, initializer_range: of the target.
        hidden_first: whether a module's projection reads `[hidden | embedding]` instead of `[embedding | hidden]`.
        norm_offset: whether the modules' norms scale by 1 + weight (Gemma's) instead of by the weight.
        norm_output: whether a module hands on its output after its final norm instead of before.
        own_embedding, own_head: whether each module has an embedding or a head of its own; otherwise the target's.
        zero_first_embedding: whether slot 0 reads zeros in place of an embedding, as vLLM runs some families.
        chaining: what the caches of modules behind the first are made of. `"modules"`: of the outputs of the module
            before, as in training. `"target"`: of the target's hidden states, as far as these are known. None: by
            modules if there are several, otherwise by the target, as serving engines run them.
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


def check_types(config: DrafterConfig) -> None:
    """Raise `ValueError` if a field of `config` that is annotated in this module has a value of another type."""
    for name, expected in _annotations(type(config)).items():
        value = getattr(config, name)
        if not any(_is_of(value, one) for one in get_args(expected) or (expected,)):
            wanted = getattr(expected, "__name__", str(expected))
            raise ValueError(f"{name} is {value!r}; expected {wanted}.")


@functools.cache
def _annotations(config_class: type[DrafterConfig]) -> dict[str, Any]:
    """Of a class and those here that it is derived from; what others register may be annotated with anything."""
    found: dict[str, Any] = {}
    for one in reversed(config_class.__mro__):
        if one.__module__ == __name__:
            found |= inspect.get_annotations(one, eval_str=True)
    return found


def _is_of(value: Any, expected: Any) -> bool:
    """Whether `value` is of a type, or a sequence of a type; an integer is a float, and no bool is an integer."""
    if get_origin(expected) is list:
        return isinstance(value, list | tuple) and all(_is_of(one, get_args(expected)[0]) for one in value)
    if isinstance(value, bool):
        return expected is bool
    return isinstance(value, int | float if expected is float else expected)


def default_chaining(num_modules: int) -> str:
    """`MtpConfig.chaining` of `num_modules` modules that say nothing about it."""
    return "modules" if num_modules > 1 else "target"


def check_num_assistant_tokens(value: int) -> int:
    """Return `value` if it can be a number of draft tokens a round, else raise `ValueError`."""
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_number or not 1 <= value <= MOST_ASSISTANT_TOKENS:
        raise ValueError(
            f"num_assistant_tokens is {value!r}; expected an integer of at least 1 and at most "
            f"{MOST_ASSISTANT_TOKENS} (draft tokens a round)."
        )
    return int(value)
