"""Cache layers of compressed attention (DeepSeek-V4): keys of windows of tokens besides those of single tokens.

A compressor makes an entry for every window of `rate` tokens, from the projections of its tokens and, if windows
overlap, of those of the window before. Attention sees an entry from the window's last token on. A layer keeps
projections in a ring, slot == position mod its size, and entries in slots of their own, slot == number of the window.
The tokens that replace rejected drafts make their entries again before a query sees them: nothing is rolled back.
"""

from __future__ import annotations

import torch

from ..host.caches import Cache
from .key_layers import RaggedLayer
from .layer_kinds import LayerKind


class CompressedWindows:
    """The memory of a layer of `cache` for one compressor, allocated at the first pass.

    Args:
        rate: tokens of a window.
        overlaps: whether an entry is made from two windows, its own and the one before.

    Attributes:
        ring: `[B, R, 2 * C]`, projections of the last tokens: values, then gates.
        entries: `[B, E + 1, D]`, the entry of each window; the last slot is a dummy slot.
    """

    def __init__(self, cache: Cache, rate: int, overlaps: bool):
        self._cache, self.rate, self.overlaps = cache, rate, overlaps
        self.ring: torch.Tensor | None = None
        self.entries: torch.Tensor | None = None

    def add(self, values: torch.Tensor, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Store the projections of the tokens of a pass, `[B, n, C]` each, at the cache's `positions`.

        Returns:
            values and gates of the windows that the tokens may complete, `[B, W, rate, C]` each, and the numbers of
            these windows, `[B, W]` int64. If windows overlap, values and gates are `[B, W + 1, rate, C]`, with the
            window before; gates are -inf before the text.
        """
        tokens = torch.cat([values, gates], dim=-1)
        if self.ring is None:
            slots = self._cache.ring_slots(self.rate * (1 + self.overlaps))
            self.ring = tokens.new_zeros(len(tokens), slots, tokens.shape[-1])
        block = self._cache.block
        count = (tokens.shape[1] - 1) // self.rate + 1
        numbers = block.begin // self.rate + torch.arange(count, device=tokens.device)
        before = self.rate if self.overlaps else 0
        steps = torch.arange(-before, count * self.rate, device=tokens.device)
        positions = numbers[:, :1] * self.rate + steps
        windows = block.at(positions, self.ring, tokens).view(len(tokens), -1, self.rate, tokens.shape[-1])
        values, gates = windows.chunk(2, dim=-1)
        if self.overlaps:
            is_before = (positions < 0).view(len(tokens), -1, self.rate, 1)
            gates = gates.masked_fill(is_before, float("-inf"))
        block.keep(self.ring, tokens)
        return values, gates, numbers

    def store(self, entries: torch.Tensor, numbers: torch.Tensor) -> None:
        """Store `entries` `[B, W, D]` of those windows among `numbers` `[B, W]` int64 that are complete."""
        if self.entries is None:
            slots = self._cache.slots // self.rate + 1
            self.entries = entries.new_zeros(len(entries), slots, entries.shape[-1])
        is_complete = (numbers + 1) * self.rate <= self._cache.block.last + 1
        rows = torch.arange(len(entries), device=entries.device)[:, None]
        self.entries[rows, torch.where(is_complete, numbers, self.entries.shape[1] - 1)] = entries

    def shown(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries of the cache's `span`, `[B, S, D]`, and whether a query may see them, `[B, n, S]` bool."""
        count = self._cache.span // self.rate
        known = (self._cache.positions + 1) // self.rate
        is_seen = torch.arange(count, device=known.device) < known[..., None]
        return self.entries[:, :count], is_seen

    def copy_rows(self, rows: torch.Tensor, source: CompressedWindows, taken: slice | torch.Tensor, slots: int) -> None:
        count = slots // self.rate
        self.ring[rows] = source.ring[taken]
        self.entries[rows, :count] = source.entries[taken, :count]


class CompressedLayer(RaggedLayer):
    """A layer that also keeps keys of windows of tokens."""

    def __init__(self, cache: Cache, kind: LayerKind):
        super().__init__(cache, kind)
        self._windows: dict[str, CompressedWindows] = {}

    def windows(self, name: str, rate: int, overlaps: bool) -> CompressedWindows:
        """The memory of the compressor called `name`; other arguments as in `CompressedWindows`."""
        if name not in self._windows:
            self._windows[name] = CompressedWindows(self._cache, rate, overlaps)
        return self._windows[name]

    def copy_rows(self, rows: torch.Tensor, source: CompressedLayer, taken: slice | torch.Tensor, slots: int) -> None:
        super().copy_rows(rows, source, taken, slots)
        for name, windows in source._windows.items():
            self._windows[name].copy_rows(rows, windows, taken, slots)
