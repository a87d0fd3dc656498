"""Drafters for tests: an oracle of a given accuracy, and small random drafters of every family."""

from functools import partial
from random import Random

import torch
from case_counts import tries_all
from transformers import LlamaConfig, PreTrainedModel

from hf_specdec import Drafter, DrafterConfig, register_drafter
from hf_specdec.config import (
    DFlash2Config,
    DFlashConfig,
    DominoConfig,
    DraftModelConfig,
    DSparkConfig,
    DSpineConfig,
    Eagle3Config,
    MtpConfig,
    Pard2Config,
    PEagleConfig,
    mtp_block_settings,
)
from hf_specdec.drafters import (
    DFlash2Drafter,
    DFlashDrafter,
    DominoDrafter,
    DraftModelDrafter,
    DSparkDrafter,
    DSpineDrafter,
    Eagle3Drafter,
    MtpDrafter,
    Pard2Drafter,
    PEagleDrafter,
)
from hf_specdec.drafters.draft_layers import DraftLayersDrafter
from hf_specdec.drafters.target_checks import generating_model
from hf_specdec.kernels.types import Proposal, Tree

# K of random drafters unless a test sets another: the first draft, one that follows drafts and is followed, the last.
# Hardly any of theirs is accepted, so more only take time.
NUM_DRAFT_TOKENS = 3


class OracleConfig(DrafterConfig):
    model_type = "hf_specdec_test_oracle"


@register_drafter
class OracleDrafter(Drafter):
    """Proposes known continuations, wrong at random places.

    Args:
        target: to bind to.
        continuations: `[B, T]` int64, the continuation of each row's prompt.
        prompt_lengths: tokens of each prompt, padding not counted; all different if rows are run one by one, since they
            identify rows.
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
        target = generating_model(target)  # as every drafter that is bound
        super().__init__(OracleConfig(vocab_size=target.config.get_text_config().vocab_size))
        generator = torch.Generator().manual_seed(seed)
        wrong = torch.rand(continuations.shape, generator=generator) >= accuracy
        answers = torch.where(wrong, (continuations.cpu() + 1) % self.config.vocab_size, continuations.cpu())
        self._answers = answers.to(target.device)
        self._prompt_lengths = torch.tensor(prompt_lengths, device=target.device)
        self._target_config = target.config

    @property
    def device(self) -> torch.device:
        return self._answers.device

    def start_prefill(self, state) -> None:
        super().start_prefill(state)
        self._rows = slice(None)
        if len(state.lengths) == 1 < len(self._answers):  # those of the stock engine, with the first token
            self._rows = (self._prompt_lengths == state.lengths - 1).nonzero()[:1, 0]

    def propose(self, state, aux_hidden_states, result) -> Proposal:
        drafts = torch.arange(state.num_draft_tokens, device=self.device)
        at = (state.lengths - self._prompt_lengths[self._rows])[:, None] + drafts
        return Proposal(self._answers[self._rows].gather(1, at.clamp(0, self._answers.shape[1] - 1)), None)


class TreeOracle(OracleDrafter):
    """An oracle that drafts random trees; one random path of each, among any siblings, is the oracle's."""

    drafts_trees = True

    def propose(self, state, aux_hidden_states, result) -> Proposal:
        answers = super().propose(state, aux_hidden_states, result).tokens
        if not state.num_nodes:
            return Proposal(answers, None)
        (batch, depth), tree = answers.shape, Tree.allocate(len(answers), state.num_nodes, self.device)
        drafts = torch.zeros(batch, state.num_nodes, dtype=torch.int64, device=self.device)
        for row in range(batch):
            random = Random(int(state.lengths[row]) * 31 + row)
            depths, children = [0], {0: []}
            for node in range(1, state.num_nodes + 1):
                parent = random.choice([one for one, at in enumerate(depths) if at < depth])
                children[parent].append(node)
                children[node] = []
                depths.append(depths[parent] + 1)
                tree.parents[row, node], tree.depths[row, node] = parent, depths[node]
                tree.ancestors[row, node] = tree.ancestors[row, parent]
                tree.ancestors[row, node, node // 64] |= 1 << node % 64 if node % 64 < 63 else -(1 << 63)
            tokens = {one: random.sample(range(self.config.vocab_size), len(nodes)) for one, nodes in children.items()}
            true = 0
            for answer in answers[row].tolist():
                if not children[true]:
                    break
                chosen = random.randrange(len(children[true]))
                own = tokens[true]
                if answer in own:
                    chosen = own.index(answer)
                own[chosen] = answer
                true = children[true][chosen]
            for one, nodes in children.items():
                for node, token in zip(nodes, tokens[one], strict=True):
                    drafts[row, node - 1] = token
        return Proposal(drafts, None, tree=tree)


def eagle_options(target: PreTrainedModel, **options) -> dict:
    """Arguments of a small `Eagle3Config` for `target`."""
    text = target.config.get_text_config()
    last = text.num_hidden_layers
    return {
        "hidden_size": text.hidden_size,
        "target_hidden_size": text.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": text.vocab_size // 2,
        "aux_hidden_state_layer_ids": [last - 2, last - 1, last],
        "num_assistant_tokens": NUM_DRAFT_TOKENS,
        "initializer_range": 0.3,
        **options,
    }


def random_eagle3(target: PreTrainedModel, seed: int = 0, **options) -> Eagle3Drafter:
    """A random EAGLE-3 drafter for `target`, bound to it."""
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(Eagle3Config(**eagle_options(target, **options))).eval().to(target.device)
    draw_draft_vocabulary(drafter)
    drafter.bind(target)
    return drafter


def random_peagle(target: PreTrainedModel, seed: int = 0, **options) -> PEagleDrafter:
    """A random P-EAGLE drafter for `target`, bound to it."""
    torch.manual_seed(seed)
    options = {"num_hidden_layers": 2, "mask_token_id": 2, **options}
    drafter = PEagleDrafter(PEagleConfig(**eagle_options(target, **options))).eval().to(target.device)
    draw_draft_vocabulary(drafter)
    drafter.mask_hidden.data.copy_(torch.randn(drafter.mask_hidden.shape))
    drafter.bind(target)
    return drafter


def random_dflash(target: PreTrainedModel, seed: int = 0, **options) -> DFlashDrafter:
    """A random DFlash drafter for `target`, bound to it, whose layers are of every kind: windowed or not, causal or
    not; with `markov_rank` a DSpark drafter, with `selector_rank` a DFlash-2, with `gru_hidden_dim` a Domino, with
    `transfer_rank` a DSpine one."""
    torch.manual_seed(seed)
    family, config_class = DFlashDrafter, DFlashConfig
    if "markov_rank" in options:
        family, config_class = DSparkDrafter, DSparkConfig
    if "gru_hidden_dim" in options:
        family, config_class = DominoDrafter, DominoConfig
    if "selector_rank" in options:
        family, config_class = DFlash2Drafter, DFlash2Config
        options["draft_vocab_size"] = target.config.get_text_config().vocab_size
    if "transfer_rank" in options:
        family, config_class = DSpineDrafter, DSpineConfig
        options["draft_vocab_size"] = target.config.get_text_config().vocab_size
    kinds = {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "causal": [False, True, False],
        "sliding_window": 7,
    }
    options = kinds | {"mask_token_id": 2, "block_size": 17, **options}
    drafter = family(config_class(**eagle_options(target, **options))).eval().to(target.device)
    draw_draft_vocabulary(drafter)
    drafter.bind(target)
    return drafter


random_dspark = partial(random_dflash, markov_rank=12, markov_type="rnn")
random_domino = partial(random_dflash, gru_hidden_dim=12, emb_dim=8, anchor_first=True)
random_dspine = partial(random_dflash, transfer_rank=10, message_size=12, selector_top_k=6)
random_dflash2 = partial(random_dflash, selector_rank=12, selector_top_k=6, conv_group_size=8)


def random_mtp(target: PreTrainedModel, seed: int = 0, num_modules: int = 2, **options) -> MtpDrafter:
    """Random MTP modules, made of the target's own kind of layers, bound to it."""
    torch.manual_seed(seed)
    text = target.config.get_text_config()
    config = MtpConfig(
        block=mtp_block_settings(text, num_modules),
        num_modules=num_modules,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        initializer_range=0.3,
        **{"num_assistant_tokens": NUM_DRAFT_TOKENS, **options},
    )
    drafter = MtpDrafter(config).eval().to(target.device)
    drafter.bind(target)
    return drafter


def draw_draft_vocabulary(drafter: DraftLayersDrafter) -> None:
    """Fill the draft vocabulary with random tokens of the target's."""
    if drafter.d2t is not None:
        size, num_drafted = drafter.config.vocab_size, drafter.config.draft_vocab_size
        ids = torch.randperm(size)[:num_drafted].sort().values
        drafter.d2t.copy_(ids - torch.arange(num_drafted))


def random_draft_model(
    target: PreTrainedModel,
    parallel: bool = False,
    vocab_size: int | None = None,
    mask_token_id: int = 2,
    seed: int = 0,
    hidden_state_ids: list[int] | None = None,
    **options,
) -> DraftModelDrafter:
    """A random Llama as draft model for `target`, bound to it; `parallel` to draft as PARD, with `hidden_state_ids` as
    PARD-2."""
    text = target.config.get_text_config()
    size = text.vocab_size
    own = LlamaConfig(
        **{
            "vocab_size": vocab_size or size,
            "hidden_size": 24,
            "intermediate_size": 40,
            # One draft a pass: several layers are those of `copy_of`.
            "num_hidden_layers": 2 if parallel else 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "initializer_range": 0.3,
            **options,
        }
    )
    torch.manual_seed(seed)
    settings = {"model": own.to_dict(), "vocab_size": size, "parallel_drafting": parallel}
    settings["num_assistant_tokens"] = NUM_DRAFT_TOKENS
    settings |= {"mask_token_id": mask_token_id} if parallel else {}
    if hidden_state_ids is None:
        drafter = DraftModelDrafter(DraftModelConfig(**settings)).eval().to(target.device)
    else:
        settings |= {"hidden_state_ids": hidden_state_ids, "target_hidden_size": text.hidden_size}
        drafter = Pard2Drafter(Pard2Config(**settings, hidden_state_scale=1.0)).eval().to(target.device)
    drafter.bind(target)
    return drafter


def copy_of(target: PreTrainedModel, noise: float = 0.0, seed: int = 0) -> DraftModelDrafter:
    """A copy of the target as draft model: always right, or less so with factors of 1 +- `noise` on its weights."""
    config = DraftModelConfig(
        model=target.config.to_dict(), vocab_size=target.config.get_text_config().vocab_size, mask_token_id=None
    )
    drafter = DraftModelDrafter(config).eval().to(target.device)
    drafter.model.load_state_dict(target.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter *= 1 + noise * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    drafter.bind(target)
    return drafter


RANDOM_DRAFTERS = {
    "eagle3": random_eagle3,
    "p-eagle": random_peagle,
    "p-eagle-sequential": partial(random_peagle, parallel_drafting=False),
    "pard": partial(random_draft_model, parallel=True),
    "pard2": partial(random_draft_model, parallel=True, hidden_state_ids=[-1, 1]),
    "draft-model": random_draft_model,
    "dflash": random_dflash,
    "dspark": random_dspark,
    "dflash2": random_dflash2,
    "domino": random_domino,
    "dspine": random_dspine,
    "mtp": random_mtp,
    "mtp-by-target": partial(random_mtp, chaining="target"),
}
# These walk along a block by DSpark's code, or have P-EAGLE's layers and draft by EAGLE-3's; tests of what surrounds a
# drafter leave them out unless they try all cases.
SELDOM = () if tries_all else ("dflash2", "domino", "dspine", "p-eagle-sequential")
