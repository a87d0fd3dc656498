"""On a GPU: programmatic dependent launch keeps the order that `kernels.launch` promises."""

import pytest
import torch
import triton
import triton.language as tl

from hf_specdec.kernels.launch import kernel, wait_for_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_SPINS = 20000


@kernel
def _slow_copy(source_ptr, out_ptr, num_spins):
    """Copy a number, a long time after the next kernel was allowed to start."""
    wait_for_inputs()
    value = tl.load(source_ptr)
    # A linear congruential generator, which no compiler computes ahead; it is 0 again after a period of 2^64.
    spun = value * 0
    for _ in range(num_spins):
        spun = spun * 6364136223846793005 + 1442695040888963407
    tl.store(out_ptr, tl.where(spun == 0, -1, value))


@kernel
def _copy(source_ptr, out_ptr):
    wait_for_inputs()
    tl.store(out_ptr, tl.load(source_ptr))


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("between", ["nothing", "waiting", "of torch"])
def test_a_kernel_sees_what_earlier_ones_wrote(between, is_captured):
    device = torch.device("cuda")
    source, middle, out, other = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4))

    def chain():
        _slow_copy[(1,)](source, middle, NUM_SPINS)
        if between == "waiting":
            _copy[(1,)](source, other)
        elif between == "of torch":
            other.add_(1)
        _copy[(1,)](middle, out)

    chain()
    torch.cuda.synchronize()
    run = chain
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        run = graph.replay
    for value in range(1, 30):
        source.fill_(value)
        run()
        assert out.item() == value


def test_the_chain_is_slow_enough_to_notice():
    device = torch.device("cuda")
    source, middle = torch.zeros(2, 1, dtype=torch.int64, device=device)
    seconds = triton.testing.do_bench(lambda: _slow_copy[(1,)](source, middle, NUM_SPINS))
    assert seconds > 0.05  # ms: several launches
