"""The step thread: takes submissions and cancellations between steps, hands deltas to the loop.

Rule 1: only this thread touches the engine; the event loop touches only the inbox and the counts,
which are replaced whole.
Rule 2: a cancellation is obeyed before the next step begins.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from nodeagent.engine.core.step import Delta, Engine, Generation
from nodeagent.engine.core.step_thread import StepThread
from nodeagent.engine.core.token_rates import StepRates
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A generation whose blocks were read from files before it is queued."""

    generation: Generation
    digests: list[bytes]
    contents: Tensor | None


Publish = Callable[[list[Delta]], None]


class Worker(StepThread):
    """Owns the engine's thread."""

    def __init__(self, engine: Engine, publish: Publish, on_death: Callable[[], None]) -> None:
        super().__init__(on_death)
        self._engine = engine
        self._publish = publish
        self._inbox: deque[Generation | _Arrived | int] = deque()
        self._awaited: set[int] = set()
        """Generations whose blocks are being read from files."""
        self._rates = StepRates()
        self._counts = self._count()

    def submit(self, generation: Generation) -> None:
        """Hand over a generation, once what files hold of its prompt has been read."""
        self._expect_progress()
        if not self._read_ahead(generation):
            self._send(generation)

    def cancel(self, number: int) -> None:
        """Have a generation dropped before the next step."""
        with self._wake:
            if number in self._awaited:
                self._awaited.discard(number)
                return
        self._expect_progress()
        self._send(number)

    def counts(self) -> Mapping[str, float]:
        """Return what was so after the last step; its rates for as long as they say anything."""
        if self._rates.are_known(time.monotonic()):
            return self._counts
        return {**self._counts, "prefill_tokens_per_s": 0.0, "decode_tokens_per_s": 0.0}

    def has_work(self) -> bool:
        """True where a step is due or under way."""
        counts = self._counts
        return bool(self._inbox or self._awaited or counts["running"] or counts["waiting"])

    def _read_ahead(self, generation: Generation) -> bool:
        mover = self._engine.mover
        if mover is None or mover.files is None:
            return False
        sequence = generation.sequence
        chain = sequence.chain((len(sequence.tokens) - 1) // BLOCK_TOKENS)
        digests = mover.missing(chain, self._engine.batching.blocks.remembers)
        if not digests:
            return False

        def then(read: list[bytes], contents: Tensor | None) -> None:
            with self._wake:
                if generation.number not in self._awaited:
                    return
                self._awaited.discard(generation.number)
                # Before the lock is let go: who gives it up from here on does so after it has come.
                self._send(_Arrived(generation, read, contents))

        with self._wake:
            self._awaited.add(generation.number)
        if mover.read_ahead(digests, then):
            return True
        with self._wake:
            self._awaited.discard(generation.number)
        return False

    def _send(self, message: Generation | _Arrived | int) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _run(self) -> None:
        while self._receive():
            started_s = time.monotonic()
            stepped = self._engine.step(started_s)
            self._progress_s = time.monotonic()
            step_s = self._progress_s - started_s
            self._rates.note(stepped, step_s, self._progress_s)
            self._engine.batching.pace.note(stepped.prefill_tokens, stepped.decode_tokens, step_s)
            self._engine.timed(stepped, step_s)
            self._counts = self._count()
            if stepped.deltas:
                self._publish(stepped.deltas)

    def _receive(self) -> bool:
        """Obey the inbox; wait while there is nothing to do. False where it is time to stop."""
        while True:
            with self._wake:
                while not (self._stopping or self._inbox or self._engine.busy):
                    self._counts = self._count()
                    self._wake.wait()
                if self._stopping:
                    return False
                messages = tuple(self._inbox)
                self._inbox.clear()
            # Not under the lock: what takes long must not keep the event loop waiting.
            for message in messages:
                self._obey(message)
            if self._engine.busy:
                return True

    def _obey(self, message: Generation | _Arrived | int) -> None:
        if isinstance(message, _Arrived):
            if message.contents is not None:
                self._engine.import_blocks(message.digests, message.contents)
            self._engine.submit(message.generation)
        elif isinstance(message, Generation):
            self._engine.submit(message)
        else:
            self._engine.cancel(message)

    def _count(self) -> dict[str, float]:
        engine, rates = self._engine, self._rates
        batching, speculation = engine.batching, engine.speculation
        everyone = (*batching.running, *batching.waiting)
        return {
            "running": len(batching.running),
            "waiting": len(batching.waiting),
            "prefill_tokens_in_flight": sum(
                sequence.pending for sequence in everyone if not sequence.decoding
            ),
            # What may still be generated: every sequence up to its max_tokens.
            "decode_tokens_in_flight": sum(
                sequence.remaining * (1 + len(sequence.followers)) for sequence in everyone
            ),
            "kv_blocks_used": batching.blocks.held,
            "kv_blocks_total": batching.blocks.total,
            "preemptions_total": batching.preemptions,
            "preempted_kept_tokens_total": batching.kept_tokens,
            "preempted_lost_tokens_total": batching.lost_tokens,
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
