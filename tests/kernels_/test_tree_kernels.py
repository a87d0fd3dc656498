"""Trees of drafts: building, verification and moves, Triton against the references, and those against plain loops.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

import heapq
from itertools import product

import pytest
import torch
from case_counts import cases
from chi_square import p_value
from targets import set_policy

from hf_specdec import ops
from hf_specdec.drafters import trees
from hf_specdec.kernels import (
    draft_sampling,
    draft_sampling_reference,
    draft_tree,
    draft_tree_reference,
    kv_cache,
    kv_cache_reference,
    logprobs,
    logprobs_reference,
    random_reference,
    reduction,
    round_state,
    round_state_reference,
    verification,
    verification_reference,
)
from hf_specdec.kernels.types import NO_TOKEN, Columns, RandomStream, Tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that kernels are to write holds a token of no vocabulary before."""
    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)

        def filled(*args, _make=make, **options):
            made = _make(*args, **options)
            return made.fill_(-77 if made.dtype == torch.int64 else float("nan"))

        monkeypatch.setattr(owner, name, filled)


def candidates(batch, depth, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values, tokens = torch.randn(batch, depth, 40, generator=generator).mul(2).log_softmax(-1).topk(width)
    return values[:, :, None].to(DEVICE), tokens[:, :, None].to(DEVICE)


def linked(batch, depth, num_rows, width, seed=0):
    """Tables of drafts that depend on others: rows of the next depth, some of which are not there."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(batch, depth, num_rows, 40, generator=generator).mul(2).log_softmax(-1)
    values, tokens = values.topk(width)
    rows = torch.randint(-1, num_rows, values.shape, generator=generator)
    tables = values, tokens, rows[:, : depth - 1]
    return [one.mT.contiguous().mT.to(DEVICE) for one in tables]  # as a sort of products leaves them


def best_first(logprobs, rows, num_nodes):
    """The likeliest paths of one row by a heap on the host: places in the tables, `[(row, rank), ...]`."""
    depth, _, width = logprobs.shape
    heap, found = [(-float(logprobs[0, 0, 0]), ((0, 0),))], []
    while heap and len(found) < num_nodes:
        _, path = heapq.heappop(heap)
        found.append(path)
        row, rank = path[-1]
        after = 0 if rows is None or len(path) == depth else int(rows[len(path) - 1, row, rank])
        others = [(*path[:-1], (row, rank + 1))] if rank + 1 < width else []
        others += [(*path, (after, 0))] if len(path) < depth and after >= 0 else []
        for other in others:
            heapq.heappush(heap, (-sum(float(logprobs[d][at]) for d, at in enumerate(other)), other))
    return found


def paths_of(parents, tokens):
    """The tokens of the path to each node of one row, by node; `parents` `[N + 1]`, `tokens` `[N]`."""
    paths = {0: ()}
    for node in range(1, len(parents)):
        if parents[node] >= 0:
            paths[node] = (*paths[int(parents[node])], int(tokens[node - 1]))
    return paths


@pytest.mark.parametrize(
    ("depth", "width", "num_nodes", "num_rows"),
    cases(
        every := [
            (*sizes, num_rows)
            for sizes in ((1, 4, 3), (3, 2, 7), (7, 8, 32), (15, 16, 63), (5, 16, 127))
            for num_rows in (1, 5)
        ],
        [one for one in every if one[2:] in ((3, 1), (7, 5), (32, 1), (63, 5), (127, 1))],
    ),
)
def test_the_likeliest_paths(depth, width, num_nodes, num_rows):
    """Of drafts that do not depend on each other, and of ones that do."""
    tables = (*candidates(3, depth, width), None) if num_rows == 1 else linked(3, depth, num_rows, width)
    logprobs, tokens, rows = tables
    out, *tree = draft_tree_reference.best_paths(*tables, num_nodes)
    tree = Tree(*tree)
    for found, right in zip(draft_tree.best_paths(*tables, num_nodes), (out, *tree), strict=True):
        assert torch.equal(found, right)
    for row in range(3):
        expected = best_first(logprobs[row].double(), None if rows is None else rows[row], num_nodes)
        of_places = [tuple(int(tokens[row, d][at]) for d, at in enumerate(path)) for path in expected]
        paths = paths_of(tree.parents[row], out[row])
        assert sorted(one for one in paths.values() if one) == sorted(of_places)
        for node, path in paths.items():
            assert tree.depths[row, node] == len(path)
            bits = [word >> bit & 1 for word in tree.ancestors[row, node].tolist() for bit in range(64)]
            assert {paths[other] for other, bit in enumerate(bits) if bit} == {path[:n] for n in range(len(path) + 1)}


def test_fewer_paths_than_nodes_and_tokens_that_are_impossible():
    logprobs, tokens = candidates(4, 2, 2)  # 6 paths
    logprobs[1, :, 0, 1] = float("-inf")
    logprobs[2], logprobs[3, 1] = float("nan"), float("nan")
    out, *tree = draft_tree_reference.best_paths(logprobs, tokens, None, 9)
    for found, right in zip(draft_tree.best_paths(logprobs, tokens, None, 9), (out, *tree), strict=True):
        assert torch.equal(found, right)
    assert [len(paths_of(tree[0][row], out[row])) - 1 for row in range(4)] == [6, 2, 0, 2]
    assert bool((tree[0][2] == -1).all()) and bool((out[2] == 0).all())


WIDTH, CANDIDATES, DUMMY = 3, 5, 90


def grown(generator, window, size, is_chained, has_places, run):
    """Arguments and results of three layers, and chained of a pass after them, one after the other."""
    batch, hidden = 4, None

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    tokens = torch.randint(99, (batch, window + 2), generator=generator).to(DEVICE)[:, 2:]
    if size and window > 1:
        hidden = draw(batch, window + 1, size)[:, 1:]
    parents, ancestors, paths = None, None, None
    lengths, limits = (torch.tensor(one, device=DEVICE) for one in ([9, 30, 40, 3], [80, 33, 80, 80]))
    rows = (lengths, limits, torch.tensor([False, False, True, False], device=DEVICE)) if has_places else (None,) * 3
    offsets = torch.tensor([0, 5, -2, 4], device=DEVICE) if window > 1 else None
    for step in range(1, 5 if is_chained else 4):
        layer, num_drafts, count = (None,) * 4, 1 if step == 1 else WIDTH, tokens.shape[1]
        if step < 4:
            logprobs = draw(batch, num_drafts, CANDIDATES).sort(-1, descending=True).values.round(decimals=1)
            logprobs[0, 0, 1:] = -torch.inf
            logprobs[1, 0, 1:3] = float("nan")
            drafts = torch.randint(99, (batch, num_drafts, CANDIDATES), generator=generator).to(DEVICE)
            table = torch.full((batch, 2, WIDTH, CANDIDATES), -77, device=DEVICE)
            layer = logprobs, drafts, paths, table[:, 1, :num_drafts]
        feedback = draw(batch, count if is_chained else num_drafts, size) if size else None
        behind = step if is_chained else 0
        sizes = window, WIDTH, -1 - window - behind, behind, DUMMY, is_chained, 2
        given = tokens, parents, ancestors, hidden, feedback, *layer, *rows, offsets, *sizes
        found = run(*given)
        yield given, found
        paths, tokens, parents, ancestors, *_, states = found
        hidden = None if hidden is None else states


@pytest.mark.parametrize(
    ("window", "size", "is_chained", "has_places"),
    [(1, 0, False, True), (1, 24, False, False), (4, 24, False, True), (8, 7, True, True)],
)
def test_a_tree_grows_by_layers(window, size, is_chained, has_places, monkeypatch):
    """Kernel and reference, and that against a loop over columns."""
    monkeypatch.setattr(draft_tree, "BLOCK", 16)
    arguments = window, size, is_chained, has_places
    both = (
        grown(torch.Generator().manual_seed(0), *arguments, run)
        for run in (draft_tree_reference.grow_tree, draft_tree.grow_tree)
    )
    for (given, right), (others, ours) in zip(*both, strict=True):
        written = [] if given[8] is None else [(given[8], others[8])]
        for one, other in [*zip(right, ours, strict=True), *written]:
            assert torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5)) and one.dtype == other.dtype
        check_growth(*given, *right)


def check_growth(
    tokens, parents, ancestors, hidden, feedback, logprobs, drafts, before, rows, lengths, limits, finished, offsets,
    window, width, first, behind, dummy, is_chained, num_words, paths, *columns,
):  # fmt: skip
    count, found = tokens.shape[1], Columns(*columns)
    for row in range(len(tokens)):
        chosen = []
        if logprobs is not None:
            scores = logprobs[row] if before is None else logprobs[row] + before[row][:, None]
            scores = scores.nan_to_num(-torch.inf, neginf=-torch.inf).flatten().tolist()
            chosen = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:width]
            assert paths[row].tolist() == [scores[at] for at in chosen]
            ranks = [chosen.index(at) if at in chosen else -1 for at in range(len(scores))]
            assert rows[row].flatten().tolist() == ranks
        for column in range(count + len(chosen)):
            step = column
            if column >= window:
                step = window + (column - window) // width
            followed = None
            if column >= count:
                followed, rank = divmod(chosen[column - count], drafts.shape[2])
                parent, token = count - drafts.shape[1] + followed, drafts[row, followed, rank]
            else:
                parent, token = max(column - 1, 0) if parents is None else parents[row, column], tokens[row, column]
            assert found.tokens[row, column] == token and found.parents[row, column] == parent
            if feedback is not None and (is_chained or column >= count or hidden is not None):
                source = feedback[row, parent] if is_chained else hidden[row, column] if followed is None else None
                source = feedback[row, followed] if source is None else source
                assert torch.equal(found.hidden[row, column - count * (len(found.hidden[row]) == len(chosen))], source)
            if lengths is None:
                continue
            line, at = {column}, column
            while at > 0:
                at = int(found.parents[row, at])
                line.add(at)
            bits = [word >> bit & 1 for word in found.ancestors[row, column].tolist() for bit in range(64)]
            assert {at for at, bit in enumerate(bits) if bit} == line
            place = int(lengths[row]) + first + step
            is_run = not finished[row] and place <= limits[row] - 2
            slot = int(lengths[row]) + first + column if is_run and place >= 0 and column >= behind else dummy
            position = max(place, 0) + (0 if offsets is None else int(offsets[row]))
            assert found.places[row, column] == (place if is_run else dummy) and found.slots[row, column] == slot
            assert found.positions[row, column] == (position if is_run else 0)


def random_trees(batch, num_drafts, vocabulary, seed=0):
    """Parents, depths, drafts of which siblings differ; the last node of each row is not used."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((batch, num_drafts + 1), -1)
    drafts = torch.zeros(batch, num_drafts, dtype=torch.int64)
    depths = torch.zeros_like(parents)
    for row in range(batch):
        taken: dict[int, set] = {}
        for node in range(1, num_drafts):
            parent = int(torch.randint(0, node, (), generator=generator))
            left = [one for one in range(vocabulary) if one not in taken.setdefault(parent, set())]
            drafts[row, node - 1] = token = left[int(torch.randint(0, len(left), (), generator=generator))]
            taken[parent].add(token)
            parents[row, node], depths[row, node] = parent, depths[row, parent] + 1
    return parents.to(DEVICE), depths.to(DEVICE), drafts.to(DEVICE)


@pytest.mark.parametrize(
    ("num_drafts", "is_drawn"),
    cases(list(product([1, 12, 80], [False, True])), [(1, False), (12, True), (12, False), (80, True)]),
)
def test_verification_follows_the_targets_tokens(num_drafts, is_drawn):
    vocabulary, batch, depth = 90, 9, 4
    parents, depths, drafts = random_trees(batch, num_drafts, vocabulary, num_drafts)
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(batch, num_drafts + 1, vocabulary, generator=generator).to(DEVICE)
    for row in range(batch):  # the target likes what was drafted
        for node in range(1, num_drafts + 1):
            if row % 3 and parents[row, node] >= 0:
                scores[row, parents[row, node], drafts[row, node - 1]] += 12.0
    scores[8, 0] = float("nan")
    seeds, lengths = torch.arange(batch, device=DEVICE) + 2**33, torch.arange(batch, device=DEVICE) + 5
    arguments = scores, drafts, parents, depths, seeds if is_drawn else None, lengths, depth
    expected, found = verification_reference.verify_tree(*arguments), verification.verify_tree(*arguments)
    tokens, accepted, committed, path = expected
    for row in range(batch):
        node, walked = 0, []
        while True:
            # As without drafts: a round of one column at this position.
            alone = scores[row, node][None, None]
            if is_drawn:
                at = lengths[row : row + 1] + depths[row, node]
                options = alone, drafts[:1, :0], None, None, seeds[row : row + 1], at
                token = int(verification_reference.verify_sampling(*options).tokens)
            else:
                token = int(alone.argmax())
            walked.append((node, token))
            children = [
                one
                for one in range(1, num_drafts + 1)
                if parents[row, one] == node and drafts[row, one - 1] == token and len(walked) <= depth
            ]
            if not children:
                break
            (node,) = children
        count = len(walked)
        assert accepted[row] == count - 1 and committed[row] == count
        assert list(zip(path[row, :count].tolist(), tokens[row, :count].tolist(), strict=True)) == walked
        for ours, right in zip((found[0], found[3]), (tokens, path), strict=True):
            assert torch.equal(ours[row, :count], right[row, :count])
    assert torch.equal(found[1], accepted) and torch.equal(found[2], committed)
    assert int(accepted.max()) >= min(2, int(depths.max()))
    assert not is_drawn or tokens[8, 0] == NO_TOKEN


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_chain_is_a_tree_in_which_each_parent_is_the_node_before(is_drawn):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 4, 7, generator=generator).mul(3).to(DEVICE)
    drafts = scores[:, :-1].argmax(-1)
    seeds, lengths = torch.arange(5, device=DEVICE), torch.arange(5, device=DEVICE) + 3
    nodes = torch.arange(4, device=DEVICE).expand(5, -1).contiguous()
    for module in (verification, verification_reference):
        options = (seeds if is_drawn else None, lengths, 3)
        chain = module.verify_tree(scores, drafts, None, None, *options)
        tree = module.verify_tree(scores, drafts, nodes - 1, nodes, *options)
        assert torch.equal(chain[1], tree[1]) and torch.equal(chain[2], tree[2])
        is_committed = nodes < chain[2][:, None]
        for ours, right in zip((chain[0], chain[3]), (tree[0], tree[3]), strict=True):
            assert torch.equal(ours[is_committed], right[is_committed])


@pytest.mark.parametrize(("has_ids", "is_one_draft"), [(False, True), (True, False)])
def test_the_noise_of_the_target(has_ids, is_one_draft):
    """Of equal distributions the best token is that which the target draws, at each position."""
    vocabulary, size = 300, 200 if has_ids else 300
    logits = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ids = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(1))[:size].to(DEVICE) if has_ids else None
    temperatures = torch.tensor([0.7, 1.5], device=DEVICE)
    seeds, lengths = torch.tensor([3, 2**40], device=DEVICE), torch.tensor([11, 4], device=DEVICE)
    arguments = logits, ids, temperatures, seeds, lengths, 2, is_one_draft
    expected = draft_sampling_reference.add_target_noise(*arguments)
    torch.testing.assert_close(draft_sampling.add_target_noise(*arguments), expected, rtol=1e-4, atol=1e-4)
    best = draft_sampling_reference.best_draft(expected, ids)
    scores = logits / temperatures[:, None, None]
    if has_ids:
        scores = torch.full((2, 3, vocabulary), float("-inf"), device=DEVICE).index_copy(2, ids, scores)
    positions = lengths[:, None] + 2 + (0 if is_one_draft else 1) * torch.arange(3, device=DEVICE)
    drawn = random_reference.exponential_sample(scores.softmax(-1), seeds[:, None], positions, RandomStream.TARGET)
    assert torch.equal(best, drawn)


def test_slots_and_positions_of_nodes():
    parents, depths, drafts = random_trees(4, 6, 9)
    tokens = torch.randint(9, (4, 30), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    lengths, limits = (torch.tensor(one, device=DEVICE) for one in ([3, 9, 5, 4], [20, 11, 20, 20]))
    finished = torch.tensor([False, False, True, False], device=DEVICE)
    arguments = tokens, lengths, limits, finished, drafts, parents, depths, 29
    expected = round_state_reference.tree_block(*arguments)
    for found, right in zip(round_state.tree_block(*arguments), expected, strict=True):
        assert torch.equal(found, right)
    block, slots, positions = (one.tolist() for one in expected)
    for row in range(4):
        length = int(lengths[row])
        assert block[row] == [tokens[row, length - 1], *drafts[row].tolist()]
        for node in range(7):
            position = length - 1 + int(depths[row, node])
            is_run = not finished[row] and position <= limits[row] - 2 and (node == 0 or parents[row, node] >= 0)
            assert positions[row][node] == (position if is_run else 29)
            assert slots[row][node] == (29 if finished[row] else length - 1 + node)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float8_e4m3fn, torch.bfloat16)], ids=str)
def test_accepted_nodes_are_moved_to_their_positions(dtypes):
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 5), (1, 700), (3, 1)]
    wide = torch.randn(3, 20, 4, 8, generator=generator).to(DEVICE, dtypes[1])  # a slot is not the next one's neighbour
    buffers = [torch.randn(3, 20, *size, generator=generator).to(DEVICE, dtypes[0]) for size in sizes] + [
        wide[:, :, 1:3]
    ]
    path = torch.tensor([[0, 2, 3, 6], [0, 1, 5, 5], [0, 4, 7, 9]], device=DEVICE)
    lengths, committed = torch.tensor([9, 12, 6], device=DEVICE), torch.tensor([4, 3, 0], device=DEVICE)
    expected = [one.clone() for one in buffers]
    for buffer in expected:
        before = buffer.clone()
        for row in range(3):
            root = int(lengths[row] - committed[row]) - 1
            for step in range(1, int(committed[row])):
                buffer[row, root + step] = before[row, root + int(path[row, step])]
    theirs, ours = ([one.clone() for one in buffers[:3]] + [wide.clone()[:, :, 1:3]] for _ in range(2))
    kv_cache_reference.move_slots(theirs, path, lengths, committed)
    kv_cache.move_slots(kv_cache.SlotTable.of(ours), path, lengths, committed)
    for right, *found in zip(expected, theirs, ours, strict=True):
        assert all(torch.equal(one.float(), right.float()) for one in found)


def test_what_moves_slots_looks_at_buffers_once(monkeypatch):
    """What a launch needs to know of them is found out again only for others, or where they have moved."""
    set_policy(monkeypatch, "cpu", triton=True)
    made, of = [], kv_cache.SlotTable.of
    monkeypatch.setattr(kv_cache.SlotTable, "of", lambda buffers: made.append(len(buffers)) or of(buffers))
    moves, path = ops.SlotMoves(), torch.tensor([[0, 2]], device=DEVICE)
    lengths, committed = torch.tensor([5], device=DEVICE), torch.tensor([2], device=DEVICE)
    buffers = [torch.arange(20.0, device=DEVICE).view(1, 10, 1, 2) for _ in range(2)]
    for one in (buffers, buffers, buffers[:1], buffers[:1]):
        moves(one, path, lengths, committed)
    assert made == [2, 1] and buffers[0][0, 3].tolist() == [[8.0, 9.0]]


def tree_of(kind, drafter, noise, temperature, num_nodes):
    """A tree of drafts that depend on none, one or all of those before them; `drafter`: logits after every text."""
    rows, depth, vocabulary = noise.shape
    tokens = torch.arange(vocabulary, device=DEVICE).expand(rows, 1, -1)
    if kind == "independent":
        return trees.tree_of_independent(drafter[:depth] / temperature + noise, None, num_nodes)
    if kind == "pairs":
        logits = drafter[: depth * vocabulary].view(depth, vocabulary, vocabulary) / temperature + noise[:, :, None]
        return trees.tree_of_pairs(logits.log_softmax(-1), tokens.expand(-1, depth, -1), num_nodes)
    texts = torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE)
    tree = trees.GrowingTree(2, Columns(texts), depth, vocabulary)
    for step in range(depth):
        logprobs = (drafter[texts] / temperature + noise[:, step, None]).log_softmax(-1)
        for part, values in zip(tree.add_layer(), (logprobs, tokens.expand(-1, texts.shape[1], -1)), strict=True):
            part.copy_(values)
        if step + 1 < depth:
            columns = tree.grow(texts[..., None])
            texts = vocabulary * columns.hidden[..., 0] + columns.tokens[:, -2:] + 1
    return tree.cut(num_nodes)


@pytest.mark.parametrize(("kind", "temperature"), [("independent", 0.5), ("pairs", 1.0), ("grown", 0.5)])
def test_the_law_of_texts_with_drafts_chosen_by_the_targets_noise(temperature, kind):
    """Texts of up to depth 3 of 8 drafts, of a drafter that is wrong, have the target's distribution."""
    vocabulary, depth, rows = 3, 3, 20_000
    generator = torch.Generator().manual_seed(0)
    # Logits after every text, of which nodes are told apart by number: v's child w is 3 v + w + 1.
    texts_up_to_depth = sum(vocabulary**n for n in range(depth + 1))
    target, drafter = torch.randn(2, texts_up_to_depth, vocabulary, generator=generator).to(DEVICE)
    seeds, lengths = torch.arange(rows, device=DEVICE), torch.full((rows,), 7, device=DEVICE)
    temperatures = torch.full((rows,), temperature, device=DEVICE)
    nothing = torch.zeros(rows, depth, vocabulary, device=DEVICE)
    noise = draft_sampling_reference.add_target_noise(nothing, None, temperatures, seeds, lengths, 0, False)
    drafts, _, _, tree = tree_of(kind, drafter, noise, temperature, 8)
    texts = torch.zeros(rows, 9, dtype=torch.int64, device=DEVICE)
    for node in range(1, 9):
        parent = texts.gather(1, tree[0][:, node, None].clamp(min=0))[:, 0]
        texts[:, node] = vocabulary * parent + drafts[:, node - 1] + 1
    scores = target[texts] / temperature
    found, accepted, _, _ = verification_reference.verify_tree(scores, drafts, *tree[:2], seeds, lengths, depth)
    assert accepted.bincount(minlength=depth + 1)[1:].min() > 100
    # Rounds go on until texts have as many tokens: without drafts, as far as the law is concerned.
    at, text = torch.zeros_like(seeds), torch.zeros_like(seeds)
    law = torch.ones(1, dtype=torch.float64, device=DEVICE)
    probs = (target / temperature).softmax(-1)
    for step in range(depth):
        alone = random_reference.exponential_sample(probs[at], seeds, lengths + step, RandomStream.TARGET)
        token = torch.where(step <= accepted, found[:, step], alone)
        first = (vocabulary**step - 1) // (vocabulary - 1)
        law = (law[:, None] * probs[first : first + vocabulary**step].double()).flatten()
        at, text = vocabulary * at + token + 1, vocabulary * text + token
    assert p_value(text.bincount(minlength=vocabulary**depth).cpu(), law.cpu()) > 1e-3


def sorted_tokens(logits, target_ids, count):
    """The first of all tokens in a stable sort, in float64."""
    logits = torch.where(logits > -torch.inf, logits, -torch.inf).double()
    values, index = logits.sort(dim=-1, descending=True, stable=True)
    logprobs = values[..., :count] - logits.logsumexp(-1, keepdim=True)
    return logprobs, index[..., :count] if target_ids is None else target_ids[index[..., :count]]


class Noting:
    """A kernel that tells the options of its launches."""

    def __init__(self, kernel, note):
        self.kernel, self.note = kernel, note

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.note(options)
            return self.kernel[grid](*args, **options)

        return launch


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "has_ids"),
    cases(
        every := list(product([5, 512, 1500, 20000], [torch.float32, torch.bfloat16], [False, True])),
        [one for one in every if (one[1] is torch.float32) == (one[2] == (one[0] == 512))],
    ),
)
def test_likeliest_tokens(vocabulary, dtype, has_ids):
    """Written into a part of larger tables."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(2, 3, vocabulary + 3, generator=generator).mul(2).to(dtype)[..., :vocabulary]
    logits[0, 0] = logits[0, 0].round()  # ties
    logits[0, 1, 2:] = -torch.inf
    logits[1, 2, 1:3] = torch.tensor([float("nan"), -0.0])
    logits[1, 1, :4] = torch.tensor([0.0, -0.0, 0.0, 60.0])
    target_ids = torch.randperm(3 * vocabulary, generator=generator)[:vocabulary].to(DEVICE) if has_ids else None
    count = min(vocabulary, 16)
    expected = sorted_tokens(logits.to(DEVICE), target_ids, count)
    for run in (logprobs, logprobs_reference):
        tables = [torch.full((2, 3, 4, count), -7, dtype=one, device=DEVICE) for one in (torch.float32, torch.int64)]
        found, tokens = (one[:, 1, :3] for one in tables)
        run.likeliest_tokens(logits.to(DEVICE), target_ids, found, tokens)
        assert torch.equal(tokens, expected[1])
        assert all(bool((one[:, [0, 2]] == -7).all()) and bool((one[:, 1, 3] == -7).all()) for one in tables)
        torch.testing.assert_close(found.double(), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("vocabulary", "count", "group"),
    [(5000, 1, 128), (24000, 2, 128), (33000, 1, 256), (70000, 2, 256), (264000, 1, 1024)],
)
def test_likeliest_tokens_of_larger_groups(monkeypatch, vocabulary, count, group):
    """At both ends of a group, in the last group, and equal ones in several groups."""
    sizes, generator = [], torch.Generator().manual_seed(count)
    launch = reduction._groups_kernel
    monkeypatch.setattr(reduction, "_groups_kernel", Noting(launch, lambda options: sizes.append(options["GROUP"])))
    logits = torch.randn(1, 3, vocabulary, generator=generator)
    logits[0, 0, [3 * group, 4 * group - 1]] = torch.tensor([9.0, 10.0])
    logits[0, 1, [vocabulary - 1, vocabulary - 2, 7]] = 9.0
    logits[0, 2, vocabulary - group :] = -torch.inf
    logits[0, 2, [group - 1, group]] = 9.0
    expected = sorted_tokens(logits.to(DEVICE), None, count)
    for run in (logprobs, logprobs_reference):
        found, tokens = torch.empty(1, 3, count), torch.empty(1, 3, count, dtype=torch.int64)
        found, tokens = found.to(DEVICE), tokens.to(DEVICE)
        run.likeliest_tokens(logits.to(DEVICE), None, found, tokens)
        assert torch.equal(tokens, expected[1])
        torch.testing.assert_close(found.double(), expected[0], rtol=1e-5, atol=1e-5)
    assert sizes == [group]
