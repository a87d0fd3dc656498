"""Measure a server with OpenAI's API under load: tokens a second, time to the first token, time between tokens.

    python examples/load_server.py --url http://localhost:8000 --clients 64 --processes 4 --prompt-tokens 256

Several processes read streamed answers, so that the server, not the reader, is measured. It needs the standard library
only, and works with `hf-specdec serve`, `transformers serve`, vLLM and others. Prompts are random words, no two alike;
a few first requests find how many words have `--prompt-tokens` tokens. `--token-ids` sends random token ids instead, to
servers that take these (vLLM's completions).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

# English words that are one token of most tokenizers.
WORDS = [
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother"),
    *("area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business"),
]
# Numbers of words of the first requests, which tell tokens of a word from tokens of a template.
FIRST_WORDS = (64, 192)
# Token ids of `--token-ids`, which all vocabularies of today's models have.
TOKEN_IDS = range(1000, 20000)
# Seconds between the start of the processes and the first requests.
HEAD_START = 1.0


class Answer(NamedTuple):
    """A streamed answer: when it was asked for, `time.perf_counter()` of each part with text, and its tokens."""

    start: float
    times: list[float]
    num_tokens: int
    num_prompt_tokens: int


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", default="http://localhost:8000")
    add("--model", help="name of the model; by default the first one that the server lists")
    add("--endpoint", choices=("chat", "completions"), default="chat")
    add("--token-ids", action="store_true", help="prompts of completions are token ids")
    add("--clients", type=int, default=64, help="requests at once")
    add("--processes", type=int, default=4, help="processes that the clients are spread over")
    add("--requests", type=int, help="requests in all; by default one for each client")
    add("--prompt-tokens", type=int, default=256)
    add("--new-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0, help="of the prompts; a server may keep those of an earlier run")
    add("--warm-ups", type=int, default=1, help="runs that are not counted")
    add("--json", action="store_true", help="print a JSON object")
    args = parser.parse_args(arguments)
    if args.token_ids and args.endpoint != "completions":
        parser.error("--token-ids is given with --endpoint chat; expected --endpoint completions.")
    return args


class Server:
    """The server at a URL; `ask` raises `RuntimeError` where it answers with an error."""

    def __init__(self, args: argparse.Namespace):
        place = urlsplit(args.url)
        self._host, self._port = place.hostname, place.port or 80
        self._path = f"{place.path.rstrip('/').removesuffix('/v1')}/v1"
        self._args, self.model = args, args.model

    async def _open(self, method: str, path: str, body: bytes = b"") -> tuple[asyncio.StreamReader, Any]:
        """The reader after the head of a response, and the writer to close."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answered = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if answered.split()[1] != "200":
            found = (await reader.read()).decode(errors="replace")
            raise RuntimeError(f"{method} {path} was answered with {answered.splitlines()[0]}: {found[:500]}")
        if "transfer-encoding: chunked" not in answered:
            return reader, writer
        return _Chunks(reader), writer

    async def first_model(self) -> str:
        """The name of the first model that the server lists."""
        reader, writer = await self._open("GET", "/models")
        found = json.loads(await reader.read())
        writer.close()
        return found["data"][0]["id"]

    async def ask(self, prompt: str | list[int], new_tokens: int) -> Answer:
        """Stream the answer to `prompt`."""
        args, is_chat = self._args, self._args.endpoint == "chat"
        body = {"model": self.model, "max_tokens": new_tokens, "temperature": args.temperature, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        start, times, usage, rest = time.perf_counter(), [], None, b""
        path = "/chat/completions" if is_chat else "/completions"
        reader, writer = await self._open("POST", path, json.dumps(body).encode())
        try:
            while data := await reader.read(1 << 16):
                now = time.perf_counter()
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    if not event.startswith(b"data: {"):
                        continue
                    found = json.loads(event[6:])
                    if "error" in found:
                        raise RuntimeError(f"A stream has an error: {found['error']}")
                    usage = found.get("usage") or usage
                    times += [now] * any(map(_has_text, found.get("choices", ())))
        finally:
            writer.close()
        if usage is None:
            raise RuntimeError("A stream has ended without usage; expected it in the last event.")
        return Answer(start, times, usage["completion_tokens"], usage["prompt_tokens"])


class _Chunks:
    """The content of a body in chunks."""

    def __init__(self, reader: asyncio.StreamReader):
        self._reader = reader

    async def read(self, limit: int = -1) -> bytes:
        """The next chunk, empty at the end; all of them if `limit` is -1."""
        found = []
        while size := int(await self._reader.readline() or b"0", 16):
            found.append(await self._reader.readexactly(size))
            await self._reader.readexactly(2)
            if limit >= 0:
                break
        return b"".join(found)


def _has_text(choice: dict[str, Any]) -> bool:
    place = choice.get("delta", choice)
    return any(place.get(name) for name in ("text", "content", "reasoning_content", "reasoning"))


def words_of(number: Any, count: int) -> str:
    """`count` random words, the same for the same `number`."""
    return " ".join(random.Random(number).choices(WORDS, k=count))


async def prepare(args: argparse.Namespace) -> tuple[str, int]:
    """The model's name, and how many words have `--prompt-tokens` tokens."""
    server = Server(args)
    server.model = args.model or await server.first_model()
    if args.token_ids:
        return server.model, 0
    few, many = FIRST_WORDS
    found = [(await server.ask(words_of(one, one), 1)).num_prompt_tokens for one in FIRST_WORDS]
    each = (found[1] - found[0]) / (many - few)
    return server.model, max(1, round(few + (args.prompt_tokens - found[0]) / each))


async def run_clients(args: argparse.Namespace, numbers: range, clients: int, words: int, start: float) -> list[Answer]:
    """The answers to the requests `numbers`, `clients` at once, from `time.perf_counter() == start` on."""
    server, left, answers = Server(args), iter(numbers), []

    def prompt(number: int) -> str | list[int]:
        if args.token_ids:
            return random.Random(f"{args.seed} {number}").choices(TOKEN_IDS, k=args.prompt_tokens)
        return words_of(f"{args.seed} {number}", words)

    async def run() -> None:
        for number in left:
            answers.append(await server.ask(prompt(number), args.new_tokens))

    await asyncio.sleep(start - time.perf_counter())
    await asyncio.gather(*[run() for _ in range(clients)])
    return answers


def _in_process(args: argparse.Namespace, *rest: Any) -> list[Answer]:
    return asyncio.run(run_clients(args, *rest))


def load(args: argparse.Namespace, words: int, pool: Any) -> list[Answer]:
    """The answers to all requests."""
    requests, start = args.requests or args.clients, time.perf_counter() + HEAD_START
    parts = [
        (args, range(one, requests, args.processes), len(range(one, args.clients, args.processes)), words, start)
        for one in range(args.processes)
    ]
    return [one for found in pool.starmap(_in_process, parts) for one in found]


def figures(answers: list[Answer]) -> dict[str, float]:
    """Tokens a second of all answers; milliseconds to the first token and between successive ones."""
    seconds = max(one.times[-1] for one in answers) - min(one.start for one in answers)
    first = sorted(1e3 * (one.times[0] - one.start) for one in answers)
    gaps = sorted(1e3 * (b - a) for one in answers for a, b in zip(one.times, one.times[1:], strict=False))
    return {
        "requests": len(answers),
        "prompt_tokens": statistics.mean(one.num_prompt_tokens for one in answers),
        "new_tokens": statistics.mean(one.num_tokens for one in answers),
        "tokens_per_second": sum(one.num_tokens for one in answers) / seconds,
        "first_ms_p50": statistics.median(first),
        "first_ms_p99": _share(first, 0.99),
        "gap_ms_p50": _share(gaps, 0.5),
        "gap_ms_p99": _share(gaps, 0.99),
        "gap_ms_max": _share(gaps, 1.0),
    }


def _share(ordered: list[float], share: float) -> float:
    """The value that `share` of the `ordered` ones do not exceed; 0 if there are none."""
    return ordered[max(0, round(share * len(ordered)) - 1)] if ordered else 0.0


def main(arguments: list[str] | None = None) -> dict[str, float]:
    args = parse_arguments(arguments)
    args.model, words = asyncio.run(prepare(args))
    seed = args.seed
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for number in range(args.warm_ups):
            args.seed = f"{seed} warm-up {number}"
            load(args, words, pool)
        args.seed = seed
        found = figures(load(args, words, pool))
    if args.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['requests']} requests, {args.clients} at once, {found['prompt_tokens']:.0f} prompt tokens, "
            f"{found['new_tokens']:.0f} new ones: {found['tokens_per_second']:.0f} tokens/s; first token "
            f"{found['first_ms_p50']:.0f} ms (median), {found['first_ms_p99']:.0f} (99 %); between tokens "
            f"{found['gap_ms_p50']:.1f} ms (median), {found['gap_ms_p99']:.1f} (99 %), {found['gap_ms_max']:.1f} (most)"
        )
    return found


if __name__ == "__main__":
    main()
