"""What a call of `generate()` must leave as it was; hooks that watch one."""

import torch


def unchecked(hook):
    """`hook`, a function, as one of an engine's own: the call is not tried beforehand on account of it."""
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
