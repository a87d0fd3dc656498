"""Configurations of drafters with layers of their own that read hidden states: EAGLE-3, P-EAGLE, DFlash and others."""

from __future__ import annotations

from .base import DEFAULT_ROPE_THETA, MAX_ASSISTANT_TOKENS, DrafterConfig, check_types

# Names that fields of `DraftLayersConfig` have in files saved by earlier versions.
_EARLIER_NAMES = {"aux_hidden_state_layer_ids": "taps", "num_aux_hidden_states": "num_taps"}

# Values of `DSparkConfig.markov_type`.
MARKOV_TYPES = ("vanilla", "gated", "rnn")


def default_aux_layer_ids(num_layers: int) -> list[int]:
    """Layer ids of the auxiliary hidden states that EAGLE-3 reads by default: 2, n // 2 and n - 3, ascending, distinct.

    Layer id `b` is the residual stream that enters layer `b` (0-based) of a target with n = `num_layers` layers, which
    is `hidden_states[b]` in transformers; id n is the stream that leaves the last layer, before the final norm.
    """
    return sorted({min(max(layer_id, 0), num_layers) for layer_id in (2, num_layers // 2, num_layers - 3)})


def default_block_layer_ids(num_layers: int, num_draft_layers: int) -> list[int]:
    """Layer ids of the auxiliary hidden states that DFlash reads by default: one for each draft layer, evenly spread.

    It is z-lab's rule (`build_target_layer_ids`), which counts outputs of layers, for a target with `num_layers`.
    """
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
        max_position_embeddings: used by some RoPE types; positions are never clamped to it.
        sliding_window: window of the layers that `layer_types` calls `"sliding_attention"`.
        layer_types: `"full_attention"` or `"sliding_attention"` for each layer; all full when None.
        initializer_range: standard deviation of random weights.
        target_hidden_size: hidden size of the target, width of an auxiliary hidden state; `hidden_size` when None.
        aux_hidden_state_layer_ids: layer ids of the auxiliary hidden states, as `default_aux_layer_ids` counts them;
            stored ascending and distinct. None: `default_layer_ids` of the target, set by `bind`.
        use_aux_hidden_state: False for drafters that read the target's last hidden state, after the final norm, and
            have no `fc`.
        fc_bias: bias on `fc`.
        logit_scale: factor on the draft logits.
        own_embedding, own_head: whether the drafter has an embedding and a head of its own; otherwise it shares the
            target's. A shared head is restricted to the draft vocabulary.
        num_aux_hidden_states: how many there are; 3 when neither it nor `aux_hidden_state_layer_ids` is given.
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

    def __post_init__(self, **kwargs):
        for name, earlier in _EARLIER_NAMES.items():
            value = kwargs.pop(earlier, None)
            if getattr(self, name) is None:
                setattr(self, name, value)
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
        """Width of `aux_hidden_states` at one position: all of them concatenated, or the last hidden state."""
        return (self.num_aux_hidden_states if self.use_aux_hidden_state else 1) * self.target_hidden_size

    def default_layer_ids(self, num_layers: int) -> list[int]:
        """Layer ids of the auxiliary hidden states of a target with `num_layers` layers where none are given."""
        return default_aux_layer_ids(num_layers)


class Eagle3Config(DraftLayersConfig):
    """EAGLE-3 drafter (arXiv 2503.01840): decoder layers that read auxiliary hidden states of the target.

    Args:
        norm_before_residual: the first layer's residual is the normed hidden state instead of the raw one.
        norm_before_fc: one RMSNorm over the concatenated auxiliary hidden states before `fc`.
        fc_norm: one RMSNorm for each auxiliary hidden state before `fc`.
        norm_output: the hidden state fed back to the next draft step is taken after the final norm (EAGLE 3.1).
        final_norm: whether a norm precedes the draft head.
    """

    model_type = "hf_specdec_eagle3"
    family = "eagle3"

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    final_norm: bool = True

    def __post_init__(self, **kwargs):
        check_types(self)
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both set; a checkpoint has at most one of them.")
        super().__post_init__(**kwargs)


class PEagleConfig(Eagle3Config):
    """P-EAGLE drafter (arXiv 2602.01469): EAGLE-3 that drafts all K tokens in one pass.

    The K - 1 positions that have no token yet embed `mask_token_id` and read a learned hidden state.

    Args:
        parallel_drafting: when None, True if there is a mask token.
        mask_hidden_shape: shape of the tensor `mask_hidden`, which replaces the auxiliary hidden states of a position;
            publishers differ in the number of leading ones. `[1, 1, aux_hidden_size]` when None.
    """

    model_type = "hf_specdec_peagle"
    family = "p-eagle"
    has_no_defaults_at_init = True  # `mask_token_id` has no default.

    parallel_drafting: bool | None = None
    mask_hidden_shape: list[int] | None = None

    def __post_init__(self, **kwargs):
        check_types(self)
        if self.parallel_drafting is None:
            self.parallel_drafting = self.mask_token_id is not None
        super().__post_init__(**kwargs)
        if self.mask_hidden_shape is None:
            self.mask_hidden_shape = [1, 1, self.aux_hidden_size]


class DFlashConfig(DraftLayersConfig):
    """DFlash drafter (arXiv 2602.06036): one pass over a block of tokens, whose layers also attend to the context.

    The block is the newest token, called the anchor, and mask tokens after it. Context positions have keys and values
    only, made of the auxiliary hidden states of the target.

    Args:
        block_size: tokens of a block in training, the anchor included.
        anchor_first: whether a token of the block drafts the token after it, the anchor the first; otherwise a mask
            token drafts the token at its own position (fill-in), and the anchor drafts none.
        causal: whether the tokens of a block see no later ones, for each layer, or for all. None: windowed layers do
            not, full ones do.
        output_bias: bias on `o_proj` of the draft layers.
        embedding_scale: factor on the embeddings.
        logit_softcap: if given, logits x become logit_softcap * tanh(x / logit_softcap), after `logit_scale`.
        num_assistant_tokens: at most `depth`, which it is when None.
    """

    model_type = "hf_specdec_dflash"
    family = "dflash"
    has_no_defaults_at_init = True  # `mask_token_id` has no default.

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

    def __post_init__(self, **kwargs):
        check_types(self)
        if not self.parallel_drafting or not self.use_aux_hidden_state:
            found = "parallel_drafting" if not self.parallel_drafting else "use_aux_hidden_state"
            raise ValueError(
                f"{found} is False; expected True: {self.family} drafters draft a block at a time, from auxiliary "
                "hidden states of the target."
            )
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
        super().__post_init__(**kwargs)
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
        """Draft tokens of a block in training, the largest K."""
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


class DFlash2Config(DFlashConfig):
    """DFlash-2 drafter (z-lab): DFlash with convolutions in its layers, and a selector of candidates.

    Args:
        conv_kernel_size: tokens of the block that a convolution reads, the token's own included.
        conv_group_size: channels that share the part of a kernel that depends on the token.
        selector_rank: width of the selector.
        selector_top_k: candidates of each draft token: the most likely ones by the head. It is one of them.
    """

    model_type = "hf_specdec_dflash2"
    family = "dflash-2"

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def __post_init__(self, **kwargs):
        check_types(self)
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}; expected a divisor of hidden_size {self.hidden_size}."
            )
        if self.conv_kernel_size > self.block_size:
            raise ValueError(
                f"conv_kernel_size is {self.conv_kernel_size}; expected at most block_size {self.block_size}."
            )
        super().__post_init__(**kwargs)
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, but {self.family} drafters select among all "
                f"{self.vocab_size} tokens of the target; expected that number."
            )
        if self.selector_top_k > self.vocab_size:
            raise ValueError(f"selector_top_k is {self.selector_top_k}; expected at most {self.vocab_size} tokens.")


class DominoConfig(DFlashConfig):
    """Domino drafter (arXiv 2605.29707): DFlash with a correction by a GRU over the draft tokens before.

    Args:
        gru_hidden_dim: width of the GRU's state.
        emb_dim: width between the two layers of the correction.
        pure_draft_prefix_len: draft tokens at the beginning of a round that are not corrected.
    """

    model_type = "hf_specdec_domino"
    family = "domino"

    gru_hidden_dim: int = 1024
    emb_dim: int = 256
    pure_draft_prefix_len: int = 1

    def __post_init__(self, **kwargs):
        check_types(self)
        for name, least in (("gru_hidden_dim", 1), ("emb_dim", 1), ("pure_draft_prefix_len", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least}.")
        super().__post_init__(**kwargs)


class DSparkConfig(DFlashConfig):
    """DSpark drafter (arXiv 2607.05147): DFlash with a Markov head, which makes a draft depend on the one before it.

    Args:
        markov_rank: width of the Markov head.
        markov_type: `"vanilla"`, `"gated"` or `"rnn"`; see `MarkovHead`.
    """

    model_type = "hf_specdec_dspark"
    family = "dspark"

    anchor_first: bool = True
    markov_rank: int = 256
    markov_type: str = "vanilla"

    def __post_init__(self, **kwargs):
        check_types(self)
        if self.markov_rank < 1:
            raise ValueError(f"markov_rank is {self.markov_rank}; expected at least 1.")
        if self.markov_type not in MARKOV_TYPES:
            raise ValueError(
                f"markov_type is {self.markov_type!r}; expected one of {', '.join(map(repr, MARKOV_TYPES))}."
            )
        super().__post_init__(**kwargs)
