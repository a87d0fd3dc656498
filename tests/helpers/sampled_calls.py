"""Calls of `generate()` that sample with a drafter."""

from oracle import RANDOM_DRAFTERS

# By name: whether drafts are drawn from the drafter's distribution, and `verification`.
MODES = {"point mass": (False, "token"), "soft": (True, "token"), "block": (True, "block")}


NEW = 10


def drafter_of(target, kind, mode, engine="auto"):
    draft_probs, verification = MODES[mode]
    drafter = RANDOM_DRAFTERS[kind](target)
    return drafter.configure(3, draft_probs=draft_probs, verification=verification, engine=engine)


def sample(target, inputs, drafter, **options):
    """`[B, NEW]`: sampled continuations."""
    options = {"do_sample": True, "top_k": 40, "max_new_tokens": NEW, **options}
    return target.generate(**inputs, assistant_model=drafter, **options)[:, inputs["input_ids"].shape[1] :]
