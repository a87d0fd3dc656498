"""The command that runs transformers' own tests sees what differs, on a small checkout."""

import textwrap

import pytest
import transformers_tests as command
from peer_tests import MISSING, Outcome, compared
from transformers_tests import Assisted

MODEL_TESTS = """
import sys

import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers import LlamaConfig, LlamaForCausalLM


def model(seed):
    torch.manual_seed(seed)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32)
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.5, eos_token_id=None, pad_token_id=0)).eval()


def test_generate():
    pass


def test_generate_alone():
    assert "hf_specdec" not in sys.modules


def test_generate_from_the_hub():
    try:
        raise OfflineModeIsEnabled("no network")
    except OfflineModeIsEnabled as error:
        raise OSError("no such file") from error


def test_beam_search_seeds():
    assert torch.rand(1) > 2, torch.rand(1)


def test_forward():
    raise AssertionError("not a test of generation")


def test_assisted_decoding():
    inputs = dict(input_ids=torch.tensor([[5, 6, 7, 8]]), do_sample=False, max_new_tokens=8)
    assert torch.equal(model(0).generate(**inputs, assistant_model=model(1)), model(0).generate(**inputs))


def test_assisted_decoding_with_holes():
    mask = torch.tensor([[1, 0, 0, 0]])
    inputs = dict(input_ids=torch.tensor([[5, 6, 7, 8]]), attention_mask=mask, do_sample=False, max_new_tokens=8)
    assert torch.equal(model(0).generate(**inputs, assistant_model=model(1)), model(0).generate(**inputs))
"""
FILE = "tests/models/tiny/test_modeling_tiny.py"


@pytest.fixture
def source(tmp_path):
    at = tmp_path / FILE
    at.parent.mkdir(parents=True)
    at.write_text(textwrap.dedent(MODEL_TESTS))
    return tmp_path


@pytest.mark.slow
def test_what_differs_is_named(source, capsys):
    """Five processes with pytest."""
    assert command.main(["--source", str(source), "--models", "tiny", "--keep", str(source / "kept")]) == 1
    out, err = capsys.readouterr()
    assert "| tiny | 6 | 3 | 2 | 1 | 1 | 1 |" in out
    (differs,) = [line for line in err.splitlines() if line.startswith("differs")]
    assert "test_generate_alone: passed without" in differs and "failed with" in differs
    # As it is, the mask with holes is refused; as an ordinary call it has none, and passes.
    assert "| tiny | 4 | 3 | 0 | 0 | 0 | 1 | 0 |" in out
    (listed,) = [line for line in err.splitlines() if line.startswith("not listed")]
    assert "test_assisted_decoding_with_holes: ValueError: Row 0" in listed
    runs = sorted((source / "kept").iterdir())
    assert len(runs) == 5
    times = [one.stat().st_mtime_ns for one in runs]
    page = source / "page.md"
    page.write_text(f"# Page\n\n{command.HEADING}\n\nof before\n")
    arguments = ["--models", "tiny", "--keep", str(source / "kept"), "--write", str(page)]
    assert command.main(["--source", str(source), *arguments]) == 1, "an outcome that differs is no matter of the page"
    assert (
        page.read_text().startswith(f"# Page\n\n{command.HEADING}\n\nMade by") and "of before" not in page.read_text()
    )
    assert "test_assisted_decoding_with_holes" in page.read_text()
    assert [one.stat().st_mtime_ns for one in runs] == times


def test_every_kind_of_difference():
    passed, failed, skipped = Outcome("passed"), Outcome("failed", "why"), Outcome("skipped", "needs the Hub")
    names = [f"{FILE}::Test::test_{one}" for one in "abcd"]
    alone = dict(zip(names, [passed, failed, skipped, passed], strict=True))
    assert compared(alone, alone, command.folder_of, "it")[1] == []
    others = dict(zip(names, [failed, passed, passed], strict=False))
    differences = compared(alone, others, command.folder_of, "it")[1]
    assert [one.partition(": ")[0] for one in differences] == names
    assert "not run" in differences[-1]
    pairs = {name: (alone[name], others.get(name, MISSING)) for name in names}
    assert list(Assisted(pairs).failures) == [names[0], names[3]]


def test_folders_without_tests(source, capsys):
    with pytest.raises(SystemExit):
        command.main(["--source", str(source), "--models", "tiny", "nothing"])
    assert "has no tests of nothing in tests/models" in capsys.readouterr().err
