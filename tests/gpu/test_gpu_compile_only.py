"""The kernels of a first call are compiled ahead, in parallel, and nothing is launched meanwhile."""

import gc
import threading
import traceback

import pytest
import torch
import triton
from oracle import RANDOM_DRAFTERS
from targets import on_gpu

from hf_specdec import NoDrafter
from hf_specdec.kernels.launch import Kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def compilations(monkeypatch, tmp_path) -> list[tuple[str, str]]:
    """Kernel and place of what is compiled, empty in other threads; the caches of earlier tests are not used."""
    found: list[tuple[str, str]] = []

    def note(*, src, cache_hit, **_):
        is_parallel = threading.current_thread() is not threading.main_thread()
        frames = [] if is_parallel else [one for one in traceback.extract_stack() if "hf_specdec" in one.filename]
        found.append((src.fn.__name__, " < ".join(one.name for one in reversed(frames))))

    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    for one in gc.get_objects():
        if type(one) is Kernel:
            one.device_caches.clear()
    return found


@pytest.mark.parametrize("family", [None, "eagle3", "p-eagle", "mtp"])
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_p": 0.9}], ids=["greedy", "top_p"])
def test_a_first_call_compiles_in_parallel(compilations, family, options):
    target = on_gpu("llama").to(torch.bfloat16)
    drafter = NoDrafter(target) if family is None else RANDOM_DRAFTERS[family](target)
    drafter.configure(engine="static")
    ids = torch.randint(5, target.config.vocab_size, (2, 20), device="cuda")
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 24, **options}
    torch.manual_seed(0)
    out = target.generate(**call, assistant_model=drafter)
    assert drafter.stats.execution.startswith("captured")
    assert len(compilations) > 5
    assert [(name, place) for name, place in compilations if place] == []
    count = len(compilations)
    torch.manual_seed(0)
    assert torch.equal(target.generate(**call, assistant_model=drafter), out)
    assert len(compilations) == count
