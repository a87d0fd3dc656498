"""A tokenizer for the tiny targets."""

from targets import VOCAB
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


def word_tokenizer():
    """A tokenizer of as many words as the targets have; words follow each other without spaces."""
    letters = "abcdefghijklmnop"
    words = [letters[token % 16] + letters[token // 16] * (token // 16 * (1 + token % 3)) for token in range(VOCAB)]
    assert len(set(words)) == VOCAB
    tokenizer = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
