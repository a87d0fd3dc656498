"""Drafters for tests: one that knows the answer as well as it is told to, and a small random EAGLE-3."""

import torch
from transformers import PreTrainedModel

from hf_specdec import Drafter, DrafterConfig, register_drafter
from hf_specdec.config import Eagle3Config
from hf_specdec.drafters import Eagle3Drafter, Proposal


class OracleConfig(DrafterConfig):
    model_type = "hf_specdec_test_oracle"


@register_drafter
class OracleDrafter(Drafter):
    """Proposes known continuations, wrong at random places.

    Args:
        target: to bind to.
        continuations: `[B, T]` int64, what each row continues its prompt with.
        prompt_lengths: tokens of each prompt, padding not counted.
        accuracy: share of the positions at which the proposal is the continuation's token.
    """

    config_class = OracleConfig

    def __init__(
        self,
        target: PreTrainedModel,
        continuations: torch.Tensor,
        prompt_lengths: list[int],
        accuracy: float = 1.0,
        seed: int = 0,
    ):
        super().__init__(OracleConfig(vocab_size=target.config.get_text_config().vocab_size))
        generator = torch.Generator().manual_seed(seed)
        wrong = torch.rand(continuations.shape, generator=generator) >= accuracy
        self._answers = torch.where(wrong, (continuations + 1) % self.config.vocab_size, continuations)
        self._prompt_lengths = torch.tensor(prompt_lengths)
        self._target_config = target.config

    @property
    def device(self) -> torch.device:
        return self._answers.device

    def propose(self, state, taps, verdict) -> Proposal:
        at = (state.lengths - self._prompt_lengths)[:, None] + torch.arange(state.num_draft_tokens)
        return Proposal(self._answers.gather(1, at.clamp(max=self._answers.shape[1] - 1)), None)


def random_eagle3(target: PreTrainedModel, seed: int = 0, **options) -> Eagle3Drafter:
    """A random EAGLE-3 drafter for `target`, bound to it."""
    text = target.config.get_text_config()
    config = Eagle3Config(
        **{
            "hidden_size": text.hidden_size,
            "target_hidden_size": text.hidden_size,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": text.vocab_size,
            "draft_vocab_size": text.vocab_size // 2,
            "taps": [1, 3, text.num_hidden_layers],
            "initializer_range": 0.3,
            **options,
        }
    )
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(config).eval()
    if drafter.d2t is not None:
        ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        drafter.d2t.copy_(ids - torch.arange(config.draft_vocab_size))
    drafter.bind(target)
    return drafter
