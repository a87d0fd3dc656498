"""What the configurations of all families of drafters have, and checks of their values."""

from __future__ import annotations

import functools
import inspect
import numbers
from typing import Any, get_args, get_origin

from transformers import PreTrainedConfig

DEFAULT_ROPE_THETA = 10000.0

# Draft tokens a round (K). Buffers and compute of a round grow with it; serving engines have far lower limits.
MAX_ASSISTANT_TOKENS = 1024

# In place of a number of draft tokens: chosen for every round, see `engine.auto_drafts`.
AUTO = "auto"


def _token_of_target(name: str) -> property:
    """Property for the id of the special token `name`: the target's, or before `bind` that of config.json, if any."""

    def read(self: DrafterConfig):
        if self.target is None:
            return vars(self).get(name)
        return getattr(self.target.get_text_config(), name, None)

    def write(self: DrafterConfig, value) -> None:
        vars(self)[name] = value

    return property(read, write)


class DrafterConfig(PreTrainedConfig):
    """Settings that drafters of every family have.

    Args:
        vocab_size: size of the target's vocabulary; `generate()` compares it with the target's.
        draft_vocab_size: number of tokens the draft head scores; at most `vocab_size`.
        num_assistant_tokens: draft tokens a round (K) unless a call of `generate()` sets it.
        dialect: publisher whose layout the checkpoint was read from; `"hf_specdec"` for the normal form.
        target_name_or_path: name of the target that the drafter was trained for, if the checkpoint states it.
        parallel_drafting: whether all K tokens are drafted in one pass, the last K - 1 of them at mask tokens.
        mask_token_id: the token that such a pass embeds at positions without a token.

    Attributes:
        target: configuration of the target that the drafter is bound to; None before `bind`. Not saved.
        bos_token_id, eos_token_id, pad_token_id: of the target, since pipelines compare them with an assistant's. Not
            saved.
    """

    # In a slot, since transformers compares and saves the instance's `__dict__`.
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
        """Number of tokens that the drafter can embed."""
        return self.vocab_size

    def _get_generation_parameters(self) -> dict:
        """Generation parameters that transformers refuses to save in a configuration: none.

        `num_assistant_tokens` is such a parameter by name, but is a field of this class. Older versions of transformers
        look for them in a configuration built without arguments, which some families cannot build.
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


def check_types(config: DrafterConfig) -> None:
    """Raise `ValueError` if a field of `config` that is annotated in this package has a value of another type."""
    for name, expected in _annotations(type(config)).items():
        value = getattr(config, name)
        if not any(_is_of(value, one) for one in get_args(expected) or (expected,)):
            wanted = getattr(expected, "__name__", str(expected))
            raise ValueError(f"{name} is {value!r}; expected {wanted}.")


@functools.cache
def _annotations(config_class: type[DrafterConfig]) -> dict[str, Any]:
    """Annotations of a class and its bases in this package; classes of others may have annotations of any kind."""
    found: dict[str, Any] = {}
    for one in reversed(config_class.__mro__):
        if one.__module__.startswith(f"{__package__}."):
            found |= inspect.get_annotations(one, eval_str=True)
    return found


def _is_of(value: Any, expected: Any) -> bool:
    """Whether `value` has a type, or is a list or tuple of it; integers count as floats, bools not as integers."""
    if get_origin(expected) is list:
        return isinstance(value, list | tuple) and all(_is_of(one, get_args(expected)[0]) for one in value)
    if isinstance(value, bool):
        return expected is bool
    return isinstance(value, int | float if expected is float else expected)


def check_num_or_auto(value: int | str) -> int | str:
    """As `check_num_assistant_tokens`, but `value` may also be `AUTO`."""
    if isinstance(value, str) and value == AUTO:
        return value
    return check_num_assistant_tokens(value)


def check_num_assistant_tokens(value: int) -> int:
    """Return `value` if it is a valid number of draft tokens a round, else raise `ValueError`."""
    is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_number or not 1 <= value <= MAX_ASSISTANT_TOKENS:
        raise ValueError(
            f"num_assistant_tokens is {value!r}; expected an integer of at least 1 and at most "
            f"{MAX_ASSISTANT_TOKENS} (draft tokens a round)."
        )
    return int(value)
