"""The encoder's server: its limits hold although bodies take time, and any thread may count."""

import asyncio
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.encoder.encoder_thread import EncoderThread, TokenizedText
from nodeagent.engine.encoder.server import EncoderServer

TEXT = TokenizedText([1, 2], [])


def encoder_server(**fields: Any) -> EncoderServer:
    """Return a server without a model."""
    model = SimpleNamespace(shape=SimpleNamespace(width=2))
    loaded: Any = SimpleNamespace(kind="embedding", context_tokens=8, model=model)
    config = EngineConfig(model_path="m", served_name="m", socket="s", **fields)
    return EncoderServer(config, loaded, lambda: None)


async def test_requests_that_passed_the_first_check_together_are_refused_above_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = encoder_server(sequences_max=1, waiting_max=1)
    refused: list[ErrorCode] = []

    async def encode(texts: list[TokenizedText]) -> np.ndarray:
        # The others arrived meanwhile.
        if server.inflight.in_flight <= 3:
            try:
                await server._encode(texts, "input")
            except ApiError as error:
                refused.append(error.code)
        return np.zeros((1, 2), np.float32)

    monkeypatch.setattr(server.worker, "encode", encode)
    await server._encode([TEXT], "input")
    assert (refused, server.inflight.in_flight) == ([ErrorCode.OUT_OF_CAPACITY], 0)


async def test_a_request_whose_body_arrives_after_the_drain_began_is_refused() -> None:
    server = encoder_server()
    server.inflight.draining = True
    with pytest.raises(ApiError) as refused:
        async with asyncio.timeout(5):
            await server._encode([TEXT], "input")
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert await server.inflight.wait_idle(1)


async def test_the_queue_is_counted_while_steps_take_texts_from_it() -> None:
    worker = encoder_server().worker
    assert isinstance(worker, EncoderThread)
    queue, taken = worker._queue, threading.Event()

    def take() -> None:
        while not taken.is_set():
            for number in range(50):
                queue.add(number, [4] * 2)
            while queue.next_batch():
                pass

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    taking = threading.Thread(target=take)
    taking.start()
    try:
        for _ in range(3000):
            assert worker.counts()["waiting"] >= 0
    finally:
        taken.set()
        taking.join()
        sys.setswitchinterval(interval_s)
