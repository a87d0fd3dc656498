"""`hf-specdec serve`: transformers' server with a drafter behind its continuous batching.

The server is `transformers serve --continuous-batching`, unchanged. It creates its continuous batching manager in a
`CBGenerateManager`. In the context `serving` that name is a subclass that creates a manager with a drafter, and gives
every request its own settings.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import queue
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..auto import AutoDrafter
from ..checkpoints.checkpoint import check_folder
from ..config import check_least, check_num_or_auto, number_or_text
from ..drafters import Drafter, NoDrafter
from ..drafters.base import check_num_nodes
from ..errors import first_line
from ..host import serving as serving_parts
from ..host.generation import GenerationOutput, WorkloadHints
from ..host.parts import about
from ..integration.request_processors import PROCESSOR_OPTIONS, SAMPLING_OPTIONS
from ..modules.adapters import NO_ADAPTER
from ..ops import row_seeds
from ..patching.support import stated_positions
from ..sampling.logits import PenaltyLogitsProcessor
from .answers import StopStringQueue, join, join_streams, without_stops
from .bodies import ParsedBody, RefusedRequest, read_body
from .delivery import event_builder, without_queues
from .manager import SpeculativeBatchingManager

# Settings of a request's generation config that are passed on otherwise, or do not affect a text.
_NOT_COMPARED = frozenset(
    {
        *SAMPLING_OPTIONS,
        *PROCESSOR_OPTIONS,
        "bos_token_id",
        "cache_implementation",
        "compile_config",
        "eos_token_id",
        "max_length",
        "max_new_tokens",
        "pad_token_id",
        "stop_strings",
        "transformers_version",
        "use_cache",
    }
)

# Tokens of a text for which the first buffers are made; with the dummy slot a power of two.
LONGEST = 2047

# Seconds for which streams may continue after the server was asked to stop.
SHUTDOWN_TIMEOUT = 10

_NO_BODY = ParsedBody({})
# Of the current task's request: its seed, and its body, whose options are those of `add_request` when it is added.
_SEED: ContextVar[int | None] = ContextVar("seed", default=None)
_BODY: ContextVar[ParsedBody] = ContextVar("body", default=_NO_BODY)


@dataclass(frozen=True)
class ServeSettings:
    """Settings of the server: the options of `add_serve`, and the managers that were made.

    `adapters` are folders or repositories of PEFT's LoRA adapters, by the model names that requests use.

    Raises:
        ValueError: a number is too small.
    """

    load_drafter: Callable[[PreTrainedModel], Drafter]
    max_requests: int | None = None
    max_queue_size: int = 0
    longest: int = LONGEST
    warmup: bool = True
    max_length: int | None = None
    shutdown_timeout: int = SHUTDOWN_TIMEOUT
    adapters: Mapping[str, str] = field(default_factory=dict)
    managers: list[SpeculativeBatchingManager] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_least(self, max_requests=1, max_queue_size=0, longest=2, max_length=2, shutdown_timeout=0)

    def manager_for(
        self, model: PreTrainedModel, settings: ContinuousBatchingConfig | None
    ) -> SpeculativeBatchingManager:
        """A running manager, with the generation config of `model`, not of the first request."""
        for name, place in self.adapters.items():
            model.load_adapter(place, adapter_name=name)
        settings = replace(
            settings or ContinuousBatchingConfig(),
            per_request_processors=True,
            max_requests_per_batch=self.max_requests,
            max_queue_size=self.max_queue_size,
            seed=_SEED.get(),  # set by --default-seed, before there are requests
        )
        hints = WorkloadHints(max_prompt_length=self.longest)
        manager = ServedManager(model, self.load_drafter(model), model.generation_config, settings, hints)
        if self.warmup:
            manager.warmup(block=False)
        # Exclude all present objects, such as modules and models, from garbage collection: all rows wait for it, for
        # hundreds of milliseconds if it traces the objects of torch and transformers.
        gc.collect()
        gc.freeze()
        manager.start()
        self.managers.append(manager)
        _SEED.set(None)
        return manager


class ServedManager(SpeculativeBatchingManager):
    """A manager that adds the options of the current task's request, and reads log-probabilities from results."""

    def add_request(self, *args: Any, **kwargs: Any) -> str:
        return super().add_request(*args, **kwargs | _BODY.get().options)

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        logprobs = _BODY.get().logprobs

        def read(result: GenerationOutput) -> None:
            if logprobs is not None:
                logprobs.read(result)
            callback(result)

        super().register_result_handler(request_id, read)


@contextmanager
def serving(settings: ServeSettings) -> Iterator[None]:
    """Context in which transformers' servers run requests by managers with a drafter. Raises `ValueError` if the
    server's dependencies are not installed, or this version of transformers has another server.

    Until its end, Python's garbage collector ignores all objects that existed when the last manager was made.
    """
    if not serving_parts.is_serve_available():
        raise ValueError(
            "The server's dependencies are not installed; expected them: pip install 'transformers[serving]'."
        )
    try:
        server, utils = serving_parts.server(), serving_parts.utils()
    except ImportError as error:
        raise ValueError(f"{error}. Install a tested version of transformers.") from error
    import uvicorn

    missing = [one.names[0] for one in serving_parts.SERVER_PARTS if not one.is_found()]
    if missing:
        fault = f"`transformers.cli.serving` has no {', '.join(missing)}, through which requests get their drafter"
        raise ValueError(f"{about(fault)}. Install a tested version of transformers.")
    changed = {
        (utils, "CBGenerateManager"): _generate_manager(utils, settings),
        (utils, "set_torch_seed"): _SEED.set,
        (server, "build_server"): functools.partial(_build_server, server.build_server, settings),
        # The timeout ends streams that still continue.
        (uvicorn, "Config"): functools.partial(uvicorn.Config, timeout_graceful_shutdown=settings.shutdown_timeout),
    }
    with ExitStack() as stack:
        stack.callback(gc.unfreeze)
        stack.callback(lambda: [manager.stop(hard_stop=True) for manager in settings.managers])
        for (place, name), value in changed.items():
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, value)
        yield


def _generate_manager(utils: Any, settings: ServeSettings) -> type:
    class SpeculativeGenerateManager(utils.CBGenerateManager):
        """The server's class, with our managers."""

        def init_cb(self, model: PreTrainedModel, gen_config: GenerationConfig) -> None:
            if self._cb is None:
                self._cb = settings.manager_for(model, self._cb_config)

        def generate_streaming(self, model, processor, inputs, gen_config, request_id, **kwargs):
            with self._request(model, processor, inputs, gen_config, request_id) as parsed:
                texts, streamer = super().generate_streaming(model, processor, inputs, gen_config, request_id, **kwargs)
            put, tokenizer, results = streamer.put, getattr(processor, "tokenizer", processor), deque(maxlen=1)

            def noted(result: GenerationOutput) -> None:
                results.append(result)
                put(result)

            def whole() -> str:
                is_parsed = any(one is not None for one in kwargs.values())  # the source then has parts of the text
                tokens = [] if is_parsed else [token for one in results for token in one.generated_tokens]
                return tokenizer.backend_tokenizer.decode(tokens)

            def on_stop() -> None:
                gen_config.max_new_tokens = None  # the handler derives the finish reason from it

            streamer.put = noted
            return StopStringQueue(texts, parsed.stops, whole, on_stop), streamer

        async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
            with self._request(model, processor, inputs, gen_config, request_id):
                return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)

        @contextmanager
        def _request(self, model, processor, inputs, gen_config, request_id) -> Iterator[ParsedBody]:
            """Context in which the request is added with its own options; errors become responses to its client."""
            parsed, length = _BODY.get(), len(inputs["input_ids"])
            self._check_alive(request_id)
            if self._cb.is_active(request_id):
                raise RefusedRequest(f"The request {request_id} is not over; expected another X-Request-ID.")
            _fit(settings.max_length, self._cb, gen_config, length, parsed)
            if parsed.logprobs is not None:
                parsed.logprobs.tokenizer = getattr(processor, "tokenizer", processor)
            options = _options_of(gen_config, self._cb.generation_config, processor, parsed, length)
            before = _BODY.set(replace(parsed, options=options))
            try:
                self._cb.check_room()
                yield parsed
            except queue.Full as error:
                raise RefusedRequest(str(error), 429) from error
            except utils.CBWorkerDeadError:
                raise
            except ValueError as error:
                raise RefusedRequest(str(error)) from error
            except RuntimeError as error:
                raise RefusedRequest(str(error), 500) from error
            finally:
                _BODY.reset(before)

    return SpeculativeGenerateManager


def _fit(
    most: int | None, manager: SpeculativeBatchingManager, config: GenerationConfig, length: int, parsed: ParsedBody
) -> None:
    """Limit the answer to a prompt of `length` tokens to the room for it, in texts of at most `most` tokens. Raises
    `RefusedRequest` if there is no room, or less than was asked for although the target could have more."""
    positions = manager.num_positions
    if positions is not None:  # the last token of a text is not embedded
        most = min(positions + 1, most or positions + 1)
    elif most is None:
        most = stated_positions(manager.model)
    if most is None:
        return
    room = most - length
    if room < 1:
        raise RefusedRequest(
            f"The prompt has {length} tokens, but texts have at most {most} with their answers; shorten it."
        )
    if config.max_new_tokens is not None and config.max_new_tokens <= room:
        return
    if parsed.has_length and (positions is None or most <= positions):
        raise RefusedRequest(
            f"The prompt has {length} tokens and the answer may have {config.max_new_tokens}, but texts have at most "
            f"{most}; expected at most {room} tokens for the answer."
        )
    config.max_new_tokens = room  # the handler derives the finish reason from it


def _options_of(
    config: GenerationConfig, base: GenerationConfig, processor: Any, parsed: ParsedBody, length: int
) -> dict[str, Any]:
    """Keywords of `add_request` for a prompt of `length` tokens with the generation config `config`; `base` is the
    manager's. Raises `RefusedRequest` for settings that requests cannot have of their own."""
    others = sorted(
        name
        for name, value in vars(config).items()
        if not name.startswith("_") and name not in _NOT_COMPARED and value not in (None, getattr(base, name, None))
    )
    if others:
        raise RefusedRequest(
            f"The request sets {', '.join(others)}, which requests cannot have of their own with a drafter; expected "
            "some of temperature, top_p, seed, stop and the numbers of tokens."
        )
    own = {name: getattr(config, name, None) for name in SAMPLING_OPTIONS + PROCESSOR_OPTIONS}
    options = {
        name: value
        for name, value in own.items()
        if value is not None and (name in SAMPLING_OPTIONS or value != getattr(base, name, None))
    }
    if config.stop_strings is not None:
        options |= {"stop_strings": config.stop_strings, "tokenizer": getattr(processor, "tokenizer", processor)}
    if parsed.logprobs is not None:
        options["return_logprobs"] = "raw"
    options |= parsed.options
    number, count = options.pop("sequence", (0, 1))
    if _SEED.get() is not None:
        # Each of several answers has a seed of its own.
        seeds = [_SEED.get()] if count == 1 else row_seeds(torch.tensor([_SEED.get()]), count).tolist()
        options["seed"] = seeds[number]
    if parsed.presence_penalty or parsed.frequency_penalty:
        penalty = PenaltyLogitsProcessor(length, parsed.presence_penalty, parsed.frequency_penalty)
        options["logits_processor"] = LogitsProcessorList([penalty])
    return options


def _checking_handler(
    handle: Callable[[dict, str], Awaitable[Any]], kind: str, adapters: Collection[str], target: str
) -> Callable[[dict, str], Awaitable[Any]]:
    """A `handle_request` for transformers' server: it checks the body, calls `handle`, and completes the answers."""
    from fastapi.responses import JSONResponse, StreamingResponse

    async def answer(parsed: ParsedBody, request_id: str) -> Any:
        _BODY.set(parsed)
        _SEED.set(None)  # the handler sets it if the request has a seed
        response = await handle(parsed.body, request_id)
        if isinstance(response, JSONResponse):
            found = without_stops(json.loads(response.body), parsed.stops)
            return found if parsed.logprobs is None else parsed.logprobs.added_to(found)
        if parsed.logprobs is not None:
            response.body_iterator = parsed.logprobs.added_to_events(response.body_iterator)
        return response

    async def handle_request(body: dict, request_id: str) -> Any:
        parsed = read_body(kind, body)
        if adapters:
            name = body.get("model")
            parsed.options["adapter_name"] = name if name in adapters else NO_ADAPTER
            if name in adapters:
                parsed.body["model"] = target
        if parsed.n == 1:
            found = await answer(parsed, request_id)
            return JSONResponse(found) if isinstance(found, dict) else found
        tasks = [
            asyncio.ensure_future(answer(parsed.for_choice(number), f"{request_id}-{number}"))
            for number in range(parsed.n)
        ]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        failed = next((one for one in found if isinstance(one, BaseException)), None)
        streams = [one.body_iterator for one in found if isinstance(one, StreamingResponse)]
        if failed is not None:
            for one in streams:
                await anext(one, None)  # a started stream ends its request on closing, as if its client had left
                await one.aclose()
            raise failed
        if streams:
            return StreamingResponse(join_streams(streams), media_type="text/event-stream")
        return JSONResponse(join(found))

    return handle_request


def _build_server(build: Callable, settings: ServeSettings, model_manager: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' `build_server`, which also makes the manager before the server takes requests."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, PlainTextResponse
    from starlette.exceptions import HTTPException

    adapters, target = list(settings.adapters), model_manager.force_model
    for one in (*args, *kwargs.values()):
        kind = type(one).__name__
        if kind in (serving_parts.CHAT, serving_parts.COMPLETION, serving_parts.RESPONSE):
            one.handle_request = _checking_handler(one.handle_request, kind, adapters, target)
            if hasattr(one, serving_parts.EVENT_BUILDER):
                setattr(one, serving_parts.EVENT_BUILDER, event_builder(getattr(one, serving_parts.EVENT_BUILDER)))
    if adapters:
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": ""} for name in (target, *adapters)]
        listed[1:] = [one | {"parent": target} for one in listed[1:]]
        for name in serving_parts.MODEL_LISTS:
            setattr(model_manager, name, lambda: listed)
    app = build(model_manager, *args, **kwargs)
    app.user_middleware = without_queues(app.user_middleware)

    def refusal(status: int, message: str) -> JSONResponse:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return JSONResponse({"error": {"message": message, "type": kind}}, status_code=status)

    async def refuse(request: Any, error: Exception) -> JSONResponse:
        if isinstance(error, RefusedRequest):
            return refusal(error.status, str(error))
        if isinstance(error, RequestValidationError):
            return refusal(400, "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()))
        if isinstance(error, HTTPException):
            return refusal(400 if error.status_code == 422 else error.status_code, str(error.detail))
        return refusal(500, f"{type(error).__name__}: {first_line(error)}")

    for one in (RefusedRequest, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(one, refuse)

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        text = "".join(one.metrics() for one in settings.managers[-1:])
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    generation_state, timed = kwargs["generation_state"], next(iter(model_manager.loaded_models.values()))
    modality = model_manager.get_model_modality(timed.model, processor=timed.processor)
    if not generation_state.use_continuous_batching(timed.model, modality):
        raise ValueError(
            f"transformers' server does not run {type(timed.model).__name__} by continuous batching; expected a "
            "language model, and the option --continuous-batching."
        )
    setattr(timed, serving_parts.IDLE_TIMER, lambda: None)
    name, _ = serving_parts.utils().split_model_id(target)
    manager = generation_state.get_manager(model_manager.process_model_name(name), use_cb=True)
    manager.init_cb(timed.model, timed.model.generation_config)
    return app


def add_serve(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="start transformers' OpenAI-compatible server with a drafter",
        description="Start `transformers serve --continuous-batching` with a drafter. Other options are passed on to "
        "it: --host, --port, --device, --dtype and so on, see `transformers serve --help`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("target", help="folder or Hub repository of the target")
    add("--drafter", help="folder or Hub repository of its drafter; without one, rounds have no drafts")
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a LoRA adapter of PEFT, its folder or repository, which requests name as their model; may be repeated",
    )
    num = functools.partial(add, type=number_or_text)
    num("--num-assistant-tokens", "-k", help='draft tokens a round, or "auto", the default: chosen round by round')
    num("--tree", help='drafts that are verified as a tree; 0, the default, for chains; "auto": chosen round by round')
    add("--max-requests", type=int, help="most requests that run at once; by default 256 on a GPU, 16 on a CPU")
    add("--max-queue-size", type=int, default=0, help="most requests that wait, 0 for any number; others are refused")
    add(
        "--longest",
        type=int,
        default=LONGEST,
        help=f"tokens of a text, prompt included, that the first buffers are made for; {LONGEST} by default",
    )
    add(
        "--warmup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on a GPU, capture rounds of all sizes while there are no requests",
    )
    add("--max-length", type=int, help="most tokens of a text, prompt and answer; the target's positions by default")
    add(
        "--shutdown-timeout",
        type=int,
        default=SHUTDOWN_TIMEOUT,
        help=f"seconds that streams may go on after the server was asked to stop; {SHUTDOWN_TIMEOUT} by default",
    )
    parser.set_defaults(run=run_serve, passes_on=True)


def run_serve(arguments: argparse.Namespace) -> None:
    """Run the server until it is stopped."""
    adapters = dict(one.partition("=")[::2] for one in arguments.adapter)
    wrong = len(adapters) < len(arguments.adapter) or not all(adapters.keys()) or not all(adapters.values())
    if wrong or {arguments.target, NO_ADAPTER} & adapters.keys():
        raise ValueError(
            f"--adapter is {', '.join(arguments.adapter)}; expected NAME=FOLDER with names that differ, none of them "
            f"the target's or {NO_ADAPTER}."
        )
    number, tree = arguments.num_assistant_tokens, arguments.tree
    if number is not None:
        check_num_or_auto(number)
    if tree is not None:
        check_num_nodes(tree)
    if arguments.drafter is None and (number, tree) != (None, None):
        raise ValueError("--num-assistant-tokens and --tree have no effect without a drafter; pass --drafter, too.")
    for name in filter(None, (arguments.target, arguments.drafter)):
        check_folder(name)

    def load_drafter(model: PreTrainedModel) -> Drafter:
        if arguments.drafter is None:
            return NoDrafter(model)
        drafter = AutoDrafter.from_pretrained(arguments.drafter, target=model)
        return drafter.configure(number, tree=tree)

    names = ("max_requests", "max_queue_size", "longest", "warmup", "max_length", "shutdown_timeout")
    with serving(ServeSettings(load_drafter, adapters=adapters, **{name: getattr(arguments, name) for name in names})):
        serving_parts.command_line()(
            ["serve", arguments.target, "--continuous-batching", *arguments.others], prog_name="hf-specdec"
        )
