"""Bodies of requests to the server: checked, and split into fields that transformers' handlers read and others.

Fields are those of OpenAI's API and, as in vLLM, other sampling settings. Unsupported fields are refused: no field that
changes an answer is ignored.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from transformers import GenerationConfig

from ..errors import first_line
from ..host.serving import CHAT, COMPLETION, RESPONSE
from .answers import AnswerLogprobs

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

# Fields that do not change answers.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "user",
    }
)

# Values of fields that ask for nothing; other values are refused.
_NEUTRAL: dict[str, tuple] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "function_call": (),
    "functions": (),
    "include": ([],),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "prediction": (),
    "previous_response_id": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "text": ({"format": {"type": "text"}},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": (),
    "web_search_options": (),
}

_TINY, _HUGE = math.ulp(0.0), sys.float_info.max

# Types and ranges of numeric fields, and their descriptions in errors.
_NUMBERS: dict[str, tuple[type, float, float, str]] = {
    **dict.fromkeys(_LENGTHS, (int, 1, math.inf, "an int of at least 1")),
    "temperature": (Real, 0, _HUGE, "a number of at least 0"),
    "top_p": (Real, _TINY, 1, "a number above 0 and up to 1"),
    "top_k": (int, -1, math.inf, "an int of at least -1"),
    "min_p": (Real, 0, 1, "a number from 0 to 1"),
    "min_tokens": (int, 0, math.inf, "an int of at least 0"),
    "repetition_penalty": (Real, _TINY, _HUGE, "a number above 0"),
    "presence_penalty": (Real, -2, 2, "a number from -2 to 2"),
    "frequency_penalty": (Real, -2, 2, "a number from -2 to 2"),
    "seed": (int, -(2**63), 2**63 - 1, "an integer of 64 bits"),
    "n": (int, 1, 128, "an int from 1 to 128"),
}

# Fields that are not OpenAI's but keywords of `add_request`, where `min_tokens` is `min_new_tokens`.
_OPTIONS = ("top_k", "min_p", "min_tokens", "repetition_penalty")


class RefusedRequest(Exception):
    """A request that cannot be run; `message` is for its client, `status` is the HTTP status code."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ParsedBody:
    """A checked request: the body for transformers' handler, `options` of `add_request`, OpenAI's penalties, stop
    strings, the number of answers `n`, the log-probabilities of the answer if it has some, and whether the request
    limits the length of answers."""

    body: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stops: tuple[str, ...] = ()
    n: int = 1
    logprobs: AnswerLogprobs | None = None
    has_length: bool = False

    def for_choice(self, number: int) -> ParsedBody:
        """The request for answer `number` of `n`."""
        own = {"body": dict(self.body), "options": self.options | {"sequence": (number, self.n)}}
        return replace(self, n=1, logprobs=None if self.logprobs is None else AnswerLogprobs(self.stops), **own)


def read_body(kind: str, body: Mapping[str, Any]) -> ParsedBody:
    """Check the body of a request of a `kind`. Raises `RefusedRequest` if it is malformed, or asks for what the server
    does not support."""
    given = {name: value for name, value in body.items() if value is not None}
    _check_text(given)
    if kind == CHAT:
        _check_messages(given)
    elif kind == COMPLETION:
        prompt = given.get("prompt")
        _check("prompt", prompt, isinstance(prompt, str) and prompt, "a string, not empty")
    else:
        items = given.get("input")
        is_input = items and (isinstance(items, str) or (isinstance(items, list) and all(map(_is_item, items))))
        _check("input", items, is_input, "a string or a list of items of text, not empty")
        _check("n", given.get("n"), given.get("n", 1) == 1, "no n, which responses do not have")
    for name, values in _NEUTRAL.items():
        if name in given and given.pop(name) not in values:
            raise RefusedRequest(f"{name} is {body[name]!r:.80}, which this server does not have; expected no {name}.")
    for name in _WITHOUT_EFFECT:
        given.pop(name, None)
    has_logprobs = _has_logprobs(kind, given.pop("logprobs", None))
    for name, (kind_of_number, low, high, expected) in _NUMBERS.items():
        value = given.get(name, low)
        _check(name, value, _is(value, kind_of_number) and low <= value <= high, expected)
    for name in ("stream", "ignore_eos"):
        _check(name, given.get(name), isinstance(given.get(name, False), bool), "true or false")
    config = given.get("generation_config", "{}")
    _check("generation_config", config, _is_object(config), "a string with a JSON object of generation settings")
    try:
        GenerationConfig(**json.loads(config))
    except (TypeError, ValueError) as error:
        raise RefusedRequest(f"generation_config is {config!r:.80}; {first_line(error)}") from error
    _check_tools(given)
    stops = given.pop("stop", ())
    stops = (stops,) if isinstance(stops, str) else stops
    are_stops = isinstance(stops, (list, tuple)) and all(isinstance(one, str) and one for one in stops)
    _check("stop", body.get("stop"), are_stops, "a string or a list of strings, none of them empty")
    if stops:
        given["stop"] = list(stops)
    return ParsedBody(
        options=_options(given),
        # Not left to transformers, which takes the frequency penalty for a repetition penalty.
        presence_penalty=float(given.pop("presence_penalty", 0.0)),
        frequency_penalty=float(given.pop("frequency_penalty", 0.0)),
        stops=tuple(stops),
        n=given.pop("n", 1),
        logprobs=AnswerLogprobs(stops) if has_logprobs else None,
        has_length=any(name in given for name in _LENGTHS) or "max_new_tokens" in config,
        body=given,
    )


def _has_logprobs(kind: str, asked: Any) -> bool:
    """Whether log-probabilities are asked for: by `true` for a chat; for a completion by 0, which means those of the
    generated tokens only."""
    if asked is None or (kind == CHAT and isinstance(asked, bool)):
        return bool(asked)
    expected = {COMPLETION: "0, for those of the generated tokens", CHAT: "true or false", RESPONSE: "no logprobs"}
    _check("logprobs", asked, kind == COMPLETION and _is(asked, int) and asked == 0, expected[kind])
    return True


def _check_text(given: Mapping[str, Any]) -> None:
    try:
        json.dumps(given, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RefusedRequest(
            f"The request holds {error.object[error.start]!r}, a lone surrogate, which is no character; expected text "
            "that is valid Unicode."
        ) from error


def _check_messages(given: Mapping[str, Any]) -> None:
    messages = given.get("messages")
    _check("messages", messages, isinstance(messages, list) and messages, "a list of messages, at least one")
    for number, one in enumerate(messages):
        name = f"messages[{number}]"
        is_message = isinstance(one, dict) and isinstance(one.get("role"), str)
        _check(name, one, is_message, "an object with a role and content")
        content = one.get("content")
        if isinstance(content, list):
            for part in content:
                _check(f"A part of {name}", part, _is_part(part), "parts of type text only")
        else:
            is_content = isinstance(content, str) or (content is None and "tool_calls" in one)
            _check(f"The content of {name}", content, is_content, "a string or text parts")
        calls = one.get("tool_calls") or []
        for call in calls if isinstance(calls, list) else [calls]:
            _check(f"A tool call of {name}", call, _is_call(call), "a function with a name and arguments")


def _is_part(part: Any) -> bool:
    types = ("text", "input_text", "output_text")
    return isinstance(part, dict) and part.get("type") in types and isinstance(part.get("text"), str)


def _is_item(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    if "role" not in item:
        return _is_part(item) or item.get("type") in ("function_call", "function_call_output", "reasoning")
    content = item.get("content", "")
    is_content = isinstance(content, str) or (isinstance(content, list) and all(map(_is_part, content)))
    return isinstance(item["role"], str) and is_content


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    return isinstance(arguments, dict) or _is_object(arguments)


def _check_tools(given: dict[str, Any]) -> None:
    tools, choice = given.get("tools", []), given.pop("tool_choice", "auto")
    is_list = isinstance(tools, list) and all(isinstance(one, dict) for one in tools)
    _check("tools", tools, is_list, "a list of tools")
    if choice == "none":
        given.pop("tools", None)
    elif choice != "auto":
        raise RefusedRequest(f"tool_choice is {choice!r:.80}, which this server cannot enforce; expected auto or none.")


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `add_request` for fields that transformers' handlers do not read, which are removed from `given`."""
    options = {name.replace("tokens", "new_tokens"): given.pop(name) for name in _OPTIONS if name in given}
    if "top_k" in options:
        options["top_k"] = max(options["top_k"], 0)
    if "repetition_penalty" in options:
        options["repetition_penalty"] = float(options["repetition_penalty"])
    if given.pop("ignore_eos", False):
        options["eos_token_id"] = -1
    bias = given.pop("logit_bias", {})
    try:
        pairs = [[[int(token)], float(value)] for token, value in bias.items()]
    except (AttributeError, TypeError, ValueError):
        pairs = [[[-1], math.nan]]
    is_bias = all(token[0] >= 0 and -100 <= value <= 100 for token, value in pairs)
    _check("logit_bias", bias, is_bias, "an object of numbers from -100 to 100 by token id")
    if pairs:
        options["sequence_bias"] = pairs
    return options


def _check(name: str, value: Any, is_right: Any, expected: str) -> None:
    if not is_right:
        raise RefusedRequest(f"{name} is {value!r:.80}; expected {expected}.")


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_object(value: Any) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return False
