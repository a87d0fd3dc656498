"""`hf-specdec serve`: transformers' server with a drafter, asked over HTTP."""

import gc
import socket
import threading
import time

import pytest
import torch
from oracle import random_eagle3
from targets import build_target
from transformers.utils.import_utils import is_serve_available
from word_tokenizer import word_tokenizer

from hf_specdec import cli, serve
from hf_specdec.engine.rounds import RoundLoop
from hf_specdec.integration.manager import SpeculativeBatchingManager

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


def served(monkeypatch, folders, work, *options):
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

    monkeypatch.setattr(uvicorn.Server, "run", beside)
    monkeypatch.setattr(SpeculativeBatchingManager, "__init__", noted)
    folder = folders[2]
    arguments = ["serve", str(folder / "target"), "--drafter", str(folder / "drafter"), "--port", str(port)]
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
            chunks = list(client.ask([5, 6, number], max_tokens=30, stream=True))
            answers[number] = "".join(one.choices[0].delta.content or "" for one in chunks)

        threads = [threading.Thread(target=stream, args=(number,)) for number in range(4, 16)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert answers == {number: client.alone([5, 6, number], 30) for number in range(4, 16)}
        assert gc.get_freeze_count() > 0
        whole = client.target.generate(torch.tensor([[5, 6, 7]]), do_sample=False, max_new_tokens=30)[0, 3:]
        word = client.tokenizer.decode(whole[8:9])
        stopped = client.ask([5, 6, 7], max_tokens=30, stop=[word]).choices[0].message.content
        assert stopped == client.alone([5, 6, 7], 30, stop_strings=[word]) and len(stopped) < len(
            client.alone([5, 6, 7], 30)
        )

    (manager,) = served(monkeypatch, folders, work)
    assert gc.get_freeze_count() == 0
    assert type(manager.drafter).__name__ == "Eagle3Drafter" and manager.drafter.stats.accepted >= 0


@needs_server
def test_requests_have_their_own_settings(monkeypatch, folders):
    """Also those that come after one with others."""
    import json

    def work(client):
        sampled = json.dumps({"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 12})
        texts = [
            client.ask([5, 6], seed=seed, extra_body={"generation_config": sampled}).choices[0].message.content
            for seed in (1, 1, 2)
        ]
        assert texts[0] == texts[1] != texts[2]
        greedy = client.ask([5, 6], max_tokens=12, temperature=0.0).choices[0].message.content
        assert greedy == client.alone([5, 6], 12)

    served(monkeypatch, folders, work, "-k", "3")


@needs_server
def test_errors_are_those_of_their_clients(monkeypatch, folders):
    """A bad parameter, a request in use, a full queue; another request goes on meanwhile."""

    def work(client):
        openai = client.openai
        going_on = client.ask([9, 9, 9], max_tokens=150, stream=True, extra_headers={"X-Request-ID": "mine"})
        first = next(one for one in going_on if one.choices[0].delta.content)
        for options, words in (
            ({"temperature": -0.5}, "temperature is -0.5; expected a number of at least 0"),
            ({"frequency_penalty": 0.5}, "sets repetition_penalty, which requests cannot have of their own"),
            ({"max_tokens": 0}, "max_new_tokens is 0; expected an int of at least 1"),
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

    served(monkeypatch, folders, work)


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

    served(monkeypatch, folders, work, "--max-requests", "1", "--max-queue-size", "1")


@needs_server
def test_a_round_that_fails(monkeypatch, folders):
    """Everybody who waits gets the error, and who comes later, too; so does who asks for the server's health."""
    import urllib.error
    import urllib.request

    def fail(self):
        raise ZeroDivisionError("a round fails, in a test")

    def work(client):
        monkeypatch.setattr(RoundLoop, "_launch", fail)
        for _ in range(2):
            with pytest.raises(client.openai.InternalServerError) as refused:
                client.ask([5, 6], max_tokens=5)
            assert refused.value.status_code == 503 and "a round fails, in a test" in refused.value.response.text
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://localhost:{client.port}/health")

    served(monkeypatch, folders, work)


@needs_server
def test_without_drafter(monkeypatch, folders):
    main, arguments = cli.main, []

    def work(client):
        assert client.ask([5, 6], max_tokens=9).choices[0].message.content == client.alone([5, 6], 9)

    def without(argv):
        place = argv.index("--drafter")
        arguments.append(argv)
        return main([*argv[:place], *argv[place + 2 :]])

    monkeypatch.setattr(cli, "main", without)
    (manager,) = served(monkeypatch, folders, work)
    assert type(manager.drafter).__name__ == "NoDrafter"


@needs_server
def test_what_cannot_be_served(monkeypatch, folders, capsys):
    folder = folders[2]
    begin = ["serve", str(folder / "target"), "--device", "cpu"]
    for options, words in (
        (["--drafter", str(folder / "none")], "none"),
        (["--no-continuous-batching"], "and the option --continuous-batching"),
        (["-k", "0"], "num_assistant_tokens is 0"),
    ):
        assert cli.main([*begin, *options]) == 1
        assert words in capsys.readouterr().err
    from transformers.cli.serving import utils

    assert utils.CBGenerateManager.__module__ == "transformers.cli.serving.utils"
    monkeypatch.delattr(utils, "set_torch_seed")
    assert cli.main(begin) == 1
    assert "has no set_torch_seed, through which" in capsys.readouterr().err


@pytest.mark.core
def test_dependencies_of_the_server(monkeypatch, capsys):
    monkeypatch.setattr(serve.serving_parts, "is_serve_available", lambda: False)
    assert cli.main(["serve", "somewhere"]) == 1
    assert "pip install 'transformers[serving]'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["inspect", "somewhere", "--port", "1"])
    assert "unrecognized arguments: --port 1" in capsys.readouterr().err
