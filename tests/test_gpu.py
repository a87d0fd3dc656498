"""On a GPU, in bfloat16: outputs are those of plain `generate()` up to ties within rounding."""

import pytest
import torch
from test_smollm2 import DRAFTERS, chat_batches

from hf_specdec import AutoDrafter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.smollm2,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_bfloat16_outputs_differ_only_at_ties(batch_size):
    from smollm2 import load_smollm2

    model, tokenizer = load_smollm2(dtype=torch.bfloat16, device="cuda")
    judge, _ = load_smollm2(dtype=torch.float32, device="cuda")
    drafter = AutoDrafter.from_pretrained(DRAFTERS[0], target=model, num_assistant_tokens=5)
    identical = total = 0
    for inputs in chat_batches(tokenizer, num_prompts=40, batch_size=batch_size):
        inputs = inputs.to("cuda")
        plain = model.generate(**inputs, do_sample=False, max_new_tokens=128)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=128, assistant_model=drafter)
        width = min(plain.shape[1], out.shape[1])
        for row in range(len(out)):
            differences = (plain[row, :width] != out[row, :width]).nonzero()
            total += 1
            identical += len(differences) == 0
            if len(differences):
                at = int(differences[0])
                prefix = plain[row, :at][int((inputs["attention_mask"][row] == 0).sum()) :]
                with torch.no_grad():
                    logits = judge(prefix[None]).logits[0, -1]
                gap = (logits[plain[row, at]] - logits[out[row, at]]).abs()
                # A bfloat16 has 8 significant bits; logits come out of a product of many such roundings.
                assert gap <= 4 * 2.0**-8 * logits.abs().max(), (row, at, float(gap))
    print(f"batch {batch_size}: {identical} of {total} outputs identical")
