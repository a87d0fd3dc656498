"""Base class of drafters."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache.layer_kinds import LayerKinds
from ..checkpoints.checkpoint import Checkpoint, quiet_loading
from ..checkpoints.tensors import KEY_MAPPING, check_draft_vocabulary, is_ignored, is_plain, rename
from ..config import AUTO, DrafterConfig, check_int, check_num_or_auto, check_type
from ..kernels.types import MOST_WORDS, WORD_BITS, Proposal, VerificationResult
from ..modules.hidden_states import num_decoder_layers
from ..modules.locks import lock_of
from ..modules.stored_linear import StoredLinear, keep_stored, store_empty
from ..modules.weights import num_bytes
from ..ops import FLOAT8
from ..state import DecodeState, Shape
from .attachment import Attachment
from .shared_weights import SharedWeight
from .target_checks import check_target, generating_model

logger = logging.getLogger(__name__)

# The number of passes of a round, and pairs of a count and the weights that the round reads so many times.
Reads = tuple[int, list[tuple[int, Iterable[torch.Tensor]]]]

# The target of each bound drafter. It is no attribute, so that copies and pickles of a drafter are not bound.
_targets: WeakKeyDictionary[nn.Module, ref[PreTrainedModel]] = WeakKeyDictionary()

ENGINES = ("auto", "static", "stock")
MATCH = "match"
VERIFICATIONS = ("token", "block", MATCH)
KV_CACHE_DTYPES = {"auto": None, "fp8": FLOAT8}
# Allowed values of settings, by attribute.
_SETTINGS = {
    "draft_probs": (True, False, AUTO),
    "engine": ENGINES,
    "verification": VERIFICATIONS,
    "compile_rounds": (True, False),
    "batch_invariant": (True, False),
    "kv_cache_dtype": KV_CACHE_DTYPES,
}
ALL = "all"
# The smallest `draft_window_size`: larger than the number of tokens that a round reads again or drafts.
LEAST_WINDOW = 64
# The most drafts of a tree, without its root.
MOST_NODES = WORD_BITS * MOST_WORDS - 1


def check_num_nodes(tree: int | str) -> None:
    """Raise `ValueError` unless `tree` is 0, a number of drafts up to `MOST_NODES`, or `AUTO`."""
    is_number = isinstance(tree, int) and not isinstance(tree, bool)
    if tree != AUTO and not (is_number and 0 <= tree <= MOST_NODES):
        raise ValueError(f'tree is {tree!r}; expected an int of 0, for a chain, to {MOST_NODES} drafts, or "{AUTO}".')


class Drafter(PreTrainedModel):
    """A model that proposes draft tokens for a target.

    A family subclasses it, sets `config_class` and implements `bind`, `new_memory`, `prefill` and `propose`. Continuous
    batching also needs `copy_rows` if the drafter keeps anything; a drafter without weights also needs `device`. A
    drafter holds weights and settings. The state of a generation is in `DecodeState`, so several calls and threads can
    share one drafter.

    `propose` runs inside the round, which may be captured in a CUDA graph. It copies no value to the CPU, and its
    shapes are fixed. The first round needs no special case: after prefill the state is as if a round had just committed
    the last token of the prompt, as an accepted draft, and the first new token.
    """

    config_class = DrafterConfig
    _supports_sdpa = True
    # Regular expressions in the names of published tensors, and their replacements in the drafter's own names.
    key_mapping = KEY_MAPPING
    # `integration.scoring.score`, which is set there, because this module cannot import the engine.
    score: ClassVar[Callable[..., torch.Tensor]]
    # Whether `propose` drafts any number of tokens up to `state.most_draft_tokens` in each round, 0 included.
    varies_num_draft_tokens = False
    # The largest K that `"auto"` tries, the K that the drafter was trained for; None for no limit.
    most_draft_tokens: int | None = None
    # Whether `propose` can draft a tree of `state.num_nodes` drafts.
    drafts_trees = False
    # The largest depth of a tree; None if only its number of drafts limits it.
    most_tree_depth: int | None = None
    # The smallest sliding window of the layers that run nodes of trees; None if there is none.
    smallest_window: int | None = None
    # Whether it reads the target's last hidden state, after the final norm, instead of auxiliary ones.
    reads_last_hidden_state = False
    # Whether it reads keys and values of the target. Only the static engine has these in slots.
    reads_target_cache = False
    # Whether it reads the target's embeddings of images in prompts, from `DecodeState.records`, and not only tokens. As
    # in vLLM, MTP modules get an image's embeddings, and EAGLE-3 drafters the placeholder token.
    reads_embeddings = False
    # Whether `prefill` takes the prompts of several rows packed into one row, see `as_one_row`.
    packs_prompts = False
    # Sizes and types of the layers whose keys and values are read in each pass of a round; None if there are none.
    attention_config: PreTrainedConfig | None = None

    _layer_ids: Sequence[int] = ()  # see `aux_hidden_state_layer_ids`

    # Attributes that a captured round does not depend on: settings that every call reads, and results that it stores.
    # `_shared_weights` changes when a copy is refreshed. The copy keeps its memory; `bind` releases captured rounds.
    unread_attributes = frozenset(
        {
            "_last_stats",
            "_shared_weights",
            "compile_rounds",
            "draft_probs",
            "engine",
            "_asked_num_assistant_tokens",
            "rollouts",
            "sessions",
            "tree",
            "verification",
        }
    )

    def __init__(self, config: DrafterConfig):
        if type(self) is Drafter:
            raise TypeError(
                "Drafter is the base class of all drafters; AutoDrafter.from_pretrained(..., target=model) loads one."
            )
        super().__init__(config)
        self._target_config: Any = None
        # Size of the target's vocabulary when the drafter was bound; None if `bind` does not call `_record_binding`.
        self._bound_vocab_size: int | None = None
        self._bound_num_layers = 0
        # The target's weights that the drafter uses, under "embedding" and "head"; set by `bind`.
        self._shared_weights: dict[str, SharedWeight] = {}
        # Buffers and CUDA graphs for later calls, set by engines; see `release`.
        self.sessions: Any = None
        # The `training.rollouts.Rollouts` that gets the texts of calls, set by a learner; None if nothing learns.
        self.rollouts: Any = None
        self._last_stats: Any = None
        self._asked_num_assistant_tokens: int | str | None = None
        self.draft_probs: bool | str = "auto"
        self.engine = "auto"
        self.verification = "token"
        self.tree: int | str = 0
        self.compile_rounds = False
        self.batch_invariant = False
        self.draft_window_size: int | None = None
        self.kv_cache_dtype = "auto"

    def __setattr__(self, name: str, value: Any) -> None:
        allowed = _SETTINGS.get(name)
        if allowed is not None and not any(type(value) is type(one) and value == one for one in allowed):
            *others, last = [f'"{one}"' if isinstance(one, str) else str(one) for one in allowed]
            raise ValueError(f"{name} is {value!r}; expected {', '.join(others)} or {last}.")
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are not bound: they have neither weights of the target, nor buffers and texts of calls."""
        unbound = {"_target_config": None, "_bound_vocab_size": None, "_shared_weights": {}}
        return vars(self) | unbound | {"sessions": None, "rollouts": None}

    def post_init(self) -> None:
        super().post_init()
        stored = self.config.stored_layers or {}
        for name, one in self.named_modules():
            if name in stored and type(one) is nn.Linear:
                store_empty(one, *stored[name])

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights that are not quantised."""
        for module in self.modules():
            for weight in module._parameters.values() if not isinstance(module, StoredLinear) else ():
                if weight is not None and weight.is_floating_point():
                    return weight.dtype
        return torch.get_default_dtype()

    @property
    def stats(self):
        """`SpeculationStats` of the last `generate()` call with this drafter; None before the first."""
        return self._last_stats

    def release(self) -> None:
        """Free the buffers and CUDA graphs that are kept for later `generate()` calls on a GPU."""
        if self.sessions is not None:
            self.sessions.clear()

    def attach(
        self,
        model: nn.Module,
        strict: bool = False,
        mode: str = "eval",
        memory: float = 0.5,
        release_after_call: bool = False,
    ) -> Attachment:
        """Make this the drafter of all calls of `model` that name none: `generate()`, `generate_batch()`, managers, and
        what is built on them, such as pipelines and trainers.

        A call that cannot run with a drafter runs plainly. It is counted, and logged once for each reason. The drafter
        is moved to the model's device.

        Args:
            model: the target, or its wrapper of PEFT, `DistributedDataParallel` or accelerate.
            strict: whether a call that cannot run with a drafter raises an error.
            mode: `"eval"` to put the target into evaluation mode for each call, `"keep"` to run calls in training mode
                plainly.
            memory: share of the device's memory, 0 to 1, that buffers may keep between calls.
            release_after_call: whether buffers are freed after each call.

        Raises:
            ValueError: the drafter is not bound to the model inside of `model`, or an argument is wrong.
        """
        return Attachment(self, model, strict, mode, memory, release_after_call)

    @contextmanager
    def attached(self, model: nn.Module, **options: Any) -> Iterator[Attachment]:
        """Context in which the drafter is attached to `model`. It takes the arguments of `attach`."""
        attachment = self.attach(model, **options)
        try:
            yield attachment
        finally:
            attachment.detach()

    @property
    def num_assistant_tokens(self) -> int | str:
        """K of calls that do not set it, or `"auto"`. The default is the configuration's."""
        asked = self._asked_num_assistant_tokens
        return self.config.num_assistant_tokens if asked is None else asked

    @num_assistant_tokens.setter
    def num_assistant_tokens(self, value: int | str) -> None:
        self._asked_num_assistant_tokens = self.num_draft_tokens(check_num_or_auto(value))

    @property
    def num_own_draft_tokens(self) -> int:
        """K that was set for the drafter, or else its configuration's: the K that `"auto"` begins with."""
        asked = self._asked_num_assistant_tokens
        return self.config.num_assistant_tokens if asked in (None, AUTO) else asked

    @property
    def aux_hidden_state_layer_ids(self) -> list[int]:
        """Layer ids of the auxiliary hidden states that the drafter reads (see `AuxHiddenStateRecorder`), ascending."""
        return list(self._layer_ids)

    @property
    def sharing_modules(self) -> list[nn.Module]:
        """The modules that may have an `embed_tokens` and an `lm_head` of their own instead of the target's."""
        return [self]

    @property
    def title(self) -> str:
        """The drafter's name in messages."""
        return f"{type(self).__name__} ({self.config.name_or_path or 'unnamed'})"

    def round_reads(self, num_draft_tokens: int) -> Reads | None:
        """The passes of a round of `num_draft_tokens` and the weights that they read, without embeddings; or None."""
        return None

    def passes_and_bytes(self, num_draft_tokens: int) -> tuple[int, int] | None:
        """The number of passes of `round_reads`, and the bytes of weights that they read."""
        reads = self.round_reads(num_draft_tokens)
        return None if reads is None else (reads[0], sum(count * num_bytes(weights) for count, weights in reads[1]))

    @property
    def is_bound(self) -> bool:
        return self._target_config is not None

    @classmethod
    def check_checkpoint(cls, checkpoint: Checkpoint, config: DrafterConfig) -> None:
        """Compare the tensors of the files with those that `config` needs, and set its `stored_layers`; weights are not
        loaded. Raises `ValueError`, which names each tensor that is missing, unexpected or of another shape."""
        names = Counter(rename(name, cls.key_mapping) for name in checkpoint.tensors)
        repeated = [name for name, count in names.items() if count > 1]
        if repeated:
            raise ValueError(
                f"{checkpoint.name} has several tensors that are {repeated[0]} by their names; expected one."
            )
        config.stored_layers = None
        with torch.device("meta"):
            weights = {name: torch.empty(one.shape, dtype=torch.bfloat16) for name, one in checkpoint.tensors.items()}
            plain = cls.load_checkpoint(checkpoint, config, weights, device_map="meta", ignore_mismatched_sizes=True)
        check_draft_vocabulary(checkpoint, config)
        published, heads = cls.tensor_names(checkpoint, config), (config.vocab_size, config.draft_vocab_size)
        found = {
            name: checkpoint.tensors[published[f"{name}.weight"]]
            for name, one in plain.named_modules()
            if type(one) is nn.Linear and one.out_features not in heads and f"{name}.weight" in published
        }
        config.stored_layers = {name: [*one.layout] for name, one in found.items() if one.can_stay} or None

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, config: DrafterConfig) -> dict[str, str]:
        """The names in the files, by the drafter's own names, of the tensors that the files hold."""
        return {rename(name, cls.key_mapping): name for name in checkpoint.tensors}

    @classmethod
    def load_checkpoint(
        cls,
        checkpoint: Checkpoint,
        config: DrafterConfig,
        weights: Mapping[str, torch.Tensor] | None = None,
        **options: Any,
    ) -> Drafter:
        """A drafter with the checkpoint's weights.

        Args:
            checkpoint: a checkpoint that passed `check_checkpoint`.
            config: its configuration in normal form.
            weights: tensors by their names in the files; None to read the files.
            options: `dtype`, `device_map` of `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: a weight was not loaded, or a tensor of the files was not used.
        """
        names, state, used = cls.tensor_names(checkpoint, config), {}, set()
        kept = {names[f"{layer}.weight"] for layer in config.stored_layers or ()}
        if weights is None:
            weights = checkpoint.read(kept)
        for name, published in names.items():
            weight, prefix = weights[published], name.removesuffix("weight")
            parts = {prefix + part: one for part, one in weight.items()} if published in kept else {name: weight}
            # Tensors that are saved must not share memory.
            state |= {part: one.clone() if published in used else one for part, one in parts.items()}
            used.add(published)
        with quiet_loading():
            drafter, info = cls.from_pretrained(
                None, config=config, state_dict=state, output_loading_info=True, **options
            )
        unexpected = [name for name in info["unexpected_keys"] if not is_ignored(name, config)]
        checkpoint.check_not_quantised(names.get(name, name) for name in unexpected)
        checkpoint.check_differences(info["missing_keys"], unexpected, info["mismatched_keys"], info["error_msgs"])
        return drafter

    def configure(
        self,
        num_assistant_tokens: int | str | None = None,
        draft_probs: bool | str | None = None,
        engine: str | None = None,
        verification: str | None = None,
        compile_rounds: bool | None = None,
        batch_invariant: bool | None = None,
        draft_window_size: int | str | None = None,
        kv_cache_dtype: str | None = None,
        tree: int | str | None = None,
    ) -> Drafter:
        """Set how the drafter is run; None leaves a setting as it is. Returns the drafter.

        Args:
            num_assistant_tokens: draft tokens a round (K), at least 1; `"auto"` to choose for each round the K, also 0,
                that gives the most tokens a second by measured times and acceptance.
            draft_probs: True to draw drafts from the drafter's distribution when sampling, False for its most likely
                tokens, `"auto"` to decide by temperature (see `calls.call.DRAFT_PROBS_TEMPERATURE`).
            engine: `"static"`, `"stock"`, or `"auto"` for the static engine where it supports the target and the call.
            verification: how drafts are verified when sampling: `"token"`, one after the other (arXiv 2211.17192);
                `"block"`, all of a round jointly (arXiv 2403.10444); or `"match"`, a draft is accepted if it is the
                token that the target draws, so that a seed gives the same text with and without drafts. All are
                lossless. The stock engine supports only `"token"`. See docs/sampling-and-seeds.md.
            compile_rounds: whether rounds on a GPU are compiled by `torch.compile`, which takes a minute or more for
                every shape of call.
            batch_invariant: whether the logits of a position depend, bit for bit, only on the tokens up to it. See
                docs/batch-invariance.md.
            draft_window_size: number of the last tokens of a text that drafting attends to, at least `LEAST_WINDOW`, or
                `"all"`; prefill attends to the whole prompt. As SGLang's `--speculative-draft-window-size`.
            kv_cache_dtype: `"fp8"` to store keys and values of target and drafter as float8 (e4m3) with a scale for
                each head of each token; `"auto"` for the model's dtype. See docs/generate.md.
            tree: number of drafts of the tree that a round verifies, 1 to `MOST_NODES`, with a depth of up to
                `num_assistant_tokens`; 0 for a chain; `"auto"` to let `num_assistant_tokens="auto"` choose a tree where
                it is faster. When sampling, a tree is verified as with `verification="match"`. See docs/generate.md.

        Raises:
            ValueError: a value is none of those above.
        """
        given = {
            "num_assistant_tokens": num_assistant_tokens,
            "draft_probs": draft_probs,
            "engine": engine,
            "verification": verification,
            "compile_rounds": compile_rounds,
            "batch_invariant": batch_invariant,
            "kv_cache_dtype": kv_cache_dtype,
        }
        for name, value in given.items():
            if value is not None:
                setattr(self, name, value)
        if draft_window_size == ALL:
            self.draft_window_size = None
        elif draft_window_size is not None:
            size = check_int("draft_window_size", draft_window_size, LEAST_WINDOW, f', or "{ALL}"')
            if type(self).limit_attention is Drafter.limit_attention:
                found = f"draft_window_size is {size}, but {type(self).__name__} has no key/value cache of its own"
                raise ValueError(f'{found}; expected "{ALL}".')
            self.draft_window_size = size if size < 2**31 else None  # no text is longer
        if tree is not None:
            self.tree = self.check_tree(tree)
        return self

    def check_tree(self, tree: int | str) -> int | str:
        """Return `tree`, see `configure`; raise `ValueError` if it is wrong, or if this drafter drafts no trees."""
        check_num_nodes(tree)
        if tree and not self.drafts_trees:
            raise ValueError(
                f"tree is {tree!r}, but {type(self).__name__} drafts chains only; expected 0, or a drafter that drafts "
                "trees: EAGLE-3, P-EAGLE, PARD, DFlash and its kinds, MTP modules, an assistant of Gemma 4, or a draft "
                "model of attention layers."
            )
        return tree

    def limit_attention(self, state: DecodeState, window: int | None) -> None:
        """Let drafting attend to the last `window` tokens of each text only; to the whole text if None."""

    @property
    def compiles_rounds(self) -> bool:
        """`compile_rounds`, but False for batch-invariant rounds, because torch's compiler orders sums by the number of
        rows, and for a float8 KV cache, because torch's compiler cannot trace the tensors that hold its keys."""
        return self.compile_rounds and not self.batch_invariant and self.key_dtype is None

    @property
    def key_dtype(self) -> torch.dtype | None:
        """The dtype in which keys and values are stored; None for the model's own."""
        return KV_CACHE_DTYPES[self.kv_cache_dtype]

    def num_draft_tokens(self, requested: int | str | None, is_bulk: bool = False) -> int | str:
        """K of a call, or `"auto"`.

        Args:
            requested: K that the call asks for; None if it does not set K.
            is_bulk: whether the call has many prompts. `"auto"` is then the default of families that vary K.

        Raises:
            ValueError: `requested` is not 1 to `MAX_ASSISTANT_TOKENS`, or `"auto"` with a family that varies K.
        """
        if requested is None:
            is_free = is_bulk and self._asked_num_assistant_tokens is None and self.varies_num_draft_tokens
            return AUTO if is_free else self.num_assistant_tokens
        requested = check_num_or_auto(requested)
        if requested == AUTO and not self.varies_num_draft_tokens:
            raise ValueError(
                f'num_assistant_tokens is "auto", but {type(self).__name__} drafts the same number of tokens in all '
                "rounds of a call; expected a number, or a family that sets varies_num_draft_tokens."
            )
        return requested

    @torch.inference_mode(False)  # tensors that the drafter keeps are created outside of it
    def bind(self, target: PreTrainedModel) -> None:
        """Bind the drafter to `target`: check that it fits, and share the embedding and head that the drafter lacks.

        A family implements it, and calls `_record_binding` at its end; or implements `_fit`.

        Raises:
            ValueError: the drafter does not fit `target`; both are left as they were.
        """
        target = keep_stored(generating_model(target))
        self._fit(target)
        self._record_binding(target)

    def _fit(self, target: PreTrainedModel) -> None:
        """Check that the drafter fits `target`, the model that generates, and keep what it shares with it."""
        raise NotImplementedError(f"{type(self).__name__} does not implement bind().")

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Write `weights` into the drafter's weights in place, so that captured rounds use them.

        It may be called at any time: it waits until a call of another thread ends, or until a manager is between two
        rounds. The output remains the target's.

        Args:
            weights: all or some of `state_dict()`, by name, in any dtype and on any device; quantised weights in their
                own dtype, beside their scales.

        Raises:
            ValueError: a name is unknown, a shape differs, a tensor of integers such as `d2t` would change, a weight is
                quantised and the given one is not, or a library has quantised or sharded it; the drafter's weights are
                then unchanged.
        """
        check_type("weights", weights, Mapping)
        own, problems = self.state_dict(keep_vars=True), []
        for name, tensor in weights.items():
            found = own.get(name)
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.is_complex():
                problems.append(f"{name} is no tensor of real numbers in memory")
            elif found is None:
                problems.append(f"{name} is none of its weights")
            elif found.shape != tensor.shape:
                problems.append(f"{name} is {list(tensor.shape)}, expected {list(found.shape)}")
            elif not is_plain(found):
                problems.append(f"{name} is a {type(found).__name__}, which is quantised or sharded")
            elif isinstance(found, nn.Parameter) and (found.itemsize == 1 or not found.is_floating_point()):
                parts = name.removesuffix("_packed") + "_"  # what the names of the other parts begin with
                if tensor.dtype != found.dtype or any(one.startswith(parts) and one not in weights for one in own):
                    problems.append(
                        f"{name} is {tensor.dtype}, expected {found.dtype} and its scales: it is quantised, unless the "
                        "drafter is loaded with a dtype"
                    )
            elif not found.is_floating_point() and not torch.equal(found, tensor.to(found)):
                problems.append(f"{name} differs, which is fixed: shared weights are chosen by it")
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ValueError(
                f"The weights do not fit {self.title}: {'; '.join(problems[:3])}{more}. Expected tensors of its "
                "state_dict(), by their names there."
            )
        target = _targets.get(self, lambda: None)()
        with nullcontext() if target is None else lock_of(target), torch.inference_mode():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
            self.update_derived()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of `nn.Module`; a bound drafter is bound again, which releases captured rounds, unlike `load_weights`."""
        result = super().load_state_dict(*args, **kwargs)
        target = _targets.get(self, lambda: None)()
        if target is not None:
            self.bind(target)
        return result

    def update_derived(self) -> None:
        """Compute again, in place, the tensors that `bind` computes from the drafter's own weights."""

    def _record_binding(self, target: PreTrainedModel) -> None:
        """Last step of `bind`. Releases captured rounds, because they may read the previous shared weights."""
        self._target_config = self.config.target = target.config
        self._bound_vocab_size = target.config.get_text_config().vocab_size
        self._bound_num_layers = num_decoder_layers(target)
        _targets[self] = ref(target)
        self.release()

    def _changes_of(self, target: PreTrainedModel) -> list[str]:
        """Message parts on why the drafter must be bound again to `target`."""
        shared = self._shared_weights.values()
        changes = [change for one in shared if (change := one.how_changed(target)) is not None]
        vocab_size = target.config.get_text_config().vocab_size
        if vocab_size != self._bound_vocab_size:
            changes.append(f"its vocabulary had {self._bound_vocab_size} tokens and has {vocab_size}")
        if (num_layers := num_decoder_layers(target)) != self._bound_num_layers:
            changes.append(f"it had {self._bound_num_layers} decoder layers and has {num_layers}")
        return changes

    def outdated(self, target: PreTrainedModel) -> list[bool]:
        """What `sync_with` would do: whether it would bind the drafter again, then whether it would refresh each shared
        weight."""
        shared = self._shared_weights.values()
        return [bool(self._changes_of(target)), *(one.is_stale(target) for one in shared)]

    def sync_with(self, target: PreTrainedModel, anew: bool = False) -> None:
        """Refresh copies of shared weights that the target has changed since. Every call begins with it.

        The drafter is bound again if the target's embedding or head was replaced, moved, cast or resized, or if its
        vocabulary size or number of layers has changed; also with `anew`, if other ranks of `target` have noticed it.

        Raises:
            ValueError: the drafter no longer fits the target, or was bound to another one.
        """
        if self._bound_vocab_size is None:
            return
        self.check_bound_to(target)
        changes = self._changes_of(target) or ["as another process has noticed"] * anew
        if not changes:
            for shared in self._shared_weights.values():
                shared.refresh(target)
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
        """Raise `ValueError` unless the drafter was bound to `target`, and the errors of `check_target`."""
        check_target(target)
        if not self.is_bound:
            raise ValueError(
                f"This {type(self).__name__} is not bound to a target; load it with "
                "AutoDrafter.from_pretrained(..., target=model) or call drafter.bind(model)."
            )
        if self._target_config is not target.config:
            raise ValueError(f"This {type(self).__name__} is bound to another target; call drafter.bind(model) first.")

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """Raise `ValueError`: a drafter's layers run this package's attention over the engines' caches."""
        raise ValueError(
            f"{type(self).__name__} drafts on a cache of an engine, which no attention implementation of transformers "
            "reads; expected set_attn_implementation() of the target only."
        )

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save the drafter in normal form, whatever dialect it was read from; `push_to_hub` uploads the same files.

        It takes the arguments of `PreTrainedModel.save_pretrained` without `save_original_format`.
        """
        super().save_pretrained(save_directory, save_original_format=False, **kwargs)

    def new_state(self, shape: Shape, layers: LayerKinds, device: torch.device) -> DecodeState:
        """Buffers of a generation, with the drafter's memory. It takes the arguments of `DecodeState`."""
        state = DecodeState(shape, layers.storing(self.key_dtype), device)
        state.memory = self.new_memory(state)
        return state

    def new_memory(self, state: DecodeState) -> Any:
        """Allocate the drafter's memory of one generation, which becomes `state.memory`."""
        return None

    def observe(self, prompt: torch.Tensor, tokens: Sequence[int] | torch.Tensor) -> None:
        """Take in a text that has ended, so that later rounds can draft from it: its `prompt` `[length]` int64 and its
        new `tokens`, ints or `[n]` int64. Called between two rounds."""

    def copy_rows(
        self, state: DecodeState, rows: torch.Tensor, source: DecodeState, slots: int, source_rows: torch.Tensor
    ) -> None:
        """Copy the drafter's memory from rows of `source` to `rows` of `state`; see `DecodeState.copy_rows`. Raises
        `NotImplementedError` for families that have a memory and do not implement it."""
        if state.memory is not None:
            raise NotImplementedError(
                f"{type(self).__name__} does not implement copy_rows(), which continuous batching needs."
            )

    def prefix_margin(self, num_draft_tokens: int, has_trees: bool = False) -> int | None:
        """The number of tokens at the end of a reused prefix that are prefilled again, since the memory at a slot may
        depend on later tokens; `num_draft_tokens` is the largest K. None if no prefix can be reused."""
        return 1 if type(self).new_memory is Drafter.new_memory else None

    def as_one_row(self, memory: Any, batch: int) -> Any:
        """`memory` of `batch` rows as one row, for `DecodeState.as_one_row`; called only with `packs_prompts`."""
        return memory

    def start_prefill(self, state: DecodeState) -> None:
        """Forget what earlier prompts have left in the memory. Called before the prompts of `state` are prefilled."""

    def prefill(self, state: DecodeState, aux_hidden_states: torch.Tensor | None, positions: torch.Tensor) -> None:
        """Process one chunk of the prompt. The first round reads the prompt's last token.

        Args:
            aux_hidden_states: `[B, n, width]` hidden states of the target at `positions`, concatenated over its
                layers; None for a drafter that reads none.
            positions: `[B, n]` int64; `state.dummy_slot` where a row has no token in this chunk.
        """

    def propose(
        self, state: DecodeState, aux_hidden_states: torch.Tensor | None, result: VerificationResult
    ) -> Proposal:
        """Draft K = `state.num_draft_tokens` tokens after the last committed token of each row.

        With `varies_num_draft_tokens` K may differ from round to round. `n` below is then K + 1, or more if this round
        drafts fewer tokens than the last; the column of the last committed token may come twice. With K = 0 only the
        memory is updated. Without `varies_num_draft_tokens` `n` is always K + 1 and K at least 1.

        Args:
            state: after `commit`: `state.lengths` counts the tokens that the last round committed.
            aux_hidden_states: `[B, n, width]` hidden states of the target at the tokens that the last round verified,
                or None.
            result: the last round's verification, with `tokens` `[B, n]`; the first `result.committed[b]` hidden states
                of row b are valid.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement propose().")
