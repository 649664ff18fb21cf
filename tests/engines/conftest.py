"""The engines that the tests share. Each is started once, when the first test needs it."""

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from isochrone.wire.engines.engine_capabilities import EngineCapabilities, capabilities_of
from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.drivers import DRIVERS
from nodeagent.host import processes
from nodeagent.host.engines.engine_process import EngineProcess
from ops.engines.vllm_cpu import small_chat_model
from tests.builders import GIB, a_spec
from tests.engines.real_engines import (
    LLAMA_CPP_COMMANDS,
    LLAMA_CPP_MODEL,
    MODEL,
    VLLM_COMMANDS,
    FakeVendor,
    installed,
    needs_llama_cpp,
    needs_vllm,
    running_engine,
)
from tests.engines.shallow_model import write_shallow

TOOLS_TEMPLATE: Final = (
    "{% if tools %}<|im_start|>system\nCall a function as "
    '<tool_call>{"name": "...", "arguments": {}}</tool_call>. Functions: {{ tools | tojson }}'
    "<|im_end|>\n{% endif %}"
)
"""Put before the chat template of SmolLM2, which knows no tools."""


FAKE_MODEL: Final = {
    "config.json": '{"model_type": "qwen3"}',
    "chat_template.jinja": "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}",
}
"""What the drivers of SGLang and TensorRT-LLM read of a model's folder."""


CONFORMING: Final = (
    *("embedded", "mock", "sglang", "tensorrt_llm"),
    pytest.param("vllm", marks=needs_vllm),
    pytest.param("llama_cpp", marks=needs_llama_cpp),
)


def a_chat_spec(driver: str, **options: str) -> ReplicaSpec:
    """Return a replica of the chat model on the CPU."""
    return a_spec(
        name="smol",
        context_tokens=2048,
        device_ids=(DeviceId("cpu"),),
        memory_bytes=3 * GIB,
        engine=EngineSettings(driver=driver, kv_memory_bytes=GIB // 4, options=options),
    )


@pytest.fixture(scope="session", autouse=True)
def _of_equal_priority() -> Iterator[None]:
    """Beside other suites, whose processes would all go first, an engine would not become ready."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "NICENESS", 0)
        yield


@pytest.fixture(scope="session", params=CONFORMING)
def engine(request: pytest.FixtureRequest) -> EngineProcess:
    """Each engine that the conformance suite runs with, in turn."""
    found: EngineProcess = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def traits(engine: EngineProcess) -> EngineCapabilities:
    """How the engine differs from others."""
    return capabilities_of(engine.record.spec.engine.driver)


@pytest.fixture(scope="session")
def model_with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat model, with a chat template that mentions tools in the way of Hermes."""
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    folder.mkdir()
    for path in MODEL.iterdir():
        (folder / path.name).symlink_to(path)
    template = folder / "chat_template.jinja"
    text = template.read_text()
    template.unlink()
    template.write_text(TOOLS_TEMPLATE + text)
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    if fields.pop("chat_template", ""):
        config.unlink()
        config.write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="session")
def shallow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat model with few layers."""
    return write_shallow(MODEL, tmp_path_factory.mktemp("models") / "shallow")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm(
    tmp_path_factory: pytest.TempPathFactory, model_with_tools: Path
) -> AsyncIterator[EngineProcess]:
    """A warm vLLM with adapters enabled. The last test of test_vllm.py kills it."""
    spec = a_chat_spec("vllm", enable_lora="true", max_lora_rank="8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{VLLM_COMMANDS}:{os.environ['PATH']}")
        await installed("vllm")
        folder = tmp_path_factory.mktemp("vllm")
        async with running_engine(spec, model_with_tools, folder) as engine:
            yield engine
    shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def embedded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcess]:
    """The embedded engine."""
    spec = a_chat_spec("embedded", waiting_max="64")
    folder = tmp_path_factory.mktemp("emb")
    async with running_engine(spec, small_chat_model().parent, folder) as engine:
        yield engine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mock(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcess]:
    """The mock engine."""
    folder = tmp_path_factory.mktemp("mock")
    async with running_engine(a_chat_spec("mock", itl_ms="1"), folder, folder / "e") as engine:
        yield engine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcess]:
    """llama.cpp's server, if ops/engines/llama_cpp.py has built it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{LLAMA_CPP_COMMANDS}:{os.environ['PATH']}")
        await installed("llama_cpp")
        folder = tmp_path_factory.mktemp("llama")
        async with running_engine(a_chat_spec("llama_cpp"), LLAMA_CPP_MODEL, folder) as engine:
            yield engine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcess]:
    """A server made from SGLang's fields: the engine needs a GPU."""
    async with fake_vendor("sglang", tmp_path_factory.mktemp("sglang")) as engine:
        yield engine


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tensorrt_llm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineProcess]:
    """A server made from TensorRT-LLM's fields: the engine needs a GPU."""
    async with fake_vendor("tensorrt_llm", tmp_path_factory.mktemp("trt")) as engine:
        yield engine


@asynccontextmanager
async def fake_vendor(name: str, folder: Path) -> AsyncIterator[EngineProcess]:
    """Start a server made from a vendor's fields with the driver of that vendor."""
    model = folder / "model"
    model.mkdir()
    for file, text in FAKE_MODEL.items():
        (model / file).write_text(text)
    async with AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(DRIVERS, name, FakeVendor(DRIVERS[name], name))
            running = running_engine(a_chat_spec(name), model, folder / "e")
            engine = await stack.enter_async_context(running)
        yield engine
