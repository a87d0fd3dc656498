"""What every token of a streamed answer passes on its way to the client, made cheap: events and middleware."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from json.encoder import encode_basestring
from types import SimpleNamespace
from typing import Any

from ..host.serving import REQUEST_ID_MIDDLEWARE

# Keywords of transformers' builders of events: the texts of an answer.
TEXTS = ("content", "reasoning_content", "text")
# Events that are kept without their text. A stream has a new one every second, because events have a time.
MOST_KEPT = 1024
# Stands for a text. No id of a request and no name of a model holds it.
_ANY_TEXT = "\0"


def event_builder(build: Callable[..., str]) -> Callable[..., str]:
    """`build`, a handler's method that makes an event of keywords, in a hundredth of its time for events with a text.

    The events are the same to the byte: one is made in each second of a stream, and others differ in their text only.
    """

    @functools.lru_cache(MOST_KEPT)
    def around(second: int, name: str, *args: Any, **others: Any) -> list[str]:
        """An event before and after its text."""
        return build(*args, **others, **{name: _ANY_TEXT}).split(encode_basestring(_ANY_TEXT))

    def event(*args: Any, **kwargs: Any) -> str:
        name = next((one for one in TEXTS if one in kwargs), None)
        if name is None or not kwargs.keys() <= {"model", name}:
            return build(*args, **kwargs)
        text = kwargs.pop(name)
        before, after = around(int(time.time()), name, *args, **kwargs)
        return f"{before}{encode_basestring(text)}{after}"

    return event


class HeaderMiddleware:
    """A function of Starlette's `BaseHTTPMiddleware` that only adds headers, without the task and the queue through
    which that class passes each part of a response."""

    def __init__(self, app: Callable, dispatch: Callable):
        self._app, self._dispatch = app, dispatch

    async def __call__(self, scope: dict[str, Any], receive: Callable, send: Callable) -> None:
        from starlette.datastructures import MutableHeaders
        from starlette.requests import Request

        async def call_next(request: Any) -> Any:
            return SimpleNamespace(headers=MutableHeaders())

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message["headers"], *added.headers.raw]}
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        added = await self._dispatch(Request(scope), call_next)
        await self._app(scope, receive, send_with_headers)


def without_queues(middleware: list[Any]) -> list[Any]:
    """The `middleware` of an application, where transformers' own is a `HeaderMiddleware`."""
    from starlette.middleware import Middleware

    return [
        Middleware(HeaderMiddleware, **one.kwargs)
        if getattr(one.kwargs.get("dispatch"), "__name__", None) == REQUEST_ID_MIDDLEWARE
        else one
        for one in middleware
    ]
