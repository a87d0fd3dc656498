"""Files of checkpoints, by folder or Hub repository."""

from __future__ import annotations

from .parts import part

cached_file = part("transformers.utils.hub", "cached_file", why="downloads the files of a checkpoint")
extract_commit_hash = part("transformers.utils.hub", "extract_commit_hash", why="revision of a downloaded checkpoint")
