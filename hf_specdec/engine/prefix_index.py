"""Which row of a session has a text with a given beginning: an index of texts by hashes of their leading blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Tokens of a block. Beginnings that are shorter are not found: copying one takes about as long as prefilling it.
BLOCK = 32
# Most texts with the same leading blocks that are compared token by token.
MOST_COMPARED = 4
_COMPARED_AT_ONCE = 256


class Match(NamedTuple):
    """A text in the index that begins as another one.

    Attributes:
        name: under which it was added.
        length: how many leading tokens the two have in common.
        size: tokens of the text in the index.
    """

    name: int
    length: int
    size: int


class _Text:
    """A text in the index, and the keys of its leading blocks: each depends on all tokens up to its block's end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.keys: list[int] = []

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Append `tokens`; returns the keys of blocks that are full now and were not."""
        self.tokens += tokens
        before = len(self.keys)
        while (len(self.keys) + 1) * BLOCK <= len(self.tokens):
            first = len(self.keys) * BLOCK
            self.keys.append(_key(self.keys[-1] if self.keys else 0, self.tokens[first : first + BLOCK]))
        return self.keys[before:]


def _key(before: int, block: Sequence[int]) -> int:
    return hash((before, *block))


class PrefixIndex:
    """Texts under the numbers of their rows, to be found by what they begin with.

    Blocks are looked up by their hashes, so that looking up a text of n tokens among any number takes time for n; what
    is found is compared token by token.
    """

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}
        # The names of the texts with a block, in the order in which it was added, by the block's key.
        self._names: dict[int, dict[int, None]] = {}

    def __contains__(self, name: int) -> bool:
        return name in self._texts

    def size(self, name: int) -> int:
        """Tokens of the text `name`."""
        return len(self._texts[name].tokens)

    def add(self, name: int, tokens: Sequence[int]) -> None:
        """Add a text in the place of what had its name."""
        self.discard(name)
        self._texts[name] = _Text()
        self.extend(name, tokens)

    def extend(self, name: int, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text `name`."""
        for key in self._texts[name].extend(tokens):
            self._names.setdefault(key, {})[name] = None

    def discard(self, name: int) -> None:
        """Remove the text `name`, if there is one."""
        text = self._texts.pop(name, None)
        for key in () if text is None else text.keys:
            names = self._names[key]
            names.pop(name, None)
            if not names:
                del self._names[key]

    def clear(self) -> None:
        self._texts.clear()
        self._names.clear()

    def rename(self, names: dict[int, int]) -> None:
        """Give texts other names, by their old ones; those that `names` lacks are removed."""
        kept = [(new, self._texts[old].tokens) for old, new in names.items() if old in self._texts]
        self.clear()
        for name, tokens in kept:
            self.add(name, tokens)

    def longest(self, tokens: Sequence[int]) -> Match | None:
        """The text that has most leading tokens in common with `tokens`, at least a block; None if there is none.

        Of texts that differ in less than a block, the best one of the last `MOST_COMPARED` that were added is taken.
        """
        names: dict[int, None] = {}
        key = 0
        for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = _key(key, tokens[first : first + BLOCK])
            if key not in self._names:
                break
            names = self._names[key]
        best = None
        for name in list(names)[-MOST_COMPARED:]:
            text = self._texts[name].tokens
            length = common_length(tokens, text)
            if length >= BLOCK and (best is None or length > best.length):
                best = Match(name, length, len(text))
        return best


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens `one` and `other` have in common."""
    limit = min(len(one), len(other))
    for first in range(0, limit, _COMPARED_AT_ONCE):
        end = min(first + _COMPARED_AT_ONCE, limit)
        if one[first:end] != other[first:end]:
            return next(at for at in range(first, end) if one[at] != other[at])
    return limit
