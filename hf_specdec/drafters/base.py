"""What a drafter is: the contract of a family, and the registry of families."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.tensors import KEY_MAPPING, check_tensors
from ..config import DrafterConfig, check_num_assistant_tokens
from ..kernels.types import Proposal, VerificationResult
from ..patching.linear import linear
from ..state import DecodeState, Shape
from .shared_weights import SharedWeight

logger = logging.getLogger(__name__)

ENGINES = ("auto", "static", "stock")
VERIFICATIONS = ("token", "block")


class Drafter(PreTrainedModel):
    """A model that proposes draft tokens for a target.

    A family subclasses it, names its config class and implements four verbs. A drafter holds weights and settings,
    never the state of a generation: that lives in `DecodeState`, so one drafter serves several calls and threads.

        bind(target)                    check that the drafter fits, borrow what the checkpoint lacks, settle the taps
        new_memory(state)               allocate what must live through one generation (the drafter's cache)
        prefill(state, taps, positions) consume a chunk of the prompt
        propose(state, taps, verdict)   draft K tokens after the committed ones

    A family without weights also says where it computes, by overriding `device`.

    `propose` runs inside the round: no host read, fixed shapes. There is no separate verb for the first round: after
    prefill the state is as if a round had just committed the last token of the prompt.
    """

    config_class = DrafterConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _supports_sdpa = True
    # Whether it is run to find out if its target can be believed, and not by a user.
    is_equivalence_check = False

    # Attributes that calls read by themselves, and what they leave: captured rounds do not depend on them.
    unread_attributes = frozenset(
        {
            "_last_stats",
            "compile_rounds",
            "draft_probs",
            "engine",
            "num_assistant_tokens",
            "sessions",
            "verification",
        }
    )

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self._target_config: Any = None
        # Size of the target's vocabulary when the drafter was bound; None if its family notes no binding.
        self._bound_vocabulary: int | None = None
        # What the drafter has of the target, by "embedding" and "head"; set by `bind`.
        self._shared_weights: dict[str, SharedWeight] = {}
        # Set by engines: what they keep for further calls, see `release`.
        self.sessions: Any = None
        self._last_stats: Any = None
        self.num_assistant_tokens = config.num_assistant_tokens
        self.draft_probs: bool | str = "auto"
        self.engine = "auto"
        self.verification = "token"
        self.compile_rounds = True

    @property
    def stats(self):
        """`SpeculationStats` of the last `generate()` call with this drafter; None before the first."""
        return self._last_stats

    def release(self) -> None:
        """Free the buffers and graphs that are kept for further `generate()` calls on a GPU."""
        if self.sessions is not None:
            self.sessions.clear()

    @property
    def aux_hidden_state_layer_ids(self) -> list[int]:
        """Boundaries of the target that this drafter reads (see `TapRecorder`)."""
        return []

    @property
    def reads_last_hidden_state(self) -> bool:
        """Whether the drafter reads the target's last hidden state, after the final norm, instead of boundaries."""
        return False

    @property
    def sharing_modules(self) -> list[nn.Module]:
        """The modules that may have an `embed_tokens` and an `lm_head` in place of the target's."""
        return [self]

    @property
    def is_bound(self) -> bool:
        return self._target_config is not None

    @classmethod
    def check_checkpoint(cls, checkpoint: Checkpoint, config: DrafterConfig) -> None:
        """Compare what the files hold with what `config` asks for, loading no weights.

        Raises:
            ValueError: naming every tensor that is missing, unexpected or of another shape.
        """
        check_tensors(checkpoint, cls, config)

    @classmethod
    def load_checkpoint(cls, checkpoint: Checkpoint, config: DrafterConfig, **options: Any) -> Drafter:
        """A drafter with the checkpoint's weights.

        Args:
            checkpoint: that passed `check_checkpoint`.
            config: its normal form.
            options: `dtype`, `device_map`, `use_safetensors` of `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: a weight was not loaded, or a tensor of the files found no place.
        """
        drafter, info = cls.from_pretrained(
            checkpoint.folder, config=config, key_mapping=KEY_MAPPING, output_loading_info=True, **options
        )
        checkpoint.check_loaded(info)
        return drafter

    def configure(
        self,
        num_assistant_tokens: int | None = None,
        draft_probs: bool | str | None = None,
        engine: str | None = None,
        verification: str | None = None,
        compile_rounds: bool | None = None,
    ) -> Drafter:
        """Set how the drafter is run; None leaves a setting as it is. Returns the drafter.

        Args:
            num_assistant_tokens: draft tokens a round, at least 1.
            draft_probs: True to draw drafts from the drafter's distribution when sampling, False for its most likely
                tokens, `"auto"` to decide by temperature (see `hf_specdec.decoding.DRAFT_PROBS_TEMPERATURE`).
            engine: `"auto"`, `"static"` or `"stock"`.
            verification: how sampling judges drafts that were drawn from the drafter's distribution: `"token"`, each
                given those before it (arXiv 2211.17192), or `"block"`, all of a round together (arXiv 2403.10444).
                Both are lossless; the second never accepts fewer in expectation, and reads the drafter's
                distributions once more. The stock engine has the first only.
            compile_rounds: whether rounds on a GPU are compiled before they are captured. That takes some seconds for
                every shape of call, and makes rounds faster.
        """
        if num_assistant_tokens is not None:
            self.num_assistant_tokens = check_num_assistant_tokens(num_assistant_tokens)
        if draft_probs is not None:
            if draft_probs not in (True, False, "auto"):
                raise ValueError(f'draft_probs is {draft_probs!r}; expected True, False or "auto".')
            self.draft_probs = draft_probs
        if engine is not None:
            if engine not in ENGINES:
                raise ValueError(f"engine is {engine!r}; expected one of {', '.join(map(repr, ENGINES))}.")
            self.engine = engine
        if verification is not None:
            if verification not in VERIFICATIONS:
                raise ValueError(f'verification is {verification!r}; expected "token" or "block".')
            self.verification = verification
        if compile_rounds is not None:
            if not isinstance(compile_rounds, bool):
                raise ValueError(f"compile_rounds is {compile_rounds!r}; expected True or False.")
            self.compile_rounds = compile_rounds
        return self

    def num_draft_tokens(self, asked: int | None) -> int:
        """K of a call that asks for `asked` draft tokens a round, or for none in particular.

        Raises:
            ValueError: it cannot be that many.
        """
        return check_num_assistant_tokens(self.num_assistant_tokens if asked is None else asked)

    def bind(self, target: PreTrainedModel) -> None:
        """Tie the drafter to `target`: check that it fits, borrow what the checkpoint lacks.

        Either binds completely or raises `ValueError` and leaves drafter and target as they were. Tensors that it
        makes are made outside of inference mode, which the caller may be in.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement bind().")

    def _note_binding(self, target: PreTrainedModel) -> None:
        """The end of every `bind` that succeeds: rounds captured before may read what was borrowed then."""
        self._target_config = self.config.target = target.config
        self._bound_vocabulary = target.config.get_text_config().vocab_size
        self.release()

    def follow(self, target: PreTrainedModel) -> None:
        """Keep up with what the owner of `target` did to it since `bind`; called at the start of every generation.

        What was written into its weights is copied to where the drafter has copies. A target whose embedding or head
        was replaced, moved, cast or resized is bound again.

        Raises:
            ValueError: the drafter does not fit what the target is now.
        """
        if self._bound_vocabulary is None:
            return
        lenders = {"embedding": target.get_input_embeddings(), "head": target.get_output_embeddings()}
        changes = [loan.how_changed(lenders[what]) for what, loan in self._shared_weights.items()]
        vocabulary = target.config.get_text_config().vocab_size
        if vocabulary != self._bound_vocabulary:
            changes.append(f"its vocabulary had {self._bound_vocabulary} tokens and has {vocabulary}")
        changes = [change for change in changes if change is not None]
        if not changes:
            for what, loan in self._shared_weights.items():
                loan.refresh(lenders[what])
            return
        found = f"{type(target).__name__} has changed since the drafter was bound to it: {', '.join(changes)}"
        try:
            self.bind(target)
        except ValueError as error:
            raise ValueError(
                f"{found}. It cannot be bound again as it is: {error} Change the target back, or load a drafter that "
                "was made for it with AutoDrafter.from_pretrained(..., target=model)."
            ) from error
        logger.info("%s. It was bound again.", found)

    def check_bound_to(self, target: PreTrainedModel) -> None:
        """Raise `ValueError` unless the drafter was bound to `target`."""
        if not self.is_bound:
            raise ValueError(
                f"This {type(self).__name__} is not bound to a target; load it with "
                "AutoDrafter.from_pretrained(..., target=model) or call drafter.bind(model)."
            )
        if self._target_config is not target.config:
            raise ValueError(
                f"This {type(self).__name__} is bound to another target than the one that generates; "
                "call drafter.bind(model) first."
            )

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write the normal form, whatever dialect the drafter was read from; `push_to_hub` uploads the same.

        Arguments as in `PreTrainedModel.save_pretrained`, without `save_original_format`.
        """
        super().save_pretrained(save_directory, save_original_format=False, **kwargs)

    def new_state(self, shape: Shape, num_layers: int, device: torch.device) -> DecodeState:
        """Buffers of a generation with this drafter, its own included; arguments as of `DecodeState.allocate`."""
        state = DecodeState.allocate(shape, num_layers, device)
        state.memory = self.new_memory(state)
        return state

    def new_memory(self, state: DecodeState) -> Any:
        """What the drafter keeps through one generation; stored as `state.memory`."""
        return None

    def prefill(self, state: DecodeState, aux_hidden_states: torch.Tensor | None, positions: torch.Tensor) -> None:
        """Consume one chunk of the prompt.

        Args:
            state: holds the committed tokens.
            taps: `[B, n, width]` hidden states of the target at `positions`, or None.
            positions: `[B, n]` int64; `state.scrap` where a row has no token in this chunk.
        """

    def propose(
        self, state: DecodeState, aux_hidden_states: torch.Tensor | None, result: VerificationResult
    ) -> Proposal:
        """Draft `state.num_draft_tokens` tokens after the last committed token of each row.

        Args:
            state: after `commit`; `state.lengths` counts the new tokens already.
            taps: `[B, K + 1, width]` hidden states of the round's verified block, or None.
            verdict: of the round; the first `verdict.committed[b]` rows of the block are valid.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement propose().")


def check_sizes(hidden_size: int, vocab_size: int, target: PreTrainedConfig, name: str) -> None:
    """Check that a drafter called `name` reads hidden states and writes tokens of the size that `target` has.

    Raises:
        ValueError: it was made for another hidden size or vocabulary.
    """
    text, target_name = target.get_text_config(), target.name_or_path or target.model_type
    if text.hidden_size != hidden_size:
        raise ValueError(
            f"{name} was made for a target with hidden_size {hidden_size}, but {target_name} has "
            f"hidden_size {text.hidden_size}: it is a drafter for another model."
        )
    if text.vocab_size != vocab_size:
        raise ValueError(
            f"{name} was made for a vocabulary of {vocab_size} tokens, but {target_name} has "
            f"{text.vocab_size}: it is a drafter for another model."
        )


def embed(tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `tokens` `[...]` int64 of an embedding `weight` `[V, H]`, where the tokens are."""
    # A target that is spread over devices has its embedding on another one than its last layer.
    return F.embedding(tokens.to(weight.device), weight).to(tokens.device, dtype)


def score(normed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits `[..., V]` of `normed` `[..., H]` by a head `weight` `[V, H]`, where `normed` is."""
    return linear(normed.to(weight.device), weight.to(normed.dtype)).to(normed.device)


_FAMILIES: dict[str, type[Drafter]] = {}


def register_drafter(cls: type[Drafter]) -> type[Drafter]:
    """Class decorator: make a `Drafter` subclass known to `AutoDrafter` under its config's `model_type`.

    Raises:
        TypeError: not a `Drafter` subclass with a `DrafterConfig` subclass as `config_class`.
        ValueError: the model type is taken by another class.
    """
    config_class = getattr(cls, "config_class", None)
    if not (isinstance(cls, type) and issubclass(cls, Drafter)):
        raise TypeError(f"register_drafter got {cls!r}; expected a subclass of hf_specdec.Drafter.")
    if not (isinstance(config_class, type) and issubclass(config_class, DrafterConfig)):
        raise TypeError(f"{cls.__name__}.config_class is {config_class!r}; expected a subclass of DrafterConfig.")
    taken = _FAMILIES.get(config_class.model_type)
    if taken is not None and taken is not cls:
        raise ValueError(
            f"The model type {config_class.model_type!r} of {cls.__name__} is already registered for {taken.__name__}."
        )
    _FAMILIES[config_class.model_type] = cls
    return cls


def registered_drafters() -> dict[str, type[Drafter]]:
    """Registered drafter classes by the `model_type` of their configs."""
    return dict(_FAMILIES)
