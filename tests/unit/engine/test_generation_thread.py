"""The generation thread and its open requests: slow clients are cut, failed steps reported."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.core.generation import Generation, GenerationDelta, StepOutput
from nodeagent.engine.core.generation_thread import GenerationThread
from nodeagent.engine.core.kv_calls import KvCalls
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.core.token_rates import StepRates
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.sampling.sampler import SamplingParams
from nodeagent.engine.scheduler.batch import Batch, StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.sequence import StopConditions
from nodeagent.engine.server.inflight_limit import InflightLimit
from nodeagent.engine.server.open_requests import OpenRequests
from nodeagent.engine.server.openai.generation_options import GenerationOptions
from nodeagent.engine.server.prepared_request import PreparedRequest, TokenisedPrompt
from tests.unit.engine.byte_vocabulary import VOCABULARY
from tests.unit.engine.test_step import Script, generation

OPTIONS = GenerationOptions(SamplingParams(), 4, (), frozenset(), False, True, False)


class Outbox:
    """Records what would go to the step thread."""

    def __init__(self) -> None:
        self.submitted: list[Generation] = []
        self.cancelled: list[int] = []

    def submit(self, generation: Generation) -> None:
        self.submitted.append(generation)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


def open_one(clients: OpenRequests, outbox: Any, aborted: list[int]) -> Any:
    stop_conditions = StopConditions(4, frozenset())
    return clients.open(
        outbox,
        PreparedRequest(OPTIONS, [TokenisedPrompt([1, 2], stop_conditions)]),
        lambda: aborted.append(1),
    )


async def test_a_client_that_does_not_read_is_cut_and_cancelled() -> None:
    inflight = InflightLimit(2)
    clients = OpenRequests(VOCABULARY, inflight, queue_max=3)
    outbox = Outbox()
    aborted: list[int] = []
    client = open_one(clients, outbox, aborted)
    (number,) = client.numbers
    clients.publish([GenerationDelta(number, "x", None, 1, 0)] * 3)
    await run_event_loop()
    assert not aborted
    clients.publish([GenerationDelta(number, "x", None, 1, 0)])
    await run_event_loop()
    clients.publish([GenerationDelta(number, "x", None, 1, 0)] * 2)
    await run_event_loop()
    assert (aborted, clients.cut_total) == ([1], 1), "it is cut only once"
    assert client.deltas.qsize() == 3
    clients.close(outbox, client)  # type: ignore[arg-type]
    assert outbox.cancelled == [number]
    assert await inflight.wait_idle(1)


async def run_event_loop() -> None:
    """Let the event loop run its scheduled callbacks."""
    due = asyncio.Event()
    asyncio.get_running_loop().call_soon(due.set)
    await due.wait()


async def test_requests_above_the_limit_and_while_draining_are_refused() -> None:
    inflight = InflightLimit(1)
    clients = OpenRequests(VOCABULARY, inflight, queue_max=3)
    outbox = Outbox()
    open_one(clients, outbox, [])
    with pytest.raises(ApiError) as full:
        open_one(clients, outbox, [])
    assert full.value.code is ErrorCode.OUT_OF_CAPACITY
    inflight.draining = True
    with pytest.raises(ApiError) as draining:
        inflight.check()
    assert draining.value.code is ErrorCode.UNAVAILABLE


async def test_several_answers_belong_to_one_client_and_end_together() -> None:
    inflight = InflightLimit(4)
    clients = OpenRequests(VOCABULARY, inflight, queue_max=1)
    outbox = Outbox()
    options = replace(OPTIONS, params=SamplingParams(seed=5), answers_per_prompt=2)
    stop_conditions = StopConditions(4, frozenset())
    client = clients.open(
        outbox,  # type: ignore[arg-type]
        PreparedRequest(
            options,
            [TokenisedPrompt([1, 2], stop_conditions), TokenisedPrompt([3], stop_conditions)],
        ),
        lambda: None,
    )
    answers = [answer for first in outbox.submitted for answer in (first, *first.forks)]
    assert [len(first.forks) for first in outbox.submitted] == [1, 1]
    assert [answer.sequence.tokens for answer in answers] == [[1, 2], [1, 2], [3], [3]]
    assert [answer.sampler.params.seed for answer in answers] == [5, 6, 7, 8]
    assert [answer.choice for answer in answers] == [0, 1, 2, 3]
    assert (client.prompt_tokens, inflight.in_flight) == (3, 4)
    with pytest.raises(ApiError, match="cannot queue 1 more: 4 are"):
        inflight.check()
    clients.publish([GenerationDelta(number, "x", None, 1, 0) for number in client.numbers])
    await run_event_loop()
    assert client.deltas.qsize() == 4
    clients.close(outbox, client)  # type: ignore[arg-type]
    assert outbox.cancelled == [answer.number for answer in answers]
    assert inflight.in_flight == 0


class PanicException(BaseException):
    """A panic of a library written in Rust, which reaches Python as such a class."""


@pytest.mark.parametrize(
    "error",
    [RuntimeError("the device is gone"), PanicException("index out of bounds")],
    ids=["an error", "a panic"],
)
def test_a_failed_step_is_reported_and_ends_the_thread(error: BaseException) -> None:
    class Broken:
        def begin(self, batch: object) -> None:
            raise error

    died = threading.Event()
    engine = EngineCore(Broken(), BatchScheduler(StepLimits(8, 2), BlockPool(4)))  # type: ignore[arg-type]
    worker = GenerationThread(engine, lambda deltas: None, died.set)
    worker.start()
    asyncio.run(_submit(worker, Outbox()))
    assert died.wait(5)
    assert worker.died
    assert worker.stop(5)


class Files:
    """A mover whose files have a block of every prompt; the test decides when they are read."""

    files = True

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def only_in_files(self, digests: object, on_device: object) -> list[bytes]:
        return [b"digest"]

    def read_ahead(self, digests: list[bytes], on_read: Any) -> bool:
        self.callbacks.append(on_read)
        return True


async def test_an_idle_engine_is_not_stalled_once_a_prompt_is_read_from_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("nodeagent.engine.core.step_thread.time", clock)
    mover, runner = Files(), object()
    engine = EngineCore(runner, BatchScheduler(StepLimits(8, 2), BlockPool(4)), mover)  # type: ignore[arg-type]
    worker = GenerationThread(engine, lambda deltas: None, lambda: None)
    now_s[0] = 3600.0
    await _submit(worker, Outbox())
    assert (worker.has_work(), worker.idle_s()) == (True, 0.0)
    now_s[0] += 10.0
    assert worker.idle_s() == 10.0, "a file that is not read stalls the engine"
    mover.callbacks[0]([b"digest"], None)
    assert (worker.has_work(), worker.idle_s()) == (True, 10.0), "read, but not begun"


def test_the_age_of_what_an_idle_engine_evicted_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("nodeagent.engine.core.generation_thread.time", clock)
    pool = BlockPool(4, clock.monotonic)
    engine = EngineCore(object(), BatchScheduler(StepLimits(8, 2), pool))  # type: ignore[arg-type]
    worker = GenerationThread(engine, lambda deltas: None, lambda: None)
    now_s[0] = 160.0
    # What the age counts back to stays the same, or routers would forget what is cached.
    assert worker.counts()["prefix_evicted_age_s"] == 60.0


async def test_a_generation_cancelled_while_its_blocks_are_read_does_not_begin() -> None:
    mover, runner = Files(), object()
    engine = EngineCore(runner, BatchScheduler(StepLimits(8, 2), BlockPool(4)), mover)  # type: ignore[arg-type]
    worker = GenerationThread(engine, lambda deltas: None, lambda: None)
    await _submit(worker, Outbox())
    canceller = threading.Thread(target=worker.cancel, args=(1,))
    send = worker._send

    def cancel_then_send(message: Any) -> None:
        if not canceller.is_alive() and message != 1:
            canceller.start()
            canceller.join(0.2)
        send(message)

    worker._send = cancel_then_send  # type: ignore[method-assign]
    mover.callbacks[0]([b"digest"], None)
    canceller.join()
    assert worker._inbox[-1] == 1


async def test_a_cancellation_does_not_wait_while_blocks_are_imported() -> None:
    mover, runner = Files(), object()
    engine = EngineCore(runner, BatchScheduler(StepLimits(8, 2), BlockPool(4)), mover)  # type: ignore[arg-type]
    worker = GenerationThread(engine, lambda deltas: None, lambda: None)
    importing, may_continue = threading.Event(), threading.Event()

    def import_blocks(digests: list[bytes], contents: object) -> None:
        importing.set()
        assert may_continue.wait(5)

    mover.import_blocks = import_blocks  # type: ignore[attr-defined]
    engine.submit = lambda generation: None  # type: ignore[method-assign]
    worker.start()
    await _submit(worker, Outbox())
    mover.callbacks[0]([b"digest"], object())
    assert importing.wait(5)
    other = threading.Thread(target=worker.cancel, args=(2,))
    other.start()
    other.join(1.0)
    is_blocked = other.is_alive()
    may_continue.set()
    assert not is_blocked
    assert worker.stop(5)


async def _submit(worker: GenerationThread, outbox: Outbox) -> None:
    clients = OpenRequests(VOCABULARY, InflightLimit(1), queue_max=3)
    open_one(clients, outbox, [])
    worker.submit(outbox.submitted[0])


def test_rates_measure_only_the_steps_that_they_dominate() -> None:
    rates = StepRates()
    # The first step of each kind is cold, and would make a new replica seem slow for long.
    rates.record_step(StepOutput([], 100, 0, 100), 5.0, 1.0)
    rates.record_step(StepOutput([], 0, 8, 11), 2.0, 1.0)
    assert (rates.prefill.per_s, rates.decode.per_s) == (0.0, 0.0)
    rates.record_step(StepOutput([], 100, 0, 100), 1.0, 1.0)
    rates.record_step(StepOutput([], 100, 90), 9.0, 1.0)
    rates.record_step(StepOutput([], 0, 8, 11), 0.5, 1.0)
    assert rates.prefill.per_s == 100.0
    assert rates.decode.per_s == 16.0
    assert (rates.steps, rates.seconds, rates.rows) == (5, 17.5, 222)


def test_an_old_rate_is_forgotten_and_measured_anew() -> None:
    rates = StepRates()
    for _ in range(20):
        rates.record_step(StepOutput([], 100, 0, 100), 100.0, now_s=1.0)
    assert rates.prefill.per_s == 1.0
    later_s = 1.0
    while rates.are_known(later_s):
        later_s += 10.0
        # The agent asks an idle engine for a single token, which measures nothing.
        rates.record_step(StepOutput([], 8, 0, 8), 0.1, later_s)
    rates.record_step(StepOutput([], 100, 0, 100), 0.1, later_s)
    assert rates.are_known(later_s)
    assert rates.prefill.per_s == 1000.0, "the next step measures the real rate"


def test_a_thread_without_free_blocks_sleeps_until_some_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took a whole core, and counted steps, so that no agent noticed requests that hang."""
    monkeypatch.setattr("nodeagent.engine.core.generation_thread.BLOCKED_WAIT_S", 60.0)
    pool, answered, slept = BlockPool(4), threading.Event(), threading.Event()
    engine = EngineCore(Script({1: [65, 66]}), BatchScheduler(StepLimits(8, 2), pool))  # type: ignore[arg-type]
    held = pool.allocate((), 4)
    assert held is not None
    worker = GenerationThread(engine, lambda deltas: answered.set(), lambda: None)
    wait_for_blocks = worker._wait_for_blocks

    def record() -> None:
        slept.set()
        wait_for_blocks()

    worker._wait_for_blocks = record  # type: ignore[method-assign]
    worker.start()
    worker.submit(generation(1, 2))
    assert slept.wait(5)
    assert worker.counts()["steps_total"] == 0
    worker.call(lambda core: core.scheduler.pool.release(held)).result(5)
    assert answered.wait(5)
    assert worker.stop(5)


class SlowModel(Script):
    """A model whose steps take until the test says so."""

    def __init__(self) -> None:
        super().__init__({1: [65, 66]})
        self.computes, self.may_end = threading.Event(), threading.Event()

    def begin(self, batch: Batch) -> Callable[[], torch.Tensor]:
        self.computes.set()
        assert self.may_end.wait(5)
        return super().begin(batch)


def test_calls_about_kv_do_not_wait_for_the_end_of_a_step() -> None:
    """Other engines gave up what they fetched: a step of prompts took longer than they waited."""
    model, ended = SlowModel(), threading.Event()
    pool = BlockPool(8)
    engine = EngineCore(model, BatchScheduler(StepLimits(32, 2), pool))  # type: ignore[arg-type]
    worker = GenerationThread(engine, lambda deltas: ended.set(), lambda: None)
    worker.start()
    worker.submit(generation(1, 2))
    assert model.computes.wait(5)
    order: list[int] = []
    between = worker.call(lambda core: order.append(0))

    def note(number: int, core: EngineCore) -> None:
        order.append(number)

    beside = [worker.call_beside_steps(partial(note, number)) for number in (1, 2)]
    for call in beside:
        call.result(5)
    assert (order, between.done(), ended.is_set()) == ([1, 2], False, False)
    model.may_end.set()
    between.result(5)
    assert order == [1, 2, 0]
    assert ended.wait(5)
    # An idle engine makes them, too.
    assert worker.call_beside_steps(lambda core: core.scheduler.pool).result(5) is pool
    assert worker.stop(5)


def test_a_step_goes_on_only_after_the_call_that_runs_beside_it() -> None:
    calls, order = KvCalls(), list[str]()
    begun, may_end = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        assert may_end.wait(5)
        order.append("call")

    def step() -> None:
        with calls.computing():
            assert begun.wait(5)
        order.append("step")

    beside = threading.Thread(target=calls.run)
    beside.start()
    calls.put(call)
    calls.put(lambda: order.append("waits"))
    stepping = threading.Thread(target=step)
    stepping.start()
    assert begun.wait(5)
    stepping.join(0.05)
    assert (order, calls.are_waiting) == ([], True)
    may_end.set()
    stepping.join(5)
    # The model computes no more, so the next call is the step thread's.
    calls.run_waiting()
    assert order[0] == "call"
    assert sorted(order[1:]) == ["step", "waits"]
    calls.close()
    beside.join(5)
    assert not beside.is_alive()


def test_a_failed_call_beside_a_step_ends_the_engine() -> None:
    died = threading.Event()
    model = SlowModel()
    engine = EngineCore(model, BatchScheduler(StepLimits(32, 2), BlockPool(8)))  # type: ignore[arg-type]
    worker = GenerationThread(engine, lambda deltas: None, died.set)
    worker.start()
    worker.submit(generation(1, 2))
    assert model.computes.wait(5)

    def fail(core: EngineCore) -> None:
        raise ValueError("cannot release block 1: no sequence references it")

    worker.call_beside_steps(fail)
    assert died.wait(5)
    assert worker.died
    model.may_end.set()
    assert worker.stop(5)


def test_calls_that_will_not_run_any_more_are_refused() -> None:
    """Threads wait for calls, and a process does not exit before its threads."""
    died, begun, may_fail = threading.Event(), threading.Event(), threading.Event()
    engine = EngineCore(object(), BatchScheduler(StepLimits(8, 2), BlockPool(4)))  # type: ignore[arg-type]
    worker = GenerationThread(engine, lambda deltas: None, died.set)

    def fail(core: EngineCore) -> None:
        begun.set()
        assert may_fail.wait(5)
        raise ValueError("cannot read block 1: the device is gone")

    failed = worker.call(fail)
    waiting = [worker.call(lambda core: 1)]
    worker.start()
    assert begun.wait(5)
    waiting += [worker.call(lambda core: 2), worker.call_beside_steps(lambda core: 3)]
    may_fail.set()
    with pytest.raises(ValueError, match="the device is gone"):
        failed.result(5)
    assert died.wait(5)
    waiting += [worker.call(lambda core: 4), worker.call_beside_steps(lambda core: 5)]
    for call in waiting:
        with pytest.raises(ApiError, match="has stopped computing") as refused:
            call.result(5)
        assert refused.value.code is ErrorCode.UNAVAILABLE


def test_calls_to_a_stopped_engine_are_refused() -> None:
    engine = EngineCore(object(), BatchScheduler(StepLimits(8, 2), BlockPool(4)))  # type: ignore[arg-type]
    worker = GenerationThread(engine, lambda deltas: None, lambda: None)
    worker.start()
    assert worker.call(lambda core: core).result(5) is engine
    assert worker.stop(5)
    for call in (worker.call, worker.call_beside_steps):
        with pytest.raises(ApiError, match="has stopped computing"):
            call(lambda core: core).result(5)
