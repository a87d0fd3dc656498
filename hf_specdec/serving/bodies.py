"""Bodies of requests to the server: checked, and split into what transformers' handlers read and what they do not.

Fields are those of OpenAI's API and, as in vLLM, settings of sampling besides. What cannot be done is refused: no field
that changes an answer is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

# Kinds of requests, by the handlers of transformers' server.
CHAT, COMPLETION, RESPONSE = "chat", "completion", "response"

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

# Fields that change no answer.
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

# Values of fields that ask for nothing; with any other they are refused.
_NEUTRAL: dict[str, tuple] = {
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "function_call": (),
    "functions": (),
    "include": ([],),
    "logprobs": (False,),
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

# OpenAI's most answers of one request.
_MOST_ANSWERS = 128


class BadRequest(ValueError):
    """What is wrong with the body of a request."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    Attributes:
        body: for transformers' handler.
        options: keywords of `add_request`.
        presence_penalty, frequency_penalty: as of OpenAI.
        stops: strings that end an answer, and are no part of it.
        n: answers.
        states_length: whether it says how many tokens an answer may have.
    """

    body: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stops: tuple[str, ...] = ()
    n: int = 1
    states_length: bool = False

    def alone(self, number: int) -> Asked:
        """The request for one of `n` answers."""
        return replace(self, n=1, body=dict(self.body), options=self.options | {"sequence": (number, self.n)})


def read_body(kind: str, body: Mapping[str, Any]) -> Asked:
    """What the body of a request of a `kind` asks for.

    Raises:
        BadRequest: it is malformed, or asks for what the server does not have.
    """
    given = {name: value for name, value in body.items() if value is not None}
    _check_text(given)
    {CHAT: _check_messages, COMPLETION: _check_prompt, RESPONSE: _check_input}[kind](given)
    for name, values in _NEUTRAL.items():
        if name in given and given.pop(name) not in values:
            raise BadRequest(f"{name} is {body[name]!r:.80}, which this server does not have; expected no {name}.")
    for name in _WITHOUT_EFFECT:
        given.pop(name, None)
    for name in _LENGTHS:
        _check(given, name, _is_count, "an int of at least 1")
    _check(given, "temperature", lambda value: _is_number(value) and 0 <= value < math.inf, "a number of at least 0")
    _check(given, "top_p", lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and up to 1")
    _check(given, "seed", lambda value: _is_int(value) and -(2**63) <= value < 2**63, "an integer of 64 bits")
    _check(given, "stream", lambda value: isinstance(value, bool), "true or false")
    _check(given, "generation_config", _is_config, "a string with a JSON object of generation settings")
    states_length = any(name in given for name in _LENGTHS) or "max_new_tokens" in given.get("generation_config", "")
    _check_tools(given)
    options = _options(given)
    # transformers takes the frequency penalty for a repetition penalty.
    presence, frequency = (_penalty(given, name) for name in ("presence_penalty", "frequency_penalty"))
    stops = given.pop("stop", ())
    stops = (stops,) if isinstance(stops, str) else stops
    if not isinstance(stops, (list, tuple)) or not all(isinstance(one, str) and one for one in stops):
        raise BadRequest(f"stop is {body['stop']!r:.80}; expected a string or a list of strings, none of them empty.")
    if stops:
        given["stop"] = list(stops)
    n = given.pop("n", 1)
    if not _is_count(n) or n > _MOST_ANSWERS:
        raise BadRequest(f"n is {n!r:.80}; expected an int from 1 to {_MOST_ANSWERS}.")
    return Asked(given, options, presence, frequency, tuple(stops), n, states_length)


def _check_text(given: Mapping[str, Any]) -> None:
    try:
        json.dumps(given, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"The request holds {error.object[error.start]!r}, a lone surrogate, which is no character; expected text "
            "that is valid Unicode."
        ) from error


def _check_messages(given: Mapping[str, Any]) -> None:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages is {messages!r:.80}; expected a list of messages, at least one.")
    for number, one in enumerate(messages):
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise BadRequest(f"messages[{number}] is {one!r:.80}; expected an object with a role and content.")
        content = one.get("content")
        if isinstance(content, list):
            for part in content:
                if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                    raise BadRequest(f"messages[{number}] has the part {part!r:.80}; expected parts of type text only.")
        elif not isinstance(content, str) and not (content is None and "tool_calls" in one):
            raise BadRequest(f"messages[{number}] has the content {content!r:.80}; expected a string or text parts.")
        _check_calls(one, number)


def _check_calls(message: Mapping[str, Any], number: int) -> None:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else [None] if calls is not None else []:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        try:
            is_right = isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)
        except ValueError:
            is_right = False
        if not is_right or not isinstance(function.get("name"), str):
            raise BadRequest(
                f"messages[{number}] has the tool call {call!r:.80}; expected a function with a name and arguments."
            )


def _check_prompt(given: Mapping[str, Any]) -> None:
    if not isinstance(given.get("prompt"), str) or not given["prompt"]:
        raise BadRequest(f"prompt is {given.get('prompt')!r:.80}; expected a string, not empty.")


def _check_input(given: Mapping[str, Any]) -> None:
    items = given.get("input")
    if not items or not isinstance(items, (str, list)) or not all(isinstance(one, (str, dict)) for one in items):
        raise BadRequest(f"input is {items!r:.80}; expected a string or a list of items, not empty.")


def _check_tools(given: dict[str, Any]) -> None:
    tools, choice = given.get("tools", []), given.pop("tool_choice", "auto")
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise BadRequest(f"tools is {tools!r:.80}; expected a list of tools.")
    if choice == "none":
        given.pop("tools", None)
    elif choice != "auto":
        raise BadRequest(f"tool_choice is {choice!r:.80}, which this server cannot enforce; expected auto or none.")


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `add_request` for fields that are no fields of OpenAI; they are taken from `given`."""
    checks: dict[str, tuple[str, Callable[[Any], bool], str]] = {
        "top_k": ("top_k", lambda value: _is_int(value) and value >= -1, "an int of at least -1"),
        "min_p": ("min_p", lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
        "min_tokens": ("min_new_tokens", lambda value: _is_int(value) and value >= 0, "an int of at least 0"),
        "repetition_penalty": (
            "repetition_penalty",
            lambda value: _is_number(value) and 0 < value < math.inf,
            "a number above 0",
        ),
        "ignore_eos": ("eos_token_id", lambda value: isinstance(value, bool), "true or false"),
    }
    options = {}
    for name, (option, is_right, expected) in checks.items():
        _check(given, name, is_right, expected)
        if name in given:
            options[option] = given.pop(name)
    if "top_k" in options:
        options["top_k"] = max(options["top_k"], 0)
    if "repetition_penalty" in options:
        options["repetition_penalty"] = float(options["repetition_penalty"])
    if "eos_token_id" in options:
        options |= {"eos_token_id": -1} if options.pop("eos_token_id") else {}
    bias = given.pop("logit_bias", {})
    try:
        pairs = [[[int(token)], float(value)] for token, value in bias.items()]
    except (AttributeError, TypeError, ValueError):
        pairs = [[[-1], math.nan]]
    if not all(token[0] >= 0 and -100 <= value <= 100 for token, value in pairs):
        raise BadRequest(f"logit_bias is {bias!r:.80}; expected an object of numbers from -100 to 100 by token id.")
    if pairs:
        options["sequence_bias"] = pairs
    return options


def _penalty(given: dict[str, Any], name: str) -> float:
    _check(given, name, lambda value: _is_number(value) and -2 <= value <= 2, "a number from -2 to 2")
    return float(given.pop(name, 0.0))


def _check(given: Mapping[str, Any], name: str, is_right: Callable[[Any], bool], expected: str) -> None:
    if name in given and not is_right(given[name]):
        raise BadRequest(f"{name} is {given[name]!r:.80}; expected {expected}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_config(value: Any) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return False
