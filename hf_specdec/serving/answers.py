"""Answers of the server: cut at stop strings, with log-probabilities, and several answers to a request joined."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from ..host.generation import GenerationOutput

# The smallest log-probability in an answer, because JSON has no -inf.
LEAST_LOGPROB = -9999.0


def cut(text: str, stops: Sequence[str]) -> str | None:
    """`text` up to its first stop string; None if it has none."""
    places = [place for place in (text.find(one) for one in stops) if place >= 0]
    return text[: min(places)] if places else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Number of characters at the end of `text` that may be the beginning of a stop string."""
    longest = min(max(map(len, stops), default=1) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if any(one.startswith(text[-size:]) for one in stops)), 0)


class StopStringQueue:
    """The queue of a streamed answer. Its handler gets text only up to where a stop string may begin. A stop string
    ends the answer and is no part of it.

    `source` gets strings, other objects, and None at the end. It lacks the end of an answer whose last token ends
    inside a character; `whole` returns the text of all tokens so far. `on_stop` is called when a stop string ends the
    answer.
    """

    def __init__(
        self, source: asyncio.Queue, stops: Sequence[str], whole: Callable[[], str], on_stop: Callable[[], object]
    ):
        self._source, self._stops, self._whole, self._on_stop = source, stops, whole, on_stop
        self._num_taken, self._text, self._ready, self._has_stopped = 0, "", deque(), False

    async def get(self) -> Any:
        while not self._ready:
            self._take(await self._source.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        """As `asyncio.Queue.get_nowait`; raises its `QueueEmpty`."""
        while not self._ready:
            self._take(self._source.get_nowait())
        return self._ready.popleft()

    def _take(self, item: Any) -> None:
        if hasattr(item, "msg"):
            item.msg = json.dumps(item.msg)[1:-1]  # the handler adds the quotes
        if item is None:
            self._add(self._whole()[self._num_taken :])
        if type(item) is str:
            self._num_taken += len(item)
            self._add(item)
        else:
            self._emit(self._text)
            self._text = ""
            self._ready.append(item)

    def _add(self, text: str) -> None:
        if self._has_stopped:
            return
        if not self._stops:
            self._emit(text)
            return
        self._text += text
        answer = cut(self._text, self._stops)
        if answer is not None:
            self._has_stopped, self._text = True, ""
            self._on_stop()
            self._emit(answer)
            return
        size = len(self._text) - held_back(self._text, self._stops)
        self._emit(self._text[:size])
        self._text = self._text[size:]

    def _emit(self, text: str) -> None:
        if text:
            self._ready.append(text)


def without_stops(answer: dict[str, Any], stops: Sequence[str]) -> dict[str, Any]:
    """An answer that is not streamed, with the texts of its choices cut at their first stop strings."""
    for choice in answer.get("choices", ()) if stops else ():
        place, key = (choice["message"], "content") if "message" in choice else (choice, "text")
        text = cut(place.get(key) or "", stops)
        if text is not None:
            place[key], choice["finish_reason"] = text, "stop"
    return answer


class _ScoredToken(NamedTuple):
    """A token of an answer: its name, its log-probability, and the text that it adds at character `start`."""

    name: str
    logprob: float
    text: str
    start: int

    def entry(self) -> dict[str, Any]:
        """The token in the form of chats; special tokens have no bytes."""
        octets = list(self.text.encode()) if self.name == self.text else None
        return {"token": self.name, "logprob": self.logprob, "bytes": octets, "top_logprobs": []}


class AnswerLogprobs:
    """Log-probabilities of an answer's tokens, in the form of OpenAI's chats and completions.

    The text of a token is what it adds to the answer: the texts of all tokens, up to a stop string, are the answer. A
    token that ends inside a character adds nothing; the token that completes the character adds it. Special tokens,
    such as the end-of-sequence token, have their name and no bytes. `tokenizer` must be set before results are read.
    """

    tokenizer: PreTrainedTokenizerFast

    def __init__(self, stops: Sequence[str]):
        self._stops, self._decoding = stops, DecodeStream([], skip_special_tokens=True)
        self._tokens: list[_ScoredToken] = []
        self._num_told, self._told, self._length = 0, 0, 0

    def read(self, result: GenerationOutput) -> None:
        """Read the new tokens of a result of the request, which has all tokens so far."""
        new = slice(len(self._tokens), None)
        for token, logprob in zip(result.generated_tokens[new], result.logprobs[new], strict=True):
            text = name = self._decoding.step(self.tokenizer.backend_tokenizer, token) or ""
            if not text and not self.tokenizer.decode([token], skip_special_tokens=True):
                name = self.tokenizer.decode([token])
            self._tokens.append(_ScoredToken(name, max(logprob, LEAST_LOGPROB), text, self._length))
            self._length += len(text)

    def added_to(self, answer: dict[str, Any]) -> dict[str, Any]:
        """An answer, or a part of a streamed answer, where each choice has the log-probabilities of its text. The last
        part of a streamed answer has all that are left, also of special tokens."""
        for choice in answer.get("choices", ()):
            message = choice.get("message", choice.get("delta"))
            text = choice.get("text") if message is None else message.get("content")
            self._told += len(text or "")
            tokens = self._next(is_last=choice.get("finish_reason") is not None)
            if message is None:
                choice["logprobs"] = {
                    "tokens": [one.name for one in tokens],
                    "token_logprobs": [one.logprob for one in tokens],
                    "text_offset": [one.start for one in tokens],
                }
            elif tokens:
                choice["logprobs"] = {"content": [one.entry() for one in tokens]}
        return answer

    def _next(self, is_last: bool) -> list[_ScoredToken]:
        """The next tokens that begin in the text sent so far, or with `is_last` all other tokens of the answer."""
        if is_last:
            answer = cut("".join(one.text for one in self._tokens), self._stops)
            end = self._length + 1 if answer is None else len(answer)
        else:
            end = self._told
        first = self._num_told
        while self._num_told < len(self._tokens) and self._tokens[self._num_told].start < end:
            self._num_told += 1
        return self._tokens[first : self._num_told]

    async def added_to_events(self, stream: AsyncIterator[str]) -> AsyncIterator[str]:
        """The events of a streamed answer, changed by `added_to`."""
        try:
            async for part in stream:
                for chunk in _chunks(part):
                    yield _event(self.added_to(chunk))
        finally:
            await stream.aclose()


def _chunks(part: str) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix("data: ")) for event in part.split("\n\n") if event]


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def join(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer with the choices of all `answers` to one prompt."""
    joined = dict(answers[0])
    joined["choices"] = [choice | {"index": number} for number, one in enumerate(answers) for choice in one["choices"]]
    joined["usage"] = _sum([one.get("usage") for one in answers])
    return joined


def _sum(usages: Sequence[dict[str, Any] | None]) -> dict[str, int]:
    prompt = max(one["prompt_tokens"] for one in usages if one)
    new = sum(one["completion_tokens"] for one in usages if one)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


async def join_streams(streams: Sequence[AsyncIterator[str]]) -> AsyncIterator[str]:
    """The events of several streamed answers to one prompt, as they come. The last usage is that of all answers."""
    events: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()

    async def read(number: int, stream: AsyncIterator[str]) -> None:
        try:
            async for part in stream:
                events.put_nowait((number, part))
        finally:
            events.put_nowait((number, None))

    tasks = [asyncio.ensure_future(read(number, stream)) for number, stream in enumerate(streams)]
    left, usages = len(tasks), []
    try:
        while left:
            number, part = await events.get()
            if part is None:
                left -= 1
                continue
            for chunk in _chunks(part):
                for choice in chunk.get("choices", ()):
                    choice["index"] = number
                if chunk.get("usage"):
                    usages.append(chunk.pop("usage"))
                    if len(usages) == len(tasks):
                        chunk["usage"] = _sum(usages)
                yield _event(chunk)
    finally:
        for one in tasks:
            one.cancel()
