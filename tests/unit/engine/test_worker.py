"""The bridge to the step thread: clients who do not read are cut, a failed step is told."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.core.generation_thread import Worker
from nodeagent.engine.core.step import Delta, Engine, Generation, Stepped
from nodeagent.engine.core.token_rates import StepRates
from nodeagent.engine.kvcache.blocks import Blocks
from nodeagent.engine.sampling.sampler import SamplingParams
from nodeagent.engine.scheduler.batching import Batching, Limits
from nodeagent.engine.scheduler.sequence import Ending
from nodeagent.engine.server.generations import Asked, Clients
from nodeagent.engine.server.inflight_limit import Entrance
from nodeagent.engine.server.request_body import Ask
from tests.unit.engine.test_text import VOCABULARY

ASK = Ask(SamplingParams(), 4, (), frozenset(), False, True, False)


class Outbox:
    """Notes what would go to the step thread."""

    def __init__(self) -> None:
        self.submitted: list[Generation] = []
        self.cancelled: list[int] = []

    def submit(self, generation: Generation) -> None:
        self.submitted.append(generation)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


def open_one(clients: Clients, outbox: Any, aborted: list[int]) -> Any:
    ending = Ending(4, frozenset())
    return clients.open(outbox, Asked(ASK, [([1, 2], ending)]), lambda: aborted.append(1))


async def test_who_does_not_read_is_cut_and_cancelled() -> None:
    entrance = Entrance(2)
    clients = Clients(VOCABULARY, entrance, queue_max=3)
    outbox = Outbox()
    aborted: list[int] = []
    client = open_one(clients, outbox, aborted)
    (number,) = client.numbers
    clients.publish([Delta(number, "x", None, 1, 0)] * 3)
    await turn()
    assert not aborted
    clients.publish([Delta(number, "x", None, 1, 0)])
    await turn()
    clients.publish([Delta(number, "x", None, 1, 0)] * 2)
    await turn()
    assert (aborted, clients.cut_total) == ([1], 1), "it is cut once, however much follows"
    assert client.deltas.qsize() == 3
    clients.close(outbox, client)  # type: ignore[arg-type]
    assert outbox.cancelled == [number]
    assert await entrance.wait_empty(1)


async def turn() -> None:
    """Let the event loop run what is due."""
    due = asyncio.Event()
    asyncio.get_running_loop().call_soon(due.set)
    await due.wait()


async def test_one_more_than_the_limit_is_refused_and_so_is_all_while_draining() -> None:
    entrance = Entrance(1)
    clients = Clients(VOCABULARY, entrance, queue_max=3)
    outbox = Outbox()
    open_one(clients, outbox, [])
    with pytest.raises(ApiError) as full:
        open_one(clients, outbox, [])
    assert full.value.code is ErrorCode.OUT_OF_CAPACITY
    entrance.draining = True
    with pytest.raises(ApiError) as draining:
        entrance.admit()
    assert draining.value.code is ErrorCode.UNAVAILABLE


async def test_several_answers_are_one_client_and_go_together() -> None:
    entrance = Entrance(4)
    clients = Clients(VOCABULARY, entrance, queue_max=1)
    outbox = Outbox()
    ask = replace(ASK, params=SamplingParams(seed=5), choices=2)
    ending = Ending(4, frozenset())
    client = clients.open(
        outbox,  # type: ignore[arg-type]
        Asked(ask, [([1, 2], ending), ([3], ending)]),
        lambda: None,
    )
    everyone = [one for first in outbox.submitted for one in (first, *first.followers)]
    assert [len(first.followers) for first in outbox.submitted] == [1, 1]
    assert [one.sequence.tokens for one in everyone] == [[1, 2], [1, 2], [3], [3]]
    assert [one.sampler.params.seed for one in everyone] == [5, 6, 7, 8]
    assert [one.choice for one in everyone] == [0, 1, 2, 3]
    assert (client.prompt_tokens, entrance.open) == (3, 4)
    with pytest.raises(ApiError, match="cannot queue 1 more: 4 are"):
        entrance.admit()
    clients.publish([Delta(number, "x", None, 1, 0) for number in client.numbers])
    await turn()
    assert client.deltas.qsize() == 4
    clients.close(outbox, client)  # type: ignore[arg-type]
    assert outbox.cancelled == [one.number for one in everyone]
    assert entrance.open == 0


def test_a_failed_step_is_told_and_ends_the_thread() -> None:
    class Broken:
        def begin(self, batch: object) -> None:
            raise RuntimeError("the device is gone")

    died = threading.Event()
    engine = Engine(Broken(), Batching(Limits(8, 2), Blocks(4)))  # type: ignore[arg-type]
    worker = Worker(engine, lambda deltas: None, died.set)
    worker.start()
    clients_less = Outbox()
    asyncio.run(_submit(worker, clients_less))
    assert died.wait(5)
    assert worker.died
    assert worker.stop(5)


class Files:
    """Files that hold of every prompt something, and are read when the test says so."""

    files = True

    def __init__(self) -> None:
        self.then: list[Any] = []

    def missing(self, chain: object, remembers: object) -> list[bytes]:
        return [b"digest"]

    def read_ahead(self, digests: list[bytes], then: Any) -> bool:
        self.then.append(then)
        return True


async def test_an_idle_engine_is_not_stalled_once_a_prompt_is_read_from_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("nodeagent.engine.core.step_thread.time", clock)
    mover, runner = Files(), object()
    engine = Engine(runner, Batching(Limits(8, 2), Blocks(4)), mover)  # type: ignore[arg-type]
    worker = Worker(engine, lambda deltas: None, lambda: None)
    now_s[0] = 3600.0
    await _submit(worker, Outbox())
    assert (worker.has_work(), worker.idle_s()) == (True, 0.0)
    now_s[0] += 10.0
    assert worker.idle_s() == 10.0, "a file that cannot be read is an outage like any"
    mover.then[0]([b"digest"], None)
    assert (worker.has_work(), worker.idle_s()) == (True, 10.0), "read, and not begun"


async def test_one_that_is_given_up_as_its_blocks_have_been_read_is_not_begun_after() -> None:
    mover, runner = Files(), object()
    engine = Engine(runner, Batching(Limits(8, 2), Blocks(4)), mover)  # type: ignore[arg-type]
    worker = Worker(engine, lambda deltas: None, lambda: None)
    await _submit(worker, Outbox())
    gives_up = threading.Thread(target=worker.cancel, args=(1,))
    send = worker._send

    def meanwhile(message: Any) -> None:
        if not gives_up.is_alive() and message != 1:
            gives_up.start()
            gives_up.join(0.2)
        send(message)

    worker._send = meanwhile  # type: ignore[method-assign]
    mover.then[0]([b"digest"], None)
    gives_up.join()
    assert worker._inbox[-1] == 1


async def test_nobody_waits_while_blocks_are_taken_in() -> None:
    mover, runner = Files(), object()
    engine = Engine(runner, Batching(Limits(8, 2), Blocks(4)), mover)  # type: ignore[arg-type]
    worker = Worker(engine, lambda deltas: None, lambda: None)
    takes, may_go_on = threading.Event(), threading.Event()

    def take_in(digests: list[bytes], contents: object) -> None:
        takes.set()
        assert may_go_on.wait(5)

    mover.take_in = take_in  # type: ignore[attr-defined]
    engine.submit = lambda generation: None  # type: ignore[method-assign]
    worker.start()
    await _submit(worker, Outbox())
    mover.then[0]([b"digest"], object())
    assert takes.wait(5)
    other = threading.Thread(target=worker.cancel, args=(2,))
    other.start()
    other.join(1.0)
    waits = other.is_alive()
    may_go_on.set()
    assert not waits
    assert worker.stop(5)


async def _submit(worker: Worker, outbox: Outbox) -> None:
    clients = Clients(VOCABULARY, Entrance(1), queue_max=3)
    open_one(clients, outbox, [])
    worker.submit(outbox.submitted[0])


def test_rates_count_only_the_steps_they_dominate() -> None:
    rates = StepRates()
    # The first of each kind is cold: it would make a replica just come up seem slow for long.
    rates.note(Stepped([], 100, 0, 100), 5.0, 1.0)
    rates.note(Stepped([], 0, 8, 11), 2.0, 1.0)
    assert (rates.prefill.per_s, rates.decode.per_s) == (0.0, 0.0)
    rates.note(Stepped([], 100, 0, 100), 1.0, 1.0)
    rates.note(Stepped([], 100, 90), 9.0, 1.0)
    rates.note(Stepped([], 0, 8, 11), 0.5, 1.0)
    assert rates.prefill.per_s == 100.0
    assert rates.decode.per_s == 16.0
    assert (rates.steps, rates.seconds, rates.rows) == (5, 17.5, 222)


def test_who_is_thought_slow_is_as_fast_as_its_like_once_nobody_asks_it() -> None:
    rates = StepRates()
    for _ in range(20):
        rates.note(Stepped([], 100, 0, 100), 100.0, now_s=1.0)
    assert rates.prefill.per_s == 1.0
    later_s = 1.0
    while rates.are_known(later_s):
        later_s += 10.0
        # An agent asks an idle engine for a token, which measures nothing.
        rates.note(Stepped([], 8, 0, 8), 0.1, later_s)
    rates.note(Stepped([], 100, 0, 100), 0.1, later_s)
    assert rates.are_known(later_s)
    assert rates.prefill.per_s == 1000.0, "the next step shows how fast it is"
