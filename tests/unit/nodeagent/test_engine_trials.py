"""Suspects are tried one at a time, by engines that answer."""

import asyncio
from typing import cast

import pytest

from nodeagent.api.request.engine_trials import engine_request
from nodeagent.decide.requests.blame import BlameLedger
from nodeagent.host.engines.engine_process import EngineProcess
from nodeagent.managed_replica import ManagedReplica


class ProbedEngine:
    """An engine whose health is what a test says; `probes` counts how often it was asked."""

    pid = 7

    def __init__(self) -> None:
        self.answers = True
        self.probes = 0
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def is_ready(self) -> bool:
        self.probes += 1
        self.is_asked.set()
        await self.may_answer.wait()
        return self.answers


class OneEngineReplica:
    """What the trials use of a replica."""

    is_serving = True

    def __init__(self) -> None:
        self.probed = ProbedEngine()
        self.engine: EngineProcess | None = cast(EngineProcess, self.probed)
        self.trial_lock = asyncio.Lock()
        self.blame = BlameLedger()

    @property
    def managed(self) -> ManagedReplica:
        return cast(ManagedReplica, self)


async def test_an_engine_that_has_failed_already_gets_no_suspect() -> None:
    replica = OneEngineReplica()
    replica.probed.answers = False
    async with engine_request(replica.managed, is_suspect=True) as request:
        assert request is None
    assert not replica.trial_lock.locked()


async def test_only_suspects_wait_for_the_engines_answer() -> None:
    replica = OneEngineReplica()
    async with engine_request(replica.managed, is_suspect=False) as request:
        assert request is not None
    assert replica.probed.probes == 0
    async with engine_request(replica.managed, is_suspect=True) as request:
        assert request is not None
        assert replica.trial_lock.locked()
    assert replica.probed.probes == 1
    assert not replica.trial_lock.locked()


async def test_a_suspect_whose_engine_was_replaced_meanwhile_goes_to_neither() -> None:
    replica = OneEngineReplica()
    probed = replica.probed
    probed.may_answer.clear()

    async def try_suspect() -> bool:
        async with engine_request(replica.managed, is_suspect=True) as request:
            return request is None

    trying = asyncio.create_task(try_suspect())
    await probed.is_asked.wait()
    replica.engine = None
    probed.may_answer.set()
    assert await trying


async def test_a_client_that_leaves_while_the_engine_is_asked_ends_the_trial() -> None:
    replica = OneEngineReplica()
    replica.probed.may_answer.clear()

    async def try_suspect() -> None:
        async with engine_request(replica.managed, is_suspect=True):
            raise AssertionError("the engine has not answered")

    trying = asyncio.create_task(try_suspect())
    await replica.probed.is_asked.wait()
    trying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trying
    assert not replica.trial_lock.locked()
