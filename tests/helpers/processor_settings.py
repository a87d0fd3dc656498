"""Settings of logits processors, for texts of the tiny targets."""

from transformers.generation import WatermarkingConfig

# A value of each setting that changes texts.
SETTINGS = {
    "bad_words_ids": [[9], [41, 12], [43, 43], [76]],
    "begin_suppress_tokens": list(range(0, 96, 2)),
    "encoder_no_repeat_ngram_size": 1,
    "encoder_repetition_penalty": 3.0,
    "epsilon_cutoff": 0.2,
    "eta_cutoff": 0.3,
    "exponential_decay_length_penalty": (3, 2.5),
    "forced_bos_token_id": 60,
    "forced_eos_token_id": 7,
    "min_length": 12,
    "min_new_tokens": 9,
    "min_p": 0.4,
    "no_repeat_ngram_size": 1,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "repetition_penalty": 1.8,
    "sequence_bias": [[[9], 4.0], [[43, 52], 5.0], [[12], -6.0]],
    "suppress_tokens": list(range(1, 96, 3)),
    "top_h": 0.3,
    "typical_p": 0.3,
    "watermarking_config": WatermarkingConfig(greenlist_ratio=0.4, bias=4.0),
}

# They change sampled texts only.
WARPERS = {"epsilon_cutoff", "eta_cutoff", "min_p", "remove_invalid_values", "renormalize_logits", "top_h", "typical_p"}
