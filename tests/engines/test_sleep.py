"""The embedded engine sleeps and wakes with each kind of weights that it reads.

The folders are the chat model of `make test-engines`. A sleep parks the weights in a file where
they are packed by our own kernels, and else drops them and loads the model again.
"""

from pathlib import Path
from typing import Final

import msgspec
import pytest

from nodeagent.decide.replicas.sleep import SleepOutcome, WakeOutcome
from nodeagent.host.devices import CPU, DeviceReader
from nodeagent.host.engines.engine_process import EngineProcess
from tests.engines.conftest import a_chat_spec
from tests.engines.quantised_model import CONFIGS, write_quantised
from tests.engines.real_engines import MODEL, ask, running_engine, user

KINDS: Final = tuple((method, "auto") for method in CONFIGS)
pytestmark = [
    pytest.mark.skipif(
        not (MODEL / "config.json").exists(), reason=f"no {MODEL}: run `make test-engines`"
    ),
    pytest.mark.asyncio(loop_scope="session"),
]


def resident_bytes(engine: EngineProcess) -> int:
    return DeviceReader(0, open_nvml=lambda: None).used_by(engine.pid, (CPU,))


@pytest.mark.parametrize(
    ("weights", "quantisation"), [("floats", "auto"), ("floats", "none"), *KINDS]
)
async def test_a_model_that_slept_answers_as_before(
    weights: str, quantisation: str, tmp_path: Path
) -> None:
    folder = write_quantised(MODEL, tmp_path / "m", weights) if weights in CONFIGS else MODEL
    spec = a_chat_spec("embedded", quantisation=quantisation)
    spec = msgspec.structs.replace(spec, overcommit=4.0)
    question = user("What is the capital of France?")
    async with running_engine(spec, folder, tmp_path / "e") as engine:
        before = await ask(engine, messages=question)
        assert before.status == 200, before.body
        awake_bytes = resident_bytes(engine)
        for _ in range(2):
            assert await engine.fall_asleep(60.0) is SleepOutcome.ASLEEP
            assert await engine.is_asleep()
            assert resident_bytes(engine) < awake_bytes - (50 << 20)
            assert await engine.wake_up(60.0) is WakeOutcome.AWAKE
            after = await ask(engine, messages=question)
            assert after.status == 200, after.body
            assert after.text == before.text
