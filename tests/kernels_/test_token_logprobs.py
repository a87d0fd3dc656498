"""Log-probabilities of given tokens: Triton against its reference, and what is no token."""

import pytest
import torch

from hf_specdec.kernels import logprobs_reference
from hf_specdec.kernels.logprobs import token_logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "width", "vocabulary"), [(1, 1, 3), (2, 3, 97), (3, 2, 5000), (2, 1, 9001)])
def test_equals_the_reference(batch, width, vocabulary, dtype):
    """Within NaN, of tokens that are none, of rows with -inf, and of rows without a softmax."""
    generator = torch.Generator().manual_seed(vocabulary)
    wide = torch.full((batch, width + 2, vocabulary + 8), float("nan"), dtype=dtype, device=DEVICE)
    scores = wide[:, 1:-1, :vocabulary]
    scores.copy_(5 * torch.randn(batch, width, vocabulary, generator=generator))
    scores[0, 0, vocabulary // 2 :] = float("-inf")
    tokens = torch.randint(vocabulary, (batch, width + 1), generator=generator).to(DEVICE)[:, 1:]
    found = token_logprobs(scores, tokens)
    expected = logprobs_reference.token_logprobs(scores.double().float(), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    exact = scores.double().log_softmax(-1).gather(-1, tokens[..., None])[..., 0].float()
    torch.testing.assert_close(expected, exact, rtol=1e-5, atol=2e-5)
    for outside in (-1, vocabulary, 2**40):
        assert token_logprobs(scores, torch.full_like(tokens, outside)).isnan().all()
        assert logprobs_reference.token_logprobs(scores, torch.full_like(tokens, outside)).isnan().all()
    scores[0, 0] = float("-inf")
    assert token_logprobs(scores, tokens)[0, 0].isnan()
    assert logprobs_reference.token_logprobs(scores, tokens)[0, 0].isnan()
