"""Answers of the server: without the stop strings that ended them, and several of one request together."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any


def cut(text: str, stops: Sequence[str]) -> str | None:
    """`text` up to the first of `stops` in it; None if it has none."""
    places = [place for place in (text.find(one) for one in stops) if place >= 0]
    return text[: min(places)] if places else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `stops`."""
    longest = min(max(map(len, stops), default=1) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if any(one.startswith(text[-size:]) for one in stops)), 0)


class StopStringQueue:
    """The queue of a streamed answer, of which its handler reads text as far as no stop string begins in it.

    Args:
        source: the queue that is filled: strings, others objects, and None at the end.
        stops: strings that end the answer, which are no part of it.
    """

    def __init__(self, source: asyncio.Queue, stops: Sequence[str]):
        self._source, self._stops = source, stops
        self._text, self._ready, self._has_stopped = "", deque(), False

    async def get(self) -> Any:
        while not self._ready:
            self._take(await self._source.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        """As of `asyncio.Queue`.

        Raises:
            asyncio.QueueEmpty: nothing is there.
        """
        while not self._ready:
            self._take(self._source.get_nowait())
        return self._ready.popleft()

    def _take(self, item: Any) -> None:
        if hasattr(item, "msg"):
            item.msg = json.dumps(item.msg)[1:-1]  # the handler puts it between quotes
        if type(item) is not str:
            self._emit("" if self._has_stopped else self._text)
            self._text = ""
            self._ready.append(item)
            return
        if self._has_stopped:
            return
        self._text += item
        answer = cut(self._text, self._stops)
        if answer is not None:
            self._has_stopped, self._text = True, ""
            self._emit(answer)
            return
        size = len(self._text) - held_back(self._text, self._stops)
        self._emit(self._text[:size])
        self._text = self._text[size:]

    def _emit(self, text: str) -> None:
        if text:
            self._ready.append(text)


def without_stops(answer: dict[str, Any], stops: Sequence[str]) -> dict[str, Any]:
    """An answer that is not streamed, in which `stops` end the texts of its choices and are no part of them."""
    for choice in answer.get("choices", ()) if stops else ():
        place, key = (choice["message"], "content") if "message" in choice else (choice, "text")
        text = cut(place.get(key) or "", stops)
        if text is not None:
            place[key], choice["finish_reason"] = text, "stop"
    return answer


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
    """The events of several streamed answers to one prompt, as they come; the usage of all is in the last one."""
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
            for event in filter(None, part.split("\n\n")):
                chunk = json.loads(event.removeprefix("data: "))
                for choice in chunk.get("choices", ()):
                    choice["index"] = number
                if chunk.get("usage"):
                    usages.append(chunk.pop("usage"))
                    if len(usages) == len(tasks):
                        chunk["usage"] = _sum(usages)
                yield f"data: {json.dumps(chunk)}\n\n"
    finally:
        for one in tasks:
            one.cancel()
