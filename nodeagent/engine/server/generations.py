"""Who waits for which generations: the bridge between the event loop and the step thread.

A request of several answers is one client: its generations share its queue, and end together where
it goes.

Rule 1: who is counted in (`entrance`) is counted out by `close`, however it ends.
Rule 2: a client's queue is bounded. Who does not read is cut, and its generations cancelled.
Rule 3: everything here runs on the event loop; only `publish` is called from the step thread.
"""

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace

from nodeagent.engine.core.generation_thread import Worker
from nodeagent.engine.core.step import Delta, Generation
from nodeagent.engine.model.layers.lora import Adapter, salted
from nodeagent.engine.sampling.sampler import Sampler
from nodeagent.engine.scheduler.fair_queue import Standing
from nodeagent.engine.scheduler.sequence import Ending, Finish, Sequence
from nodeagent.engine.server.inflight_limit import Entrance
from nodeagent.engine.server.request_body import Ask
from nodeagent.engine.speculative.speculation import Speculation
from nodeagent.engine.structured.constraint import Constraint
from nodeagent.engine.tokenizer.detokenizer import StopStrings, TokenText
from nodeagent.engine.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, checked and tokenised: what its generations are made of."""

    ask: Ask
    prompts: Ordered[tuple[list[int], Ending]]
    salt: bytes = b""
    constraint: Constraint | None = None
    shown: Mapping[int, str] | None = None
    adapter: Adapter | None = None
    standing: Standing = field(default_factory=Standing)
    predicted: Ordered[int] = ()
    """Tokens that the caller expects."""
    goes_on: bool = False
    """Whether the answers go on from text at the prompt's end."""

    @property
    def answers(self) -> int:
        """How many generations it takes: so many of each prompt."""
        return len(self.prompts) * self.ask.choices


@dataclass(slots=True, eq=False)
class Client:
    """One open request as the event loop sees it."""

    numbers: range
    """Of its generations, in the order of its answers."""
    prompt_tokens: int
    abort: Callable[[], None]
    deltas: asyncio.Queue[Delta] = field(repr=False)
    ended: bool = False
    cut: bool = False


class Clients:
    """All open requests of this process."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        entrance: Entrance,
        queue_max: int,
        speculation: Speculation | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._speculation = speculation
        self._entrance = entrance
        self._queue_max = queue_max
        self._open: dict[int, Client] = {}
        self._next = 1
        self._loop = asyncio.get_running_loop()
        self.cut_total = 0

    def open(self, worker: Worker, asked: Asked, abort: Callable[[], None]) -> Client:
        """Start the generations of a request; the caller must `close` them."""
        count = asked.answers
        self._entrance.admit(count)
        numbers = range(self._next, self._next + count)
        # All are made before the first is submitted: a constraint is the step thread's from then.
        generations = [self._generation(asked, choice, numbers[choice]) for choice in range(count)]
        prompt_tokens = sum(len(tokens) for tokens, _ in asked.prompts)
        queue: asyncio.Queue[Delta] = asyncio.Queue(self._queue_max * count)
        client = Client(numbers, prompt_tokens, abort, queue)
        self._next = numbers.stop
        self._open.update(dict.fromkeys(numbers, client))
        self._entrance.enter(count)
        each = asked.ask.choices
        for first in range(0, count, each):
            generations[first].followers = tuple(generations[first + 1 : first + each])
            worker.submit(generations[first])
        return client

    def close(self, worker: Worker, client: Client) -> None:
        """Forget `client`; what it still has running is cancelled."""
        for number in client.numbers:
            del self._open[number]
        self._entrance.leave(len(client.numbers))
        if not client.ended:
            client.ended = True
            for number in client.numbers:
                worker.cancel(number)

    def publish(self, deltas: list[Delta]) -> None:
        """Carry `deltas` from the step thread to the event loop."""
        self._loop.call_soon_threadsafe(self._deliver, deltas)

    def fail_all(self, message: str) -> None:
        """End every open generation with an error."""
        for client in dict.fromkeys(self._open.values()):
            if not client.ended:
                self._put(client, Delta(client.numbers[0], "", None, 0, 0, Finish.ERROR, message))

    def _generation(self, asked: Asked, choice: int, number: int) -> Generation:
        ask, constraint = asked.ask, asked.constraint
        tokens, ending = asked.prompts[choice // ask.choices]
        # Each answer moves through the grammar, and draws, by itself.
        own = constraint.copy() if constraint is not None and choice else constraint
        params, drafter = ask.params, None
        if params.seed is not None:
            params = replace(params, seed=params.seed + choice)
        if self._speculation is not None and ask.speculate:
            drafter = self._speculation.drafter(own, asked.predicted)
        kept = salted(asked.salt, asked.adapter)
        return Generation(
            Sequence(number, tokens.copy(), ending, kept, asked.adapter, asked.standing),
            Sampler(params, tokens.copy() if params.penalised else [], own, ending.stop_ids),
            TokenText(self._vocabulary, asked.shown, goes_on=asked.goes_on),
            StopStrings(ask.stops),
            drafter,
            choice,
        )

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            client = self._open.get(delta.number)
            if client is not None and not client.ended:
                self._put(client, delta)

    def _put(self, client: Client, delta: Delta) -> None:
        if not client.deltas.full():
            client.deltas.put_nowait(delta)
        elif not client.cut:
            # The connection goes with it: its handler is stuck in a write to a full socket.
            client.cut = True
            self.cut_total += 1
            client.abort()
