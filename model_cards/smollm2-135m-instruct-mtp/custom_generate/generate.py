"""Speculative decoding for anyone: `model.generate(..., custom_generate="<this repository>", trust_remote_code=True)`.

Needs `pip install hf-specdec`.
"""

from weakref import WeakKeyDictionary

from hf_specdec import AutoDrafter
from hf_specdec.drafters import Drafter

DEFAULT_DRAFTER = "smollm2-135m-instruct-mtp"

_drafters = WeakKeyDictionary()


def generate(model, *args, drafter=DEFAULT_DRAFTER, assistant_model=None, **kwargs):
    """`model.generate()` with a drafter as its assistant.

    Args:
        model: the target.
        drafter: Hub repository or folder of a drafter, or a `Drafter` bound to `model`. A loaded drafter is kept for
            the next call and freed with the model.
        kwargs: of `generate()`, `num_assistant_tokens` among them.
    """
    if assistant_model is not None:
        raise ValueError(
            "This custom_generate brings its own assistant; pass `drafter=` instead of `assistant_model=`."
        )
    if not isinstance(drafter, Drafter):
        loaded = _drafters.setdefault(model, {})
        if drafter not in loaded:
            loaded[drafter] = AutoDrafter.from_pretrained(drafter, target=model)
        drafter = loaded[drafter]
    return model.generate(*args, assistant_model=drafter, **kwargs)
