"""A wake that finds no memory for the model leaves it asleep, and says so."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.architecture.errors import CheckpointError, MemoryShortage
from nodeagent.engine.server.sleep import EngineSleep


def an_engine_asleep(restore: Callable[[], Any]) -> EngineSleep:
    loaded = SimpleNamespace(
        known=None,
        parked=SimpleNamespace(restore=restore),
        first_touch=None,
        kv_blocks=SimpleNamespace(block_bytes=1),
    )
    unused = cast(Any, None)
    config = EngineConfig(model_path="m", served_name="m", socket="s")
    sleep = EngineSleep(config, cast(Any, loaded), unused, unused, unused)
    sleep.is_asleep = True
    return sleep


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryShortage("9 bytes are needed"), ErrorCode.OUT_OF_CAPACITY),
        (MemoryError(), ErrorCode.OUT_OF_CAPACITY),
        (torch.OutOfMemoryError("CUDA out of memory"), ErrorCode.OUT_OF_CAPACITY),
        (CheckpointError("no such file"), ErrorCode.UNAVAILABLE),
        (OSError("no such file"), ErrorCode.UNAVAILABLE),
    ],
    ids=["no room", "no host memory", "no device memory", "broken file", "no file"],
)
async def test_only_a_lack_of_memory_is_worth_another_try(error: Exception, code: str) -> None:
    def restore() -> None:
        raise error

    sleep = an_engine_asleep(restore)
    for _ in range(2):
        with pytest.raises(ApiError, match="cannot wake up") as refused:
            await sleep.wake()
        assert refused.value.code is code
        assert sleep.is_dropped
