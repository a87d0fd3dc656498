"""Options of `generate()` calls, by name."""

from targets import PAD

MODES = {
    "greedy": {"do_sample": False},
    "end of sequence": {"do_sample": False, "eos_token_id": [7, 11, 13], "pad_token_id": PAD},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "ngrams": {"do_sample": False, "no_repeat_ngram_size": 2},
    "cold sampling": {"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    "hot sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
}
