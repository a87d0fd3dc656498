"""Drafter configurations: the normal form of checkpoints, into which every dialect is read, and which is saved."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from transformers import AutoConfig, PreTrainedConfig

DEFAULT_ROPE_THETA = 10000.0

# The largest K, draft tokens a round. Buffers and compute grow with K; serving engines have far lower limits.
MAX_ASSISTANT_TOKENS = 1024

# In place of K: K is chosen for every round, see `auto_k.auto_drafts`.
AUTO = "auto"

# Values of `DSparkConfig.markov_type` and of `MtpConfig.chaining`.
MARKOV_TYPES = ("vanilla", "gated", "rnn")
CHAININGS = ("modules", "target")

# Models of one family may pad the same vocabulary to different multiples (Qwen2.5: 151936 and 152064). Vocabularies
# whose sizes differ by this much or more have different tokenizers.
MAX_PADDING = 1024

_SHARE = frozenset({"share_embedding", "share_head"})
_MASKS = frozenset({"mask_token_id", "parallel_drafting"})
_LAYERS = _SHARE | {"aux_hidden_state_layer_ids", "rope_parameters", "rope_theta"}

_SHOWN_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "target_hidden_size",
)


def _token_of_target(name: str) -> property:
    """Property for the id of the special token `name`: the target's, or before `bind` config.json's or None."""

    def read(self: DrafterConfig):
        if self.target is None:
            return vars(self).get(name)
        return getattr(self.target.get_text_config(), name, None)

    def write(self: DrafterConfig, value) -> None:
        vars(self)[name] = value

    return property(read, write)


class DrafterConfig(PreTrainedConfig):
    """Settings of every drafter.

    Args:
        vocab_size: size of the target's vocabulary; `generate()` compares it with the target's.
        draft_vocab_size: number of tokens that the draft head scores; at most `vocab_size`.
        num_assistant_tokens: draft tokens a round (K) unless a call of `generate()` sets it.
        dialect: publisher whose layout the checkpoint has; `"hf_specdec"` for the normal form.
        target_name_or_path: name of the target that the drafter was trained for, if the checkpoint states it.
        parallel_drafting: whether one pass drafts all K tokens, with mask tokens at positions without a token.
        mask_token_id: id of the mask token.
        stored_layers: by name, the linear layers that hold quantised weights: the kind of their numbers, a key of
            `stored_linear.KINDS`, and how many outputs and inputs have a common scale.

    Attributes:
        target: configuration of the target that the drafter is bound to; None before `bind`. Not saved.
        bos_token_id, eos_token_id, pad_token_id: the target's, because pipelines compare them with an assistant's. Not
            saved.
        keywords: keywords of `AutoDrafter.from_pretrained` that the family takes.
        description: description of a checkpoint of the family in messages; None for the family's name.
        least: smallest allowed values, by field.
        choices: allowed values, by field; fields that are completed later may also be None.
    """

    # Not in `__dict__`, which transformers compares and saves.
    __slots__ = ("target",)

    model_type = "hf_specdec"
    family = "base"
    keywords = frozenset()
    description = None
    least = {}
    choices = {}

    vocab_size: int = 32000
    draft_vocab_size: int | None = None
    num_assistant_tokens: int = 5
    dialect: str = "hf_specdec"
    target_name_or_path: str | None = None
    parallel_drafting: bool = False
    mask_token_id: int | None = None
    stored_layers: dict | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        hints = _annotations(type(self))
        check_types({name: getattr(self, name) for name in hints}, hints)
        for name, least in self.least.items():
            if not least <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least}, and less than 2**31.")
        for name, choices in self.choices.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                one_of = "one of " if len(choices) > 1 else ""
                raise ValueError(
                    f"{name} is {value!r}; expected {one_of}{', '.join(map(repr, choices))} in a {self.family} drafter."
                )
        self.target: PreTrainedConfig | None = None
        self._complete()
        kwargs.pop("quantization_config", None)  # by which transformers would convert layers that `stored_layers` has
        super().__post_init__(**kwargs)

    def _complete(self) -> None:
        """Fill in fields that depend on others, and raise `ValueError` for fields that contradict each other."""
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; expected 1 to vocab_size = {self.vocab_size}."
            )
        check_num_assistant_tokens(self.num_assistant_tokens)
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

    bos_token_id = _token_of_target("bos_token_id")
    eos_token_id = _token_of_target("eos_token_id")
    pad_token_id = _token_of_target("pad_token_id")

    @property
    def num_embeddings(self) -> int:
        """Number of tokens that the drafter can embed."""
        return self.vocab_size

    def _get_generation_parameters(self) -> dict:
        """Empty: transformers refuses to save generation parameters, and takes `num_assistant_tokens` for one by its
        name. Older versions compare with a configuration built without arguments, which some families cannot build."""
        return {}

    @classmethod
    def check_keywords(cls, given: Mapping[str, Any], name: str) -> None:
        """Raise `ValueError` if `given` has keywords that the family does not take; `parallel_drafting=False` is
        allowed where it is always False. `name` is the checkpoint's."""
        unknown = given.keys() - cls.keywords
        if given.get("parallel_drafting") is False and not cls.parallel_drafting:
            unknown -= {"parallel_drafting"}
        if unknown:
            raise ValueError(
                f"{name} {cls.description or f'is a drafter of the family {cls.family}'}: it takes no "
                f"{', '.join(f'`{one}=`' for one in sorted(unknown))}. Drop that keyword."
            )

    def check_fit(self, target: PreTrainedConfig, num_layers: int, name: str) -> list[int] | None:
        """Check that the drafter called `name` fits a target with this configuration and `num_layers` layers.

        Returns:
            layer ids of the hidden states that it reads, 0 to `num_layers`; None for a family that reads none by id.

        Raises:
            ValueError: the target's sizes are not those that the drafter was made for.
        """
        _check_sizes(None, self.vocab_size, target, name)

    def report(self) -> dict[str, Any]:
        """The family's own fields in `hf-specdec inspect`, as JSON values."""
        return {}


def check_types(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """`check_type` of each of `values`, by the type of its name in `hints`."""
    for name, value in values.items():
        check_type(name, value, hints[name])


def check_type(name: str, value: Any, expected: Any) -> None:
    """Raise `ValueError` if `value` is not of the type `expected`, or of one of a union."""
    if not any(_is_of(value, one) for one in get_args(expected) or (expected,)):
        wanted = getattr(expected, "__name__", " | ".join(one.split(".")[-1] for one in str(expected).split(" | ")))
        raise ValueError(f"{name} is {value!r:.200}; expected {wanted}.")


def check_positive(**values: Any) -> None:
    """Raise `ValueError` unless all `values` are finite numbers above 0."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}; expected a finite number above 0.")


@functools.cache
def _annotations(config_class: type[DrafterConfig]) -> dict[str, Any]:
    """Annotations of a class and its bases in this module. Classes elsewhere may have annotations of any kind."""
    found: dict[str, Any] = {}
    for one in reversed(config_class.__mro__):
        if one.__module__ == __name__:
            found |= inspect.get_annotations(one, eval_str=True)
    return found


def _is_of(value: Any, expected: Any) -> bool:
    """Whether `value` has the type `expected`. Tuples count as lists, integers as floats, but bools not as integers."""
    if get_origin(expected) is list:
        return isinstance(value, list | tuple) and all(_is_of(one, get_args(expected)[0]) for one in value)
    if isinstance(value, bool):
        return expected is bool
    return isinstance(value, int | float if expected is float else expected)


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer of Python or NumPy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_int(name: str, value: Any, least: int, others: str = "") -> int:
    """Return `value` if it is an integer of at least `least`, else raise `ValueError`, which names `others`."""
    if not is_integer(value) or value < least:
        raise ValueError(f"{name} is {value!r}; expected an int of at least {least}{others}.")
    return int(value)


def number_or_text(text: str) -> int | str:
    """An argument of a command line as an integer if it is one, such as K or `AUTO`."""
    return int(text) if text.lstrip("-").isdigit() else text


def check_least(options: Any, **least: int) -> None:
    """Raise `ValueError` if one of the `options` of a command line, a number or a list, is below its `least` value."""
    for name, bound in least.items():
        value = getattr(options, name)
        if any(one < bound for one in (value if isinstance(value, list) else [value]) if one is not None):
            raise ValueError(f"--{name.replace('_', '-')} is {value}; expected at least {bound}.")


def check_num_or_auto(value: int | str) -> int | str:
    """`check_num_assistant_tokens`, except that `value` may be `AUTO`."""
    if isinstance(value, str) and value == AUTO:
        return value
    return check_num_assistant_tokens(value, f', or "{AUTO}"')


def check_num_assistant_tokens(value: int, others: str = "") -> int:
    """Return `value` if it is a valid number of draft tokens a round, else raise `ValueError`, which names `others`."""
    if not is_integer(value) or not 1 <= value <= MAX_ASSISTANT_TOKENS:
        raise ValueError(
            f"num_assistant_tokens is {value!r}; expected an integer of at least 1 and at most "
            f"{MAX_ASSISTANT_TOKENS} (draft tokens a round){others}."
        )
    return int(value)


def _check_sizes(hidden_size: int | None, vocab_size: int | None, target: PreTrainedConfig, name: str) -> None:
    """Raise `ValueError` unless `target` has the sizes that the drafter called `name` needs; None allows any size."""
    text, target_name = target.get_text_config(), target.name_or_path or target.model_type
    if hidden_size not in (None, text.hidden_size):
        raise ValueError(
            f"{name} was made for a target with hidden_size {hidden_size}, but {target_name} has "
            f"hidden_size {text.hidden_size}: it is a drafter for another model."
        )
    if vocab_size not in (None, text.vocab_size):
        raise ValueError(
            f"{name} was made for a vocabulary of {vocab_size} tokens, but {target_name} has {text.vocab_size}: it is "
            "a drafter for another model, or the target was resized (resize_token_embeddings)."
        )


def default_aux_layer_ids(num_layers: int) -> list[int]:
    """Default layer ids of EAGLE-3 for n = `num_layers` layers: 2, n // 2 and n - 3, ascending and distinct.

    Id b is the stream that enters layer b, `hidden_states[b]` in transformers; id n leaves the last, before the norm.
    """
    return sorted({min(max(layer_id, 0), num_layers) for layer_id in (2, num_layers // 2, num_layers - 3)})


def default_block_layer_ids(num_layers: int, num_draft_layers: int) -> list[int]:
    """Default layer ids of DFlash: one for each draft layer, evenly spread, by z-lab's rule (`build_target_layer_ids`),
    which counts layers' outputs and so is one lower."""
    if num_draft_layers == 1:
        return [num_layers // 2 + 1]
    step = (num_layers - 4) / (num_draft_layers - 1)
    return sorted({min(max(round(1 + index * step) + 1, 0), num_layers) for index in range(num_draft_layers)})


class DraftLayersConfig(DrafterConfig):
    """Settings of drafters with decoder layers of their own that read hidden states of the target.

    Args:
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim,
            hidden_act, rms_norm_eps, attention_bias, mlp_bias: the draft layers, named as in `LlamaConfig`.
        qk_norm: Qwen3-style RMSNorm on every query and key head.
        rope_parameters: RoPE in transformers 5's form, `{"rope_type": ..., "rope_theta": ...}`.
        max_position_embeddings: for some RoPE types; positions are never clamped to it.
        sliding_window: window of the `"sliding_attention"` layers.
        layer_types: `"full_attention"` or `"sliding_attention"` for each layer; None for all full.
        initializer_range: standard deviation of random weights.
        target_hidden_size: hidden size of the target, the width of an auxiliary hidden state; None for `hidden_size`.
        aux_hidden_state_layer_ids: layer ids of the auxiliary hidden states, as in `default_aux_layer_ids`; stored
            ascending and distinct. None for the target's `default_layer_ids`, which `bind` determines.
        use_aux_hidden_state: False for drafters that read the target's last hidden state, after the final norm, and
            have no `fc`.
        fc_bias: whether `fc` has a bias.
        logit_scale: factor on the draft logits.
        own_embedding, own_head: whether the drafter has an embedding and a head of its own; if not it shares the
            target's. A shared head is restricted to the draft vocabulary.
        num_aux_hidden_states: number of auxiliary hidden states; 3 without it and `aux_hidden_state_layer_ids`.
    """

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
    fc_bias: bool = False
    logit_scale: float = 1.0
    own_embedding: bool = True
    own_head: bool = True
    num_aux_hidden_states: int | None = None

    def _complete(self) -> None:
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
        check_windows("layer_types is", self.layer_types, self.num_hidden_layers, self.sliding_window)
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
        super()._complete()

    @property
    def aux_hidden_size(self) -> int:
        """Width of `aux_hidden_states` at a position: all of them concatenated, or the last hidden state."""
        return (self.num_aux_hidden_states if self.use_aux_hidden_state else 1) * self.target_hidden_size

    def default_layer_ids(self, num_layers: int) -> list[int]:
        """Layer ids of the auxiliary hidden states if none are given, for a target with `num_layers` layers."""
        return default_aux_layer_ids(num_layers)

    def check_fit(self, target: PreTrainedConfig, num_layers: int, name: str) -> list[int]:
        _check_sizes(self.target_hidden_size, self.vocab_size, target, name)
        if not self.use_aux_hidden_state:
            return []
        layer_ids = self.aux_hidden_state_layer_ids or self.default_layer_ids(num_layers)
        if layer_ids[-1] > num_layers or layer_ids[0] < 0:
            raise ValueError(
                f"{name} reads the auxiliary hidden states {layer_ids}, but {target.name_or_path or target.model_type} "
                f"has {num_layers} layers, so ids 0 to {num_layers}: it is a drafter for another model, or "
                "`aux_hidden_state_layer_ids=` must be given."
            )
        if len(layer_ids) != self.num_aux_hidden_states:
            raise ValueError(
                f"{name} reads {self.num_aux_hidden_states} auxiliary hidden states, but the rule for {num_layers} "
                f"layers gives the ids {layer_ids}; pass `aux_hidden_state_layer_ids=` with "
                f"{self.num_aux_hidden_states} different ones."
            )
        return layer_ids

    def readings(self) -> dict[str, list[Any]]:
        """The values that a checkpoint may have been trained with, by keyword, the configured value first.
        `hf-specdec inspect --self-check` scores each, and layer ids and RoPE in every family."""
        return {}

    def report(self) -> dict[str, Any]:
        layer_ids = self.aux_hidden_state_layer_ids if self.use_aux_hidden_state else "last hidden state"
        sizes = {name: getattr(self, name) for name in _SHOWN_SIZES}
        return {"aux_hidden_state_layer_ids": layer_ids, "rope_parameters": self.rope_parameters, "sizes": sizes}


def check_windows(what: str, types: list[str], num_layers: int, window: int | None) -> None:
    """Raise `ValueError` unless `types` has an attention type for each draft layer, and a window if one needs it."""
    if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f'{what} {types}; expected "full_attention" or "sliding_attention" for each of its {num_layers} draft '
            "layers."
        )
    if "sliding_attention" in types and (window is None or window < 1):
        raise ValueError(f"{what} {types}, but sliding_window {window}; expected a size.")


class Eagle3Config(DraftLayersConfig):
    """EAGLE-3 drafter (arXiv 2503.01840): decoder layers that read auxiliary hidden states of the target.

    Args:
        norm_before_residual: whether the first layer's residual is the normed hidden state instead of the raw one.
        norm_before_fc: whether one RMSNorm over the concatenated auxiliary hidden states precedes `fc`.
        fc_norm: whether an RMSNorm for each auxiliary hidden state precedes `fc`.
        norm_output: whether the next draft step reads the hidden state after the final norm (EAGLE 3.1).
        final_norm: whether a norm precedes the draft head.
    """

    model_type = "hf_specdec_eagle3"
    family = "eagle3"
    description = "is an EAGLE-3 drafter, which drafts token by token"
    keywords = _LAYERS | {"norm_before_residual", "norm_output", "final_norm"}

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    final_norm: bool = True

    def _complete(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both set; a checkpoint has at most one of them.")
        super()._complete()

    def readings(self) -> dict[str, list[Any]]:
        # Parallel drafting feeds back no hidden state.
        feedbacks = [self.norm_output, not self.norm_output][: 1 if self.parallel_drafting else 2]
        # Only SpecForge's EAGLE-3 files may hold a final norm that must not be applied.
        is_optional = self.final_norm and self.dialect == "SpecForge" and self.family == "eagle3"
        return {
            "norm_before_residual": [self.norm_before_residual, not self.norm_before_residual],
            "norm_output": feedbacks,
            "final_norm": [True, False] if is_optional else [self.final_norm],
        }


class PEagleConfig(Eagle3Config):
    """P-EAGLE drafter (arXiv 2602.01469): EAGLE-3 that drafts all K tokens in one pass.

    The K - 1 positions without a token embed `mask_token_id` and read a learned hidden state.

    Args:
        parallel_drafting: None for True if there is a mask token, else False.
        mask_hidden_shape: shape of the tensor `mask_hidden`, which replaces the auxiliary hidden states of a position.
            Publishers differ in the number of leading dimensions of 1. None for `[1, 1, aux_hidden_size]`.
    """

    model_type = "hf_specdec_peagle"
    family = "p-eagle"
    description = None
    keywords = Eagle3Config.keywords | _MASKS
    has_no_defaults_at_init = True  # `mask_token_id` has no default.

    parallel_drafting: bool | None = None
    mask_hidden_shape: list[int] | None = None

    def _complete(self) -> None:
        if self.parallel_drafting is None:
            self.parallel_drafting = self.mask_token_id is not None
        super()._complete()
        if self.mask_hidden_shape is None:
            self.mask_hidden_shape = [1, 1, self.aux_hidden_size]


class DFlashConfig(DraftLayersConfig):
    """DFlash drafter (arXiv 2602.06036): one pass over a block of tokens, which also attend to the context.

    The block is the newest token, called the anchor, and mask tokens after it. Context positions have only keys and
    values, which are computed from the target's auxiliary hidden states.

    Args:
        block_size: number of tokens of a block in training, the anchor included.
        anchor_first: whether every token of the block, the anchor included, drafts the token after it. If not, each
            mask token drafts the token at its own position (fill-in), and the anchor drafts none.
        causal: whether attention within a block is causal, for each layer or for all. None: windowed layers are
            causal, full layers are not.
        output_bias: whether `o_proj` of the draft layers has a bias.
        embedding_scale: factor on the embeddings.
        logit_softcap: soft cap c of the logits x after `logit_scale`: c * tanh(x / c); None for none.
        num_assistant_tokens: at most `depth`; None for `depth`.
    """

    model_type = "hf_specdec_dflash"
    family = "dflash"
    keywords = _LAYERS | {"anchor_first", "causal", "mask_token_id"}
    has_no_defaults_at_init = True  # `mask_token_id` has no default.
    choices = {"parallel_drafting": (True,), "use_aux_hidden_state": (True,)}

    num_assistant_tokens: int | None = None
    parallel_drafting: bool = True
    qk_norm: bool = True
    own_embedding: bool = False
    own_head: bool = False
    block_size: int = 16
    anchor_first: bool = False
    causal: bool | list[bool] | None = None
    output_bias: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float | None = None

    def _complete(self) -> None:
        if not 1 <= self.depth <= MAX_ASSISTANT_TOKENS:
            raise ValueError(
                f"block_size is {self.block_size}; expected {2 - self.anchor_first} to "
                f"{MAX_ASSISTANT_TOKENS + 1 - self.anchor_first}."
            )
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise ValueError(f"logit_softcap is {self.logit_softcap}; expected more than 0, or None.")
        if self.num_assistant_tokens is None:
            self.num_assistant_tokens = self.depth
        if self.num_aux_hidden_states is None:
            self.num_aux_hidden_states = self.num_hidden_layers
        super()._complete()
        if self.causal is None:
            self.causal = [kind == "sliding_attention" for kind in self.layer_types]
        elif isinstance(self.causal, bool):
            self.causal = [self.causal] * self.num_hidden_layers
        if len(self.causal) != self.num_hidden_layers:
            raise ValueError(
                f"causal is {self.causal}; expected True or False for each of the {self.num_hidden_layers} draft "
                "layers, or for all."
            )
        self.check_depth(self.num_assistant_tokens)

    @property
    def depth(self) -> int:
        """Number of draft tokens of a block in training, the largest K."""
        return self.block_size if self.anchor_first else self.block_size - 1

    def check_depth(self, num_assistant_tokens: int) -> int:
        """Return `num_assistant_tokens` if it is at most `depth`, else raise `ValueError`."""
        if num_assistant_tokens > self.depth:
            raise ValueError(
                f"num_assistant_tokens is {num_assistant_tokens}, but this {self.family} drafter was trained to draft "
                f"{self.depth} tokens a block, and drafts worse beyond that; expected at most {self.depth}."
            )
        return num_assistant_tokens

    def default_layer_ids(self, num_layers: int) -> list[int]:
        return default_block_layer_ids(num_layers, self.num_hidden_layers)

    def readings(self) -> dict[str, list[Any]]:
        windowed = [kind == "sliding_attention" for kind in self.layer_types]
        ways = [self.causal, windowed, [False] * len(windowed), [True] * len(windowed)]
        return {
            "anchor_first": [self.anchor_first, not self.anchor_first],
            "causal": [way for index, way in enumerate(ways) if way not in ways[:index]],
        }

    def report(self) -> dict[str, Any]:
        block = {name: getattr(self, name) for name in ("block_size", "anchor_first", "causal")}
        return {"block": block} | super().report()


class DFlash2Config(DFlashConfig):
    """DFlash-2 drafter (z-lab): DFlash with convolutions in its layers and a selector among candidates.

    Args:
        conv_kernel_size: number of tokens of the block that a convolution reads, the token itself included.
        conv_group_size: number of channels that share the token-dependent part of a kernel.
        selector_rank: width of the selector.
        selector_top_k: number of candidates for each draft token: the most likely tokens by the head.
    """

    model_type = "hf_specdec_dflash2"
    family = "dflash-2"
    least = {"conv_kernel_size": 1, "conv_group_size": 1, "selector_rank": 1, "selector_top_k": 1}

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def _complete(self) -> None:
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}; expected a divisor of hidden_size {self.hidden_size}."
            )
        if self.conv_kernel_size > self.block_size:
            raise ValueError(
                f"conv_kernel_size is {self.conv_kernel_size}; expected at most block_size {self.block_size}."
            )
        super()._complete()
        self._check_selector()

    def _check_selector(self) -> None:
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, but {self.family} drafters select among all "
                f"{self.vocab_size} tokens of the target; expected that number."
            )
        if self.selector_top_k > self.vocab_size:
            raise ValueError(f"selector_top_k is {self.selector_top_k}; expected at most {self.vocab_size} tokens.")


class DSpineConfig(DFlashConfig):
    """DSpine drafter (Tencent): DFlash in which each token of a block sends a message to the next.

    Args:
        transfer_rank: width of a token's features, and of the codes of the vocabulary.
        message_size: width of a message.
        selector_top_k: number of candidates for each draft token: the most likely tokens by the head.
    """

    model_type = "hf_specdec_dspine"
    family = "dspine"
    least = {"transfer_rank": 1, "message_size": 1, "selector_top_k": 1}
    choices = DFlashConfig.choices | {"anchor_first": (False,), "logit_softcap": (None,)}

    transfer_rank: int = 1024
    message_size: int = 512
    selector_top_k: int = 16

    def _complete(self) -> None:
        super()._complete()
        DFlash2Config._check_selector(self)


class DominoConfig(DFlashConfig):
    """Domino drafter (arXiv 2605.29707): DFlash with a correction from a GRU over the draft tokens before.

    Args:
        gru_hidden_dim: width of the GRU's state.
        emb_dim: width between the two layers of the correction.
        pure_draft_prefix_len: number of a round's first draft tokens that are not corrected.
    """

    model_type = "hf_specdec_domino"
    family = "domino"
    least = {"gru_hidden_dim": 1, "emb_dim": 1, "pure_draft_prefix_len": 0}

    gru_hidden_dim: int = 1024
    emb_dim: int = 256
    pure_draft_prefix_len: int = 1


class DSparkConfig(DFlashConfig):
    """DSpark drafter (arXiv 2607.05147): DFlash with a Markov head, which makes a draft depend on the token before it.

    Args:
        markov_rank: width of the Markov head.
        markov_type: `"vanilla"`, `"gated"` or `"rnn"`; see `MarkovHead`.
        confidence_head: whether there is a confidence head; see `DSparkDrafter.confidence`.
    """

    model_type = "hf_specdec_dspark"
    family = "dspark"
    least = {"markov_rank": 1}
    choices = DFlashConfig.choices | {"markov_type": MARKOV_TYPES}

    anchor_first: bool = True
    markov_rank: int = 256
    markov_type: str = "vanilla"
    confidence_head: bool = False


class SuffixConfig(DrafterConfig):
    """Settings of suffix decoding (arXiv 2411.04975).

    Args:
        history_size: number of tokens of earlier outputs that are kept; 0 to draft from each text alone.
    """

    model_type = "hf_specdec_suffix"
    family = "suffix"
    least = {"history_size": 0}

    num_assistant_tokens: int = 7
    history_size: int = 32768

    def report(self) -> dict[str, Any]:
        return {"history_size": self.history_size}


class DraftModelConfig(DrafterConfig):
    """A causal language model as drafter: sequential (arXiv 2211.17192) or parallel (PARD, arXiv 2504.18583).

    Args:
        model: settings of the model's own configuration, with its `model_type`.
    """

    model_type = "hf_specdec_draft_model"
    family = "draft model"
    keywords = _MASKS
    description = "is a draft model, which reads tokens only"

    model: dict | None = None

    @property
    def model_config(self) -> PreTrainedConfig:
        """The model's own configuration, as transformers' class."""
        return AutoConfig.for_model(**(self.model or {}))

    @property
    def num_embeddings(self) -> int:
        return self.vocab_size if self.model is None else self.model_config.get_text_config().vocab_size

    def check_fit(self, target: PreTrainedConfig, num_layers: int, name: str) -> list[int] | None:
        size = target.get_text_config().vocab_size
        if abs(size - self.num_embeddings) >= MAX_PADDING:
            raise ValueError(
                f"{name} has a vocabulary of {self.num_embeddings} tokens, but "
                f"{target.name_or_path or target.model_type} has {size}; expected sizes that differ by padding only "
                f"(less than {MAX_PADDING}): it was made for another tokenizer."
            )

    def report(self) -> dict[str, Any]:
        return _report_of_model(self.model)


def _report_of_model(model: Mapping[str, Any]) -> dict[str, Any]:
    text = AutoConfig.for_model(**model).get_text_config().to_dict()
    sizes = {name: text[name] for name in _SHOWN_SIZES if name in text}
    return {"model_type": model["model_type"], "rope_parameters": text.get("rope_parameters"), "sizes": sizes}


class CacheReaderConfig(DraftModelConfig):
    """A drafter whose layers attend to the target's keys and values: Google's assistants of Gemma 4."""

    model_type = "hf_specdec_cache_reader"
    family = "Gemma 4 assistant"
    keywords = frozenset()
    description = None

    def check_fit(self, target: PreTrainedConfig, num_layers: int, name: str) -> None:
        _check_sizes(self.model_config.backbone_hidden_size, self.vocab_size, target, name)


class Pard2Config(DraftModelConfig):
    """PARD-2 drafter (arXiv 2605.08632): PARD that adds a projection of hidden states to the input embeddings.

    Args:
        hidden_state_ids: indices of the target's hidden states in transformers' `hidden_states`, in the order in which
            `target_proj` reads them; a negative index counts from the end. The last hidden state, -1, is after the
            final norm.
        target_hidden_size: hidden size of the target.
        hidden_state_scale: factor on the projection.
        projection_bias: whether the projection has a bias.
    """

    model_type = "hf_specdec_pard2"
    family = "pard-2"
    keywords = frozenset({"mask_token_id"})
    description = None
    has_no_defaults_at_init = True  # `mask_token_id` and `hidden_state_ids` have no default.
    choices = {"parallel_drafting": (True,)}

    parallel_drafting: bool = True
    hidden_state_ids: list[int] | None = None
    target_hidden_size: int = 4096
    hidden_state_scale: float = 0.02
    projection_bias: bool = False

    def _complete(self) -> None:
        ids = self.hidden_state_ids
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(
                f"hidden_state_ids is {ids}; expected a list of different indices of the target's hidden states."
            )
        super()._complete()

    def check_fit(self, target: PreTrainedConfig, num_layers: int, name: str) -> list[int]:
        super().check_fit(target, num_layers, name)
        _check_sizes(self.target_hidden_size, None, target, name)
        ids = [index + num_layers + 1 if index < 0 else index for index in self.hidden_state_ids]
        if min(ids) < 0 or max(ids) > num_layers or len(set(ids)) != len(ids):
            raise ValueError(
                f"{name} reads the hidden states {self.hidden_state_ids}, but the target has {num_layers} layers, so "
                f"{num_layers + 1} hidden states; expected indices of different ones: it is a drafter for another "
                "model."
            )
        return ids

    def report(self) -> dict[str, Any]:
        return {"aux_hidden_state_layer_ids": self.hidden_state_ids} | super().report()


class MtpConfig(DrafterConfig):
    """Multi-token-prediction modules of a target (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    They are part of the target's own checkpoint, or trained for it; `for_target` makes a configuration for the latter.

    Args:
        block: settings of the decoder that has one layer for each module, otherwise like the target's.
        num_modules: number of modules; module k % num_modules drafts token k of a round.
        hidden_size, rms_norm_eps, initializer_range: of the target.
        hidden_first: whether a module's projection reads `[hidden | embedding]` instead of `[embedding | hidden]`.
        norm_offset: whether the modules' norms scale by 1 + weight (Gemma's) instead of by the weight.
        norm_output: whether the next step reads a module's output after its final norm instead of before.
        own_embedding, own_head: whether each module has an embedding or a head of its own; if not, the target's.
        zero_first_embedding: whether slot 0 reads zeros instead of an embedding, as vLLM runs some families.
        chaining: the hidden states that modules after the first read, which also determine their caches. `"modules"`:
            the output of the module before, as in training. `"target"`: the target's hidden states as far as they are
            known. None: `default_chaining`.
    """

    model_type = "hf_specdec_mtp"
    family = "mtp"
    keywords = _SHARE | {"chaining", "hidden_first", "norm_offset", "norm_output", "zero_first_embedding"}
    description = "holds MTP modules, which draft token by token from one hidden state"
    choices = {"chaining": CHAININGS, "parallel_drafting": (False,)}

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

    def _complete(self) -> None:
        if self.chaining is None:
            self.chaining = default_chaining(self.num_modules)
        super()._complete()

    @classmethod
    def for_target(cls, text: PreTrainedConfig, block: dict[str, Any], **settings: Any) -> MtpConfig:
        """The configuration of modules for a target with the text configuration `text`. `block` is its
        `mtp_block_settings`, which may have other MLPs; `settings` are other fields."""
        return cls(
            block=block,
            num_modules=block["num_hidden_layers"],
            hidden_size=text.hidden_size,
            rms_norm_eps=getattr(text, "rms_norm_eps", cls.rms_norm_eps),
            initializer_range=getattr(text, "initializer_range", cls.initializer_range),
            vocab_size=text.vocab_size,
            **settings,
        )

    def check_fit(self, target: PreTrainedConfig, num_layers: int, name: str) -> None:
        _check_sizes(self.hidden_size, self.vocab_size, target, name)

    def report(self) -> dict[str, Any]:
        return {"modules": self.num_modules, "chaining": self.chaining} | _report_of_model(self.block)


def mtp_block_settings(text: PreTrainedConfig, num_modules: int) -> dict[str, Any]:
    """Settings of a decoder with one layer for each of `num_modules` modules, otherwise like `text`.

    A module's layer has full attention, and experts if the target has any, unless the configuration states other types
    (`mtp_layer_types`, `mtp_mlp_layer_types`).
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
        # No embedding and no head are built.
        "vocab_size": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    # Settings of each layer are derived again from the types of layers; quantised modules are dequantised when read.
    derived = ("per_layer_config", "num_nextn_predict_layers", "num_mtp_layers", "architectures", "auto_map")
    for name in (*derived, "quantization_config"):
        settings.pop(name, None)
    return settings | {name: value for name, value in changes.items() if name in settings}


def default_chaining(num_modules: int) -> str:
    """`MtpConfig.chaining` that serving engines use for `num_modules` modules, for checkpoints that do not state it."""
    return "modules" if num_modules > 1 else "target"
