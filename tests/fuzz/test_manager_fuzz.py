"""Managers under random load: every text is that of `generate()` alone, or its beginning if the request ended early.

Requests of random lengths, settings and processors arrive at random times; some are cancelled, the manager is paused,
the target is used meanwhile, and memory fails. By default it takes 12 seconds; for longer:

    python -m pytest tests/fuzz --fuzz-seconds 300 [--fuzz-seed 7] -s
"""

import functools
import random
import time

import pytest
import torch
from oracle import RANDOM_DRAFTERS, copy_of
from processor_settings import SETTINGS
from targets import tiny_target
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestStatus
from word_tokenizer import word_tokenizer

from hf_specdec import NoDrafter
from hf_specdec.engine import session_prefill
from hf_specdec.engine.continuous import ContinuousRunner
from hf_specdec.graphs import buckets
from hf_specdec.serving import manager_thread

END = [7, 23, 57]
# Requests of one manager.
MOST_REQUESTS = 200
# Of targets: dense, recurrent, and one with MTP modules.
TARGETS = {
    "dense": ("llama", functools.partial(copy_of, noise=0.01)),
    "recurrent": ("qwen3-next", RANDOM_DRAFTERS["eagle3"]),
    "mtp": ("deepseek-v3", RANDOM_DRAFTERS["mtp"]),
}


@functools.cache
def tokenizer():
    return word_tokenizer()


class Faults:
    """Lets memory fail now and then: rows do not get it, and larger sessions cannot be opened."""

    def __init__(self, chance, rng):
        self.chance, self.rng, self.count = chance, rng, 0
        self._reserve, self._open = ContinuousRunner.reserve, ContinuousRunner._open

    def fails(self):
        failed = self.rng.random() < self.chance
        self.count += failed
        return failed

    def install(self, patch):
        def reserve(run, lengths):
            return not self.fails() and self._reserve(run, lengths)

        def open_session(run, num_rows, longest, rows):
            if hasattr(run, "lease") and self.fails():
                raise torch.OutOfMemoryError("out of memory, in a test")
            return self._open(run, num_rows, longest, rows)

        patch.setattr(ContinuousRunner, "reserve", reserve)
        patch.setattr(ContinuousRunner, "_open", open_session)


class Session:
    """A manager and what is asked of it.

    Args:
        target, drafter: of the manager.
        rng: draws everything.
        patch: of the test.
    """

    def __init__(self, target, drafter, rng, patch):
        self.target, self.drafter, self.rng = target, drafter, rng
        self.per_request = rng.random() < 0.8
        self.samples = not self.per_request and rng.random() < 0.3
        # The settings of a manager hold for all of its requests.
        self.options = {}
        own = {} if rng.random() < 0.6 else self.draw_settings()
        self.options = {"max_new_tokens": 12, "do_sample": self.samples, "eos_token_id": END, **own}
        if self.samples:
            self.options |= {"temperature": 1.1, "top_k": 20}
        self.asked, self.cancelled = {}, set()
        self.faults = Faults(rng.choice([0.0, 0.0, 0.02, 0.2]), random.Random(rng.random()))
        self.faults.install(patch)
        chunk = rng.choice([2048, 16, 5])
        patch.setattr(buckets, "PACKED_TOKENS", (chunk,))
        patch.setattr(session_prefill, "EAGER_COLUMNS", chunk)
        patch.setattr(manager_thread, "LINGER", rng.choice([0.0, 0.02, 1.0]))
        patch.setattr(buckets, "ROWS_TO_FEWER", rng.randint(2, 4))
        config = {"max_requests_per_batch": rng.randint(1, 9), "per_request_processors": self.per_request}
        config["allow_block_sharing"] = rng.random() < 0.8
        drafter.num_assistant_tokens = rng.choice([1, 2, 3])
        drafter.draft_probs = rng.random() < 0.5
        self.manager = target.init_continuous_batching(
            None, ContinuousBatchingConfig(**config), assistant_model=drafter, **self.options
        )
        self.beginnings = [[rng.randint(3, 90) for _ in range(rng.randint(0, 50))] for _ in range(3)]

    def draw_settings(self):
        names = self.rng.sample(sorted(SETTINGS), self.rng.choice([0, 1, 1, 2]))
        # An end that is forced and suppressed is refused by plain `generate()`.
        if "forced_eos_token_id" in {*names, *self.options}:
            names = [name for name in names if name != "suppress_tokens"]
        if "suppress_tokens" in self.options:
            names = [name for name in names if name != "forced_eos_token_id"]
        return {name: SETTINGS[name] for name in names}

    def add(self):
        rng = self.rng
        length = rng.choice([1, 2, rng.randint(1, 9), rng.randint(10, 60)])
        prompt = rng.choice(self.beginnings)[: rng.randint(0, 50)] + [rng.randint(3, 90) for _ in range(length)]
        new = rng.choice([1, 2, rng.randint(3, 16), rng.randint(17, 40)])
        options = {"max_new_tokens": new, "seed": rng.randint(0, 2**40)}
        options["eos_token_id"] = rng.choice([None, -1, [7], END])
        if self.per_request:
            options |= self.draw_settings()
            if rng.random() < 0.4:
                options |= {"do_sample": True, "temperature": rng.choice([0.3, 0.9, 1.4])}
                options |= {"top_k": rng.choice([0, 5, 40]), "top_p": rng.choice([0.7, 1.0])}
        if "exponential_decay_length_penalty" in self.options | options and options["eos_token_id"] == -1:
            options["eos_token_id"] = None  # it is about these tokens
        if rng.random() < 0.2:
            options |= {"stop_strings": [rng.choice("bcdef") + rng.choice("bcdef")], "tokenizer": tokenizer()}
        self.asked[self.manager.add_request(prompt, streaming=rng.random() < 0.3, **options)] = prompt, options

    def act(self):
        """Something at random."""
        action = self.rng.choices(["add", "burst", "wait", "cancel", "pause", "other"], [20, 3, 4, 2, 1, 1])[0]
        if action in ("add", "burst"):
            for _ in range(1 if action == "add" else self.rng.randint(2, 9)):
                self.add()
        elif action == "wait":
            time.sleep(self.rng.choice([0.001, 0.01, 0.05]))
        elif action == "cancel" and self.asked:
            name = self.rng.choice(sorted(self.asked))
            self.manager.cancel_request(name)
            self.cancelled.add(name)
        elif action == "pause":
            with self.manager.pause():
                self.target(torch.tensor([[5, 6, 7]]))
        elif action == "other":
            self.target.generate(torch.tensor([[5, 6]]), assistant_model=NoDrafter(self.target), max_new_tokens=3)

    def run(self, num_requests):
        """Ask for so many requests, and collect what they say."""
        self.manager.start()
        try:
            while len(self.asked) < num_requests:
                self.act()
            self.results = {name: list(self.manager.request_id_iter(name)) for name in self.asked}
        finally:
            self.manager.stop(timeout=120)
        assert not self.manager.is_running() and self.manager._queue.has_no_results

    def alone(self, prompt, options):
        """What `generate()` says, plain or, if it draws, with such a drafter."""
        seed, end = options["seed"], options["eos_token_id"]
        own = {name: value for name, value in options.items() if name not in ("seed", "eos_token_id")}
        own = {**self.options, **own, "eos_token_id": self.options["eos_token_id"] if end is None else end}
        if own["eos_token_id"] == -1:
            own["eos_token_id"] = None
        if own["do_sample"]:
            own |= {"assistant_model": self.drafter, "seeds": [seed]}
        inputs = torch.tensor([prompt])
        out = self.target.generate(inputs, attention_mask=torch.ones_like(inputs), **own)
        return out[0, len(prompt) :].tolist()

    def check(self):
        """Compare all that was said."""
        for name, (prompt, options) in self.asked.items():
            *parts, last = self.results[name]
            try:
                expected = self.alone(prompt, options)
            except RuntimeError as error:  # settings that leave no token, of which a request fails alone
                assert "none can be drawn" in str(error) and last.status == RequestStatus.FAILED, (prompt, options)
                continue
            for part in (*parts, last):
                said = part.generated_tokens
                assert said == expected[: len(said)], (prompt, options, said, expected)
            if last.error is None:
                assert last.status == RequestStatus.FINISHED and last.generated_tokens == expected, (prompt, options)
            else:
                has_failed = self.faults.count and "There is no memory" in last.error
                assert has_failed or (name in self.cancelled and "was cancelled" in last.error), last.error


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", TARGETS)
def test_managers(monkeypatch, request, kind):
    seconds = request.config.getoption("--fuzz-seconds") / len(TARGETS)
    seed = request.config.getoption("--fuzz-seed")
    seed = random.randrange(10**9) if seed is None else seed
    print(f"--fuzz-seed {seed}")
    family, drafter_of = TARGETS[kind]
    target, rng, compared, sessions = tiny_target(family), random.Random(seed), 0, 0
    begin, rate = time.perf_counter(), 2.0
    while (left := begin + seconds - time.perf_counter()) > 0:
        with monkeypatch.context() as patch:
            session = Session(target, drafter_of(target), rng, patch)
            session.run(min(max(int(rate * left / 2), 5), MOST_REQUESTS))
        session.check()
        compared, sessions = compared + len(session.asked), sessions + 1
        rate = compared / (time.perf_counter() - begin)
    print(f"{kind}: {compared} texts of {sessions} managers compared")
    assert compared
