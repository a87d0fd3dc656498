"""Runs TRL's own tests of a trainer that generates: without the package, with it imported, and with drafters attached.

    python tests/peers/trl_tests.py --source CHECKOUT
    python tests/peers/trl_tests.py --source CHECKOUT --tests tests/test_rloo_trainer.py
    python tests/peers/trl_tests.py --source CHECKOUT --write docs/rollouts.md

CHECKOUT is one of TRL, of about the version that is installed, of which only the tests are run. Nothing is downloaded.
The models of text and the data sets that the tests ask for are made by the checkout's own scripts, and take the place
of those of the Hub; their tokenizer cuts a text into bytes. A test that asks for anything else of the Hub counts as
skipped. No outcome may differ.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

from peer_tests import Outcomes, Runner, class_of, compared, report, table

HEADING = "## TRL's own tests"
SCRIPTS = "scripts.generate_tiny_models"
# Where a script reads a configuration of the Hub: what that is one of, by how the repository's name begins.
CONFIGS = {"Qwen/Qwen2": "Qwen2Config", "Qwen/Qwen3": "Qwen3Config", "meta-llama": "LlamaConfig"}


def byte_tokenizer(source: Path):
    """A tokenizer of bytes, with Qwen2.5's special tokens and template of chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # So many that texts, which are drawn, do not end by chance where tests expect that they do not.
    unused = [f"<|unused_{number}|>" for number in range(2**15)]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special, *unused]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=special[2],
        additional_special_tokens=[special[1]],
        chat_template=(source / "trl" / "chat_templates" / "qwen2_5.jinja").read_text(),
    )


def make_hub(source: Path, folder: Path) -> None:
    """Write what the tests ask the Hub for: models into a cache of huggingface_hub, and data sets beside it."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when they are imported
    import datasets
    import torch
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = byte_tokenizer(source)
    ends = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)

    def config_of(name, *_, **settings):
        kind = next(getattr(transformers, kind) for start, kind in CONFIGS.items() if name.startswith(start))
        settings |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        return kind(**settings)

    def save(model, tokenizer, generation_config, prefix=None, suffix=None, **_):
        name = "-".join(filter(None, (prefix, type(model).__name__, suffix)))
        repository = folder / "hub" / f"models--trl-internal-testing--{name}"
        for kept, content in (("refs/main", "local"), (".no_exist/local/adapter_config.json", "")):
            (repository / kept).parent.mkdir(parents=True, exist_ok=True)
            (repository / kept).write_text(content)
        for one in (model, tokenizer, generation_config):
            one.save_pretrained(repository / "snapshots" / "local")

    def save_data(self, repository, config_name, **_):
        self.save_to_disk(folder / "data" / repository / config_name)

    def unchecked(*_, **__):
        pass

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(patch.object(sys, "path", [str(source), *sys.path]))
        replaced.enter_context(patch.object(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer))
        replaced.enter_context(patch.object(transformers.GenerationConfig, "from_pretrained", lambda *_, **__: ends))
        replaced.enter_context(patch.object(transformers.AutoConfig, "from_pretrained", config_of))
        replaced.enter_context(patch.object(datasets.DatasetDict, "push_to_hub", save_data))
        common = importlib.import_module(f"{SCRIPTS}._common")
        for name in ("check_dtype_pattern", "check_transformers_version", "print_config_diff", "smoke_test"):
            replaced.enter_context(patch.object(common, name, unchecked))
        replaced.enter_context(patch.object(common, "push_to_hub", save))
        for kind in ("for_causal_lm", "for_sequence_classification"):
            for script in sorted((source / SCRIPTS.replace(".", "/") / kind).glob("[!_]*.py")):
                torch.manual_seed(0)
                # Tests that ask for a model that could not be made count as skipped.
                with contextlib.suppress(Exception):
                    importlib.import_module(f"{SCRIPTS}.{kind}.{script.stem}")
        for name in ("zen", "zen_image", "zen_multi_image"):
            data = importlib.import_module(f"scripts.generate_{name}_dataset")
            data.main(0.1, True, name.replace("_", "-"))


def rollouts(drafted: Outcomes) -> str:
    """What became of the calls of tests that passed with drafters attached."""
    passed = [one.notes for one in drafted.values() if one.outcome == "passed"]
    reasons = Counter(note for notes in passed for note in notes if note.startswith("plainly: "))
    count = sum(any(note.startswith("drafted: ") for note in notes) for notes in passed)
    lines = [f"Of these that passed, {count} had rollouts with drafts."]
    if reasons:
        rows = [[why.removeprefix("plainly: "), count] for why, count in reasons.most_common()]
        lines.append(table(["why calls ran plainly", "tests"], rows))
    return "\n\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="checkout of TRL")
    parser.add_argument("--tests", nargs="+", default=["tests/test_grpo_trainer.py"], help="files of it")
    parser.add_argument("--rows", type=int, default=1000, help="most rows of a data set, which tests train on thrice")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="processes that run tests")
    parser.add_argument("-k", help="as of pytest: which tests")
    parser.add_argument("--keep", type=Path, help="folder for outcomes of runs, which are then not repeated")
    parser.add_argument("--write", type=Path, help="page whose section on these tests is replaced")
    options = parser.parse_args(arguments)
    source = options.source.resolve()
    missing = [one for one in options.tests if not (source / one).exists()]
    if missing:
        parser.error(f"{options.source} has no {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        make_hub(source, Path(folder))
        chosen = [] if options.k is None else [f"-k{options.k}"]
        settings = {"HF_HOME": folder, "PEER_DATA": f"{folder}/data", "PEER_ROWS": str(options.rows)}
        paths = [*chosen, *options.tests]
        runner = Runner(source, "trl_plugin", paths, options.n, options.keep, settings, "load")
        alone, imported, drafted = (runner.run(f"--with={what}") for what in ("nothing", "import", "drafters"))
    sections, faults = [], []
    for name, run in (("the import", imported), ("a drafter attached", drafted)):
        counts, differences = compared(alone, run, class_of, name)
        sections.append(f"With {name}:\n\n{counts}")
        faults += [f"differs: {one}" for one in differences]
    sections.append(rollouts(drafted))
    tests = re.sub(r"\s", "", (source / "VERSION").read_text())
    used = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers"))
    introduction = INTRODUCTION.format(versions=used, tests=tests, files=", ".join(options.tests))
    return report("\n\n".join([HEADING, introduction, *sections]) + "\n", HEADING, faults, options.write)


INTRODUCTION = """\
Made by `python tests/peers/trl_tests.py --source CHECKOUT --write docs/rollouts.md` with {versions} on a CPU, and
{files} of TRL {tests}.
Models of text and data sets are made by TRL's own scripts, with a tokenizer of bytes; nothing is downloaded. The
drafter is a random Llama of one layer, attached to each trainer's model."""


if __name__ == "__main__":
    sys.exit(main())
