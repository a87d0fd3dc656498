"""Drafters that read the target's keys and values, and keep none: Google's assistants of Gemma 4."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from .. import ops
from ..checkpoints.checkpoint import Checkpoint, quiet_loading
from ..checkpoints.read_models import auto_class
from ..config import CacheReaderConfig
from ..host.modeling import sliding_window_bidirectional_overlay
from ..kernels.types import Columns
from ..modules.hidden_states import decoder_layers
from ..parallel.tensor_parallel import tensor_parallel_group
from ..patching.attention import set_ragged_attention
from ..patching.mask_rules import MaskRule
from ..patching.support import cache_layers
from ..state import DecodeState
from .base import Drafter
from .cached import CachedDrafter, Outputs
from .draft_model import WITHOUT_WEIGHTS, load_language_model
from .shared_weights import SharedWeight, score

_building = threading.RLock()


@contextmanager
def sharing_all_layers(model: PreTrainedConfig) -> Iterator[None]:
    """Context in which transformers can build an assistant, none of whose text layers stores keys.

    `kv_sharing_modes` of transformers 5.23 looks for layers that store keys and fails if there are none.
    """
    kind = type(model.get_text_config())
    own = vars(kind).get("kv_sharing_modes")
    if own is None:
        yield
        return

    def sharing_modes(config: PreTrainedConfig) -> list[str | None]:
        count = config.num_hidden_layers
        return ["reuse"] * count if config.num_kv_shared_layers == count else own.fget(config)

    with _building:
        kind.kv_sharing_modes = property(sharing_modes)
        try:
            yield
        finally:
            kind.kv_sharing_modes = own


def _layers_read(target: PreTrainedModel, kinds: Sequence[str], name: str) -> dict[str, int]:
    """For each of `kinds`, the last layer of `target` that stores keys; raises `ValueError` if there is none."""
    text = target.config.get_text_config()
    types = getattr(text, "layer_types", None) or []
    storing = [index for index, kind in enumerate(cache_layers(target).layers[: len(types)]) if kind.stores_keys]
    found = {types[index]: index for index in storing}
    missing = sorted(set(kinds) - found.keys())
    if missing:
        raise ValueError(
            f"{name} reads keys and values of layers of type {', '.join(missing)}, but the layers of "
            f"{text.name_or_path or text.model_type} that store any are of type {', '.join(sorted(found)) or 'none'}; "
            "expected the Gemma 4 model that it was made for."
        )
    return {kind: found[kind] for kind in kinds}


class CacheReaderDrafter(CachedDrafter):
    """An assistant of Gemma 4 (`Gemma4AssistantForCausalLM` and its like): layers with queries only.

    A draft step combines the target's embedding of the last token with a hidden state. In the first step that is the
    target's, after the final norm, at the token before the newest one; in later steps it is the assistant's own. Each
    layer attends to the keys and values of the target's last storing layer of the same type, up to the token before the
    newest one. All steps of a round are at the newest token's position. Nothing is prefilled.

    transformers' own loop also shows the assistant the key of a rejected draft, if there is one, at the newest token's
    position. Here it is hidden, so the drafts depend on the text alone.

    `model` is the assistant, whose attention is replaced; None for random weights.
    """

    config_class = CacheReaderConfig
    num_cached_layers = 0
    shift = 1
    grows_trees = True
    reads_last_hidden_state = True
    reads_target_cache = True
    start_prefill, prefill = Drafter.start_prefill, Drafter.prefill  # nothing is kept of a prompt

    def __init__(self, config: CacheReaderConfig, model: PreTrainedModel | None = None):
        super().__init__(config)
        if model is None:
            own = config.model_config
            with sharing_all_layers(own):
                model = auto_class(own).from_config(own)
        self.model = model
        config.model = config.model or model.config.to_dict()
        text = model.config.get_text_config()
        # transformers' mask puts the newest token at distance 0 from the last key.
        sees = sliding_window_bidirectional_overlay(text.sliding_window)
        window = text.sliding_window + bool(sees(0, 0, 0, text.sliding_window))
        rules = {"sliding_attention": MaskRule(window=window), "full_attention": MaskRule()}
        layers = zip(model.model.layers, text.layer_types, strict=True)
        set_ragged_attention(model, [(layer.self_attn, rules[kind]) for layer, kind in layers])
        self._layers_read: dict[str, int] = {}
        # Factor on the target's embedding, `[]`; None before `bind`.
        self.register_buffer("embedding_scale", None, persistent=False)

    @classmethod
    def check_checkpoint(cls, checkpoint: Checkpoint, config: CacheReaderConfig) -> None:
        with quiet_loading(), sharing_all_layers(config.model_config):
            load_language_model(checkpoint, config, **WITHOUT_WEIGHTS)

    @classmethod
    def load_checkpoint(cls, checkpoint: Checkpoint, config: CacheReaderConfig, **options: Any) -> CacheReaderDrafter:
        with sharing_all_layers(config.model_config):
            return cls(config, load_language_model(checkpoint, config, **options))

    @torch.no_grad()
    def _fit(self, target: PreTrainedModel) -> None:
        own, text, name = self.model.config, self.model.config.get_text_config(), self.title
        self.config.check_fit(target.config, 0, name)
        if tensor_parallel_group(target) is not None:
            raise ValueError(
                f"{name} reads the target's keys and values, of which every process of a tensor parallel target holds "
                "those of some heads only; expected a target that is not split."
            )
        layers_read = _layers_read(target, list(dict.fromkeys(text.layer_types)), name)
        _check_heads(self.model, target, layers_read, name)
        embedding = target.get_input_embeddings()
        shared = SharedWeight(target, "embedding", own.backbone_hidden_size, name)
        self.embedding_scale = _scale_of(embedding, shared.weight, name).to(self.device)
        self._shared_weights = {"embedding": shared}
        self._layers_read = layers_read

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's embeddings `[..., Ht]` of `tokens` `[...]` int64, scaled as its decoder reads them."""
        weight = self._shared_weights["embedding"].weight
        embeds = F.embedding(tokens.to(weight.device), weight)
        return (embeds * self.embedding_scale.to(embeds)).to(self.embedding_scale.device, self.dtype)

    def combine_hidden_states(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        return aux_hidden_states.to(self.dtype)

    def gather_hidden_states(self, hidden: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        return ops.gather_rows(hidden, sources, None)

    def extend_cache(self, state: DecodeState, columns: Columns, num_logits: int) -> Outputs:
        # Only the hidden states carry earlier drafts: no pass runs other columns than those with logits.
        if num_logits == 0:
            return None, None
        tokens, hidden = columns.tokens[:, -num_logits:], columns.hidden[:, -num_logits:]
        # The last token whose key the target has stored. Without one, before slot 0, no slot is seen.
        last = state.next_slots(-2).expand(-1, num_logits)
        state.cache.show(state.live)
        out = self.model.model(
            inputs_embeds=self.model.pre_projection(torch.cat([self.embed(tokens), hidden], dim=-1)),
            attention_mask=dict.fromkeys(self._layers_read, last.contiguous()[:, None, :, None]),
            position_ids=(state.lengths - 1)[:, None].expand_as(last),
            shared_kv_states={kind: state.cache.layers[index].shown() for kind, index in self._layers_read.items()},
            use_cache=False,
            # A tensor: with a number, layers that share others' keys would drop tokens of inputs that they do not have.
            logits_to_keep=torch.arange(num_logits, device=tokens.device),
        ).last_hidden_state
        return self.logits(out), self.model.post_projection(out)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits `[B, n, V]` of `[B, n, H]` after the final norm.

        With ordered embeddings the tokens are in clusters. Only the tokens of the clusters with the best centroids are
        scored; the others get -inf.
        """
        head, clusters = self.model.lm_head.weight, self.model.masked_embedding
        if clusters is None:
            return score(normed, head)
        members = clusters.token_ordering.long().view(clusters.num_centroids, -1)
        chosen = clusters.centroids(normed).topk(clusters.centroid_intermediate_top_k, dim=-1).indices
        tokens = members[chosen].flatten(-2)
        scores = (head[tokens] @ normed[..., None]).squeeze(-1)
        logits = scores.new_full((*normed.shape[:-1], len(head)), float("-inf"))
        return logits.scatter(-1, tokens, scores)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save the assistant as transformers does, with K among its generation settings."""
        if self.model.generation_config is not None:
            self.model.generation_config.num_assistant_tokens = self.num_own_draft_tokens
        self.model.save_pretrained(save_directory, **kwargs)


def _check_heads(model: PreTrainedModel, target: PreTrainedModel, layers_read: Mapping[str, int], name: str) -> None:
    """Raise `ValueError` unless the queries of the assistant `model` fit the keys of the target that they read."""
    text = model.config.get_text_config()
    theirs = decoder_layers(target)
    for layer, kind in zip(model.model.layers, text.layer_types, strict=True):
        own, read = layer.self_attn, theirs[layers_read[kind]].self_attn
        num_heads = own.q_proj.out_features // own.head_dim
        num_keys = read.k_proj.out_features // read.head_dim
        if own.head_dim != read.head_dim or num_heads % num_keys:
            raise ValueError(
                f"{name} has {num_heads} query heads of {own.head_dim} in its {kind} layers, but layer "
                f"{layers_read[kind]} of the target has {num_keys} key heads of {read.head_dim}; expected the target "
                "that it was made for."
            )


def _scale_of(embedding: torch.nn.Module, weight: torch.Tensor, name: str) -> torch.Tensor:
    """The factor `[]` of `embedding` on rows of its weight; raises `ValueError` if it does anything else."""
    scale = getattr(embedding, "embed_scale", None)
    scale = torch.as_tensor(1.0 if scale is None else scale, device=weight.device).to(weight.dtype)
    tokens = torch.arange(min(8, len(weight)), device=weight.device)
    if not torch.equal(embedding(tokens).to(weight.device), weight[tokens] * scale):
        raise ValueError(
            f"{name} reads the target's embeddings, but those of {type(embedding).__name__} are not rows of its "
            "weight, times `embed_scale`; expected Gemma 4's."
        )
    return scale.clone()
