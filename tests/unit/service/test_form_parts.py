"""A form of nothing but parts, or of lines without one, is refused and not read for minutes."""

import asyncio
from typing import Final
from unittest import mock

import pytest
from aiohttp import BodyPartReader, StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request

from isochrone.service.network.form_parts import LINES_MAX, form_parts
from isochrone.service.network.http_server import FORM_ERRORS

PART: Final = b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n'
END: Final = b"--b--\r\n"


def a_form(body: bytes, kind: str, boundary: str) -> web.Request:
    loop = asyncio.get_running_loop()
    content = StreamReader(mock.create_autospec(BaseProtocol, instance=True), 2**16, loop=loop)
    content.feed_data(body)
    content.feed_eof()
    headers = {"content-type": f"multipart/{kind}; boundary={boundary}"}
    return make_mocked_request("POST", "/", headers=headers, payload=content)


async def read(body: bytes, kind: str = "form-data", boundary: str = "b") -> list[bytes]:
    contents: list[bytes] = []
    async for part in form_parts(a_form(body, kind, boundary)):
        assert isinstance(part, BodyPartReader)
        contents.append(bytes(await part.read()))
    return contents


async def test_a_form_is_read_and_its_contents_have_any_number_of_lines() -> None:
    lines = b"\r\n" * (2 * LINES_MAX)
    assert await read(b"\r\n" + PART + PART.replace(b"x", lines) + END) == [b"x", lines]


@pytest.mark.parametrize(
    "body",
    [PART * LINES_MAX + END, b"\r\n" * LINES_MAX + PART + END, b"\r\n" * (2 * LINES_MAX)],
    ids=["parts", "lines before them", "lines"],
)
async def test_a_form_of_many_lines_beside_its_contents_is_refused(body: bytes) -> None:
    with pytest.raises(FORM_ERRORS, match="more than 1000 lines"):
        await read(body)


@pytest.mark.parametrize("kind", ["form-data", "mixed"])
@pytest.mark.parametrize("name", ["Content-Encoding", "Content-Transfer-Encoding"])
async def test_a_part_with_an_encoding_of_its_own_is_refused(kind: str, name: str) -> None:
    """A compressed part was inflated on the event loop, and base64 read byte by byte."""

    def a_part(encoding: str) -> bytes:
        return PART.replace(b"\r\n\r\n", f"\r\n{name}: {encoding}\r\n\r\n".encode(), 1) + END

    assert await read(a_part("Binary"), kind) == [b"x"]
    for encoding in ("gzip", "base64", "quoted-printable"):
        with pytest.raises(FORM_ERRORS, match=f"'{encoding}': send it as it is"):
            await read(a_part(encoding), kind)


async def test_a_form_that_aiohttp_only_asserts_about_is_refused() -> None:
    """It reads 32 bytes of a field of this name, and expects a shorter boundary."""
    body = PART.replace(b'"f"', b'"_charset_"').replace(b"--b", b"--" + 60 * b"b") + END
    with pytest.raises(FORM_ERRORS):
        await read(body, boundary=60 * "b")
