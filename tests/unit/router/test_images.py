"""Images are checked by their headers: the size that they decode to, and their format."""

import base64
import io
import json
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.errors import ApiError, openai_error_event
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    KeyId,
    ModelId,
    PopId,
    TenantId,
)
from isochrone.wire.peers.routes import DeploymentEntry, KeyEntry, KeyTable, RouteTable
from ops.bench.relay import IMAGE_KIB, conversation
from router.apis.openai.decode import CHAT, decode
from router.apis.openai.images import (
    BLOCKS_MAX,
    HEAD_CHARS,
    IMAGES_MAX,
    LARGEST_MAX,
    SCANS_MAX,
    BlockCount,
    ImageSize,
    check_images,
    image_size,
)
from router.apis.openai.long_texts import LONG_BODY_BYTES
from router.apis.openai.schema import CHAT_PATH
from router.apis.openai.surface import OpenAiSurface
from router.config import RouterConfig
from router.dataplane.http_messages import HttpRequest
from router.fleet_state import FleetState

PIXELS_MAX = 1_000_000


def a_chunk(kind: bytes, data: bytes = b"") -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + bytes(4)


def a_png_header(width: int, height: int) -> bytes:
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return a_chunk(b"IHDR", size + b"\x08\x02\0\0\0")


def a_png(width: int, height: int, between: bytes = b"") -> bytes:
    return b"\x89PNG\r\n\x1a\n" + a_png_header(width, height) + between + a_chunk(b"IDAT")


def a_gif(width: int, height: int, *, frame: bytes | None = None, between: bytes = b"") -> bytes:
    size = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    colours = b"\x91\0\0" + bytes(3 << 2)
    frame = b"\x2c" + bytes(4) + size + b"\0" if frame is None else frame
    return b"GIF89a" + size + colours + between + frame + b"\x02\0\x3b"


def a_frame(width: int, height: int) -> bytes:
    size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return b"\xff\xc2\0\x0b\x08" + size + b"\x01\x01\x11\0"


SCAN = b"\xff\xda\0\x08\x01\x01\0\0\x3f\0"


def a_jpeg(width: int, height: int, before: bytes = b"") -> bytes:
    return b"\xff\xd8" + before + a_frame(width, height) + SCAN


def a_webp(kind: bytes, rest: bytes) -> bytes:
    return b"RIFF\0\0\0\0WEBP" + kind + b"\0\0\0\0" + rest.ljust(16, b"\0")


EXIF = b"\xff\xe1\xff\xf0" + bytes(0xFFF0 - 2)
IMAGES = [
    a_png(640, 480),
    a_gif(640, 480),
    a_gif(
        640, 480, between=b"\x21\xfe\0\x21\xff\x0bNETSCAPE2.0\x03\x01\0\0\0\x21\xf9\x04\0\0\0\0\0"
    ),
    a_gif(1, 1, frame=b"\x2c\x01\0\x02\0\x7f\x02\xde\x01\0"),
    a_png(640, 480, a_chunk(b"iCCP", bytes(300)) + a_chunk(b"fcTL", bytes(26))),
    a_jpeg(640, 480),
    a_jpeg(640, 480, EXIF + EXIF + b"\xff\xff\xff\xdb\0\x04\0\0"),
    a_webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + (640).to_bytes(2, "little") + b"\xe0\x01"),
    a_webp(b"VP8L", b"\x2f" + (639 | 479 << 14).to_bytes(4, "little")),
    a_webp(b"VP8X", bytes(4) + (639).to_bytes(3, "little") + (479).to_bytes(3, "little")),
]


def chat(*urls: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]
    return decode(json.dumps({"model": "m", "messages": messages}).encode(), CHAT)


def a_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("data", IMAGES)
def test_a_size_is_read_from_each_format(data: bytes) -> None:
    size = image_size(data, BlockCount())
    assert size is not None and (size.width, size.height) == (640, 480)
    check_images(chat(a_url(data)), PIXELS_MAX)


def test_the_image_of_the_benchmark_is_accepted() -> None:
    check_images(decode(conversation(IMAGE_KIB, 3).encode(), CHAT), PIXELS_MAX)


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "webp"])
def test_sizes_agree_with_a_library(kind: str) -> None:
    pillow = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pillow.new("RGB", (37, 21)).save(file, kind)
    assert image_size(file.getvalue(), BlockCount()) == ImageSize(37, 21)


def test_a_progressive_image_of_a_library_is_accepted() -> None:
    pillow, file = pytest.importorskip("PIL.Image"), io.BytesIO()
    pillow.new("RGB", (64, 64)).save(file, "jpeg", progressive=True)
    assert image_size(file.getvalue(), BlockCount()) == ImageSize(64, 64, has_scans=True)
    check_images(chat(a_url(file.getvalue(), "jpeg")), PIXELS_MAX)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        (a_url(a_png(50_000, 20_000)), "50000 x 20000 = 1000000000 pixels, the limit is 1000000"),
        (a_url(a_jpeg(65_000, 65_000), "jpeg"), "4225000000 pixels"),
        (a_url(a_webp(b"VP8X", b"\xff" * 10), "webp"), "16777216 x 16777216"),
        (a_url(a_png(0, 5)), "header is broken"),
        (a_url(b"hello"), "header is broken"),
        (a_url(a_png(5, 5)[:20]), "header is broken"),
        (a_url(b"\xff\xd8\xff\xe1\xff\xff"), "header is broken"),
        (a_url(a_gif(1, 1, frame=b"\x2c\0\0\0\0\xff\xff\xff\xff\0")), "65535 x 65535"),
        (a_url(a_gif(1, 1, frame=b"\x2c\xff\xff\xff\xff\x01\0\x01\0\0")), "65536 x 65536"),
        (a_url(a_gif(2, 2, between=b"\x21\x01\0")), "header is broken"),
        (a_url(a_gif(2, 2, frame=b"")), "header is broken"),
        (a_url(a_png(2, 2, a_png_header(50_000, 20_000))), "header is broken"),
        (a_url(a_png(2, 2)[:-12]), "header is broken"),
        (a_url(a_jpeg(2, 2, a_frame(65_000, 65_000))), "header is broken"),
        (a_url(a_jpeg(2, 2, b"\xff\0\0\x14" + a_frame(65_000, 65_000) + SCAN)), "is broken"),
        (a_url(a_jpeg(2, 2, b"\xff\xf0\0\x14" + a_frame(65_000, 65_000) + SCAN)), "is broken"),
        (a_url(a_jpeg(2, 0)), "header is broken"),
        ("data:image/png;base64,!!!", "base64 is not valid"),
        ("data:image/png,abc", "expected `data:image/FORMAT;base64"),
        ("data:image/svg+xml;base64,AAAA", "expected `data:image/FORMAT;base64"),
        ("data:text/html;base64,AAAA", "expected `data:image/FORMAT;base64"),
    ],
)
def test_an_image_that_cannot_be_used_is_refused_by_name(url: str, match: str) -> None:
    with pytest.raises(ApiError, match=match) as refused:
        check_images(chat(a_url(a_png(2, 2)), url), PIXELS_MAX)
    assert refused.value.param == "messages[1].content[1].image_url"


@pytest.mark.parametrize("is_tall", [True, False])
def test_a_thin_image_that_engines_would_enlarge_is_refused(is_tall: bool) -> None:
    for long, is_refused in ((400, False), (401, True)):
        size = (2, long) if is_tall else (long, 2)
        with pytest.raises(ApiError, match="200 times") if is_refused else nullcontext():
            check_images(chat(a_url(a_png(*size))), PIXELS_MAX)


@pytest.mark.parametrize("is_progressive", [True, False])
def test_the_scans_of_an_image_are_limited(is_progressive: bool) -> None:
    """A decoder goes through all pixels for each scan, which may have 31 bytes."""
    frame = a_frame(2, 2) if is_progressive else b"\xff\xc0\0\x11\x08\0\x02\0\x02\x03" + bytes(9)
    begin = b"\xff\xd8" + EXIF + frame
    for scans, fits in ((SCANS_MAX, True), (SCANS_MAX + 1, False)):
        url = a_url(begin + (SCAN + bytes(HEAD_CHARS // 64)) * scans, "jpeg")
        refused = pytest.raises(ApiError, match=f"more than {SCANS_MAX} scans")
        with nullcontext() if fits else refused:
            check_images(chat(url), PIXELS_MAX)


def test_scans_after_a_whole_one_are_not_counted() -> None:
    """Decoders end with the first scan of a frame that is not progressive, if it has all."""
    frame = b"\xff\xc0\0\x0b\x08\0\x02\0\x02\x01\x01\x11\0"
    check_images(chat(a_url(b"\xff\xd8" + frame + SCAN * 2 * SCANS_MAX, "jpeg")), PIXELS_MAX)


def test_the_number_of_images_is_limited() -> None:
    urls = [a_url(a_png(2, 2))] * (IMAGES_MAX + 1)
    check_images(chat(*urls[1:]), PIXELS_MAX)
    urls[0] = "data:none is looked at"
    with pytest.raises(ApiError, match="they have 65 images, the limit is 64"):
        check_images(chat(*urls), PIXELS_MAX)


def test_the_pixels_of_all_images_are_limited() -> None:
    urls = [a_url(a_png(1000, 1000))] * LARGEST_MAX
    check_images(chat(*urls), PIXELS_MAX)
    with pytest.raises(ApiError, match="their images have 4000004 pixels, the limit is 4000000"):
        check_images(chat(*urls, a_url(a_png(2, 2))), PIXELS_MAX)


@given(st.sampled_from(IMAGES), st.integers(0, 40), st.binary(max_size=40))
def test_any_bytes_have_a_size_or_none(data: bytes, keep: int, rest: bytes) -> None:
    size = image_size(data[:keep] + rest, BlockCount())
    assert size is None or (size.width >= 0 and size.height >= 0)


def test_a_frame_header_behind_much_else_is_found_and_a_cut_one_is_not() -> None:
    data = a_jpeg(640, 480, EXIF * 3)
    check_images(chat(a_url(data)), PIXELS_MAX)
    assert image_size(data[: -len(SCAN)], BlockCount()) is None
    with pytest.raises(ApiError, match="base64 is not valid"):
        check_images(chat(a_url(a_png(2, 2) + bytes(HEAD_CHARS)) + "!AAA"), PIXELS_MAX)


@pytest.mark.parametrize("padding", [0, LONG_BODY_BYTES])
@pytest.mark.parametrize("name", ["image_url", "image\\u005furl"])
def test_an_image_is_checked_however_its_field_is_spelt(name: str, padding: int) -> None:
    key_id = KeyId("k" * 12)
    key = KeyEntry(key_id=key_id, secret_sha256="0" * 64, tenant_id=TenantId("acme"))
    entry = DeploymentEntry(
        deployment_id=DeploymentId("d-1"), name="m", model_id=ModelId("m-1"), context_tokens=8192
    )
    fleet = FleetState(PopId("ams"), lambda: 0.0)
    fleet.adopt(
        RouteTable(
            cluster_id=ClusterId("c"),
            generation=Generation(1),
            epoch=Epoch(1),
            deployments=(entry,),
            routes=(),
            keys=KeyTable.of([key]),
        )
    )
    config = RouterConfig(image_pixels_max=PIXELS_MAX)
    surface = OpenAiSurface(config, fleet, lambda: 0.0)
    request = HttpRequest()
    request.key = key
    url = a_url(a_png(2000, 2000) + bytes(padding))
    body = (
        '{"model":"m","messages":[{"role":"user","content":'
        f'[{{"type":"{name}","{name}":{{"url":"{url}"}}}}]}}]}}'
    ).encode()
    with pytest.raises(ApiError, match="pixels"):
        surface.read(request, CHAT_PATH, body, openai_error_event)


@pytest.mark.parametrize(
    "data",
    [
        a_jpeg(2, 2, b"\xff" * BLOCKS_MAX),
        a_jpeg(2, 2, b"\xff\xfe\0\x02" * BLOCKS_MAX),
        a_png(2, 2, a_chunk(b"tEXt") * BLOCKS_MAX),
        a_gif(2, 2, between=b"\x21\xfe" + b"\x01x" * BLOCKS_MAX + b"\0"),
        a_gif(2, 2, between=b"\x21\xfe\0" * (BLOCKS_MAX + 1)),
    ],
)
def test_what_comes_before_the_pixels_is_read_up_to_a_limit(data: bytes) -> None:
    with pytest.raises(ApiError, match=f"more than {BLOCKS_MAX} blocks"):
        check_images(chat(a_url(data)), PIXELS_MAX)


def test_the_images_of_a_request_share_the_limit_of_blocks() -> None:
    url = a_url(a_jpeg(2, 2, b"\xff\xfe\0\x02" * (BLOCKS_MAX // 4)))
    check_images(chat(url, url, url), PIXELS_MAX)
    with pytest.raises(ApiError, match="blocks in front"):
        check_images(chat(url, url, url, url), PIXELS_MAX)
