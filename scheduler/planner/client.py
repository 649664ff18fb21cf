"""The scheduler's side of its planner: started at the first question, and anew where it was lost.

A planner that ends, or does not answer in time, costs the questions it was asked, and no more: the
next one starts another. It ends by itself when nobody is left who could ask.
"""

import asyncio
import logging
import sys
from contextlib import suppress
from itertools import count
from typing import Final, TypeVar, cast

import msgspec

from isochrone.wire.ids import DeploymentId, Epoch
from scheduler.decide.cluster import PlacementPlan
from scheduler.decide.membership.liveness import NodeContact
from scheduler.decide.placement.prefetch import PrefetchDecision
from scheduler.decide.whatif.explain import Explanation
from scheduler.planner.messages import (
    ExplainRequest,
    LearnReply,
    LearnRequest,
    PlannerQuestion,
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
"""Many times what the largest fleet's first plan takes: whoever thinks for so long is stuck."""

ReplyT = TypeVar("ReplyT")


class PlannerFailed(Exception):
    """There is no answer; the message says why."""


class PlannerClient:
    """Asks the planner's process, whichever lives. `stop()` ends it."""

    def __init__(
        self, settings: PlannerSettings, *, answer_timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._settings = settings
        self._answer_timeout_s = answer_timeout_s
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[PlannerReply]] = {}

    async def plan(self, heard: NodeContact) -> PlacementPlan:
        """Return what should start and end."""
        return await self._ask(PlanRequest(heard), PlacementPlan)

    async def foresee(self, heard: NodeContact) -> PrefetchDecision:
        """Return which weights should be where before they are needed."""
        return await self._ask(PrefetchRequest(heard), PrefetchDecision)

    async def explain(self, heard: NodeContact, deployment_id: DeploymentId) -> Explanation | None:
        """Return why a deployment runs where it does; None where there is no such deployment."""
        question = ExplainRequest(heard, deployment_id)
        # mypy takes no union for a type.
        return await self._ask(question, cast(type[Explanation], Explanation | None))

    async def picture(self, heard: NodeContact) -> msgspec.Raw:
        """Return the picture that would be decided from, as JSON."""
        return msgspec.Raw(await self._ask(SnapshotRequest(heard), bytes))

    async def learn(self, epoch: Epoch) -> LearnReply:
        """Have it learn the demand of what has ended."""
        return await self._ask(LearnRequest(epoch), LearnReply)

    async def stop(self) -> None:
        """End it at once: it holds nothing that the store does not."""
        if self._process is not None:
            await self._killed(self._process)

    async def _ask(self, question: PlannerQuestion, answer: type[ReplyT]) -> ReplyT:
        process = await self._started()
        assert process.stdin is not None
        number = next(self._numbers)
        told = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                process.stdin.write(frame(PlannerRequest(number, question)))
                await process.stdin.drain()
                told_now = await told
        except TimeoutError:
            await self._killed(process)
            raise PlannerFailed(
                f"cannot decide: no answer within {self._answer_timeout_s:g} s; another planner "
                "is started"
            ) from None
        except ConnectionError as error:
            raise PlannerFailed("cannot decide: the planner has ended") from error
        finally:
            del self._waiting[number]
        if told_now.failure:
            raise PlannerFailed(f"cannot decide: {told_now.failure}")
        return msgspec.msgpack.decode(told_now.answer, type=answer)

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._listening is None or self._listening.done():
                self._process = process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "scheduler.planner"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                assert process.stdin is not None
                process.stdin.write(frame(self._settings))
                self._listening = asyncio.create_task(self._listen(process))
            return self._process

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Hand out answers for as long as there are any, then see the process end."""
        assert process.stdout is not None
        try:
            while True:
                told = msgspec.msgpack.decode(await read_frame(process.stdout), type=PlannerReply)
                waiting = self._waiting.get(told.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(told)
        except asyncio.IncompleteReadError:
            log.debug("no more answers")
        except msgspec.MsgspecError as error:
            log.warning("cannot read an answer", extra={"fields": {"reason": str(error)}})
            process.kill()
        code = await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(PlannerFailed(f"cannot decide: the planner ended ({code})"))
        log.info("planner ended", extra={"fields": {"code": code}})

    async def _killed(self, process: asyncio.subprocess.Process) -> None:
        """Kill it, and see it end: whoever asks next must not ask a dead one."""
        with suppress(ProcessLookupError):
            process.kill()
        if process is self._process and self._listening is not None:
            await asyncio.shield(self._listening)
