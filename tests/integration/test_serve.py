"""`hf-specdec serve`: transformers' server with a drafter, asked over HTTP."""

import contextlib
import copy
import functools
import gc
import http.client
import itertools
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import load_server
import pytest
import torch
from adapters import with_adapters
from oracle import random_eagle3
from targets import build_target
from tokenizers import Tokenizer, decoders, models
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessorList, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.import_utils import is_serve_available
from word_tokenizer import word_tokenizer

from hf_specdec import cli
from hf_specdec.engine.run import Run
from hf_specdec.sampling.logits import PenaltyLogitsProcessor
from hf_specdec.serving import server as serve
from hf_specdec.serving.answers import AnswerLogprobs
from hf_specdec.serving.delivery import event_builder
from hf_specdec.serving.manager import SpeculativeBatchingManager

needs_server = pytest.mark.skipif(
    not is_serve_available(), reason="the dependencies of transformers' server are not installed"
)

# A prompt is the text of the message; the tokenizer splits it into letters, tokens 0 to 15.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a target and of its drafter."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    target = build_target("llama")
    target.generation_config.eos_token_id = None
    target.save_pretrained(folder / "target")
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    random_eagle3(target).save_pretrained(folder / "drafter")
    return target, tokenizer, folder


class Client:
    """Asks the server, and expects what plain `generate()` says."""

    def __init__(self, target, tokenizer, folder, port):
        import openai

        self.target, self.tokenizer, self.model = target, tokenizer, str(folder / "target")
        self.openai, self.port = openai, port
        self.api = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(self, prompt, **options):
        messages = [{"role": "user", "content": self.tokenizer.decode(prompt)}]
        return self.api.chat.completions.create(model=self.model, messages=messages, **options)

    def alone(self, prompt, new, **options):
        options = {"do_sample": False, "max_new_tokens": new, "tokenizer": self.tokenizer, **options}
        out = self.target.generate(torch.tensor([prompt]), **options)
        return self.tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)


def served(monkeypatch, folders, work, *options, drafter="drafter"):
    """Run `work(client)` beside the server; returns the managers that it made."""
    import uvicorn

    with socket.socket() as place:
        place.bind(("localhost", 0))
        port = place.getsockname()[1]
    failures, managers = [], []
    run, init = uvicorn.Server.run, SpeculativeBatchingManager.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        managers.append(self)

    def beside(self):
        def ask():
            try:
                while not self.started:
                    time.sleep(0.01)
                work(Client(*folders, port))
            except BaseException as error:
                failures.append(error)
            finally:
                self.should_exit = True

        thread = threading.Thread(target=ask)
        thread.start()
        run(self)
        thread.join()

    folder = folders[2]
    drafting = ["--drafter", str(folder / drafter)] if drafter else []
    arguments = ["serve", str(folder / "target"), *drafting, "--port", str(port)]
    with monkeypatch.context() as patch:
        patch.setattr(uvicorn.Server, "run", beside)
        patch.setattr(SpeculativeBatchingManager, "__init__", noted)
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--device", "cpu", "--dtype", "float32", *options])
    if failures:
        raise failures[0]
    assert ended.value.code in (0, None)
    assert not any(one.is_running() for one in managers)
    return managers


@needs_server
def test_chats(monkeypatch, folders):
    def work(client):
        for new, prompt in ((9, [5, 6, 7]), (20, [8] * 12)):
            answer = client.ask(prompt, max_tokens=new)
            assert answer.choices[0].message.content == client.alone(prompt, new)
            assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == new
        answers = {}

        def stream(number):
            chunks = list(client.ask([5, 6, number], max_tokens=20, stream=True))
            answers[number] = "".join(one.choices[0].delta.content or "" for one in chunks)

        threads = [threading.Thread(target=stream, args=(number,)) for number in range(4, 12)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert answers == {number: client.alone([5, 6, number], 20) for number in range(4, 12)}
        assert gc.get_freeze_count() > 0
        whole = client.target.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=20)[0, 3:]
        word = client.tokenizer.decode(whole[8:9])
        stopped = client.ask([5, 6, 7], max_tokens=20, stop=[word]).choices[0]
        text = answers[7]
        assert stopped.message.content == text[: text.index(word)] and stopped.finish_reason == "stop"

    (manager,) = served(monkeypatch, folders, work)
    assert gc.get_freeze_count() == 0
    assert type(manager.drafter).__name__ == "Eagle3Drafter" and manager.drafter.stats.accepted >= 0


@needs_server
def test_requests_have_their_own_settings(monkeypatch, folders):
    """Also those that come after one with others."""

    def work(client):
        sampled = json.dumps({"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 12})
        texts = [
            client.ask([5, 6], seed=seed, extra_body={"generation_config": sampled}).choices[0].message.content
            for seed in (1, 1, 2)
        ]
        assert texts[0] == texts[1] != texts[2]
        greedy = client.ask([5, 6], max_tokens=12, temperature=0.0).choices[0].message.content
        assert greedy == client.alone([5, 6], 12)

    served(monkeypatch, folders, work, "-k", "3", "--tree", "0")


@needs_server
def test_errors_are_those_of_their_clients(monkeypatch, folders):
    """A bad parameter, a request in use, a full queue; another request goes on meanwhile."""

    def work(client):
        openai = client.openai
        going_on = client.ask([9, 9, 9], max_tokens=150, stream=True, extra_headers={"X-Request-ID": "mine"})
        first = next(one for one in going_on if one.choices[0].delta.content)
        for options, words in (
            ({"temperature": -0.5}, "temperature is -0.5; expected a number of at least 0"),
            ({"frequency_penalty": 3}, "frequency_penalty is 3; expected a number from -2 to 2"),
            ({"max_tokens": 0}, "max_tokens is 0; expected an int of at least 1"),
            ({"seed": 2**70}, "seed is .*; expected an integer of 64 bits"),
            ({"extra_headers": {"X-Request-ID": "mine"}}, "The request mine is not over"),
        ):
            for stream in (False, True):
                options = {"max_tokens": 5, **options}
                if "temperature" in options:
                    options["extra_body"] = {
                        "generation_config": '{"do_sample": true, "max_new_tokens": 5}', "temperature": -0.5
                    }  # fmt: skip
                with pytest.raises(openai.BadRequestError, match=words):
                    client.ask([5, 6], stream=stream, **options)
        rest = "".join(one.choices[0].delta.content or "" for one in going_on)
        assert first.choices[0].delta.content + rest == client.alone([9, 9, 9], 150)
        assert client.ask([5, 6], max_tokens=5).choices[0].message.content == client.alone([5, 6], 5)

    served(monkeypatch, folders, work, "-k", "2", "--tree", "0")


@needs_server
def test_a_full_queue_and_clients_that_leave(monkeypatch, folders):
    def work(client):
        one = client.ask([5, 6], max_tokens=2000, stream=True)
        next(chunk for chunk in one if chunk.choices[0].delta.content)  # it runs
        two = client.ask([6, 5], max_tokens=2000, stream=True)  # it waits
        for stream in (False, True):
            with pytest.raises(client.openai.RateLimitError, match="1 requests wait, as many as may"):
                client.ask([8], max_tokens=3, stream=stream)
        begin = time.perf_counter()
        one.close()
        two.close()
        while True:
            try:
                answer = client.ask([7, 7, 7], max_tokens=5)
                break
            except client.openai.RateLimitError:
                time.sleep(0.05)
        assert answer.choices[0].message.content == client.alone([7, 7, 7], 5)
        assert time.perf_counter() - begin < 10, "those that have left take no rows"

    served(monkeypatch, folders, work, "--max-requests", "1", "--max-queue-size", "1", "--max-length", "4000")


@needs_server
def test_a_round_that_fails(monkeypatch, folders):
    """Everybody who waits gets the error, and who comes later, too; so does who asks for the server's health."""
    import urllib.error
    import urllib.request

    def fail(self):
        raise ZeroDivisionError("a round fails, in a test")

    def work(client):
        monkeypatch.setattr(Run, "_launch", fail)
        for _ in range(2):
            with pytest.raises(client.openai.InternalServerError) as refused:
                client.ask([5, 6], max_tokens=5)
            assert refused.value.status_code == 503 and "a round fails, in a test" in refused.value.response.text
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://localhost:{client.port}/health")

    served(monkeypatch, folders, work)


@needs_server
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_events_with_a_text_are_those_of_transformers(monkeypatch, endpoint):
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler

    is_chat = endpoint == "chat"
    build = (ChatCompletionHandler if is_chat else CompletionHandler)(None, None)._build_chunk_sse
    names, args = (("content", "reasoning_content"), ("id",)) if is_chat else (("text",), ("id", "a/model"))
    others, built, now = {"model": "a/model"} if is_chat else {}, [], [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def counted(*args, **kwargs):
        built.append(kwargs)
        return build(*args, **kwargs)

    event, characters = event_builder(counted), [*range(0xD800), *range(0xE000, 0x110000)]
    texts = ["", *("".join(map(chr, characters[first::4096])) for first in range(4096))]
    for name in names:
        for text in texts[: None if name == names[0] else 9]:
            assert event(*args, **others, **{name: text}) == build(*args, **others, **{name: text})
    assert len(built) == len(names), "one event for all texts of a second"
    now[0] += 1
    assert event(*args, **others, **{names[0]: "a"}) == build(*args, **others, **{names[0]: "a"})
    assert event("other", *args[1:], **others, **{names[0]: "a"}) != event(*args, **others, **{names[0]: "a"})
    end = {**others, "finish_reason": "stop"}
    assert event(*args, **end) == build(*args, **end) and built[-1] == end


@needs_server
def test_request_ids(monkeypatch, folders):
    """They are those of transformers' middleware, but no answer passes its queue, and no request starts a timer."""
    from starlette.middleware.base import BaseHTTPMiddleware

    async def unexpected(*args):
        raise AssertionError("BaseHTTPMiddleware runs")

    def work(client):
        found, timers = [], []
        monkeypatch.setattr(threading.Timer, "start", timers.append)
        for asked in ({"X-Request-ID": "mine"}, {}):
            body = {"model": client.model, "prompt": "abc", "max_tokens": 2}
            connection = http.client.HTTPConnection("localhost", client.port)
            headers = {**asked, "Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            found.append((response.getheader("X-Request-ID"), json.loads(response.read())["id"]))
            connection.close()
        assert found[0] == ("mine", "mine") and found[1][0] == found[1][1] != "" and not timers

    monkeypatch.setattr(BaseHTTPMiddleware, "__call__", unexpected)
    served(monkeypatch, folders, work)


@needs_server
def test_load_client(monkeypatch, folders, capsys):
    def work(client):
        options = ["--url", f"http://localhost:{client.port}", "--clients", "3", "--processes", "2", "--requests", "5"]
        options += ["--prompt-tokens", "40", "--new-tokens", "6", "--warm-ups", "0"]
        for endpoint in ("chat", "completions"):
            found = load_server.main([*options, "--model", client.model, "--endpoint", endpoint])
            assert found["requests"] == 5 and found["new_tokens"] == 6 and abs(found["prompt_tokens"] - 40) < 20
            assert 0 < found["first_ms_p50"] <= found["first_ms_p99"] and found["tokens_per_second"] > 0
        with pytest.raises(RuntimeError, match=r"was answered with http/1\.1 400"):
            load_server.main([*options, "--model", "other", "--new-tokens", "0"])

    monkeypatch.setattr(load_server, "HEAD_START", 0.1)
    monkeypatch.setattr(load_server, "FIRST_WORDS", (4, 12))
    served(monkeypatch, folders, work)
    assert "5 requests, 3 at once, " in capsys.readouterr().out


@needs_server
def test_without_drafter(monkeypatch, folders):
    def work(client):
        assert client.ask([5, 6], max_tokens=9).choices[0].message.content == client.alone([5, 6], 9)

    (manager,) = served(monkeypatch, folders, work, drafter=None)
    assert type(manager.drafter).__name__ == "NoDrafter"


@needs_server
def test_adapters_are_models(monkeypatch, folders, tmp_path):
    """One for each request, by the name of the model, side by side with requests of the target."""
    target, tokenizer, _ = folders
    adapted = with_adapters(copy.deepcopy(target))
    adapted.save_pretrained(tmp_path)

    def work(client):
        assert [one.id for one in client.api.models.list()] == [client.model, "a", "b"]
        names, answers = ["a", client.model, "b"] * 2, {}

        def ask(number):
            messages = [{"role": "user", "content": tokenizer.decode([5, 6, 7])}]
            options = {"max_tokens": 12, "stream": number == 0}
            answer = client.api.chat.completions.create(model=names[number], messages=messages, **options)
            answers[number] = streamed(answer)[0][0] if number == 0 else content(answer)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(names))]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        with adapted.disable_adapter():
            expected = {client.model: client.alone([5, 6, 7], 12)}
        for name in ("a", "b"):
            adapted.set_adapter(name)
            out = adapted.generate(input_ids=torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=12)
            expected[name] = tokenizer.decode(out[0, 3:], skip_special_tokens=True)
        assert len(set(expected.values())) == 3
        assert answers == {number: expected[name] for number, name in enumerate(names)}
        with pytest.raises(client.openai.BadRequestError, match="pinned"):
            client.api.chat.completions.create(model="c", messages=[{"role": "user", "content": "a"}])

    served(monkeypatch, folders, work, "--adapter", f"a={tmp_path / 'a'}", "--adapter", f"b={tmp_path / 'b'}")


@needs_server
def test_what_cannot_be_served(monkeypatch, folders, capsys):
    folder = folders[2]
    begin = ["serve", str(folder / "target"), "--device", "cpu"]
    for options, words in (
        (["--drafter", str(folder / "none")], "none"),
        (["--no-continuous-batching"], "and the option --continuous-batching"),
        (["-k", "0"], "num_assistant_tokens is 0"),
        (["--tree", "x"], "tree is 'x'; expected an int of 0"),
        (["-k", "3"], "--num-assistant-tokens and --tree have no effect without a drafter; pass --drafter, too"),
        (["--tree", "31"], "have no effect without a drafter"),
        (["--max-queue-size", "-1"], "--max-queue-size is -1; expected at least 0"),
        (["--longest", "-5"], "--longest is -5; expected at least 2"),
        (["--max-requests", "0"], "--max-requests is 0; expected at least 1"),
        (["--max-length", "1"], "--max-length is 1; expected at least 2"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout is -1; expected at least 0"),
        (["--adapter", "a"], "--adapter is a; expected NAME=FOLDER"),
        (["--adapter", "a=b", "--adapter", "a=c"], "expected NAME=FOLDER with names that differ"),
    ):
        assert cli.main([*begin, *options]) == 1
        assert words in capsys.readouterr().err
    from transformers.cli.serving import utils

    assert utils.CBGenerateManager.__module__ == "transformers.cli.serving.utils"
    monkeypatch.delattr(utils, "set_torch_seed")
    assert cli.main(begin) == 1
    assert "has no set_torch_seed, through which" in capsys.readouterr().err


def content(answer, number=0):
    return answer.choices[number].message.content


def streamed(chunks):
    """Texts of all choices, by index, and the reasons why they ended."""
    texts, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    return texts, reasons


@needs_server
def test_settings_of_openai_and_of_vllm(monkeypatch, folders):
    """Each changes the answer as it does that of plain `generate()`."""
    prompt, new = [5, 6, 7], 12

    def work(client):
        plain = client.alone(prompt, new)
        first = client.target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=1)[0, -1]
        bias = {str(int(first)): -100, "9": 4.5}
        penalties = LogitsProcessorList([PenaltyLogitsProcessor(len(prompt), 1.5, 0.7)])
        for options, expected in (
            ({"extra_body": {"repetition_penalty": 1.7}}, {"repetition_penalty": 1.7}),
            ({"logit_bias": bias}, {"sequence_bias": [[[int(token)], float(one)] for token, one in bias.items()]}),
            ({"presence_penalty": 1.5, "frequency_penalty": 0.7}, {"logits_processor": penalties}),
            ({"extra_body": {"generation_config": '{"no_repeat_ngram_size": 1}'}}, {"no_repeat_ngram_size": 1}),
        ):
            changed = client.alone(prompt, new, **expected)
            for stream in (False, True):
                answer = client.ask(prompt, max_tokens=new, stream=stream, temperature=0.0, **options)
                text = streamed(answer)[0][0] if stream else content(answer)
                assert text == changed != plain, options
        for options in ({"n": 1}, {"tool_choice": "none"}, {"user": "me"}, {"response_format": {"type": "text"}}):
            assert content(client.ask(prompt, max_tokens=new, **options)) == plain
        sampled = {"seed": 4, "temperature": 1.2, "max_tokens": new}
        bodies = ({}, {"top_k": 1}, {"min_p": 1.0}, {"top_k": 0, "min_p": 0.0})
        with_sampling = json.dumps({"do_sample": True, "max_new_tokens": new})
        texts = [
            content(client.ask(prompt, **sampled, extra_body={"generation_config": with_sampling, **body}))
            for body in bodies
        ]
        assert texts[1] == texts[2] == plain != texts[0]

    served(monkeypatch, folders, work, "-k", "2")


@needs_server
def test_ends_of_answers(monkeypatch, folders, tmp_path):
    """Stop strings are no part of an answer, also where they come in parts; `min_tokens` and `ignore_eos`."""
    target, tokenizer, _ = folders
    prompt, new = [5, 6, 7], 24
    said = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new)[0, len(prompt) :].tolist()
    end = said[6]
    ending = copy.deepcopy(target)
    ending.generation_config.eos_token_id = ending.generation_config.pad_token_id = end
    ending.generation_config.stop_strings = ["nowhere"]  # which the model's own settings have
    ending.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")

    def work(client):
        whole = tokenizer.decode(said)
        other = next(one for one in map("".join, itertools.product("abcdef", repeat=3)) if one not in whole)
        for stop in (whole[5:9], [whole[12:15], whole[9:11]], [whole[3:5], other], [other]):
            stops = [stop] if isinstance(stop, str) else stop
            place = min((whole.find(one) for one in stops if one in whole), default=-1)
            expected = whole if place < 0 else whole[:place]
            options = {"max_tokens": new, "stop": stop, "extra_body": {"ignore_eos": True}}
            answer = client.ask(prompt, **options)
            texts, reasons = streamed(client.ask(prompt, stream=True, **options))
            assert content(answer) == texts[0] == expected
            assert answer.choices[0].finish_reason == reasons[0] == ("length" if place < 0 else "stop")
        until_end = said[: said.index(end) + 1]
        answer = client.ask(prompt, max_tokens=new)
        assert content(answer) == tokenizer.decode(until_end) and answer.choices[0].finish_reason == "stop"
        answer = client.ask(prompt, max_tokens=new, extra_body={"ignore_eos": True})
        assert content(answer) == whole and answer.choices[0].finish_reason == "length"
        answer = client.ask(prompt, max_tokens=new, extra_body={"min_tokens": 12})
        options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": 12, "tokenizer": tokenizer}
        expected = ending.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert content(answer) == tokenizer.decode(expected) and answer.usage.completion_tokens == len(expected) > 7

    served(monkeypatch, (target, tokenizer, tmp_path), work, drafter=None)


@needs_server
def test_characters_of_several_tokens(monkeypatch, folders, tmp_path):
    """Streams have all of an answer that ends inside of one, and nothing of a stop string with which one begins; a stop
    string ends them also where the last token has brought it."""
    target, *_ = folders
    words = [bytes([97 + one]) for one in range(16)]
    for one in range(40):
        words += [bytes([65 + one, 0xC3]), bytes([0x80 + one, 65 + one])]
    names = ["".join(map(bytes_to_unicode().get, word)) for word in words]
    byte_level = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges=[]))
    byte_level.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, chat_template=TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "target")
    target.save_pretrained(tmp_path / "target")
    ends = set()

    def work(client):
        def check(prompt, new, expected, reason, **options):
            answer = client.ask(prompt, max_tokens=new, **options)
            texts, reasons = streamed(client.ask(prompt, max_tokens=new, stream=True, **options))
            assert content(answer) == texts.get(0, "") == expected, (prompt, new, options)
            assert answer.choices[0].finish_reason == reasons[0] == reason, (prompt, new, options)

        checks = []
        for prompt in ([5], [8, 9, 10]):
            for new in range(14, 21):
                whole = client.alone(prompt, new)
                checks.append(functools.partial(check, prompt, new, whole, "length"))
                ends.add(whole[-1] == "\ufffd")
            ids = torch.tensor([prompt])
            for stop in re.findall("[^ -~\ufffd]", whole)[:2] + re.findall("[^ -~\ufffd][ -~]", whole)[:2]:
                options = {"do_sample": False, "max_new_tokens": 20, "stop_strings": [stop], "tokenizer": tokenizer}
                last = target.generate(ids, **options).shape[1] - len(prompt)
                ends.add(stop)
                for new in {last, 20}:
                    text = whole[: whole.index(stop)]
                    checks.append(functools.partial(check, prompt, new, text, "stop", stop=stop))
        # Side by side they share rounds.
        with ThreadPoolExecutor(8) as pool:
            for one in [pool.submit(check) for check in checks]:
                one.result()

    random_eagle3(target).save_pretrained(tmp_path / "drafter")
    served(monkeypatch, (target, tokenizer, tmp_path), work, "-k", "3")
    assert ends >= {True, False} and len(ends) > 4


@needs_server
def test_several_answers(monkeypatch, folders):
    """Each has a seed of its own; one stream has all of them."""

    def work(client):
        settings = {"do_sample": True, "max_new_tokens": 9, "temperature": 1.5, "top_k": 0}
        body = {"generation_config": json.dumps(settings)}
        answer = client.ask([5, 6], n=3, seed=5, extra_body=body)
        texts = [content(answer, number) for number in range(3)]
        assert [one.index for one in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
        assert answer.usage.prompt_tokens == 2 and answer.usage.completion_tokens == 27
        found, reasons = streamed(chunks := list(client.ask([5, 6], n=3, seed=5, stream=True, extra_body=body)))
        assert [found[number] for number in range(3)] == texts and set(reasons.values()) == {"length"}
        usages = [one.usage for one in chunks if one.usage]
        assert len(usages) == 1 and usages[0].completion_tokens == 27

    served(monkeypatch, folders, work, "-k", "2")


def raw_logprobs(target, prompt, tokens):
    """Of `tokens` after `prompt`, by a plain forward pass."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        found = target(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    return found.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()


@needs_server
def test_logprobs(monkeypatch, folders, tmp_path):
    """Of chats and completions, streamed and not, under the target's softmax; as many as tokens that an answer shows,
    and one for the token that ends it."""
    target, tokenizer, folder = folders
    ending, prompt = copy.deepcopy(target), [8, 9, 10]
    tokens = ending.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, 3:].tolist()
    tokens = tokens[: tokens.index(end := tokens[12]) + 1]
    ending.generation_config.eos_token_id = end
    ending.save_pretrained(tmp_path / "target")
    special = copy.deepcopy(tokenizer)
    special.add_special_tokens({"eos_token": special.convert_ids_to_tokens(end)})
    special.save_pretrained(tmp_path / "target")
    expected = pytest.approx(raw_logprobs(target, prompt, tokens), abs=1e-4)

    def work(client):
        words = [client.tokenizer.decode([token]) for token in tokens]
        text = "".join(words[:-1])
        for options in ({}, {"temperature": 0.7}, {"n": 2}):  # greedy, by the target's configuration
            answer = client.ask(prompt, max_tokens=20, logprobs=True, top_logprobs=0, **options)
            for choice in answer.choices:
                found = choice.logprobs.content
                assert [one.token for one in found] == words and [one.logprob for one in found] == expected
                assert found[-1].bytes is None and not found[0].top_logprobs
                shown = b"".join(bytes(one.bytes or []) for one in found)
                assert shown.decode() == choice.message.content == text
            parts = {}
            for chunk in client.ask(prompt, max_tokens=20, logprobs=True, stream=True, **options):
                for choice in chunk.choices:
                    entries = choice.logprobs.content if choice.logprobs else []
                    shown = "".join(one.token for one in entries if one.bytes)
                    assert shown == (choice.delta.content or "")
                    parts.setdefault(choice.index, []).extend(entries)
            assert len(parts) == options.get("n", 1)
            for found in parts.values():
                assert [one.token for one in found] == words and [one.logprob for one in found] == expected

        stop = words[len(words) // 2]  # none of the stop string, or after it
        before = sum(len("".join(words[:number])) < text.index(stop) for number in range(len(words)))
        assert 0 < before < len(words) - 1
        options = {"max_tokens": 20, "logprobs": True, "stop": [stop]}
        assert len(client.ask(prompt, **options).choices[0].logprobs.content) == before
        chunks = [one.choices[0] for one in client.ask(prompt, stream=True, **options)]
        assert sum(len(one.logprobs.content) for one in chunks if one.logprobs) == before

        completion = {"model": client.model, "prompt": client.tokenizer.decode(prompt), "max_tokens": 20, "logprobs": 0}
        found = client.api.completions.create(**completion).choices[0].logprobs
        assert found.tokens == words and found.token_logprobs == expected
        assert found.text_offset == [len("".join(words[:number])) for number in range(len(words))]
        parts = [one.choices[0].logprobs for one in client.api.completions.create(stream=True, **completion)]
        assert [value for one in parts for value in one.token_logprobs] == expected
        assert [token for one in parts for token in one.tokens] == words
        with pytest.raises(client.openai.BadRequestError, match="logprobs is 2; expected 0, for those of the gen"):
            client.api.completions.create(**completion | {"logprobs": 2})
        assert client.ask(prompt, max_tokens=20).choices[0].logprobs is None

    folder = tmp_path
    random_eagle3(ending).save_pretrained(folder / "drafter")
    served(monkeypatch, (ending, special, folder), work, "-k", "3")


def test_logprobs_of_characters_of_several_tokens():
    """What ends inside of a character adds no text; that which completes it all of it."""
    byte_level = Tokenizer(models.BPE({one: number for number, one in enumerate(["Ã", "©", "a", "</s>"])}, merges=[]))
    byte_level.decoder = decoders.ByteLevel()
    logprobs = AnswerLogprobs(())
    logprobs.tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="</s>")
    values = [-1.0, -2.0, -3.0, -math.inf]
    for count in (1, 2, 4):
        logprobs.read(SimpleNamespace(generated_tokens=[0, 1, 2, 3][:count], logprobs=values[:count]))
    answer = {"choices": [{"message": {"content": "éa"}, "finish_reason": "stop"}]}
    found = logprobs.added_to(answer)["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in found] == ["", "é", "a", "</s>"]
    assert [one["bytes"] for one in found] == [[], list("é".encode()), [97], None]
    assert [one["logprob"] for one in found] == [-1.0, -2.0, -3.0, -9999.0]


# What is malformed, or not there: a 400 that names it.
REFUSED = [
    ({"messages": None}, "messages is None; expected a list of messages"),
    ({"messages": []}, r"messages is \[\]; expected a list of messages"),
    ({"messages": "hello"}, "messages is 'hello'; expected a list of messages"),
    ({"messages": [{"content": "a"}]}, r"messages\[0\] is .*; expected an object with a role"),
    ({"messages": [{"role": "user", "content": 5}]}, r"content of messages\[0\] is 5; expected a string or text parts"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "expected parts of type text only"),
    ({"messages": [{"role": "user", "content": "a\ud800b"}]}, "a lone surrogate"),
    ({"max_tokens": "abc"}, "max_tokens is 'abc'; expected an int of at least 1"),
    ({"temperature": "hot"}, "temperature is 'hot'; expected a number of at least 0"),
    ({"top_p": 0}, "top_p is 0; expected a number above 0"),
    ({"seed": "x"}, "seed is 'x'; expected an integer of 64 bits"),
    ({"stop": [""]}, r"stop is \[''\]; expected a string or a list of strings"),
    ({"n": 0}, "n is 0; expected an int from 1"),
    ({"logprobs": 2}, "logprobs is 2; expected true or false"),
    ({"top_logprobs": 3}, "top_logprobs is 3, which this server does not have"),
    ({"response_format": {"type": "json_object"}}, "response_format is .*, which this server does not have"),
    ({"tool_choice": "required"}, "tool_choice is 'required', which this server cannot enforce"),
    ({"logit_bias": {"a": 1}}, "logit_bias is .*; expected an object of numbers"),
    ({"logit_bias": {"96": 1}}, "sequence_bias has the token 96; expected tokens from 0 to 95"),
    ({"generation_config": '{"bad_words_ids": [[5, 96]]}'}, "bad_words_ids has the token 96; expected tokens"),
    ({"generation_config": '{"forced_eos_token_id": [5, 400]}'}, "forced_eos_token_id has the token 400; expected"),
    ({"presence_penalty": 9}, "presence_penalty is 9; expected a number from -2 to 2"),
    ({"min_tokens": -1}, "min_tokens is -1; expected an int of at least 0"),
    ({"min_p": 2}, "min_p is 2; expected a number from 0 to 1"),
    ({"top_k": 0.5}, "top_k is 0.5; expected an int"),
    ({"ignore_eos": "yes"}, "ignore_eos is 'yes'; expected true or false"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0; expected a number above 0"),
    ({"generation_config": "{"}, "generation_config is '{'; expected a string with a JSON object"),
    (
        {"generation_config": '{"max_new_tokens": -1}'},
        "generation_config is .*; .max_new_tokens. must be",
    ),
    ({"generation_config": '{"max_new_tokens": "x"}'}, "generation_config is .*; '<=' not supported"),
    ({"generation_config": '{"guidance_scale": 2.0}'}, "sets guidance_scale, which requests cannot have of their own"),
    ({"generation_config": '{"num_beams": 4}'}, "sets num_beams, which requests cannot have of their own"),
    ({"nonsense": 1}, "Unexpected fields in the request: {'nonsense'}"),
    ({"messages": [{"role": "user", "content": "a" * 300}]}, "The prompt has 300 tokens, but texts have at most 256"),
    ({"max_tokens": 300}, "the answer may have 300, but texts have at most 256"),
]


REFUSED_RESPONSES = [
    ({"input": ["fg"]}, r"input is \['fg'\]; expected a string or a list of items of text"),
    ({"input": [{"x": 1}]}, "input is .*; expected a string or a list of items of text"),
    ({"input": [{"role": "user", "content": [{"text": "fg"}]}]}, "input is .*; expected a string or a list of items"),
    ({"n": 2}, "n is 2; expected no n, which responses do not have"),
    ({"logprobs": True}, "logprobs is True; expected no logprobs"),
]


@needs_server
def test_what_is_wrong_is_said_with_400(monkeypatch, folders):
    """As JSON, also where the body is none; other requests go on."""
    import urllib.error
    import urllib.request

    def post(port, data, path="chat/completions"):
        request = urllib.request.Request(
            f"http://localhost:{port}/v1/{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def work(client):
        right = {"model": client.model, "messages": [{"role": "user", "content": "fg"}]}
        for wrong, words in REFUSED:
            for stream in (False, True):
                body = {**right, **wrong, "stream": stream}
                body = {name: value for name, value in body.items() if value is not None}
                status, answer = post(client.port, json.dumps(body).encode())
                assert status == 400 and re.search(words, answer["error"]["message"]), (wrong, status, answer)
        for wrong, words in REFUSED_RESPONSES:
            body = {"model": client.model, "input": "fg", "stream": False, **wrong}
            status, answer = post(client.port, json.dumps(body).encode(), "responses")
            assert status == 400 and re.search(words, answer["error"]["message"]), (wrong, status, answer)
        for data in (b"{", b"[]", b'"x"', b"", b"\xff"):
            status, answer = post(client.port, data)
            assert status == 400 and answer["error"]["type"] == "invalid_request_error", (data, status, answer)
        assert content(client.ask([5, 6], max_tokens=5)) == client.alone([5, 6], 5)
        # Without a length answers go on as far as texts do.
        answer = client.ask([5, 6])
        assert answer.choices[0].finish_reason == "length" and answer.usage.total_tokens == 256

    served(monkeypatch, folders, work, "-k", "2")


@needs_server
def test_positions_that_run_out_end_an_answer(monkeypatch, folders, tmp_path):
    """With learned positions there are no more; it is an answer all the same."""
    _, tokenizer, _ = folders
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=None)
    target = GPT2LMHeadModel(config).eval()
    target.generation_config.eos_token_id = None
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")

    def work(client):
        for options in ({}, {"max_tokens": 500}, {"max_tokens": 38}):
            for stream in (False, True):
                answer = client.ask([5, 6, 7], stream=stream, **options)
                if stream:
                    (text,), (reason,) = (one.values() for one in streamed(answer))
                else:
                    text, reason = content(answer), answer.choices[0].finish_reason
                assert text == client.alone([5, 6, 7], 38) and reason == "length"
        with pytest.raises(client.openai.BadRequestError, match="The prompt has 41 tokens, but texts have at most 41"):
            client.ask([5] * 41)

    served(monkeypatch, (target, tokenizer, tmp_path), work, drafter=None)


@needs_server
def test_default_seed_is_none_of_every_request(monkeypatch, folders):
    """Requests without a seed differ from each other, and repeat with the server."""
    texts = []

    def work(client):
        settings = {"do_sample": True, "max_new_tokens": 12, "temperature": 2.0, "top_k": 0}
        body = {"generation_config": json.dumps(settings)}
        texts.append([content(client.ask([5, 6], extra_body=body)) for _ in range(4)])

    for _ in range(2):
        served(monkeypatch, folders, work, "-k", "2", "--default-seed", "7")
    assert texts[0] == texts[1] and len(set(texts[0])) == 4


@needs_server
def test_many_clients_some_of_which_leave(monkeypatch, folders):
    """32 at once; then the server's metrics."""
    import urllib.request

    def work(client):
        answers, errors = {}, []

        def ask(number):
            try:
                prompt, new = [5 + number % 7, 3, 1 + number % 11], 5 + number // 2
                if number % 4 == 3:  # leaves in the middle
                    with client.ask(prompt, max_tokens=200, stream=True) as stream:
                        next(chunk for chunk in stream if chunk.choices[0].delta.content)
                    return
                options = ({}, {"extra_body": {"repetition_penalty": 1.5}})[number % 2]
                expected = ({}, {"repetition_penalty": 1.5})[number % 2]
                answer = client.ask(prompt, max_tokens=new, stream=number % 3 == 0, **options)
                text = streamed(answer)[0][0] if number % 3 == 0 else content(answer)
                answers[number] = text, prompt, new, expected
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert not errors and len(answers) == 24
        for text, prompt, new, expected in answers.values():
            assert text == client.alone(prompt, new, **expected)
        text = urllib.request.urlopen(f"http://localhost:{client.port}/metrics").read().decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(values['hf_specdec_requests_total{outcome="finished"}']) == 24
        # Those that have left may be over by now.
        assert float(values["hf_specdec_time_to_first_token_seconds_count"]) >= 24
        assert float(values["hf_specdec_generated_tokens_total"]) >= sum(new for _, _, new, _ in answers.values())
        drafted, accepted = (float(values[f"hf_specdec_{name}_tokens_total"]) for name in ("drafted", "accepted"))
        assert 0 <= accepted <= drafted and drafted > 0
        assert {"hf_specdec_requests_running", "hf_specdec_requests_waiting"} <= values.keys()

    served(monkeypatch, folders, work, "-k", "2", "--max-requests", "8")


@needs_server
def test_sigterm_ends_streams(folders, tmp_path):
    """In time, while clients read answers that would go on for long, and a long prompt is prefilled."""
    import openai

    with socket.socket() as place:
        place.bind(("localhost", 0))
        port = place.getsockname()[1]
    folder, tokenizer = folders[2], folders[1]
    command = [sys.executable, "-m", "hf_specdec.cli", "serve", str(folder / "target"), "--port", str(port)]
    options = ["--device", "cpu", "--dtype", "float32", "--max-length", "60000", "--shutdown-timeout", "1"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, cwd=Path(__file__).parents[2])
    try:
        api = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=60)
        deadline = time.perf_counter() + 120
        while True:
            try:
                with socket.create_connection(("localhost", port), timeout=1):
                    break
            except OSError:
                assert process.poll() is None and time.perf_counter() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
        messages = [{"role": "user", "content": tokenizer.decode([5, 6, 7])}]
        ask = functools.partial(api.chat.completions.create, model=str(folder / "target"), stream=True)
        streams = [iter(ask(messages=messages, max_tokens=50_000)) for _ in range(3)]
        for one in streams:
            next(chunk for chunk in one if chunk.choices[0].delta.content)
        long = [{"role": "user", "content": tokenizer.decode([5] * 40_000)}]
        streams.append(iter(ask(messages=long, max_tokens=5)))
        process.send_signal(signal.SIGTERM)
        begin = time.perf_counter()
        assert process.wait(timeout=30) is not None
        assert time.perf_counter() - begin < 20
        for one in streams:
            with contextlib.suppress(Exception):
                list(one)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("arguments", [["/nonexistent"], ["OWNER/NAME", "--drafter", "./nonexistent"]])
def test_folders_that_do_not_exist(arguments, capsys):
    assert cli.main(["serve", *arguments]) == 1
    assert f"hf-specdec: {arguments[-1]} is not a folder; expected one, or a repository" in capsys.readouterr().err


@pytest.mark.core
def test_dependencies_of_the_server(monkeypatch, capsys):
    monkeypatch.setattr(serve.serving_parts, "is_serve_available", lambda: False)
    assert cli.main(["serve", "somewhere"]) == 1
    assert "pip install 'transformers[serving]'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["inspect", "somewhere", "--port", "1"])
    assert "unrecognized arguments: --port 1" in capsys.readouterr().err
