"""An engine that falls asleep: what it holds meanwhile, and what it says of it."""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.core.step import DroppedModel
from nodeagent.engine.kvcache.block_pool import CachedBlock
from nodeagent.engine.server import sleep
from nodeagent.engine.server.sleep import EngineSleep

CONFIG = EngineConfig(model_path="m", served_name="m", socket="s")


class Model:
    """In place of a model that cannot be parked."""


class Core:
    """In place of an engine core; also calls on it, at once, in place of its thread."""

    def __init__(self) -> None:
        self.model: Model | None = Model()

    def call(self, function: Callable[[Any], Any]) -> Future[Any]:
        result: Future[Any] = Future()
        result.set_result(function(self))
        return result

    def fall_asleep(self, save_until_s: float, kept_max: int) -> DroppedModel:
        model: Any = self.model
        self.model = None
        return DroppedModel(model, ())

    def wake_up(self, model: Model, kept: Sequence[CachedBlock]) -> None:
        self.model = model


def an_engine(core: Core) -> EngineSleep:
    loaded: Any = SimpleNamespace(
        known=None,
        parked=SimpleNamespace(restore=lambda: None),
        first_touch=SimpleNamespace(stop=lambda: None),
        kv_blocks=SimpleNamespace(block_bytes=1 << 20),
    )
    worker: Any = core
    inflight: Any = SimpleNamespace(in_flight=0)
    staging: Any = SimpleNamespace(forget=lambda: None)
    return EngineSleep(CONFIG, loaded, worker, inflight, staging)


async def test_the_model_has_gone_when_memory_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = Core()
    model = weakref.ref(core.model)
    are_gone: list[bool] = []
    give_back = sleep._give_memory_back

    def look() -> None:
        give_back()
        are_gone.append(model() is None)

    monkeypatch.setattr(sleep, "_give_memory_back", look)
    await an_engine(core).fall_asleep()
    assert are_gone == [True]


async def test_an_engine_says_that_it_sleeps_only_between_its_switches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[bool] = []
    engine = an_engine(Core())

    def note(*_: object) -> Model:
        said.append(engine.is_dropped)
        return Model()

    monkeypatch.setattr(sleep, "_give_memory_back", note)
    monkeypatch.setattr(sleep, "reload_runner", note)
    said.append(engine.is_dropped)
    await engine.fall_asleep()
    assert engine.is_dropped
    await asyncio.gather(engine.wake(), engine.wake())
    assert not engine.is_dropped
    assert said == [False, False, False]
