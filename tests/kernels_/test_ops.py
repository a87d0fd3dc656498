"""Kernels as ops of torch: schemas, fakes, and compiled code, which sees what they write.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

import importlib
import inspect

import pytest
import torch

from hf_specdec import op_choice, ops
from hf_specdec.kernels.types import AnglesKind, NormKind, VerificationResult

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, SLOTS, WIDTH = 3, 12, 4


def integers(*shape, seed=0):
    return torch.randint(9, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rows():
    """Tokens, lengths, flags, limits and ends of rows; of a result; and where that is kept."""
    lengths, limits = torch.tensor([3, 4, 5], device=DEVICE), torch.tensor([11, 11, 8], device=DEVICE)
    finished, ends = torch.tensor([False, True, False], device=DEVICE), torch.tensor([[1, -1]] * BATCH, device=DEVICE)
    accepted = torch.tensor([1, 2, 3], device=DEVICE)
    state = [integers(BATCH, SLOTS), lengths, finished, limits, ends]
    result = [integers(BATCH, WIDTH, seed=1), accepted, accepted + 1]
    return state, result, [torch.zeros_like(one) for one in (integers(BATCH, WIDTH + 1), accepted, accepted)]


# Whether there are columns besides the window, hidden states, what a pass found and a front; and if passes are chained.
GROWN = [(False, True, True, True, False), (False, False, False, True, False), (True, True, True, False, True)]


def grown(of_rows, has_columns, has_hidden, has_feedback, has_front, is_chained):
    """Arguments of `grow_tree`: of a window of 2 columns, or of one and a draft after it."""
    tokens, states = integers(BATCH, 2), draw(BATCH, 2, 8)
    columns = (integers(BATCH, 2) % 2, integers(BATCH, 2, 1)) if has_columns else (None, None)
    front = (draw(BATCH, 1, 5), integers(BATCH, 1, 5), draw(BATCH, 1), integers(BATCH, 1, 5))
    feedback = (states if is_chained else states[:, 1:]) if has_feedback else None
    sizes = (1 if has_columns else 2), 3, -3, 1, SLOTS - 1, is_chained, 1
    layer = front if has_front else (None,) * 4
    return tokens, *columns, states if has_hidden else None, feedback, *layer, *of_rows, None, *sizes


def examples():
    """Arguments of the ops, by name, which the modules have registered."""
    state, result, kept = rows()
    (tokens, lengths, finished, limits, _), accepted = state, result[1]
    states, weight, angles = draw(2, 3, 16), draw(16, seed=1), draw(2, 2, 3, 8)
    heads = [draw(2, count, 3, 8, seed=count) for count in (4, 2)]
    stored = [draw(2, 6, 2, 8), draw(2, 6, 2, 8, seed=1), draw(2, 2, 3, 8), integers(2, 3).clamp(max=5)]
    query, keys = heads[0].transpose(1, 2).contiguous().transpose(1, 2), draw(2, 6, 2, 8).transpose(1, 2)
    scores, drafts, seeds = draw(BATCH, WIDTH + 1, 9), integers(BATCH, WIDTH), integers(BATCH)
    inputs = [draw(2, 3, count, 8, seed=count) for count in (2, 2, 4)]
    memory = [draw(2, 4, 8, 8), *(torch.zeros(2, 4, *one, device=DEVICE) for one in ((2, 8), (4, 8), (4,)))]
    base, positions = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.arange(3, device=DEVICE).expand(2, -1)
    return {
        "attention": [(query, keys, keys, stored[3], 0.5)],
        "recurrence": [
            (*inputs, -draw(2, 3, 4).abs(), None, *memory, base, base, positions, SLOTS - 1, True, True, 1.0, None)
        ],
        "short_conv": [(states, torch.zeros(2, 8, 16, device=DEVICE), positions, SLOTS - 1, draw(16, 2), None, True)],
        "linear": [(states[0].t(), draw(6, 3), *[None] * 9, None, None)],
        "rms_norm": [(states.transpose(0, 1), weight, 1e-5, *NormKind())],
        "row_sum": [(states.transpose(0, 1), torch.float32)],
        "draw_draft": [(scores, torch.ones(BATCH, device=DEVICE), seeds, lengths, 0)],
        "likeliest_tokens": [(scores, None, draw(BATCH, WIDTH + 1, 2), integers(BATCH, WIDTH + 1, 2))],
        "best_paths": [(scores[:, :2, None], integers(BATCH, 2, 1, 9), None, 3)],
        "verify_sampling": [(scores, drafts, None, None, seeds, lengths)],
        "verify_tree": [(scores, drafts, None, None, one, lengths, WIDTH) for one in (seeds, None)],
        "prepare_inputs": [
            (tokens, lengths, accepted, limits, finished, 5, 2, 7, 1, 2, one) for one in (lengths, None)
        ],
        "suffix_drafts": [(tokens, lengths, integers(20), 3)],
        "commit": [(*state, *result, *kept), (*state, *result, None, None, None)],
        "next_slots": [(lengths, limits, finished, -2, 3, SLOTS - 1)],
        "block": [(tokens, lengths, limits, finished, result[0][:, 1:], SLOTS - 1)],
        "position_ids": [(tokens, one, SLOTS - 1) for one in (lengths, None)],
        "add_rms_norm": [(states, states, one, 1e-5, *NormKind(cast_first=True)) for one in (weight, None)],
        "joined_norms": [(weight[None], states, integers(2, 3) * 0, None, weight, weight, 1e-5, *NormKind())],
        "rotary_angles": [
            (draw(4), tokens, torch.float32, *AnglesKind(one, 1.5)) for one in ("halves", "pairs", "once")
        ],
        "gather_rows": [(states, integers(2, 2) // 4 - 1, one) for one in (weight, None)],
        "join_rows": [(draw(2, 4, 32), [states] * 2, one) for one in (integers(2, 2).clamp(max=2), None)],
        "rotate_and_store": [(*angles, one, *[False] * 5, *stored, None) for one in (heads, heads[1:])],
        "grow_tree": [grown(rows, *one) for rows in ((lengths, limits, finished), (None,) * 3) for one in GROWN],
        "write_kv": [(*stored[:2], *stored[2:3] * 2, stored[3], None)],
    }


def test_kernels_have_the_parameters_of_their_references():
    seen = set()
    for reference in {one.__wrapped__ for one in vars(ops).values() if hasattr(one, "__wrapped__")}:
        module = reference.__module__.removesuffix("_reference")
        if module != reference.__module__ and reference.__name__ != "linear":  # which is told its tiles
            function = getattr(importlib.import_module(module), reference.__name__)
            expected, found = (list(inspect.signature(one).parameters) for one in (reference, function))
            assert found[: len(expected)] == expected, function
            seen.add(reference.__name__)
    assert len(seen) > 30


def test_arguments_that_are_written_have_no_defaults():
    """torch 2.11 looks for what is written among the arguments that are given (`IndexError` of a dispatched call)."""
    ops = [one for one in torch._C._jit_get_all_schemas() if one.name.startswith("hf_specdec::")]
    assert len(ops) > 20
    for schema in ops:
        written = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        assert not [one.name for one in written if one.has_default_value()], schema


@pytest.mark.parametrize("name", examples())
def test_schemas_and_fakes(name):
    op = getattr(torch.ops.hf_specdec, name).default
    for arguments in examples()[name]:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@torch.no_grad()
def test_an_op_chooses_once(monkeypatch):
    """It costs the host time in every op of an eager round."""
    asked, (_, lengths, finished, limits, _) = [], rows()[0]
    expected = ops.next_slots(lengths, limits, finished, 0, 2, SLOTS - 1)
    for takes_kernel in (False, True):
        monkeypatch.setattr(op_choice, "is_for_triton", lambda tensor, found=takes_kernel: asked.append(found) or found)
        assert torch.equal(ops.next_slots(lengths, limits, finished, 0, 2, SLOTS - 1), expected)
    assert asked == [False, True]


@torch.no_grad()
def test_compiled_code_sees_what_ops_write(monkeypatch):
    monkeypatch.setattr(op_choice, "is_for_triton", lambda _: True)

    def step(state, result, kept):
        tokens, lengths, finished, limits, _ = state
        before = ops.next_slots(lengths, limits, finished, 0, 2, SLOTS - 1) + 1
        block, slots = ops.block(tokens, lengths, limits, finished, result[0][:, 1:], SLOTS - 1)
        committed = ops.commit(*state, VerificationResult(*result), VerificationResult(*kept))
        after = ops.next_slots(lengths, limits, finished, 0, 2, SLOTS - 1) + committed[:, None]
        return before, block, slots, after, tokens[:, :-1] + 1, kept[0] * 2

    given, expected = rows(), rows()
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(*given)
    assert all(torch.equal(*pair) for pair in zip(found, step(*expected), strict=True))
    for ours, theirs in zip(given, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert not torch.equal(given[0][1], rows()[0][1])
