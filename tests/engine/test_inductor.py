"""Options of torch's compiler."""

import pytest
import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx

from hf_specdec.graphs.inductor import PlainLaunchOfCreation

FUNCTIONS = {
    "pointwise": (lambda x: torch.relu(x) * 2 + x[:1], True),
    "reduction": (lambda x: x.softmax(-1).sum(), True),
    "zeros": (lambda x: (x + 1, torch.zeros(3, 4, device=x.device)), False),
    "arange": (lambda x: (x, torch.arange(7, device=x.device)), False),
    "new_full": (lambda x: x.new_full((4, 2), 3.0), False),
    "ones_like": (lambda x: (x, torch.ones_like(x)), False),
    "index": (lambda x: x[torch.arange(2, device=x.device)], False),
    "positions": (lambda x: x + torch.arange(4, device=x.device)[:, None] * 2, True),
    "masked": (lambda x: x.masked_fill(x > 0, float("-inf")), True),
    "in place": (lambda x: x.copy_(torch.arange(4, device=x.device)), False),
    "of several results": (lambda x: x.max(-1).values + 1, True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_that_store_what_they_create_are_launched_as_usual(name):
    function, is_early = FUNCTIONS[name]
    graph = make_fx(function, tracing_mode="fake")(torch.randn(4, 4)).graph
    with config.patch({"triton.enable_pdl": True}):
        PlainLaunchOfCreation()(graph)
        assert config.triton.enable_pdl == is_early
    assert not config.triton.enable_pdl


@pytest.mark.slow  # a compiler of C++ runs
def test_the_compiler_runs_it():
    class Recorded(PlainLaunchOfCreation):
        graphs = 0

        def __call__(self, graph):
            super().__call__(graph)
            type(self).graphs += 1
            assert not config.triton.enable_pdl

    def function(x):
        return x + 1, torch.arange(4, device=x.device)

    patches = {"triton.enable_pdl": True, "post_grad_custom_post_pass": Recorded(), "force_disable_caches": True}
    compiled = torch.compile(function, backend=lambda *args: compile_fx(*args, config_patches=patches))
    assert torch.equal(compiled(torch.ones(4))[1], torch.arange(4))
    assert Recorded.graphs == 1 and not config.triton.enable_pdl
