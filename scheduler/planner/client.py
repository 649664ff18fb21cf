"""The scheduler's client of the planner process, which it starts when needed.

If the planner ends or does not answer in time, only its pending requests fail: the next request
starts another process. The planner ends by itself when the scheduler is gone.
"""

import asyncio
import logging
import sys
from contextlib import suppress
from itertools import count
from typing import Final, TypeVar, cast

import msgspec

from isochrone.service.tracing.recorder import child_span
from isochrone.service.tracing.spans import SpanKind
from isochrone.wire.ids import DeploymentId, Epoch
from scheduler.decide.cluster import PlacementPlan
from scheduler.decide.membership import NodeContact
from scheduler.decide.placement import PrefetchDecision
from scheduler.decide.whatif import Explanation
from scheduler.planner.messages import (
    ExplainRequest,
    LearnedDemand,
    LearnRequest,
    PlannerCall,
    PlannerReply,
    PlannerRequest,
    PlannerSettings,
    PlanRequest,
    PrefetchRequest,
    SnapshotRequest,
    frame,
    read_frame,
)

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 120.0
"""Many times the time of the largest fleet's first plan: a planner that takes longer is stuck."""

ReplyT = TypeVar("ReplyT")


class PlannerFailed(Exception):
    """The planner gave no answer; the message says why."""


class PlannerClient:
    """Sends requests to the planner process. `stop()` ends it."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._answer_timeout_s = ANSWER_TIMEOUT_S
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[PlannerReply]] = {}

    async def plan(self, contact: NodeContact, *, is_quick: bool = False) -> PlacementPlan:
        """Return what should start and end; if `is_quick`, without a thorough search."""
        return await self._ask(PlanRequest(contact, is_quick), PlacementPlan)

    async def plan_prefetch(self, contact: NodeContact) -> PrefetchDecision:
        """Return which weights to prefetch to which nodes."""
        return await self._ask(PrefetchRequest(contact), PrefetchDecision)

    async def explain(
        self, contact: NodeContact, deployment_id: DeploymentId
    ) -> Explanation | None:
        """Return why a deployment runs where it does; None if there is no such deployment."""
        request = ExplainRequest(contact, deployment_id)
        # mypy does not accept a union as a type argument.
        return await self._ask(request, cast(type[Explanation], Explanation | None))

    async def snapshot(self, contact: NodeContact) -> msgspec.Raw:
        """Return the cluster snapshot that the next plan would be made from, as JSON."""
        return msgspec.Raw(await self._ask(SnapshotRequest(contact), bytes))

    async def learn(self, epoch: Epoch) -> LearnedDemand:
        """Let the planner learn the demand of slots that have ended."""
        return await self._ask(LearnRequest(epoch), LearnedDemand)

    async def stop(self) -> None:
        """Kill the planner: all of its state is in the store."""
        if self._process is not None:
            await self._kill(self._process)

    async def _ask(self, request: PlannerRequest, answer_type: type[ReplyT]) -> ReplyT:
        """Send a request and return the answer; raise PlannerFailed if there is none."""
        with child_span("planner", SpanKind.CLIENT):
            return await self._exchange(request, answer_type)

    async def _exchange(self, request: PlannerRequest, answer_type: type[ReplyT]) -> ReplyT:
        process = await self._ensure_started()
        assert process.stdin is not None
        number = next(self._numbers)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                process.stdin.write(frame(PlannerCall(number, request)))
                await process.stdin.drain()
                reply = await future
        except TimeoutError:
            await self._kill(process)
            raise PlannerFailed(
                f"cannot plan: no answer within {self._answer_timeout_s:g} s; the next request "
                "starts another planner"
            ) from None
        except ConnectionError as error:
            raise PlannerFailed("cannot plan: the planner has ended") from error
        finally:
            del self._pending[number]
        if reply.failure:
            raise PlannerFailed(f"cannot plan: {reply.failure}")
        return msgspec.msgpack.decode(reply.answer, type=answer_type)

    async def _ensure_started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._reading is None or self._reading.done():
                try:
                    process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", "scheduler.planner"),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                    )
                except OSError as error:
                    # Callers take an OSError for a failure of the database.
                    raise PlannerFailed(
                        f"cannot plan: cannot start the planner: {error}"
                    ) from error
                self._process = process
                assert process.stdin is not None
                process.stdin.write(frame(self._settings))
                self._reading = asyncio.create_task(self._read_replies(process))
            return self._process

    async def _read_replies(self, process: asyncio.subprocess.Process) -> None:
        """Give each reply to its request until the process ends, then fail the pending ones."""
        assert process.stdout is not None
        try:
            while True:
                reply = msgspec.msgpack.decode(await read_frame(process.stdout), type=PlannerReply)
                future = self._pending.get(reply.number)
                if future is not None and not future.done():
                    future.set_result(reply)
        except asyncio.IncompleteReadError:
            log.debug("the planner closed its output")
        except msgspec.MsgspecError as error:
            log.warning("cannot read a reply", extra={"fields": {"reason": str(error)}})
            process.kill()
        code = await process.wait()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(PlannerFailed(f"cannot plan: the planner ended ({code})"))
        log.info("planner ended", extra={"fields": {"code": code}})

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process and wait for its end, so that the next request starts another."""
        with suppress(ProcessLookupError):
            process.kill()
        if process is self._process and self._reading is not None:
            await asyncio.shield(self._reading)
