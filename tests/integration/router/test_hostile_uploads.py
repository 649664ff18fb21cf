"""Documents and images that lie about their kind or size: refused, and chats go on."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests import hostile_documents
from tests.integration.router.fleet_of import a_bench
from tests.integration.router.test_bad_input import still_serves
from tests.integration.router.test_to_markdown import convert, needs_landlock
from tests.unit.router.test_images import a_jpeg, a_png

SECRET = "the-secret-of-this-machine"


@needs_landlock
async def test_hostile_documents_end_in_errors_and_chats_go_on(tmp_path: Path) -> None:
    pytest.importorskip("markitdown")
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    word = hostile_documents.docx(hostile_documents.word_text("harmless"))
    documents = (
        ("harmless.docx", word),
        ("entities.docx", hostile_documents.exponential_entities()),
        ("outside.docx", hostile_documents.external_entity(str(secret))),
        ("far.xlsx", hostile_documents.far_cell()),
        ("deep.html", hostile_documents.nested_html(2_000)),
        ("page.pdf", b"<h1>no PDF</h1>"),
        ("sheet.xlsx", word),
        ("letters.pptx", b"PK\x05\x06" + bytes(18)),
    )
    async with a_bench(tmp_path) as bench:
        converting = asyncio.create_task(convert(bench, *documents))
        for _ in range(5):
            await still_serves(bench)
        status, answer = await converting
        assert (status, answer["success"]) == (200, True)
        rows = {row["name"]: row for row in answer["result"]}
        assert rows.pop("harmless.docx")["data"] == "harmless"
        assert rows.pop("deep.html")["data"] == "x"
        assert {row["format"] for row in rows.values()} == {"error"}, rows
        assert "cells" in rows["far.xlsx"]["error"], "found out before its grid was filled"
        assert SECRET not in json.dumps(answer)


BIG_PNG = base64.b64encode(a_png(50_000, 20_000)).decode()
BIG_URL = f"data:image/png;base64,{BIG_PNG}"
LYING_URL = f"data:image/png;base64,{base64.b64encode(a_jpeg(65_000, 65_000)).decode()}"
"""The type says PNG, the bytes are a JPEG."""


def chat_with(url: str) -> list[dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [part]}]


BIG_BLOCK = {
    "role": "user",
    "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BIG_PNG}}
    ],
}
BIG_INPUT = [{"role": "user", "content": [{"type": "input_image", "image_url": BIG_URL}]}]

IMAGE_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "tiny", "messages": chat_with(BIG_URL)}),
    "a lie": ("/v1/chat/completions", {"model": "tiny", "messages": chat_with(LYING_URL)}),
    "responses": ("/v1/responses", {"model": "tiny", "input": BIG_INPUT}),
    "input_tokens": ("/v1/responses/input_tokens", {"model": "tiny", "input": BIG_INPUT}),
    "messages": ("/v1/messages", {"model": "tiny", "max_tokens": 3, "messages": [BIG_BLOCK]}),
    "count_tokens": ("/v1/messages/count_tokens", {"model": "tiny", "messages": [BIG_BLOCK]}),
    "run": ("/ai/run/tiny", {"messages": chat_with(BIG_URL)}),
}


@pytest.mark.parametrize("name", IMAGE_REQUESTS)
async def test_an_image_of_a_billion_pixels_reaches_no_engine(tmp_path: Path, name: str) -> None:
    path, body = IMAGE_REQUESTS[name]
    async with a_bench(tmp_path) as bench:
        async with bench.http.post(f"{bench.url}{path}", json=body) as response:
            text = await response.text()
            assert response.status == 400, text
        assert "pixels, the limit is 64000000" in text, text
        field = "input" if "input" in body else "messages"
        assert f"cannot use field '{field}" in text, text
        assert bench.nodes[0].requests == 0
        await still_serves(bench)
