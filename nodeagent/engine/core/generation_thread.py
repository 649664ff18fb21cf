"""The step thread of a decoder: takes submissions and cancellations, publishes deltas.

Rule 1: only this thread touches the engine core, except for rule 4. The event loop touches only the
inbox and the counts, which are replaced as a whole.
Rule 2: a cancellation takes effect before the next step begins.
Rule 3: a generation that does not yield interrupts the step of those that do.
Rule 4: calls that touch only the KV transfers also run while the model computes (kv_calls.py).
Rule 5: once the thread has ended, by an error or because it was stopped, calls are refused. The
threads that wait for them would otherwise keep the process from exiting.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from torch import Tensor

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.core.generation import Generation, GenerationDelta, StepOutput
from nodeagent.engine.core.kv_calls import KvCalls
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.core.step_thread import StepThread
from nodeagent.engine.core.token_rates import StepRates
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class _PrefetchedGeneration:
    """A generation that is queued after its KV blocks were read from files."""

    generation: Generation
    digests: list[bytes]
    contents: Tensor | None


@dataclass(frozen=True, slots=True)
class _Call:
    """A function to be called between steps, and where its result goes."""

    function: Callable[[EngineCore], object]
    result: Future[Any]

    def run(self, engine: EngineCore) -> None:
        """Call the function, unless its caller no longer waits. Raises its error."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.function(engine))
        except BaseException as error:
            self.result.set_exception(error)
            raise

    def refuse(self) -> None:
        """Answer that the function will not be called."""
        if self.result.set_running_or_notify_cancel():
            message = "cannot answer: this engine has stopped computing"
            self.result.set_exception(ApiError(ErrorCode.UNAVAILABLE, message, retry_after_s=1.0))


_Message = Generation | _PrefetchedGeneration | _Call | int
"""A submission, a call, or the number of a generation to cancel."""

Publish = Callable[[list[GenerationDelta]], None]
Result = TypeVar("Result")

BLOCKED_WAIT_S: Final = 0.05
"""How long the thread waits for a message if no waiting sequence fits: deadlines may pass."""


class GenerationThread(StepThread):
    """Runs the steps of an engine core on a thread of its own."""

    def __init__(self, engine: EngineCore, publish: Publish, on_death: Callable[[], None]) -> None:
        super().__init__(on_death)
        self._engine = engine
        self._publish = publish
        self._inbox: deque[_Message] = deque()
        self._received: deque[_Message] = deque()
        """Messages that the thread has taken from the inbox and has yet to handle."""
        self._has_ended = False
        """Whether the inbox is read no more. Set under `_wake`."""
        self._prefetching: set[int] = set()
        """Generations whose blocks are being read from files."""
        self._rates = StepRates()
        self._kv_calls = KvCalls()
        engine.computing = self._kv_calls.computing
        self._counts = self._count()

    def submit(self, generation: Generation) -> None:
        """Submit a generation, once the KV blocks that files have of its prompt are read."""
        self._expect_progress()
        if not self._prefetch(generation):
            self._send(generation)

    def cancel(self, number: int) -> None:
        """Have a generation dropped before the next step."""
        with self._wake:
            if number in self._prefetching:
                self._prefetching.discard(number)
                return
        self._expect_progress()
        self._send(number)

    def call(self, function: Callable[[EngineCore], Result]) -> Future[Result]:
        """Have `function` called between two steps; return the future of its result.

        An error in it is fatal, like one in a step. Once the thread has ended, the future has an
        ApiError.
        """
        self._expect_progress()
        call = _Call(function, Future())
        self._send(call)
        return call.result

    def call_beside_steps(self, function: Callable[[EngineCore], Result]) -> Future[Result]:
        """Have `function` called between two steps, or while the model computes one; return the
        future of its result.

        The call may touch nothing but the core's `kv_transfers`. Such calls keep their order, and
        may overtake submissions, cancellations and other calls. An error in one is fatal, like one
        in a step.
        """
        self._expect_progress()
        call = _Call(function, Future())
        self._kv_calls.put(lambda: call.run(self._engine), call.refuse)
        with self._wake:
            self._wake.notify()
        return call.result

    def counts(self) -> Mapping[str, float]:
        """Return the counts after the last step; rates are 0 once they are too old."""
        now_s = time.monotonic()
        counts = {**self._counts, "prefix_evicted_age_s": self._evicted_age_s(now_s)}
        if not self._rates.are_known(now_s):
            counts |= {"prefill_tokens_per_s": 0.0, "decode_tokens_per_s": 0.0}
        return counts

    def has_work(self) -> bool:
        """Return whether a step is due or in progress."""
        counts = self._counts
        has_message = self._has_message()
        return bool(has_message or self._prefetching or counts["running"] or counts["waiting"])

    def _prefetch(self, generation: Generation) -> bool:
        """Start reading the blocks that only files have; return False if there are none."""
        mover = self._engine.block_mover
        if mover is None or mover.files is None:
            return False
        sequence = generation.sequence
        prompt_digests = sequence.block_digests((len(sequence.tokens) - 1) // BLOCK_TOKENS)
        digests = mover.only_in_files(prompt_digests, self._engine.scheduler.pool.has_digest)
        if not digests:
            return False

        def on_read(read: list[bytes], contents: Tensor | None) -> None:
            with self._wake:
                if generation.number not in self._prefetching:
                    return
                self._prefetching.discard(generation.number)
                # Under the lock, so that a later cancellation enters the inbox behind it.
                self._send(_PrefetchedGeneration(generation, read, contents))

        with self._wake:
            self._prefetching.add(generation.number)
        if mover.read_ahead(digests, on_read):
            return True
        with self._wake:
            self._prefetching.discard(generation.number)
        return False

    def _send(self, message: _Message) -> None:
        if isinstance(message, _PrefetchedGeneration):
            is_urgent = not message.generation.sequence.yields
        else:
            is_urgent = isinstance(message, Generation) and not message.sequence.yields
        with self._wake:
            if not self._has_ended:
                self._inbox.append(message)
                if is_urgent:
                    self._engine.interrupt.set()
                self._wake.notify()
                return
        if isinstance(message, _Call):
            message.refuse()

    def _run(self) -> None:
        beside = threading.Thread(
            target=self._run_guarded, args=(self._kv_calls.run,), name="kv-calls", daemon=True
        )
        beside.start()
        try:
            self._run_steps()
        finally:
            self._kv_calls.close()
            self._refuse_calls()

    def _refuse_calls(self) -> None:
        with self._wake:
            self._has_ended = True
            left = (*self._received, *self._inbox)
            self._received.clear()
            self._inbox.clear()
        for message in left:
            if isinstance(message, _Call):
                message.refuse()

    def _run_steps(self) -> None:
        was_empty = False
        while self._receive():
            started_s = time.monotonic()
            output = self._step(started_s)
            # The first such step may have preempted sequences, which the next one admits.
            is_empty = not output.rows and not output.deltas
            if is_empty and was_empty:
                self._wait_for_blocks()
            was_empty = is_empty
            if is_empty:
                continue
            self._progress_s = time.monotonic()
            step_s = self._progress_s - started_s
            if output.rows:
                self._record(output, step_s)
            self._counts = self._count()
            if output.deltas:
                self._publish(output.deltas)

    def _step(self, now_s: float) -> StepOutput:
        self.is_busy = True
        try:
            return self._engine.step(now_s)
        finally:
            self.is_busy = False

    def _wait_for_blocks(self) -> None:
        """Wait while no sequence fits: peers have yet to take the blocks that they read."""
        self._counts = self._count()
        with self._wake:
            if not (self._stopping or self._has_message()):
                self._wake.wait(BLOCKED_WAIT_S)

    def _record(self, output: StepOutput, step_s: float) -> None:
        """Learn from a step that was computed to its end."""
        self._rates.record_step(output, step_s, self._progress_s)
        self._engine.scheduler.prefill_budget.record_step(
            output.prefill_tokens, output.decode_tokens, step_s
        )
        self._engine.record_timing(output, step_s)

    def _receive(self) -> bool:
        """Handle the inbox; wait while there is nothing to do. Return False to stop."""
        while True:
            with self._wake:
                while not (self._stopping or self._has_message() or self._engine.has_work):
                    self._counts = self._count()
                    self._wake.wait()
                if self._stopping:
                    return False
                self._received.extend(self._inbox)
                self._inbox.clear()
                self._engine.interrupt.clear()
            # Not under the lock, so that a slow message does not block the event loop.
            self.is_busy = True
            try:
                # Before the messages: a request finds what was stored for it.
                self._kv_calls.run_waiting()
                while self._received:
                    self._handle(self._received.popleft())
            finally:
                self.is_busy = False
            if self._engine.has_work:
                return True

    def _has_message(self) -> bool:
        return bool(self._inbox) or self._kv_calls.are_waiting

    def _handle(self, message: _Message) -> None:
        if isinstance(message, _PrefetchedGeneration):
            if message.contents is not None:
                self._engine.import_blocks(message.digests, message.contents)
                file_tokens = len(message.digests) * BLOCK_TOKENS
                message.generation.sequence.file_tokens = file_tokens
            self._engine.submit(message.generation)
        elif isinstance(message, Generation):
            self._engine.submit(message)
        elif isinstance(message, _Call):
            message.run(self._engine)
        else:
            self._engine.cancel(message)

    def _evicted_age_s(self, now_s: float) -> float:
        """Return how far back the prefix cache reaches; -1 with tiers that keep what it evicts."""
        if self._engine.block_mover is not None:
            return -1.0
        return now_s - self._engine.scheduler.pool.evicted_used_at_s

    def _count(self) -> dict[str, float]:
        engine, rates = self._engine, self._rates
        scheduler, speculation = engine.scheduler, engine.speculation
        sequences = (*scheduler.running, *scheduler.waiting)
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "prefill_tokens_in_flight": sum(
                sequence.pending_tokens for sequence in sequences if not sequence.is_decoding
            ),
            # The most that may still be generated: every sequence up to its max_tokens.
            "decode_tokens_in_flight": sum(
                sequence.remaining_tokens * (1 + len(sequence.forks)) for sequence in sequences
            ),
            "kv_blocks_used": scheduler.pool.used_blocks,
            "kv_blocks_total": scheduler.pool.total,
            "preemptions_total": scheduler.queues.preemptions,
            "preempted_kept_tokens_total": scheduler.blocks.reused_tokens,
            "preempted_lost_tokens_total": scheduler.blocks.recomputed_tokens,
            "steps_total": rates.steps,
            "step_seconds_total": rates.seconds,
            "step_rows_total": rates.rows,
            "prefill_tokens_per_s": rates.prefill.per_s,
            "decode_tokens_per_s": rates.decode.per_s,
            "tokens_out_total": engine.output_tokens_total,
            "prompt_tokens_total": engine.prompt_tokens_total,
            "prefix_hit_tokens_total": engine.prefix_hit_tokens_total,
            "drafted_tokens_total": speculation.drafted_tokens_total if speculation else 0,
            "accepted_tokens_total": speculation.accepted_tokens_total if speculation else 0,
            "draft_acceptance": speculation.recent_acceptance if speculation else 0.0,
        }
