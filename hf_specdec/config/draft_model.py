"""Configuration of draft models."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

from .base import DrafterConfig, check_types


class DraftModelConfig(DrafterConfig):
    """A causal language model as drafter, sequential (arXiv 2211.17192) or parallel (PARD, arXiv 2504.18583).

    Args:
        model: settings of the model's own configuration, with its `model_type`.
    """

    model_type = "hf_specdec_draft_model"
    family = "draft model"

    model: dict | None = None

    @property
    def model_config(self) -> PreTrainedConfig:
        """The model's own configuration, as transformers' class."""
        return AutoConfig.for_model(**(self.model or {}))

    @property
    def num_embeddings(self) -> int:
        return self.vocab_size if self.model is None else self.model_config.get_text_config().vocab_size


class Pard2Config(DraftModelConfig):
    """PARD-2 drafter (arXiv 2605.08632): PARD whose input embeddings have a projection of hidden states added.

    Args:
        hidden_state_ids: which of the target's hidden states are read, in the order in which `target_proj` reads them:
            indices of transformers' `hidden_states`, negative ones counted from its end. The last one, -1, is after
            the final norm.
        target_hidden_size: hidden size of the target.
        hidden_state_scale: factor on the projection.
        projection_bias: bias of the projection.
    """

    model_type = "hf_specdec_pard2"
    family = "pard-2"
    has_no_defaults_at_init = True  # `mask_token_id` and `hidden_state_ids` have no default.

    parallel_drafting: bool = True
    hidden_state_ids: list[int] | None = None
    target_hidden_size: int = 4096
    hidden_state_scale: float = 0.02
    projection_bias: bool = False

    def __post_init__(self, **kwargs):
        check_types(self)
        if not self.parallel_drafting:
            raise ValueError("parallel_drafting is False; expected True: PARD-2 drafts all tokens of a round at once.")
        ids = self.hidden_state_ids
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(
                f"hidden_state_ids is {ids}; expected a list of different indices of the target's hidden states."
            )
        super().__post_init__(**kwargs)

    def layer_ids(self, num_layers: int, name: str) -> list[int]:
        """`hidden_state_ids` of a target with `num_layers` layers, from 0 to `num_layers`, of a drafter called `name`.

        Raises:
            ValueError: expected indices of `num_layers` + 1 hidden states, all different.
        """
        ids = [index + num_layers + 1 if index < 0 else index for index in self.hidden_state_ids]
        if min(ids) < 0 or max(ids) > num_layers or len(set(ids)) != len(ids):
            raise ValueError(
                f"{name} reads the hidden states {self.hidden_state_ids}, but the target has {num_layers} layers, so "
                f"{num_layers + 1} hidden states; expected indices of different ones: it is a drafter for another "
                "model."
            )
        return ids
