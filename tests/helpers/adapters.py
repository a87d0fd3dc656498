"""Targets with LoRA adapters."""

import warnings

import pytest
import torch


def with_adapters(target, names=("a", "b")):
    """The `PeftModel` around `target`, with random LoRA adapters, the first of them active."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' of what peft asks it
        adapted = peft.get_peft_model(target, config, adapter_name=names[0])
        for name in names[1:]:
            adapted.add_adapter(name, config)
    adapted.set_adapter(names[0])
    return adapted.eval()
