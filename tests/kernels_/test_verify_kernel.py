"""Verification and sampling kernels against the reference, that against a loop in float64, and distributions.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

import math
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from case_counts import cases, num_cases
from chi_square import p_value
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import ops
from hf_specdec.kernels import (
    draft_sampling,
    draft_sampling_reference,
    random_reference,
    reduction,
    verification,
    verification_reference,
)
from hf_specdec.kernels.random import race_times, uniform
from hf_specdec.kernels.types import NO_TOKEN, RandomStream, VerificationResult

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
POISON = -0x7777777777777777
INF, NAN = float("inf"), float("nan")
# Relative distance from a boundary within which rounding may decide.
MARGIN = 1e-5

reference = SimpleNamespace(
    verify_tree=verification_reference.verify_tree,
    verify_sampling=verification_reference.verify_sampling,
    verify_block=verification_reference.verify_block,
    best_draft=draft_sampling_reference.best_draft,
    draw_draft=draft_sampling_reference.draw_draft,
)
kernels = SimpleNamespace(
    verify_tree=verification.verify_tree,
    verify_sampling=verification.verify_sampling,
    verify_block=verification.verify_block,
    best_draft=draft_sampling.best_draft,
    draw_draft=draft_sampling.draw_draft,
)
both = pytest.mark.parametrize("module", [pytest.param(reference, id="torch"), pytest.param(kernels, id="triton")])
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory():
    """What the kernels' launchers allocate is poison until it is written."""
    allocate = torch.empty

    def poisoned(*args, **kwargs):
        out = allocate(*args, **kwargs)
        return out.fill_(NAN if out.is_floating_point() else POISON)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield


@contextmanager
def blocks(reduce, sample):
    """Blocks of other sizes, so that small vocabularies have many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "REDUCE_BLOCK", reduce)
        patch.setattr(reduction, "SAMPLE_BLOCK", sample)
        yield


def draw_sizes(random):
    """B, K and V: one of them large where the others are small, for the interpreter's sake."""
    kind = random.randrange(4)
    batch = random.randint(1, 9 if kind in (0, 3) else 3)
    num_drafts = random.randint(0, 16 if kind in (1, 3) else 4)
    vocabulary = random.choice([1, 2, 16, 17, random.randint(1, 5000)] if kind == 2 else [random.randint(1, 300)])
    return batch, num_drafts, vocabulary


def draw_blocks(random, num_rows, vocabulary):
    """Sizes of the two blocks: on a GPU few, for each is compiled; else such that 25 programs scan, or one a row."""
    if ON_GPU:
        return random.choice([(256, 64), (reduction.REDUCE_BLOCK, reduction.SAMPLE_BLOCK)])
    sizes = [size for size in (16, 64, 256, 1024, 4096) if num_rows * -(-vocabulary // size) <= 25]
    return random.choice([*sizes, 8192]), random.choice([*sizes, 8192])


def buried(values, margin):
    """`values` on the device as a view into a larger buffer of poison, with unit stride in its last dimension."""
    if values is None:
        return None
    values = values.to(DEVICE)
    shape = [size + 2 * margin for size in values.shape]
    buffer = torch.full(shape, NAN if values.is_floating_point() else POISON, dtype=values.dtype, device=DEVICE)
    view = buffer[tuple(slice(margin, margin + size) for size in values.shape)]
    return view.copy_(values)


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and one.is_contiguous()
        assert torch.equal(one.cpu(), other.cpu())


# ---- random numbers


@triton.jit
def numbers_kernel(
    seeds_ptr,
    positions_ptr,
    tokens_ptr,
    steps_ptr,
    uniform_ptr,
    size,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds_ptr + at, mask=at < size, other=0)
    position = tl.load(positions_ptr + at, mask=at < size, other=0)
    token = tl.load(tokens_ptr + at, mask=at < size, other=0)
    step = tl.load(steps_ptr + at, mask=at < size, other=0)
    tl.store(uniform_ptr + at, uniform(seed, position, token, step, STREAM), mask=at < size)


def numbers_in_triton(seeds, positions, tokens, stream, steps=None):
    """`uniform` of the kernels."""
    steps = torch.zeros_like(seeds) if steps is None else steps
    arguments = [values.contiguous().to(DEVICE) for values in torch.broadcast_tensors(seeds, positions, tokens, steps)]
    out = torch.empty(seeds.shape[0], dtype=torch.float32, device=DEVICE)
    numbers_kernel[(triton.cdiv(len(seeds), 1024),)](*arguments, out, len(seeds), STREAM=stream, BLOCK=1024)
    return out.cpu()


@pytest.mark.parametrize("stream", list(RandomStream))
def test_random_numbers_are_those_of_the_reference(stream):
    generator = torch.Generator().manual_seed(int(stream))
    size = 1_000_000 if ON_GPU else num_cases(50_000, 10_000)
    seeds = torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)
    seeds[:6] = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**32])
    positions = torch.randint(0, 2**20, (size,), generator=generator)
    positions[:3] = torch.tensor([0, 2**31 - 1, 2**31])
    tokens = torch.randint(0, 2**18, (size,), generator=generator)
    tokens[:2] = torch.tensor([0, 2**18 - 1])
    steps = torch.randint(0, 17, (size,), generator=generator)
    expected = random_reference.uniform(seeds, positions, tokens, stream, steps)
    assert torch.equal(numbers_in_triton(seeds, positions, tokens, int(stream), steps), expected)
    assert expected.min() > 0 and expected.max() < 1


@triton.jit
def times_kernel(seeds_ptr, positions_ptr, steps_ptr, times_ptr, size, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    seed, position = tl.load(seeds_ptr + tl.program_id(0)), tl.load(positions_ptr + tl.program_id(0))
    step, first = tl.load(steps_ptr + tl.program_id(0)), tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    times = race_times(seed, position, first, step, STREAM, BLOCK)
    tl.store(times_ptr + tl.program_id(0) * size + at, times, mask=at < size)


def plain_times(seed, position, vocabulary, stream, step=0):
    """`race_times` by its definition, token by token, in float64."""
    _philox, where = random_reference._philox, (torch.tensor([seed]), torch.tensor([position]))

    def exponential(word):
        return -math.log1p(-float(random_reference._unit(torch.tensor(word))))  # a float32 number

    times = []
    for token in range(vocabulary):
        group = [int(word) for word in _philox(*where, torch.tensor([-1 - token // 64]), stream, step)]
        own = [int(word) for word in _philox(*where, torch.tensor([token // 4]), stream, step)]
        is_least = token % 64 == group[1] * 64 // 2**32
        times.append(exponential(group[0]) / 64 + (0.0 if is_least else exponential(own[token % 4])))
    return torch.tensor(times, dtype=torch.float64)


@pytest.mark.parametrize("block", cases([16, 64, 1024], [64, 1024]))
def test_race_times_are_those_of_the_reference(block):
    vocabulary, stream = 1100, RandomStream.DRAFT
    generator = torch.Generator().manual_seed(block)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_cases(60, 12),), generator=generator)
    positions, steps = (torch.randint(0, most, seeds.shape, generator=generator) for most in (2**31, 17))
    expected = random_reference.race_times(seeds, positions, vocabulary, stream, steps)
    found = torch.empty(len(seeds), vocabulary, dtype=torch.float32, device=DEVICE)
    where = [one.to(DEVICE) for one in (seeds, positions, steps)]
    times_kernel[(len(seeds), triton.cdiv(vocabulary, block))](*where, found, vocabulary, STREAM=stream, BLOCK=block)
    torch.testing.assert_close(found.cpu(), expected, rtol=5e-7, atol=0)
    exact = plain_times(int(seeds[0]), int(positions[0]), vocabulary, int(stream), int(steps[0]))
    torch.testing.assert_close(expected[0].double(), exact, rtol=7e-7, atol=0)


def test_race_times_are_independent_exponential_numbers():
    """Of one token, of two of a group and of two of neighbouring groups, and the least of some of a group."""
    count = num_cases(200_000, 40_000)
    times = random_reference.race_times(torch.arange(count) * 977, torch.full((count,), 3), 70, RandomStream.TARGET)
    even, pairs = torch.full((20,), 1 / 20), torch.full((100,), 1 / 100)
    quantiles = 1 - (-times.double()).exp()
    for token in (0, 3, 63, 64, 69):
        assert p_value((quantiles[:, token] * 20).long().bincount(minlength=20), even) > 1e-4
    for one, other in [(0, 1), (4, 63), (63, 64), (2, 66)]:
        cells = (quantiles[:, one] * 10).long() * 10 + (quantiles[:, other] * 10).long()
        assert p_value(cells.bincount(minlength=100), pairs) > 1e-4
    for tokens in (range(64), range(7, 20), range(60, 70)):
        least = 1 - (-times[:, tokens].amin(dim=1).double() * len(tokens)).exp()
        assert p_value((least * 20).long().bincount(minlength=20), even) > 1e-4
        whose = times[:, tokens].argmin(dim=1).bincount(minlength=len(tokens))
        assert p_value(whose, torch.full((len(tokens),), 1 / len(tokens))) > 1e-4


def test_small_race_times_are_distinct():
    """Of 2**17 equal weights the smallest samples hardly ever tie; with -log(u) of float32 u some do."""
    # Few of the seeds have ties of coarse numbers; 62 has.
    seeds, tokens = torch.arange(num_cases(0, 50), num_cases(400, 70))[:, None], torch.arange(2**17)
    ties = {"race": 0, "coarse": 0}
    for chunk in seeds.split(20):
        times = random_reference.race_times(chunk[:, 0], chunk[:, 0] * 0 + 5, 2**17, RandomStream.TARGET)
        coarse = -torch.log(random_reference.uniform(chunk, chunk * 0 + 5, tokens, RandomStream.TARGET))
        for name, values in {"race": times, "coarse": coarse}.items():
            first, second = values.topk(2, dim=1, largest=False).values.unbind(1)
            ties[name] += int((first == second).sum())
    assert ties["race"] == 0 and ties["coarse"] > 0


# Where the numbers of a stream come as close to 0 and 1 as they do: (stream, seed, position), all for token 0.
EXTREMES = {
    (RandomStream.ACCEPT, 222, 38450): 3.4924596548080444e-10,
    (RandomStream.ACCEPT, 80, 245075): 6.868503987789154e-09,
    (RandomStream.ACCEPT, 35, 239249): 1 - 2.0**-24,
    (RandomStream.ACCEPT, 46, 342): 1 - 2.0**-24,
    (RandomStream.TARGET, 53, 187444): 1 - 2.0**-24,
    (RandomStream.TARGET, 267, 166946): 1.8044374883174896e-08,
}


@pytest.mark.parametrize(("stream", "seed", "position"), EXTREMES)
def test_extreme_random_numbers(stream, seed, position):
    arguments = [torch.tensor([value]) for value in (seed, position, 0)]
    expected = torch.tensor([EXTREMES[stream, seed, position]])
    assert torch.equal(random_reference.uniform(*arguments, stream), expected)
    assert torch.equal(numbers_in_triton(*arguments, int(stream)), expected)


@given(random=st.randoms(use_true_random=False))
@settings(max_examples=num_cases(200, 40))
def test_numbers_of_few_groups_draw_the_same_tokens(random):
    """On a CPU the race draws what a race of the numbers of all tokens draws."""
    batch, width, vocabulary = (
        random.randint(1, 4),
        random.randint(1, 3),
        random.choice([1, 64, random.randint(1, 900)]),
    )
    generator = torch.Generator().manual_seed(random.randint(0, 2**31))
    weights = (torch.randn(batch, width, vocabulary, generator=generator) * random.choice([0, 1, 3, 8])).softmax(-1)
    weights[torch.rand(batch, width, vocabulary, generator=generator) < random.choice([0, 0.5, 0.98])] = 0
    weights[0, 0] *= random.choice([0, 1])  # where all are 0 token 0 is drawn
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch, 1), generator=generator)
    positions = torch.randint(0, 5000, (batch, 1), generator=generator)
    for steps in (0, torch.arange(width) + 3):
        numbers = random_reference.race_times(seeds, positions, vocabulary, RandomStream.DRAFT, steps)
        found = random_reference.exponential_sample(weights, seeds, positions, RandomStream.DRAFT, steps)
        assert torch.equal(found, (weights / numbers).argmax(-1)) and found.shape == (batch, width)


def test_few_numbers_are_made_on_a_cpu(monkeypatch):
    """Of a text's usual distributions about one token in 20 has its number made, or its group's."""
    philox, made = random_reference._philox, []

    def counted(*args):
        words = philox(*args)
        made.append(words[0].numel())
        return words

    monkeypatch.setattr(random_reference, "_philox", counted)
    logits = torch.randn(8, 2**15, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, :50] += 12
    random_reference.exponential_sample(logits.softmax(-1), torch.arange(8), torch.arange(8), RandomStream.TARGET)
    assert sum(made) < logits.numel() / 20


# ---- greedy


def greedy_scores(random, batch, width, vocabulary, dtype):
    """Scores with ties, now and then with zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(random.randint(0, 2**31))
    spread = random.choice([1.0, 3.0, 50.0])
    scores = (torch.randn(batch, width, vocabulary, generator=generator) * spread).to(dtype)
    if random.random() < 0.5:
        scores = scores.round()
    for _ in range(random.choice([0, 1, 5])):
        row = scores[random.randrange(batch), random.randrange(width)]
        row[random.randrange(vocabulary) :: random.randint(1, vocabulary)] = random.choice([INF, -INF, NAN, -0.0])
        if random.random() < 0.3:
            row.fill_(random.choice([-INF, INF, NAN, 0.0]))
        if random.random() < 0.3:
            row.copy_(-row.abs() * 0.0)
    return scores


def verify_greedy(module, scores, drafts):
    """Greedy verification of chains."""
    lengths = torch.zeros(len(drafts), dtype=torch.int64, device=drafts.device)
    *result, _ = module.verify_tree(scores, drafts, None, None, None, lengths, drafts.shape[1])
    return VerificationResult(*result)


def plain_greedy(scores, drafts):
    tokens = [[first_largest(row) for row in rows] for rows in scores.double().tolist()]
    accepted = []
    for row, draft in zip(tokens, drafts.tolist(), strict=True):
        count = 0
        while count < len(draft) and draft[count] == row[count]:
            count += 1
        accepted.append(count)
    accepted = torch.tensor(accepted)
    return torch.tensor(tokens), accepted, accepted + 1


def first_largest(row):
    best = 0
    for index, value in enumerate(row):
        if math.isnan(row[best]):
            break
        if math.isnan(value) or value > row[best]:
            best = index
    return best


@settings(max_examples=150 if ON_GPU else num_cases(40, 12), deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_greedy_equals_reference(random):
    batch, num_drafts, vocabulary = draw_sizes(random)
    dtype = random.choice([torch.float32, torch.bfloat16, torch.float16])
    scores = greedy_scores(random, batch, num_drafts + 1, vocabulary, dtype)
    drafts = scores[:, :-1].argmax(dim=-1)
    for _ in range(random.randint(0, batch)):
        if num_drafts:
            drafts[random.randrange(batch), random.randrange(num_drafts)] = random.randrange(vocabulary)
    expected = verify_greedy(reference, scores, drafts)
    assert_same(expected, plain_greedy(scores, drafts))
    margin = random.randint(0, 3)
    with blocks(*draw_blocks(random, batch * (num_drafts + 1), vocabulary)):
        assert_same(verify_greedy(kernels, buried(scores, margin), buried(drafts, margin)), expected)


@both
@pytest.mark.parametrize("size", [5, 40, 5000])
def test_greedy_edges(module, size):
    """Ties within a block and over blocks, NaN after and before larger numbers, rows of one value."""
    rows = torch.full((8, size), -1.0)
    rows[0, [1, 3]] = 2.0
    rows[1, [size - 2, size - 1]] = 2.0
    rows[2, 2], rows[2, size - 1], rows[2, 0] = NAN, NAN, INF
    rows[3] = -INF
    rows[4] = NAN
    rows[5] = -INF
    rows[5, size - 1] = -3e38
    rows[6, 1], rows[6, 3] = -0.0, 0.0
    rows[7, 1], rows[7, 3] = INF, INF
    expected = [1, size - 2, 2, 0, 0, size - 1, 1, 1]
    for scan in (max(16, triton.next_power_of_2(size) // 8), 8192):
        with blocks(scan, scan):
            assert module.best_draft(rows.to(DEVICE)).tolist() == expected
            result = verify_greedy(module, rows[None].to(DEVICE), torch.tensor([expected[:7]], device=DEVICE))
            assert result.tokens.tolist() == [expected]
            assert result.accepted.tolist() == [7] and result.committed.tolist() == [8]


# ---- sampling


class Case(NamedTuple):
    scores: torch.Tensor
    drafts: torch.Tensor
    draft_probs: torch.Tensor | None
    seeds: torch.Tensor
    lengths: torch.Tensor
    draft_ids: torch.Tensor | None = None

    @property
    def arguments(self):
        """Of `verify_sampling`."""
        return [self.scores, self.drafts, self.draft_probs, self.draft_ids, self.seeds, self.lengths]

    @property
    def draft_laws(self):
        """`[B, K, V]`: q over the target's vocabulary."""
        if self.draft_ids is None:
            return torch.nn.functional.pad(self.draft_probs, (0, self.scores.shape[2] - self.draft_probs.shape[2]))
        laws = torch.zeros(*self.drafts.shape, self.scores.shape[2])
        known = (self.draft_ids >= 0).nonzero()[:, 0]
        laws[..., known] = self.draft_probs[..., self.draft_ids[known]]
        return laws

    def buried(self, margin):
        ids = None if self.draft_ids is None else self.draft_ids.to(DEVICE)
        return [ids if values is self.draft_ids else buried(values, margin) for values in self.arguments]


def draw_case(random, batch, num_drafts, vocabulary, share_of_point_masses=0.4):
    """Rows as they occur: peaked and flat, truncated, drafts from q, which is now like p and now not."""
    generator = torch.Generator().manual_seed(random.randint(0, 2**31))
    shape = (batch, num_drafts + 1, vocabulary)
    scores = torch.randn(shape, generator=generator) * random.choice([0.0, 1.0, 4.0, 20.0])
    if random.random() < 0.4:
        keep = torch.rand(shape, generator=generator) < random.choice([0.1, 0.7])
        keep.scatter_(2, torch.randint(vocabulary, (*shape[:2], 1), generator=generator), True)
        scores = scores.masked_fill(~keep, -INF)
    if random.random() < 0.2:
        scores += random.choice([-1e4, 1e4])
    nearness = random.choice([0.0, 0.3, 2.0])
    logits = scores[:, :num_drafts] + nearness * torch.randn(batch, num_drafts, vocabulary, generator=generator)
    if nearness == 2.0:
        logits = logits.nan_to_num(neginf=float(scores[scores.isfinite()].mean()))
    kind = random.choice(["whole", "whole", "first", "some"])
    size = vocabulary if kind == "whole" else random.randint(1, vocabulary)
    target_ids = torch.arange(size)
    if kind == "some":
        target_ids = torch.randperm(vocabulary, generator=generator)[:size].sort().values
    logits = logits[..., target_ids]
    is_lost = logits.isneginf().all(dim=-1, keepdim=True)
    laws = torch.where(is_lost, torch.zeros(()), logits).softmax(dim=-1)
    drafts = target_ids[torch.multinomial(laws.flatten(0, 1) + 1e-30, 1, generator=generator)].view(batch, num_drafts)
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
    lengths = torch.randint(1, 5000, (batch,), generator=generator)
    if random.random() < share_of_point_masses:
        return Case(scores, drafts, None, seeds, lengths)
    draft_ids = ops.invert_draft_vocabulary(target_ids, vocabulary) if kind == "some" else None
    return Case(scores, drafts, laws, seeds, lengths, draft_ids)


def exponential_times(seed, position, vocabulary):
    return random_reference.race_times(seed, position, vocabulary, RandomStream.TARGET).double()


def plain_sampling(case):
    """Result of a loop in float64, and for each row whether rounding cannot change it."""
    tokens, accepted, is_clear = [], [], []
    vocabulary = case.scores.shape[2]
    laws = None if case.draft_probs is None else case.draft_laws
    for row, drafts in enumerate(case.drafts.tolist()):
        probs = case.scores[row].double().softmax(dim=-1)
        seed, length = case.seeds[row], case.lengths[row]
        clear, count = True, 0
        for step, draft in enumerate(drafts):
            p = float(probs[step, draft])
            q = 1.0 if laws is None else float(laws[row, step, draft])
            level = q * float(random_reference.uniform(seed, length, torch.tensor(0), RandomStream.ACCEPT, step))
            clear &= abs(level - p) > MARGIN * max(level, p) or level == p == 0.0
            if level >= p:
                break
            count += 1
        weights = probs[count]
        slack = MARGIN * weights
        if count < len(drafts):
            if case.draft_probs is None:
                weights = weights.clone()
                weights[drafts[count]] = 0.0
                slack = MARGIN * weights
            else:
                q = laws[row, count].double()
                slack = MARGIN * torch.maximum(weights, q) * ((weights > 0) | (q > 0))
                weights = (weights - q).clamp(min=0.0)
        times = exponential_times(seed, length + count, vocabulary)
        best = int((weights / times).argmax())
        others = (weights + slack) / times
        others[best] = 0.0
        clear &= bool((weights - slack)[best] / times[best] > others.max())
        tokens.append(drafts[:count] + [best] + (drafts[count + 1 :] + [0] if count < len(drafts) else []))
        accepted.append(count)
        is_clear.append(clear)
    accepted = torch.tensor(accepted)
    return VerificationResult(torch.tensor(tokens), accepted, accepted + 1), torch.tensor(is_clear)


@settings(max_examples=150 if ON_GPU else num_cases(30, 10), deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_sampling_equals_reference(random):
    batch, num_drafts, vocabulary = draw_sizes(random)
    case = draw_case(random, batch, num_drafts, vocabulary)
    expected, is_clear = plain_sampling(case)
    with blocks(*draw_blocks(random, batch * (num_drafts + 1), vocabulary)):
        got = kernels.verify_sampling(*case.buried(random.randint(0, 3)))
    for result in (got, reference.verify_sampling(*case.arguments)):
        assert_same((values.cpu()[is_clear] for values in result), (values[is_clear] for values in expected))
        assert ((result.tokens >= 0) & (result.tokens < vocabulary)).all()
        assert torch.equal(result.committed, result.accepted + 1)


@pytest.mark.parametrize("is_soft", cases([False, True], [True]))
def test_largest_vocabulary(is_soft):
    vocabulary = 262_144
    batch, num_drafts = (9, 7) if ON_GPU else (3, num_cases(2, 1))
    generator = torch.Generator().manual_seed(0)
    scores = 4 * torch.randn(batch, num_drafts + 1, vocabulary, generator=generator)
    laws = (scores[:, :-1] + 0.3 * torch.randn(batch, num_drafts, vocabulary, generator=generator)).softmax(dim=-1)
    drafts = torch.multinomial(laws.flatten(0, 1), 1, generator=generator).view(batch, num_drafts)
    if not is_soft:  # a draft's probability becomes about 0.8
        scores[:, :-1].scatter_(2, drafts[..., None], float(scores[0, 0].logsumexp(0)) + 1.4)
    seeds = torch.arange(batch) + 1
    case = Case(scores, drafts, laws if is_soft else None, seeds, seeds + 92)
    expected, is_clear = plain_sampling(case)
    assert is_clear.all() and len(expected.accepted.unique()) > 1
    with blocks(reduction.REDUCE_BLOCK, reduction.SAMPLE_BLOCK if ON_GPU else 16_384):
        assert_same(kernels.verify_sampling(*case.buried(0)), expected)
        if not is_soft:  # greedy verification reads no laws
            assert_same(verify_greedy(kernels, *case.buried(0)[:2]), verify_greedy(reference, *case[:2]))


def test_most_rows_are_away_from_decision_boundaries():
    """So the comparison above is one of nearly all rows."""
    random, clear = Random(0), []
    for _ in range(60):
        case = draw_case(random, 9, random.randint(0, 16), random.randint(2, 400))
        clear.append(plain_sampling(case)[1])
    assert torch.cat(clear).float().mean() > 0.98


@both
@pytest.mark.parametrize("q_draft", [None, 1.0, 0.0])
def test_impossible_drafts_are_rejected_by_the_smallest_numbers(module, q_draft):
    """Draft 3 has probability 0 in the target, if not in q too; the number is as close to 0 as they come."""
    scores = torch.randn(2, 2, 40)
    scores[:, 0, 3] = -INF
    probs = None if q_draft is None else torch.zeros(2, 1, 40)
    if q_draft is not None:
        probs[:, 0, [3, 4]] = torch.tensor([q_draft, 1.0 - q_draft])
    case = Case(scores, torch.tensor([[3], [3]]), probs, torch.tensor([222, 80]), None)
    case = case._replace(lengths=torch.tensor([38450, 245075]))
    expected, is_clear = plain_sampling(case)
    assert is_clear.all()
    with blocks(16, 16):
        result = module.verify_sampling(*case.buried(1))
    assert_same(result, expected)
    assert result.accepted.tolist() == [0, 0] and (result.tokens[:, 0] != 3).all()


@both
@pytest.mark.parametrize("is_soft", [False, True])
def test_certain_drafts_are_accepted_by_the_largest_numbers(module, is_soft):
    """Draft 3 has probability 1 in the target, and in q."""
    scores = torch.full((2, 2, 40), -INF)
    scores[:, 0, 3] = -70.0
    scores[:, 1, 17] = 5.0
    probs = torch.zeros(2, 1, 40)
    probs[:, 0, 3] = 1.0
    case = Case(scores, torch.tensor([[3], [3]]), probs if is_soft else None, torch.tensor([35, 46]), None)
    case = case._replace(lengths=torch.tensor([239249, 342]))
    with blocks(16, 16):
        result = module.verify_sampling(*case.buried(1))
    assert result.tokens.tolist() == [[3, 17], [3, 17]] and result.committed.tolist() == [2, 2]


@both
def test_empty_residual_is_drawn_from_the_target(module):
    """q is nowhere less than p, and more on the draft, as by rounding: the draft is rejected, p is sampled."""
    size, batch = 40, 4
    scores = torch.zeros(batch, 2, size)
    probs = torch.full((batch, 1, size), 1.0 / size + 1e-6)
    probs[:, 0, 7] = 1e6
    drafts, seeds, lengths = torch.full((batch, 1), 7), torch.arange(batch), torch.arange(batch) + 5
    with blocks(16, 16):
        result = module.verify_sampling(*Case(scores, drafts, probs, seeds, lengths).buried(1))
    assert result.accepted.tolist() == [0] * batch
    expected = random_reference.exponential_sample(scores[:, 0].softmax(-1), seeds, lengths, RandomStream.TARGET)
    assert result.tokens[:, 0].tolist() == expected.tolist()


@both
@pytest.mark.parametrize("is_soft", [False, True])
def test_only_token_of_the_residual_is_recovered(module, is_soft):
    """All of the target's mass but one part in 10^6 is on the draft, or on tokens that q overrates."""
    size, batch = 40, 6
    scores = torch.full((batch, 2, size), -INF)
    scores[:, :, 7] = 0.0
    scores[:, :, 33] = -14.0
    probs = torch.zeros(batch, 1, size)
    probs[:, :, 7] = 1e7
    seeds, lengths = (
        torch.tensor([35, 46, 135, 165, 177, 288]),
        torch.tensor([239249, 342, 157692, 37059, 105074, 63846]),
    )
    case = Case(scores, torch.full((batch, 1), 7), probs if is_soft else None, seeds, lengths)
    with blocks(16, 16):
        result = module.verify_sampling(*case.buried(0))
    assert result.tokens[:, 0].tolist() == [33] * batch and result.accepted.tolist() == [0] * batch


@both
@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("scores", [[-INF] * 20, [NAN] * 20, [INF] + [0.0] * 19, [0.0] * 19 + [NAN]])
def test_rows_without_a_softmax_have_no_token(module, is_soft, scores):
    """The token after the accepted drafts is `NO_TOKEN` there, and only there."""
    broken, sound = torch.tensor(scores), torch.linspace(-1.0, 1.0, 20)
    probs = sound.softmax(0).expand(2, 2, 20) if is_soft else None
    block = torch.stack([torch.stack([broken, sound, sound]), torch.stack([sound, sound, broken])])
    drafts, seeds, lengths = torch.tensor([[0, 19], [19, 19]]), torch.arange(2), torch.tensor([9, 9])
    case = Case(block, drafts, probs, seeds, lengths)
    with blocks(16, 16):
        result = module.verify_sampling(*case.buried(1))
    assert result.accepted[0] == 0 and result.tokens[0, 0] == NO_TOKEN
    drawn = int(result.tokens[1, result.accepted[1]])
    assert drawn == NO_TOKEN if result.accepted[1] == 2 else 0 <= drawn < 20
    assert_same(result, reference.verify_sampling(*case.arguments))


def without_laws(random, module):
    """A case of two drafts where the first row has no law of the first draft, the second of the second, as drawn."""
    scores = torch.randn(3, 3, 40, generator=torch.Generator().manual_seed(random.randint(0, 99)))
    logits = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(random.randint(0, 99)))
    logits[0, 0, 17], logits[1, 1] = NAN, random.choice([-INF, INF, NAN])
    seeds, lengths = torch.randint(0, 2**40, (3,)), torch.tensor([9, 12, 300])
    settings = (torch.ones(3), seeds, lengths)
    with blocks(16, 16):
        index, laws = module.draw_draft(logits.to(DEVICE), *(one.to(DEVICE) for one in settings), 0)
    assert laws.isnan().all(-1).tolist() == [[True, False], [False, True], [False, False]]
    return Case(scores, index.cpu(), laws.cpu(), seeds, lengths)


@both
@pytest.mark.parametrize("name", ["verify_sampling", "verify_block"])
def test_drafts_without_a_law_are_none(module, name):
    """What is accepted, and said after it, is what a row with fewer drafts has."""
    random, numbers = Random(0), []
    for _ in range(num_cases(20, 5)):
        case = without_laws(random, module)
        more = (torch.full((3,), 99),) if name == "verify_block" else ()
        with blocks(16, 16):
            result = getattr(module, name)(*case.buried(1), *(buried(one, 0) for one in more))
        for row, count in enumerate((0, 1, 2)):
            part = Case(*(None if one is None else one[row : row + 1] for one in case))
            part = part._replace(
                scores=part.scores[:, : count + 1],
                drafts=part.drafts[:, :count],
                draft_probs=part.draft_probs[:, :count],
            )
            fewer = getattr(reference, name)(*part.arguments, *(one[:1] for one in more))
            accepted = int(result.accepted[row])
            assert accepted == int(fewer.accepted)
            assert result.tokens[row, : accepted + 1].tolist() == fewer.tokens[0, : accepted + 1].tolist()
            numbers.append(accepted)
    assert set(numbers) == {0, 1, 2}


@pytest.mark.parametrize("token", [-1, 20, 2**40, -(2**63)])
@pytest.mark.parametrize("is_soft", [False, True])
def test_kernel_rejects_drafts_that_are_no_tokens(token, is_soft):
    probs = torch.full((1, 2, 20), 0.05) if is_soft else None
    case = Case(torch.zeros(1, 3, 20), torch.tensor([[token, 3]]), probs, torch.tensor([5]), torch.tensor([5]))
    with blocks(16, 16):
        result = kernels.verify_sampling(*case.buried(2))
    assert result.accepted.tolist() == [0] and 0 <= result.tokens[0, 0] < 20


@both
def test_rows_do_not_depend_on_other_rows(module):
    case = draw_case(Random(3), 3, 3, 150)
    with blocks(64, 64):
        whole = module.verify_sampling(*case.buried(0))
        for row in range(3):
            alone = Case(*(None if values is None else values[row : row + 1] for values in case[:5]), case.draft_ids)
            assert_same(module.verify_sampling(*alone.buried(0)), (values[row : row + 1] for values in whole))


@both
@pytest.mark.parametrize("is_soft", cases([False, True], [True]))
def test_sampling_has_the_distribution_of_the_target(module, is_soft):
    """The first committed token, and the second where there is one, whatever the drafts were drawn from."""
    draws, size = 40_000 if ON_GPU or module is reference else num_cases(130, 80), 7
    generator = torch.Generator().manual_seed(1)
    scores = 1.5 * torch.randn(2, size, generator=generator)
    logits = (scores[0] + torch.randn(size, generator=generator)).expand(draws, 1, size)
    scores[0, 2] = -INF
    seeds, lengths = torch.arange(draws) * 977, torch.full((draws,), 3)
    drafts, probs = reference.draw_draft(logits, torch.ones(draws), seeds, lengths, 0)
    case = Case(scores.expand(draws, 2, size), drafts, probs, seeds, lengths)
    if not is_soft:
        case = case._replace(drafts=scores[0].argmax().expand(draws, 1), draft_probs=None)
    result = module.verify_sampling(*case.buried(0))
    tokens, law = result.tokens.cpu(), scores.softmax(dim=-1)
    assert p_value(tokens[:, 0].bincount(minlength=size), law[0]) > 1e-4
    assert p_value(tokens[result.committed.cpu() == 2, 1].bincount(minlength=size), law[1]) > 1e-4


# ---- block verification


def plain_block(case, remaining):
    """Block verification as a loop in float64 (arXiv 2403.10444, algorithm 2); as `plain_sampling`."""
    tokens, accepted, is_clear = [], [], []
    vocabulary, laws = case.scores.shape[2], case.draft_laws.double()
    for row, drafts in enumerate(case.drafts.tolist()):
        probs = case.scores[row].double().softmax(dim=-1)
        seed, length, count = case.seeds[row], case.lengths[row], min(int(remaining[row]), len(drafts))
        held, weights, clears = 0, [1.0], [True]
        for step, draft in enumerate(drafts[:count]):
            p, q = float(probs[step, draft]), float(laws[row, step, draft])
            weights.append(min(weights[-1] * p / q, 1.0) if weights[-1] * p > 0 else 0.0)
        for number in range(1, count + 1):
            weight, level = (
                weights[number],
                float(random_reference.uniform(seed, length, torch.tensor(0), RandomStream.ACCEPT, number - 1)),
            )
            if number == count:
                below, above = level, weight
            else:
                excess = float((weight * probs[number] - laws[row, number]).clamp(min=0.0).sum())
                below, above = level * (excess + 1.0 - weight), excess
            clears.append(abs(below - above) > 10 * MARGIN * max(below, above, weight) or weight == 0.0)
            if below < above:
                held = number
        clear, weights_next = all(clears[held:]), probs[held]
        slack = MARGIN * weights_next
        if held < count:
            law = weights[held] * weights_next
            slack = 10 * MARGIN * torch.maximum(law, laws[row, held])
            weights_next = (law - laws[row, held]).clamp(min=0.0)
            clear &= float(weights_next.sum()) > 1e-4
        times = exponential_times(seed, length + held, vocabulary)
        best = int((weights_next / times).argmax())
        others = (weights_next + slack) / times
        others[best] = 0.0
        clear &= bool((weights_next - slack)[best] / times[best] > others.max())
        tokens.append(drafts[:held] + [best] + (drafts[held + 1 :] + [0] if held < len(drafts) else []))
        accepted.append(held)
        is_clear.append(clear)
    accepted = torch.tensor(accepted)
    return VerificationResult(torch.tensor(tokens), accepted, accepted + 1), torch.tensor(is_clear)


def draw_block_case(random, batch, num_drafts, vocabulary):
    case = draw_case(random, batch, num_drafts, vocabulary, share_of_point_masses=0.0)
    remaining = torch.tensor([random.choice([0, 1, num_drafts, num_drafts + 1, 900]) for _ in range(batch)])
    return case, remaining


@settings(max_examples=150 if ON_GPU else num_cases(30, 10), deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_block_equals_reference(random):
    batch, num_drafts, vocabulary = draw_sizes(random)
    case, remaining = draw_block_case(random, batch, num_drafts, vocabulary)
    expected, is_clear = plain_block(case, remaining)
    with blocks(*draw_blocks(random, batch * (num_drafts + 1), vocabulary)):
        margin = random.randint(0, 3)
        got = kernels.verify_block(*case.buried(margin), buried(remaining, margin))
    for result in (got, reference.verify_block(*case.arguments, remaining)):
        assert_same((values.cpu()[is_clear] for values in result), (values[is_clear] for values in expected))
        assert ((result.tokens >= 0) & (result.tokens < vocabulary)).all()
        assert torch.equal(result.committed, result.accepted + 1)
        assert (result.accepted.cpu() <= remaining).all()


def test_most_blocks_are_away_from_decision_boundaries():
    """So the comparison above is one of nearly all rows, and of all numbers of accepted drafts."""
    random, clear, accepted = Random(0), [], []
    for _ in range(60):
        case, remaining = draw_block_case(random, 9, 4, random.randint(2, 400))
        result, is_clear = plain_block(case, remaining)
        clear.append(is_clear)
        accepted.append(result.accepted[is_clear])
    assert torch.cat(clear).float().mean() > 0.9
    assert (torch.cat(accepted).bincount(minlength=5) > 4).all()


@both
def test_blocks_of_equal_distributions_are_accepted_whole(module):
    """Where p and q are the same nothing is left of p, so nothing is rejected."""
    batch, num_drafts, vocabulary = 6, 4, 40
    scores = torch.randn(batch, num_drafts + 1, vocabulary, generator=torch.Generator().manual_seed(0))
    laws = scores[:, :-1].softmax(dim=-1)
    drafts = laws.argmax(dim=-1)
    case = Case(scores, drafts, laws, torch.arange(batch), torch.full((batch,), 9))
    with blocks(64, 64):  # as one block, so that both sums run alike
        result = module.verify_block(*case.buried(0), buried(torch.full((batch,), 99), 0))
    assert result.accepted.tolist() == [num_drafts] * batch


@both
def test_block_never_accepts_what_the_target_rules_out(module):
    """Draft 3 has probability 0 in the target at step 1; the number is as close to 0 as they come."""
    scores = torch.randn(2, 4, 40, generator=torch.Generator().manual_seed(0))
    scores[:, 1, 3] = -INF
    scores[0, 2:] = NAN  # nobody computed what follows a token that cannot be
    laws = torch.full((2, 3, 40), 1 / 40)
    drafts = torch.tensor([[7, 3, 5], [7, 3, 5]])
    case = Case(scores, drafts, laws, torch.tensor([222, 80]), torch.tensor([38450, 245075]))
    with blocks(16, 16):
        result = module.verify_block(*case.buried(1), buried(torch.full((2,), 99), 1))
    assert (result.accepted <= 1).all() and (result.tokens.gather(1, result.accepted[:, None]) != 3).all()


@both
@pytest.mark.parametrize("scores", [[-INF] * 20, [NAN] * 20, [INF] + [0.0] * 19, [0.0] * 19 + [NAN]])
def test_blocks_without_a_softmax_have_no_token(module, scores):
    broken, sound = torch.tensor(scores), torch.linspace(-1.0, 1.0, 20)
    probs = sound.softmax(0).expand(2, 2, 20)
    block = torch.stack([torch.stack([broken, sound, sound]), torch.stack([sound, sound, broken])])
    case = Case(block, torch.tensor([[0, 19], [19, 19]]), probs, torch.arange(2), torch.tensor([9, 9]))
    with blocks(32, 32):
        result = module.verify_block(*case.buried(1), buried(torch.full((2,), 99), 1))
    assert result.accepted.tolist() == [0, 2] and result.tokens[[0, 1], [0, 2]].tolist() == [NO_TOKEN] * 2
    assert_same(result, reference.verify_block(*case.arguments, torch.full((2,), 99)))


@both
def test_drafts_beyond_the_remaining_tokens_do_not_matter(module):
    case, _ = draw_block_case(Random(5), 3, 4, 60)
    remaining, other = torch.tensor([0, 1, 2]), Case(*(None if part is None else part.clone() for part in case))
    for row, left in enumerate(remaining.tolist()):
        other.scores[row, left:] = torch.randn_like(other.scores[row, left:])
        other.drafts[row, left:] = 1
        other.draft_probs[row, left:] = 0.5
    with blocks(64, 64):
        one, two = (module.verify_block(*each.buried(0), buried(remaining, 0)) for each in (case, other))
    assert torch.equal(one.accepted, two.accepted)
    kept = torch.arange(5, device=DEVICE) < torch.minimum(one.committed, remaining.to(DEVICE))[:, None]
    assert torch.equal(one.tokens[kept], two.tokens[kept])


# ---- drawing drafts


@settings(max_examples=150 if ON_GPU else num_cases(15, 10), deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_draws_equal_reference(random):
    batch, num_drafts, vocabulary = draw_sizes(random)
    num_drafts = min(max(num_drafts, 1), 30 // batch)
    generator = torch.Generator().manual_seed(random.randint(0, 2**31))
    dtype = random.choice([torch.float32, torch.bfloat16, torch.float16])
    logits = torch.randn(batch, num_drafts, vocabulary, generator=generator) * random.choice([0.0, 1.0, 8.0])
    if random.random() < 0.3:
        logits[..., 1:].masked_fill_(torch.rand(batch, num_drafts, vocabulary - 1, generator=generator) < 0.8, -INF)
    logits = logits.to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
    lengths = torch.randint(1, 5000, (batch,), generator=generator)
    temperatures = torch.tensor([random.choice([1.0, 0.3, 1.7]) for _ in range(batch)])
    margin, first = random.randint(0, 3), random.randint(0, 4)
    index, probs = reference.draw_draft(logits, temperatures, seeds, lengths, first)
    with blocks(*draw_blocks(random, batch * num_drafts, vocabulary)):
        got, got_probs = kernels.draw_draft(
            *(buried(values, margin) for values in (logits, temperatures, seeds, lengths)), first
        )
    assert got_probs.dtype == torch.float32 and got_probs.is_contiguous() and got_probs.shape == probs.shape
    torch.testing.assert_close(got_probs.cpu(), probs, rtol=5e-5, atol=1e-30)  # exp on a GPU
    assert (got_probs.cpu()[probs == 0] == 0).all()
    steps = torch.arange(first, first + num_drafts)
    times = random_reference.race_times(seeds[:, None], lengths[:, None], vocabulary, RandomStream.DRAFT, steps)
    best, second = (
        (probs / times.double()).topk(2, dim=-1).values.unbind(-1)
        if vocabulary > 1
        else (1.0, torch.zeros(index.shape))
    )
    is_clear = second < best * (1 - 2 * MARGIN)
    assert got.dtype == torch.int64 and torch.equal(got.cpu()[is_clear], index[is_clear])
    assert is_clear.float().mean() > 0.9


@both
def test_drafts_have_the_reported_distribution(module):
    draws = 40_000 if ON_GPU or module is reference else num_cases(180, 100)
    logits = torch.tensor([0.0, 1.0, -INF, 2.0, -1.0, 0.5]).expand(draws, 1, 6)
    rows = torch.arange(draws)
    arguments = logits, torch.full((draws,), 0.8), torch.full((draws,), 5), rows
    index, probs = module.draw_draft(*(values.to(DEVICE) for values in arguments), 0)
    assert p_value(index[:, 0].cpu().bincount(minlength=6), probs[0, 0].cpu()) > 1e-4


@both
def test_draws_differ_between_rounds_rows_and_steps(module):
    """Of equal laws: every pair of rounds, rows and steps agrees about as often as chance has it."""
    logits = torch.zeros(4, 3, 50, device=DEVICE)
    temperatures, seeds = torch.ones(4, device=DEVICE), torch.arange(4, device=DEVICE)
    rounds = [
        module.draw_draft(logits, temperatures, seeds, torch.full((4,), length, device=DEVICE), 0)[0].flatten()
        for length in range(7, 7 + 6)
    ]
    drawn = torch.cat(rounds)
    share = ((drawn[:, None] == drawn).sum() - len(drawn)) / (len(drawn) * (len(drawn) - 1))
    assert share < 0.04, "draws repeat"
    # The second draft of one round and the first of the next would take the same position.
    assert (rounds[0].view(4, 3)[:, 1] != rounds[1].view(4, 3)[:, 0]).any()
    alone = module.draw_draft(logits[:, 1:2], temperatures, seeds, torch.full((4,), 7, device=DEVICE), 1)[0]
    assert torch.equal(alone[:, 0], rounds[0].view(4, 3)[:, 1]), "a step alone draws what it draws among others"


@both
def test_best_drafts_may_come_without_a_batch(module):
    logits = torch.randn(3, 50, device=DEVICE)
    assert_same([module.best_draft(logits)], [module.best_draft(logits[None])[0]])


@both
def test_best_drafts_are_tokens_of_the_target(module):
    target_ids = torch.tensor([3, 9, 12, 100_000], device=DEVICE)
    logits = torch.tensor([[[0.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 5.0]]], device=DEVICE)
    assert module.best_draft(logits, target_ids).tolist() == [[9, 100_000]]
    assert module.best_draft(logits).tolist() == [[1, 3]]


# ---- dispatch and capture


@pytest.mark.parametrize("name", ["verify_tree", "verify_sampling", "verify_block", "best_draft", "draw_draft"])
def test_kernels_refuse_unsupported_inputs(name):
    scores = torch.zeros(2, 5, 3, device=DEVICE).transpose(1, 2)
    drafts = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    numbers = torch.ones(2, dtype=torch.int64, device=DEVICE)
    arguments = {
        "verify_tree": (scores, drafts, None, None, None, numbers, 2),
        "verify_sampling": (scores, drafts, None, None, numbers, numbers),
        "verify_block": (scores, drafts, torch.zeros(2, 2, 5, device=DEVICE), None, numbers, numbers, numbers),
        "best_draft": (scores,),
        "draw_draft": (scores, numbers.float(), numbers, numbers, 0),
    }[name]
    with pytest.raises(AssertionError, match="unit stride"):
        getattr(kernels, name)(*arguments)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("vocabulary", [1000, 128256])
@pytest.mark.parametrize("mode", ["point mass", "soft", "block"])
def test_cuda_graph_replays_a_round(vocabulary, mode):
    """One captured round, replayed: its numbers are fresh because the lengths have advanced."""
    batch, num_drafts, size = 4, 5, vocabulary // 4
    logits = torch.randn(batch, num_drafts, size, device=DEVICE)
    scores = torch.randn(batch, num_drafts + 1, vocabulary, device=DEVICE)
    scores[:, :num_drafts, :size] += logits
    seeds, lengths = torch.arange(batch, device=DEVICE) * 31, torch.full((batch,), 7, device=DEVICE)
    temperatures, remaining = torch.full((batch,), 0.8, device=DEVICE), torch.full((batch,), 9, device=DEVICE)

    def round_of(module):
        best = module.best_draft(logits)
        drafts, probs = module.draw_draft(logits, temperatures, seeds, lengths, 0)
        if mode == "soft":
            sampled = module.verify_sampling(scores, drafts, probs, None, seeds, lengths)
        elif mode == "block":
            sampled = module.verify_block(scores, drafts, probs, None, seeds, lengths, remaining)
        else:
            sampled = module.verify_sampling(scores, best, None, None, seeds, lengths)
        return (best, drafts, *sampled, *verify_greedy(module, scores, best))

    start = lengths.clone()
    round_of(ops)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = round_of(ops)
        lengths += out[4]
    seen, differing = [], 0
    for _ in range(50):
        before = lengths.clone()
        graph.replay()
        advanced = lengths.clone()
        lengths.copy_(before)
        assert_same(out, round_of(kernels))
        expected = round_of(reference)
        assert torch.equal(out[0], expected[0]) and all(map(torch.equal, out[5:], expected[5:]))
        differing += sum(int((one != other).any()) for one, other in zip(out[1:3], expected[1:3], strict=True))
        lengths.copy_(advanced)
        seen.append(out[1].tolist())
    assert (lengths > start + 49).all() and len({str(drafts) for drafts in seen}) == 50
    assert differing <= 2, "rounding decided too often"
