"""Images through a router and an agent to a real vLLM, sent by the official SDKs.

The model is tiny, with random weights: what it says means nothing, but it reads the images.
"""

import base64
import io
import zlib
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

import anthropic
import openai
import pytest
import pytest_asyncio

from tests.builders import GIB
from tests.engines.real_engines import VLLM_COMMANDS, needs_vllm
from tests.engines.vendor_fleet import ONE_REPLICA, a_vendor_fleet
from tests.engines.vision_model import write_vision_model
from tests.system.harness import Fleet

pytestmark = [needs_vllm, pytest.mark.asyncio(loop_scope="session")]

DEPLOYMENT: Final = {
    "deployment_id": "see",
    "model_id": "see",
    "engine": {"driver": "vllm", "kv_memory_bytes": GIB // 4, "context_tokens_max": 2048},
    "policy": ONE_REPLICA,
}


class Clients(NamedTuple):
    """The SDKs of both vendors."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    model = await write_vision_model(tmp_path_factory.mktemp("models") / "see")
    settings = {"router-ams": {"stream_idle_timeout_s": 30.0}}
    async with a_vendor_fleet(VLLM_COMMANDS, model, DEPLOYMENT, 8, settings) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def clients(fleet: Fleet) -> AsyncIterator[Clients]:
    url = fleet.endpoint("ams")
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=fleet.key, max_retries=0) as first,
        anthropic.AsyncAnthropic(base_url=url, api_key=fleet.key, max_retries=0) as second,
    ):
        yield Clients(first, second)


def an_image(kind: str = "png", colour: str = "red") -> bytes:
    """Return an image of 120 x 80 pixels."""
    pillow = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pillow.new("RGB", (120, 80), colour).save(file, kind)
    return file.getvalue()


def a_png(width: int, height: int, pixels: bytes) -> bytes:
    """Return a PNG of one bit a pixel with these compressed pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + checksum

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    head = chunk(b"IHDR", size + b"\x01\0\0\0\0")
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def a_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def parts(*urls: str) -> Any:
    """Return the messages of a chat about images."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *images]}]


async def prompt_tokens(clients: Clients, *urls: str) -> int:
    """Return how many tokens the prompt of a chat about images has."""
    answer = await clients.openai.chat.completions.create(
        model="see", messages=parts(*urls), max_tokens=2
    )
    assert answer.usage is not None
    return answer.usage.prompt_tokens


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "webp"])
async def test_an_image_of_each_format_is_read(clients: Clients, kind: str) -> None:
    without, url = await prompt_tokens(clients), a_url(an_image(kind), kind)
    one, two = await prompt_tokens(clients, url), await prompt_tokens(clients, url, url)
    # Each is four tokens between two or more marks.
    assert one - without == two - one > 4
    stream = await clients.openai.chat.completions.create(
        model="see",
        messages=parts(url),
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = [chunk.usage async for chunk in stream][-1]
    assert usage is not None
    assert usage.prompt_tokens == one


async def test_both_vendors_clients_send_the_same_image(clients: Clients) -> None:
    data = base64.b64encode(an_image()).decode()
    chat = await prompt_tokens(clients, a_url(an_image()))
    question: Any = {"type": "text", "text": "What is it?"}
    image: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }
    message = await clients.anthropic.messages.create(
        model="see", max_tokens=2, messages=[{"role": "user", "content": [question, image]}]
    )
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": [image]}
    call: Any = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    message = await clients.anthropic.messages.create(
        model="see",
        max_tokens=2,
        tools=[{"name": "look", "input_schema": {"type": "object"}}],
        messages=[
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    )
    assert message.stop_reason in ("max_tokens", "end_turn")
    given: Any = {"type": "input_image", "image_url": a_url(an_image()), "detail": "auto"}
    response = await clients.openai.responses.create(
        model="see",
        max_output_tokens=2,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, given]}],
    )
    assert response.usage is not None
    assert response.usage.input_tokens == chat


async def test_another_image_has_another_answer_and_its_own_cache(clients: Clients) -> None:
    """Prefixes of prompts are cached by the image, not by its place."""

    async def ask(colour: str) -> tuple[str | None, list[float]]:
        answer = await clients.openai.chat.completions.create(
            model="see",
            messages=parts(a_url(an_image(colour=colour))),
            max_tokens=4,
            temperature=0,
            logprobs=True,
        )
        (choice,) = answer.choices
        assert choice.logprobs is not None
        return choice.message.content, [t.logprob for t in choice.logprobs.content or ()]

    red, blue, again = await ask("red"), await ask("blue"), await ask("red")
    assert red[1] == pytest.approx(again[1], abs=0.05)
    assert red[1] != pytest.approx(blue[1], abs=1e-6)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("https://example.com/a.png", "other URLs are not fetched"),
        ("file:///etc/passwd", "other URLs are not fetched"),
        ("data:image/png;base64,@@@@", "base64"),
        (a_url(b"no image at all" * 8), "header is broken"),
        (a_url(a_png(31_623, 31_623, b"")), "pixels, the limit is"),
        (a_url(a_png(1, 100_000, b"")), "200 times as long"),
    ],
)
async def test_the_router_refuses_an_image_by_its_field(
    clients: Clients, url: str, match: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=match) as refused:
        await prompt_tokens(clients, url)
    assert refused.value.param is not None
    assert refused.value.param.startswith("messages[0].content[1].image_url")


async def test_an_image_that_cannot_be_decoded_is_the_clients_fault(
    clients: Clients, fleet: Fleet
) -> None:
    before, whole = fleet.engine_pids(), an_image("jpeg")
    for url in (a_url(a_png(64, 64, b"")), a_url(whole[: len(whole) * 3 // 4], "jpeg")):
        with pytest.raises(openai.BadRequestError, match="image"):
            await prompt_tokens(clients, url)
    assert await prompt_tokens(clients, a_url(whole, "jpeg"))
    assert fleet.engine_pids() == before


async def test_a_body_of_thirty_megabytes_is_refused(clients: Clients) -> None:
    with pytest.raises(openai.APIStatusError, match="413") as refused:
        await prompt_tokens(clients, a_url(bytes(22_500_000)))
    assert refused.value.status_code == 413
