"""A real vLLM says what its prefix cache stores and evicts; the agent knows how far it reaches."""

import json
import os
import time
from pathlib import Path
from typing import Final

import pytest

from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from nodeagent.drivers.driver import COMPLETIONS_PATH
from nodeagent.host.engines.engine_process import EngineProcess
from tests.builders import GIB, a_spec
from tests.engines.real_engines import VLLM_COMMANDS, needs_vllm, post, running_engine
from tests.integration.nodeagent.test_two_legs import artifact_of
from tests.system.harness import until

PROMPT_TOKENS: Final = 579
CACHED_TOKENS: Final = 512
"""vLLM on a CPU caches blocks of 128 tokens."""
KV_BYTES: Final = 7_000_000
"""Room for about 35 blocks, of which a prompt has four."""

pytestmark = [needs_vllm, pytest.mark.timeout(900)]


async def ask(engine: EngineProcess, seed: int) -> int:
    """Send a prompt; return how many of its tokens were cached."""
    prompt = [1000 + (37 * n + 101 * seed) % 5000 for n in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = await post(engine, COMPLETIONS_PATH, json.dumps(body).encode(), salt="s")
    assert answer.status == 200, answer
    return answer.cached_tokens


async def since_s(engine: EngineProcess) -> float | None:
    """Return since when the cache has all that was used; None if that is not known."""
    stats = await engine.stats()
    assert stats is not None
    age_s = stats.prefix_evicted_age_s
    return time.monotonic() - age_s if age_s >= 0 else None


async def test_the_agent_knows_what_a_vllm_has_evicted(
    tmp_path: Path, shallow_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{VLLM_COMMANDS}:{os.environ['PATH']}")
    engine_settings = EngineSettings(driver="vllm", kv_memory_bytes=KV_BYTES)
    spec = a_spec(
        engine=engine_settings,
        device_ids=(DeviceId("cpu"),),
        memory_bytes=3 * GIB,
        artifact=artifact_of(shallow_model),
        context_tokens=1024,
    )
    began_s = time.monotonic()
    async with running_engine(spec, shallow_model, tmp_path / "e") as engine:

        async def is_known() -> bool:
            return await since_s(engine) is not None

        await until("it is known how far the cache reaches", is_known, 60.0)
        asked_s: list[float] = []
        for seed in range(3):
            asked_s.append(time.monotonic())
            await ask(engine, seed)
        known_s = await since_s(engine)
        assert known_s is not None
        assert began_s - 1 < known_s < asked_s[0], "nothing is evicted yet"
        assert await ask(engine, 0) == CACHED_TOKENS

        for seed in range(3, 24):
            asked_s.append(time.monotonic())
            await ask(engine, seed)

        async def has_moved() -> bool:
            known_s = await since_s(engine)
            return known_s is not None and known_s > asked_s[3]

        await until("evictions are known", has_moved, 60.0)
        known_s = await since_s(engine)
        assert known_s is not None
        kept = [seed for seed, at_s in enumerate(asked_s) if at_s > known_s]
        # From the newest, so that asking evicts none of those to be asked.
        assert 4 <= len(kept) < 9
        assert [await ask(engine, seed) for seed in reversed(kept)] == [CACHED_TOKENS] * len(kept)
        assert await ask(engine, kept[0] - 3) < CACHED_TOKENS
        # It reads on, and at most a few bytes for each token.
        events_bytes = engine._kv_events.bytes_total
        assert 0 < events_bytes < 10 * PROMPT_TOKENS * len(asked_s)
        print(f"{events_bytes / (PROMPT_TOKENS * len(asked_s)):.1f} bytes of events for each token")
