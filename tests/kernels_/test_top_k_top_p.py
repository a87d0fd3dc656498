"""Temperature, top-k and top-p of each row: Triton and its reference against sorted float64 probabilities."""

from itertools import product

import pytest
import torch
from case_counts import cases
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_specdec.kernels.top_k_top_p import apply_top_k_top_p
from hf_specdec.kernels.top_k_top_p_reference import apply_top_k_top_p as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Temperature, top_k, 1 - top_p of the rows of a batch.
SETTINGS = [(0.7, 20, 0.2), (1.0, 2**40, 0.1), (1.3, 50, 0.0), (0.6, 0, 0.5), (1.0, 1, 0.3), (0.9, 2**40, 0.0)]
SETTINGS += [(1.0, 3, 0.6), (0.8, 2**40, 0.95), (1.0, 700, 1.0), (2.0, 2**40, 1e-7)]
BATCH, WIDTH = len(SETTINGS), 2


def settings(device=DEVICE):
    temperatures, top_k, tail = zip(*SETTINGS, strict=True)
    return tuple(torch.tensor(one, device=device) for one in (temperatures, top_k, tail))


def scores_of(kind, vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    scores = 3 * torch.randn(BATCH, WIDTH, vocabulary, generator=generator)
    if kind == "peaked":
        scores = scores.abs() ** 2
    elif kind == "few values":
        scores = scores.round()
    elif kind == "equal":
        scores = torch.full_like(scores, 2.5)
    elif kind == "far apart":
        scores = scores * 1e4
    elif kind == "ruled out":
        scores[..., torch.rand(vocabulary, generator=generator) < 0.9] = float("-inf")
        scores[..., vocabulary // 2] = 0.0
    return scores


def left_by(scores, top_k, tail, tolerance):
    """Which tokens of a row of float64 scores `[V]` are left, with `tolerance` of the share of probability."""
    order = scores.flip(0).sort(descending=True, stable=True).indices.neg() + len(scores) - 1
    ordered = scores[order]
    is_left = ordered >= ordered[min(top_k, len(ordered)) - 1]
    probs = ordered.where(is_left, float("-inf")).softmax(0)
    is_left &= (probs.cumsum(0) - probs < 1 - tail + tolerance) | (torch.arange(len(scores)) == 0)
    return torch.zeros_like(is_left).scatter(0, order, is_left)


KINDS = ["normal", "peaked", "few values", "equal", "far apart", "ruled out"]


@pytest.mark.parametrize(
    ("vocabulary", "kind", "dtype"),
    cases(
        [*product([1, 3, 97, 5000, 9001, 70001, 150001], KINDS, [torch.float32, torch.bfloat16])],
        [
            *product([3, 5000], KINDS, [torch.float32]),
            (1, "normal", torch.float32),
            (70001, "few values", torch.bfloat16),
        ],
    ),
)
def test_equals_sorted_probabilities(vocabulary, kind, dtype):
    """Of equal scores top-k leaves all, and top-p of the kernel those with the largest ids."""
    wide = torch.full((BATCH, WIDTH + 2, vocabulary + 8), float("nan"), dtype=dtype, device=DEVICE)
    logits = wide[:, 1:-1, :vocabulary]
    logits.copy_(scores_of(kind, vocabulary))
    found = apply_top_k_top_p(logits, *settings())
    expected = reference(logits.cpu(), *settings("cpu"))
    for row, (temperature, top_k, tail) in enumerate(SETTINGS):
        for step in range(WIDTH):
            score = logits[row, step].float().cpu()
            if top_k == 0:
                best = torch.arange(vocabulary) == score.argmax()
                score = torch.zeros(vocabulary).where(best, float("-inf"))
                torch.testing.assert_close(found[row, step].cpu(), score, rtol=0, atol=0)
                torch.testing.assert_close(expected[row, step], score, rtol=0, atol=0)
                continue
            score = score / temperature
            # The reference adds float32 one after the other, and its sort takes any of equal scores.
            for one, error in ((expected[row, step], 1e-6 * vocabulary**0.5), (found[row, step].cpu(), 2e-6)):
                is_left = one > float("-inf")
                torch.testing.assert_close(one[is_left], score[is_left], rtol=1e-6, atol=0)
                least, most = (left_by(score.double(), top_k, tail, sign * error) for sign in (-1, 1))
                least &= score > float("-inf")
                assert least.sum() <= is_left.sum() <= most.sum()
                assert score[least].min() >= score[is_left].min() >= score[most].min()
            assert not (least & ~is_left).any() and not (is_left & ~most).any()


def test_reference_equals_transformers():
    """Bit for bit, in float32 on a CPU."""
    scores = scores_of("few values", 3000)
    found = reference(scores, *settings("cpu"))
    for row, (temperature, top_k, tail) in enumerate(SETTINGS):
        if top_k == 0:
            continue
        one = TemperatureLogitsWarper(temperature)(None, scores[row])
        one = one if top_k > 2**20 else TopKLogitsWarper(top_k)(None, one)
        one = one if tail == 0 else TopPLogitsWarper(float(1 - torch.tensor(tail)))(None, one)
        assert torch.equal(found[row], one)


@pytest.mark.parametrize("apply", [apply_top_k_top_p, reference])
def test_scores_without_a_distribution(apply):
    """NaN stays, so that nothing is drawn; a greedy row takes it as the largest. Rows of only -inf stay so."""
    scores = scores_of("normal", 5000)
    scores[:, 0, 4321], scores[:, 1] = float("nan"), float("-inf")
    found = apply(scores.to(DEVICE), *settings()).cpu()
    is_greedy = torch.tensor([top_k == 0 for _, top_k, _ in SETTINGS])
    assert found[~is_greedy, 0, 4321].isnan().all()
    assert found[is_greedy, 0, 4321].eq(0).all() and found[is_greedy, 0].isneginf().sum() == 4999
    assert found[~is_greedy, 1].isneginf().all()
    assert found[is_greedy, 1, 0].eq(0).all()


def test_rows_do_not_depend_on_each_other():
    scores = scores_of("normal", 9001).to(DEVICE)
    together = apply_top_k_top_p(scores, *settings())
    for row in range(BATCH):
        alone = apply_top_k_top_p(scores[row : row + 1], *(one[row : row + 1] for one in settings()))
        assert torch.equal(alone[0], together[row])


def test_one_temperature_for_all_rows():
    scores, (_, top_k, tail) = scores_of("normal", 5000).to(DEVICE), settings()
    found = apply_top_k_top_p(scores, torch.tensor(0.7, device=DEVICE).expand(BATCH), top_k, tail)
    assert torch.equal(found, apply_top_k_top_p(scores, torch.full((BATCH,), 0.7, device=DEVICE), top_k, tail))
