"""The open requests and their generations: the bridge between the event loop and the step thread.

The generations of a request with several answers share one queue and are cancelled together.

Rule 1: generations are counted in `InflightLimit` by `open`, and released by `close` in every case.
Rule 2: the queue of a request is bounded. If its client does not read, the connection is aborted
and the generations are cancelled.
Rule 3: everything here runs on the event loop, except `publish`, which the step thread calls.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nodeagent.engine.core.generation import Generation, GenerationDelta
from nodeagent.engine.core.generation_thread import GenerationThread
from nodeagent.engine.sampling.sampler import Sampler
from nodeagent.engine.scheduler.sequence import FinishReason, Sequence
from nodeagent.engine.server.inflight_limit import InflightLimit
from nodeagent.engine.server.prepared_request import PreparedRequest
from nodeagent.engine.speculative.speculation import Speculation
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.lora_adapter import prefix_cache_salt


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One open request as the event loop sees it."""

    numbers: range
    """The numbers of its generations, in the order of its answers."""
    prompt_tokens: int
    abort: Callable[[], None]
    """Aborts the client's connection."""
    deltas: asyncio.Queue[GenerationDelta] = field(repr=False)
    ended: bool = False
    on_first_delta: Callable[[], None] | None = None
    """Called once: its prompt has been computed."""
    cut: bool = False
    """Whether the connection was aborted because the client does not read."""


class OpenRequests:
    """All open requests of this process."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        inflight: InflightLimit,
        queue_max: int,
        speculation: Speculation | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._speculation = speculation
        self._inflight = inflight
        self._queue_max = queue_max
        self._by_number: dict[int, OpenRequest] = {}
        self._next_number = 1
        self._loop = asyncio.get_running_loop()
        self.cut_total = 0

    def open(
        self, worker: GenerationThread, prepared: PreparedRequest, abort: Callable[[], None]
    ) -> OpenRequest:
        """Start the generations of a request; the caller must `close` it. Raises ApiError."""
        count = prepared.answers
        self._inflight.check(count)
        numbers = range(self._next_number, self._next_number + count)
        # All generations are created before the first is submitted: from then on the step thread
        # owns the constraint, which the others copy.
        generations = [
            self._generation(prepared, choice, numbers[choice]) for choice in range(count)
        ]
        prompt_tokens = sum(len(prompt.tokens) for prompt in prepared.prompts)
        queue: asyncio.Queue[GenerationDelta] = asyncio.Queue(self._queue_max * count)
        opened = OpenRequest(numbers, prompt_tokens, abort, queue)
        self._next_number = numbers.stop
        self._by_number.update(dict.fromkeys(numbers, opened))
        self._inflight.acquire(count)
        per_prompt = prepared.options.answers_per_prompt
        for first in range(0, count, per_prompt):
            generations[first].forks = tuple(generations[first + 1 : first + per_prompt])
            worker.submit(generations[first])
        return opened

    def close(self, worker: GenerationThread, opened: OpenRequest) -> None:
        """Forget a request and cancel those of its generations that still run."""
        for number in opened.numbers:
            del self._by_number[number]
        self._inflight.release(len(opened.numbers))
        if not opened.ended:
            opened.ended = True
            for number in opened.numbers:
                worker.cancel(number)

    def publish(self, deltas: list[GenerationDelta]) -> None:
        """Carry `deltas` from the step thread to the event loop."""
        self._loop.call_soon_threadsafe(self._deliver, deltas)

    def fail_all(self, message: str) -> None:
        """End every open request with an error."""
        for opened in dict.fromkeys(self._by_number.values()):
            if not opened.ended:
                number = opened.numbers[0]
                failure = GenerationDelta(number, "", None, 0, 0, FinishReason.ERROR, message)
                self._put(opened, failure)

    def _generation(self, prepared: PreparedRequest, choice: int, number: int) -> Generation:
        """Create the generation of answer `choice`."""
        options, constraint = prepared.options, prepared.constraint
        prompt = prepared.prompts[choice // options.answers_per_prompt]
        # Each answer has its own position in the grammar and its own random draws.
        own_constraint = constraint.copy() if constraint is not None and choice else constraint
        params, drafter = options.params, None
        if params.seed is not None:
            params = replace(params, seed=params.seed + choice)
        if self._speculation is not None and options.speculate:
            drafter = self._speculation.drafter(own_constraint, prepared.predicted_tokens)
        stop_conditions = prompt.stop_conditions
        return Generation(
            Sequence(
                number,
                prompt.tokens.copy(),
                stop_conditions,
                prefix_cache_salt(prepared.salt, prepared.adapter),
                prepared.adapter,
                prepared.scheduling,
            ),
            Sampler(
                params,
                prompt.tokens.copy() if params.has_penalties else [],
                own_constraint,
                stop_conditions.stop_ids,
            ),
            StreamDetokenizer(
                self._vocabulary,
                prepared.visible_special,
                continues_text=prepared.continues_text,
            ),
            StopStrings(options.stops),
            drafter,
            choice,
            outgoing=prepared.outgoing,
        )

    def _deliver(self, deltas: list[GenerationDelta]) -> None:
        for delta in deltas:
            opened = self._by_number.get(delta.number)
            if opened is not None and not opened.ended:
                on_first_delta, opened.on_first_delta = opened.on_first_delta, None
                if on_first_delta is not None:
                    on_first_delta()
                self._put(opened, delta)

    def _put(self, opened: OpenRequest, delta: GenerationDelta) -> None:
        if not opened.deltas.full():
            opened.deltas.put_nowait(delta)
        elif not opened.cut:
            # The handler is stuck in a write to a full socket; only an abort wakes it.
            opened.cut = True
            self.cut_total += 1
            opened.abort()
