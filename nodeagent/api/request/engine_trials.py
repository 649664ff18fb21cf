"""Reports the requests that an engine processes to the replica's blame ledger, and runs the trials.

Suspects wait for one another before they reach the engine, so that a failure has one culprit. The
engine must answer before each of them: one that has failed already, perhaps with the one that the
suspect comes from, says nothing of the suspect.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Final

from isochrone.wire.peers.report import ReplicaState
from nodeagent.decide.requests.blame import EXIT_DELAY_S
from nodeagent.host.engines.engine_adapters import LoadedAdapter
from nodeagent.host.engines.engine_process import EngineProcess
from nodeagent.managed_replica import ManagedReplica

TRIAL_S_MAX: Final = 5.0
"""A trial ends after this time also without a token: an answer that is not streamed has none before
its end, and what makes an engine fail mostly does so when the prompt is read."""

TRIAL_WAIT_S_MAX: Final = 30.0
"""A suspect that waited for other trials this long goes to the engine without a trial. Half of the
time within which a router by default expects the first byte."""


class EngineRequest:
    """One request on its way through a replica's engine."""

    def __init__(
        self, replica: ManagedReplica, engine: EngineProcess, *, is_on_trial: bool
    ) -> None:
        """With `is_on_trial` the caller holds the replica's trial lock, which is released here."""
        self.adapter: LoadedAdapter | None = None
        self.is_counted = False
        """Whether the engine counts the tokens of each event for the router."""
        self._replica = replica
        self._engine = engine
        self._entry = replica.blame.begin(engine.pid, is_on_trial=is_on_trial)
        self._holds_lock = is_on_trial
        self._timer: asyncio.TimerHandle | None = None
        if is_on_trial:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TRIAL_S_MAX, self.record_token)

    def is_sent_to(self, engine: EngineProcess) -> bool:
        """Return whether `engine` is the one that the request waited for, with its adapter."""
        return engine is self._engine and (
            self.adapter is None or self.adapter.engine_pid == engine.pid
        )

    def record_token(self) -> None:
        """Note the first token, or that the trial took too long."""
        self._replica.blame.end_trial(self._entry)
        self._release()

    async def is_blamed(self) -> bool:
        """Return whether this request may have made the engine fail, which has just failed.

        A request is not to blame for an engine that the agent ends, or that had failed before it
        came.
        """
        is_ending = self._replica.end_ordered.is_set()
        if is_ending or self._replica.state is ReplicaState.DRAINING:
            return False
        ledger = self._replica.blame
        if ledger.is_late(self._entry, monotonic()) and await self._exits_now():
            return False
        return ledger.is_blamed(self._entry, monotonic())

    async def _exits_now(self) -> bool:
        """Return whether the engine's process has ended or ends within EXIT_DELAY_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_DELAY_S):
                await self._engine.exited.wait()
        return self._engine.exited.is_set()

    def end(self) -> None:
        """Note that the request is over."""
        self._replica.blame.end_trial(self._entry)
        self._release()

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._holds_lock:
            self._holds_lock = False
            self._replica.trial_lock.release()


@asynccontextmanager
async def engine_request(
    replica: ManagedReplica, *, is_suspect: bool
) -> AsyncIterator[EngineRequest | None]:
    """Note a request that goes to the replica's engine; a suspect first waits for its trial.

    Yield None if the replica has no engine to serve it, or no longer.
    """
    is_on_trial = is_suspect and await _wait_for_trial(replica.trial_lock)
    request = None
    try:
        engine = replica.engine
        is_lost = engine is None or (is_on_trial and not await engine.is_ready())
        if engine is not None and engine is replica.engine and not is_lost and replica.is_serving:
            request = EngineRequest(replica, engine, is_on_trial=is_on_trial)
        yield request
    finally:
        if request is not None:
            request.end()
        elif is_on_trial:
            replica.trial_lock.release()


async def _wait_for_trial(lock: asyncio.Lock) -> bool:
    """Take the trial lock; return False if that takes too long."""
    try:
        async with asyncio.timeout(TRIAL_WAIT_S_MAX):
            return await lock.acquire()
    except TimeoutError:
        return False
