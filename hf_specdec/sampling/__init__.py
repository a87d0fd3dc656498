"""Random numbers of a call, and logits processors over blocks of draft tokens."""

from .logits import DraftVocabularyLogitsProcessor, MaskTokenLogitsProcessor, RowTemperature

__all__ = ["DraftVocabularyLogitsProcessor", "MaskTokenLogitsProcessor", "RowTemperature"]
