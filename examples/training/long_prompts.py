"""Long prompts made of texts that the target wrote: documents with an instruction, and chats of several turns."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from .prompts import entries

ABOUT_TEXTS = """
Summarize the following text:|Summarize this article in three sentences.|Write a short summary of the text below.
What are the main points of this text?|Give me the key facts as bullet points.|Summarize the news article.
What is this article about?|Explain the text in simple words.|Write a headline for this article.|TL;DR
List the people and places in this text.|List all numbers and dates in the text.|Which problems does it describe?
What does the author recommend?|Who is this text for?|Rewrite the last paragraph in a friendly tone.
Rewrite the first paragraph in your own words.|Continue this text.|Write a conclusion for this text.
What happened, in order?|Write three questions that this text answers, with the answers.|Quote the most important part.
Make a table of contents for the text.|Which claims need a source?|Give an example for the main idea of the text.
Write an email to a colleague that sums up the text.|Shorten the text to one paragraph.|Find mistakes in the text.
Extract the most important terms and define them.|What is missing in this text?|Translate the last sentence to French.
Summarize the passage below in one sentence.|Read the article and write highlights.|What is the tone of this text?
"""
ABOUT_CODE = """
Explain what this code does.|Explain the code step by step.|Add comments to the code.|Find bugs in the code.
Write unit tests for the code.|Write a docstring for each function.|Rewrite the last function.
Repeat the first function.|What are the inputs and outputs?
How can this code be made faster?|Convert this code to JavaScript.|Refactor the code.
Which functions are defined here?|Write a README for this code.|Add error handling to the first function.
"""
FOLLOW_UPS = """
Can you explain that in more detail?|Continue.|Please make it shorter.|Why?|Give me an example.
Summarize our conversation.|Rewrite your last answer as a list.
Can you say that in simpler words?|What else should I know?|Is that always true?
Now write it as an email.|Go on.|Thanks! What did I ask first?|Can you give more examples?|How does that compare?
"""
QUESTIONS = ("Use the text to answer: {}", "Question about the text above: {}", "Based on this text: {}", "{}")
SEPARATORS = ("\n\n", "\n\n---\n\n", "\n\n")
_ABOUT_TEXTS, _ABOUT_CODE, _FOLLOW_UPS = map(entries, (ABOUT_TEXTS, ABOUT_CODE, FOLLOW_UPS))
CHAT_SHARE, CODE_SHARE, QUESTION_SHARE, INSTRUCTION_FIRST, FOLLOW_UP_SHARE = 0.25, 0.15, 0.25, 0.5, 0.4


class Passage(NamedTuple):
    """A text that the target wrote, without special tokens, the ids of most of it, and the prompt that it answers,
    None for an article."""

    text: str
    tokens: list[int]
    prompt: str | None


class LongPrompts:
    """Makes prompts of about a given length of `passages`, at least one of them not empty. `decode` gives the text of
    ids, without special tokens."""

    def __init__(self, passages: list[Passage], decode: Callable[[list[int]], str], rng: random.Random):
        passages = [passage for passage in passages if passage.text and passage.tokens]
        self._decode, self._rng = decode, rng
        self._answers = [passage for passage in passages if passage.prompt is not None]
        code = [passage for passage in self._answers if "```" in passage.text or "\ndef " in passage.text]
        articles = [passage for passage in passages if passage.prompt is None]
        self._code = code or passages
        self._articles = articles or passages
        self._prose = passages

    def turns(self, length: int) -> list[str]:
        """The turns of a chat of about `length` tokens, the user's and the assistant's by turns, the user's last."""
        kind = self._rng.random()
        if kind < CHAT_SHARE and self._answers:
            return self._chat(length)
        if kind < CHAT_SHARE + CODE_SHARE:
            return [self._about(self._code, length, _ABOUT_CODE)]
        source = self._rng.choice((self._articles, self._prose))
        return [self._about(source, length, _ABOUT_TEXTS)]

    def _chat(self, length: int) -> list[str]:
        turns = []
        while length > 0:
            passage = self._rng.choice(self._answers)
            turns += [passage.prompt, self._beginning(passage, length)]
            length -= len(passage.tokens)
        is_follow_up = self._rng.random() < FOLLOW_UP_SHARE
        last = self._rng.choice(_FOLLOW_UPS) if is_follow_up else self._rng.choice(self._answers).prompt
        return [*turns, last]

    def _about(self, passages: list[Passage], length: int, instructions: list[str]) -> str:
        """A document of some of `passages`, with an instruction before or after it."""
        rng, parts, prompts = self._rng, [], []
        while length > 0:
            passage = rng.choice(passages)
            parts.append(self._beginning(passage, length))
            prompts += [passage.prompt] if passage.prompt else []
            length -= len(passage.tokens)
        instruction = rng.choice(instructions)
        if prompts and rng.random() < QUESTION_SHARE:
            instruction = rng.choice(QUESTIONS).format(rng.choice(prompts))
        document = rng.choice(SEPARATORS).join(parts)
        parts = (instruction, document) if rng.random() < INSTRUCTION_FIRST else (document, instruction)
        return "\n\n".join(parts)

    def _beginning(self, passage: Passage, length: int) -> str:
        """The text of `passage`, or about its first `length` tokens."""
        return passage.text if len(passage.tokens) <= length else self._decode(passage.tokens[:length])
