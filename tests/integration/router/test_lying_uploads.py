"""Uploads that lie about what they are or how large: refused, and nothing else is disturbed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from isochrone.wire.peers.routes import KeyLimits
from tests.integration.router.fleet_of import KEY, Bench, a_bench
from tests.integration.router.test_bad_input import still_serves
from tests.integration.router.test_media import SOUND, a_media_bench

FORM = b"multipart/form-data; boundary=b"
AUDIO = "/v1/audio/transcriptions"


def part(name: str, value: bytes, extra: str = "") -> bytes:
    file = '; filename="a.wav"' if name == "file" else ""
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n{extra}\r\n'
    return head.encode() + value + b"\r\n"


A_FORM = part("model", b"transcription") + part("file", SOUND) + b"--b--\r\n"


async def post_raw(
    bench: Bench, path: str, body: bytes, *, length: int, kind: bytes = FORM, ends: bool = False
) -> bytes:
    """Send a body that its Content-Length may not agree with; return all that comes back.

    With `ends` the client closes its side at once, else the router must end the wait.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.app.port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Connection: close\r\nContent-Type: {kind.decode()}\r\nContent-Length: {length}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    if ends:
        writer.write_eof()
    async with asyncio.timeout(60):
        received = await reader.read()
    writer.close()
    return received


LIES: dict[str, tuple[bytes, dict[str, Any], tuple[bytes, ...]]] = {
    "longer than it is": (A_FORM, {"length": len(A_FORM) + 9}, (b"408",)),
    "longer, and it ends": (A_FORM, {"length": 10**7, "ends": True}, (b"400", b"413", b"")),
    "shorter than it is": (A_FORM, {"length": len(A_FORM) - 30}, (b"400",)),
    "larger than any": (A_FORM, {"length": 10**15}, (b"413",)),
    "negative": (A_FORM, {"length": -1}, (b"400",)),
    "a part's length": (
        part("model", b"transcription")
        + part("file", SOUND, f"Content-Length: {10**12}\r\n")
        + b"--b--\r\n",
        {},
        (b"400",),
    ),
    "no end": (A_FORM[:-4], {}, (b"400",)),
    "another boundary": (A_FORM.replace(b"--b", b"--c"), {}, (b"400",)),
    "no boundary": (A_FORM, {"kind": b"multipart/form-data"}, (b"400",)),
    "JSON": (A_FORM, {"kind": b"application/json"}, (b"400",)),
    "a form that is JSON": (b'{"model":"transcription"}', {}, (b"400",)),
}


@pytest.mark.parametrize("name", LIES)
async def test_a_sound_that_lies_about_its_form_leaves_nothing(tmp_path: Path, name: str) -> None:
    body, given, statuses = LIES[name]
    async with a_media_bench(tmp_path) as bench:
        received = await post_raw(bench, AUDIO, body, **{"length": len(body), **given})
        assert received[9:12] in statuses, received
        assert bench.app.server.bodies.uploads._size_bytes == 0
        assert bench.nodes[0].requests == 0
        received = await post_raw(bench, AUDIO, A_FORM, length=len(A_FORM))
        assert received[9:12] == b"200", received


@pytest.mark.parametrize("name", [name for name in LIES if name != "a part's length"])
async def test_a_document_that_lies_about_its_form_is_refused(tmp_path: Path, name: str) -> None:
    body, given, statuses = LIES[name]
    body = body.replace(b'name="file"', b'name="files"').replace(b"a.wav", b"a.txt")
    length = len(body) + given.get("length", len(A_FORM)) - len(A_FORM)
    limits = KeyLimits(requests_per_min=100)
    async with a_bench(tmp_path, limits=limits) as bench:
        received = await post_raw(
            bench,
            "/ai/tomarkdown",
            body,
            **{**given, "length": length if "length" in given else len(body)},
        )
        assert received[9:12] in statuses, received
        if received:
            assert b'"success":false' in received or b'"error"' in received
        await still_serves(bench)
