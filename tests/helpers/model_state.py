"""State that a call of `generate()` must leave unchanged, and hooks that watch a call."""

import torch


def unchecked(hook):
    """Mark `hook`, a function, as an engine's own, so that the call is not tried beforehand because of it."""
    hook.__module__ = "hf_specdec.tests"
    return hook


def traces(model):
    """Everything about a model that a generation may touch."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return {
        "hooks": [
            (list(module._forward_hooks.values()), list(module._forward_pre_hooks.values()))
            for module in model.modules()
        ],
        "attention": [config._attn_implementation for config in configs],
        "config": [config.to_dict() for config in configs],
        "generation_config": model.generation_config.to_dict() if model.can_generate() else None,
        "training": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "weights": [parameter.data_ptr() for parameter in model.parameters()],
        "function_modes": torch._C._len_torch_function_stack(),
        "grad": torch.is_grad_enabled(),
    }
