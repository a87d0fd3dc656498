"""Whole prompts composed of templates and words. They are specific, as users' prompts are; a small target's are vague.

In `composed_prompts.json`, `{name}` stands for one of the words of that name, which may contain such places, too, and
`{2-90}` for a number.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from .prompts import PEOPLE, TOPICS, entries

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_TEMPLATES: dict[str, list[str]] = _DATA["templates"]
_WORDS: dict[str, list[str]] = {**_DATA["words"], "topic": entries(TOPICS), "person": entries(PEOPLE)}
_PLACE = re.compile(r"\{(\w+)\}|\{(\d+)-(\d+)\}")


def composed_prompt(rng: random.Random) -> str:
    """A prompt of one of the kinds, which are equally frequent."""
    text = _filled(rng.choice(_TEMPLATES[rng.choice(list(_TEMPLATES))]), rng)
    return text[:1].upper() + text[1:]


def _filled(template: str, rng: random.Random) -> str:
    def word(place: re.Match) -> str:
        name, least, most = place.groups()
        return str(rng.randint(int(least), int(most))) if name is None else _filled(rng.choice(_WORDS[name]), rng)

    return _PLACE.sub(word, template)
