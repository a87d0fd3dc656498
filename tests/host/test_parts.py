"""The seam with transformers: what is touched of it is declared in `hf_specdec.host`, found, and named if it is not."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from oracle import random_eagle3
from targets import build_target, padded_prompts, tiny_target
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from hf_specdec import cli
from hf_specdec.host import caches, parts
from hf_specdec.inspection.doctor import parts_table
from hf_specdec.patching.support import why_not_supported

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_specdec"
NEWEST = parts.TESTED[1].rpartition(".")[0]

# Names of our own that are also names of transformers': class attributes for subclasses, words of configurations.
OWN_NAMES = frozenset(
    {
        *("_keys_to_ignore_on_load_unexpected", "name_or_path", "generation_config"),
        *("cache", "state", "hybrid", "conv", "moe", "mlp", "rotary_emb", "gate_proj"),
        *("full_attention", "sliding_attention", "compress_rate", "index_topk"),
        *("hidden_states", "position_ids"),
    }
)


def trees():
    """The syntax trees of the package without its seam and its kernels, by path."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if not {"host", "kernels"} & set(path.relative_to(PACKAGE).parts):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


@pytest.mark.core
def test_all_parts_are_found():
    assert parts.missing() == () and parts.why_broken() is None
    lost = [one for one in parts.PARTS if not one.is_found()]
    assert {name for one in lost for name in one.names} <= {"_mask_length"}, "a feature of its own would be refused"


def test_imports_of_transformers_are_in_one_place():
    found = [
        f"{path}:{node.lineno} {node.module}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("transformers.")
    ]
    assert found == []


def test_private_names_of_transformers_are_in_one_place():
    declared = {name for one in parts.PARTS for name in one.names} - OWN_NAMES
    private = {name for name in declared if name.startswith("_")} | {*caches.CACHE_NAMES} - OWN_NAMES
    of_files = {name for one in parts.PARTS if one.where == "transformers.models" for name in one.names} - OWN_NAMES
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in private | of_files:
                found.append(f"{path}:{node.lineno} {node.value!r}")
            elif isinstance(node, (ast.Attribute, ast.keyword)):
                name = node.attr if isinstance(node, ast.Attribute) else node.arg
                is_own = isinstance(getattr(node, "value", None), ast.Name) and node.value.id in ("self", "cls")
                if name in private and not is_own:
                    found.append(f"{path}:{node.lineno} {name}")
    # `hooks.py` names the methods that it replaces, which it looks up in the table.
    assert [one for one in found if not one.startswith("hf_specdec/install.py")] == []


def test_versions_are_compared_in_one_place():
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and "__version__" in ast.unparse(node)
    ]
    assert found == []


# What does away with a part of transformers, and the part's name.
GONE = {
    "method": ("del transformers.generation.GenerationMixin._assisted_decoding", "_assisted_decoding"),
    "class": ("del transformers.cache_utils.LinearAttentionLayer", "LinearAttentionLayer"),
    "attribute": (
        "transformers.PreTrainedConfig._attn_implementation = property(lambda self: 'sdpa')",
        "_attn_implementation_internal",
    ),
    "module": ("transformers.LlamaModel; sys.modules['transformers.integrations.moe'] = None", "ALL_EXPERTS_FUNCTIONS"),
}
# What one feature needs, here experts in FP8: the others run without it.
OPTIONAL = "sys.modules['transformers.integrations.finegrained_fp8'] = None"
# Each is done in a copy of a process that has imported what the package imports of others, but not the package.
WITHOUT_PARTS = """
import contextlib, os, sys, warnings
import transformers, transformers.generation.utils, transformers.cache_utils, transformers.masking_utils
import transformers.generation.continuous_batching, transformers.integrations.moe, transformers.modeling_utils
import transformers.models.auto.modeling_auto, transformers.models.llama.modeling_llama, transformers.processing_utils
with contextlib.suppress(ImportError):
    import openai, transformers.cli.serve
for gone in sys.argv[1:]:
    print("GONE", gone, flush=True)
    if os.fork():
        assert os.wait()[1] == 0
        continue
    exec(gone)
    sys.modules["transformers"].__version__ = "99.1.0"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import hf_specdec
    print("WARNED", *(one.message for one in caught if "hf_specdec" in str(one.message)))
    try:
        hf_specdec.AutoDrafter
    except ImportError as error:
        print("RAISED", error)
    from hf_specdec import cli
    print("STATUS", cli.main(["doctor"]))
    break
"""


@pytest.fixture(scope="module")
def without_parts():
    """What is said without each of the parts: lines."""
    command = [sys.executable, "-c", WITHOUT_PARTS, *(gone for gone, _ in GONE.values()), OPTIONAL]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return {gone: said.splitlines() for gone, _, said in (one.partition("\n") for one in run.stdout.split("GONE ")[1:])}


@pytest.mark.parametrize("where", GONE)
def test_a_part_that_is_gone_is_named(where, without_parts):
    """As with a release of transformers that has renamed it: a warning, an error on use, and a report."""
    gone, name = GONE[where]
    lines = without_parts[gone]
    for kind in ("WARNED", "RAISED", "the static engine cannot run"):
        (line,) = [one for one in lines if one.startswith(kind)]
        assert f"`{name}`" in line and "transformers 99.1.0" in line and f"is tested with 5.17 to {NEWEST}" in line
    assert lines[-1] == "STATUS 1" and any("newer than tested" in line for line in lines)


def test_a_part_of_one_feature_may_be_gone(without_parts):
    lines = without_parts[OPTIONAL]
    assert not [one for one in lines if one.startswith(("RAISED", "the static engine cannot run"))]
    assert any("`FP8Experts`" in one for one in lines)


@pytest.fixture
def renamed(tmp_path, monkeypatch):
    """Llama's modeling file of a release that calls the cache of `forward` something else."""
    source, name = Path(modeling_llama.__file__).read_text(), caches.OUTPUT_NAME
    source = re.sub(rf"\b{name}\b", "kv_store", re.sub(r"\n +@deprecate_kwarg\([^\n]*", "", source))
    # What is not of this file keeps its name: functions that make masks, outputs.
    source = re.sub(r"(create_causal_mask|OutputWithPast)\(([^()]*)\bkv_store=", rf"\1(\2{name}=", source)
    source = source.replace("outputs.kv_store", f"outputs.{name}")
    source = re.sub(r"from \.\.\.(\w)", r"from transformers.\1", source)
    source = source.replace("from .conf", "from transformers.models.llama.conf").replace("@auto_docstring\n", "\n")
    (tmp_path / "modeling_renamed.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import modeling_renamed

    target = tiny_target("llama")
    model = modeling_renamed.LlamaForCausalLM(target.config).eval()
    model.load_state_dict(target.state_dict())
    yield model
    del sys.modules["modeling_renamed"]


@pytest.mark.core
def test_a_parameter_that_is_renamed_is_named(renamed, caplog):
    expected = f"transformers {transformers.__version__}: `LlamaForCausalLM.forward` has no parameter `cache`, "
    expected += f"`past_key_values` or `cache_params`; hf_specdec {parts.__version__} is tested with 5.17 to {NEWEST}"
    assert expected in why_not_supported(renamed)
    drafter = random_eagle3(tiny_target("llama"))
    drafter.bind(renamed)
    with pytest.raises(ValueError, match=re.escape(expected)):
        renamed.generate(**padded_prompts([5]), assistant_model=drafter.configure(engine="static"), max_new_tokens=4)
    with pytest.raises(ValueError, match="neither on the static engine"):  # its texts are not those of plain generate()
        renamed.generate(**padded_prompts([5]), assistant_model=drafter.configure(engine="auto"), max_new_tokens=4)
    (warning,) = [one.message for one in caplog.records if "hf_specdec runs the stock engine" in one.message]
    assert expected in warning


@pytest.mark.core
def test_doctor_of_targets(tmp_path, capsys):
    tiny_target("llama").save_pretrained(tmp_path / "llama")
    for options in ([], ["--load"]):
        assert cli.main(["doctor", str(tmp_path / "llama"), *options]) == 0
        assert "LlamaForCausalLM: static engine" in capsys.readouterr().out
    transformers.RwkvConfig(vocab_size=32, hidden_size=8, num_hidden_layers=2, attention_hidden_size=8).save_pretrained(
        tmp_path / "rwkv"
    )
    assert cli.main(["doctor", str(tmp_path / "rwkv")]) == 1
    out = capsys.readouterr().out
    assert "RwkvForCausalLM: stock engine, since the target keeps its states in a cache of its own (`state`" in out
    build_target("bert", is_decoder=False).save_pretrained(tmp_path / "bert")
    for options in ([], ["--load"]):
        assert cli.main(["doctor", str(tmp_path / "bert"), *options]) == 1
        assert "bert is an encoder; hf_specdec drafts for decoder-only models" in capsys.readouterr().err
    random_eagle3(tiny_target("llama")).save_pretrained(tmp_path / "drafter")
    assert cli.main(["doctor", str(tmp_path / "drafter")]) == 1
    assert "drafter (ValueError: The checkpoint " in (error := capsys.readouterr().err)
    assert error.endswith("expected a decoder-only target.\n") and "upgrade" not in error
    assert cli.main(["doctor", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err


def test_modules_that_cannot_be_imported(tmp_path, monkeypatch, capsys):
    """The server's modules raise NameError where its packages are not installed."""
    (tmp_path / "modeling_broken.py").write_text("raise NameError('name is not defined')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(parts, "PARTS", [*parts.PARTS])
    parts.named_in("modeling_broken", "_private", why="of a feature", is_needed=False)
    with pytest.raises(ImportError, match="`modeling_broken` has no `name`"):
        parts.lazy_part("modeling_broken", "name", why="of a feature")()
    assert cli.main(["doctor"]) == 0
    assert "`modeling_broken` has no `_private` (of a feature)" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"hf-specdec {parts.__version__}\n"


def test_the_table_of_the_docs():
    """docs/transformers.md holds what `hf-specdec doctor --parts` prints."""
    assert parts_table() in (ROOT / "docs" / "transformers.md").read_text()


@pytest.mark.core
def test_caches_by_every_name():
    cache = transformers.DynamicCache()
    for name in caches.CACHE_NAMES:
        assert caches.given_cache({"other": 1, name: cache}) is cache
    assert caches.given_cache({}) is None
    assert caches.model_cache_name(LlamaForCausalLM) == caches.OUTPUT_NAME
    assert caches.model_cache_name(transformers.MambaForCausalLM) in ("cache", "cache_params")
    assert caches.model_cache_name(transformers.xLSTMForCausalLM) is None
    assert caches.cache_parameter(torch.nn.Linear.forward) is None
