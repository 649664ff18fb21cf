"""Links to images: which are fetched, how their files are encoded, and how they enter a body."""

import base64
import ipaddress
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from isochrone.service.network.public_addresses import refuse_private
from router.apis.linked_images.cheap_tls import with_cheap_handshakes
from router.apis.linked_images.download import EncodedImage, ImageBudget
from router.apis.linked_images.link import (
    LINK_CHARS_MAX,
    FetchRefused,
    parse_link,
    printable,
    redirected,
)
from router.apis.linked_images.splice import FetchedImage, with_images
from router.apis.openai.images import MAGIC_BYTES, media_type
from tests.unit.router.test_images import IMAGES


def forms_of(address: ipaddress.IPv4Address) -> list[str]:
    """Return the forms in which some parser or resolver takes an IPv4 address as a host."""
    number, parts = int(address), str(address).split(".")
    return [
        *(str(address), f"{address}.", f"[::ffff:{address}]", str(number), hex(number)),
        *(f"{number:#o}".replace("o", ""), ".".join(hex(int(part)) for part in parts)),
        *(".".join(f"0{int(part):o}" for part in parts), f"{parts[0]}.{number & 0xFFFFFF}"),
        *(".".join((*parts[:2], str(number & 0xFFFF))), ".".join(f"%3{part}" for part in parts)),
        *(str(address).replace(".", "\u3002"), f"{address}%00.example.com"),
        str(address).translate({48 + digit: 0x2460 + digit - 1 for digit in range(1, 10)}),
    ]


@given(st.ip_addresses(v=4).filter(lambda address: not address.is_global))
def test_no_form_of_a_private_address_is_fetched(address: ipaddress.IPv4Address) -> None:
    for host in forms_of(address):
        for text in (f"https://{host}/a.png", f"https://{host}:443/", f"https://a@{host}/"):
            with pytest.raises(FetchRefused):
                parse_link(text)
            with pytest.raises(FetchRefused):
                redirected(URL("https://example.com/"), text, refuse=refuse_private)


@given(
    st.text("ab1.:/@\\?#%[]0xX\t\n \u3002\u2460", max_size=20),
    st.sampled_from(["", "example.com", "user@example.com", "10.0.0.1"]),
)
def test_a_link_that_is_fetched_has_one_reading(text: str, before: str) -> None:
    link = f"https://{before}{text}"
    try:
        url = parse_link(link)
    except FetchRefused:
        return
    # Other parsers of Python; browsers read a backslash as a slash, and skip tabs and newlines.
    assert urlsplit(link).hostname == str(url.raw_host).lower()
    assert urlsplit(link.replace("\\", "/")).netloc in (url.raw_host, f"{url.raw_host}:443")
    assert URL(link).host == str(url.host).lower()
    assert link.isascii()
    assert link.isprintable()


@pytest.mark.parametrize(
    "text",
    [
        "https://example.com",
        "https://EXAMPLE.com/a.png?X-Amz-Signature=a%2Fb&c=%7E#part",
        "https://my_bucket.s3.eu-west-1.amazonaws.com:443/a//b/../c%20d.png",
        "https://xn--bcher-kva.example/a.png",
        "https://8.8.8.8/a.png",
        "https://example.com?a=b@c",
    ],
)
def test_a_link_is_sent_as_it_was_written(text: str) -> None:
    assert str(parse_link(text)) == text.replace(":443", "").replace(".com?", ".com/?")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("http://example.com/a.png", "no plain"),
        ("https://u:p@example.com/a.png", "no plain"),
        ("https://localhost/a.png", "no plain"),
        ("https://[2606:4700::1111]/a.png", "no plain"),
        ("https://b\u00fccher.example/a.png", "no plain"),
        ("https://example.com\\@10.0.0.1/", "no plain"),
        ("https://example.com/a b.png", "no plain"),
        ("https://example.com/a.png\r\nhost: x", "no plain"),
        ("https://example.com/" + "a" * LINK_CHARS_MAX, "no plain"),
        ("https://example.com./a.png", "no plain"),
        ("https://example.com:8443/a.png", "its port is not 443"),
        ("https://example.com:99999/a.png", "its port is not 443"),
        ("https://169.254.169.254/latest", "no public address"),
        ("https://127.1/a.png", "no public address"),
        ("https://example.0x7f/a.png", "no public address"),
        ("https://256.8.8.8/a.png", "no public address"),
    ],
)
def test_other_links_are_refused(text: str, reason: str) -> None:
    with pytest.raises(FetchRefused, match=reason):
        parse_link(text)


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/b.png?c", "https://example.com/b.png?c"),
        ("b.png", "https://example.com/a/b.png"),
        ("//cdn.example.net/b.png", "https://cdn.example.net/b.png"),
        ("https://cdn.example.net/b.png", "https://cdn.example.net/b.png"),
        ("http://example.com/b.png", ""),
        ("file:///etc/passwd", ""),
        ("//10.0.0.1/b.png", ""),
        ("//user@example.com/b.png", ""),
        ("https://[", ""),
        ("\\\\10.0.0.1\\b", ""),
        ("//example.com:22/", ""),
    ],
)
def test_a_redirect_is_checked_like_a_link(location: str, target: str) -> None:
    base = URL("https://example.com/a/a.png")
    if target:
        assert str(redirected(base, location, refuse=refuse_private)) == target
        return
    with pytest.raises(FetchRefused, match="it redirects to a link that is not fetched"):
        redirected(base, location, refuse=refuse_private)


def test_an_error_shows_no_signature() -> None:
    assert printable("https://example.com/a.png?signature=s") == "https://example.com/a.png"
    assert len(printable("https://example.com/" + "a" * 1000)) < 130


@given(st.sampled_from(IMAGES), st.binary(max_size=200), st.lists(st.integers(1, 40)))
def test_an_image_is_encoded_whatever_its_chunks_are(
    image: bytes, more: bytes, sizes: list[int]
) -> None:
    data, held = image + more, list[int]()
    encoded = EncodedImage(ImageBudget(1_000_000, held.append))
    position = 0
    for size in (*sizes, len(data)):
        encoded.add(data[position : position + size])
        position += size
    fetched = encoded.end()
    assert base64.b64decode(fetched.base64, validate=True) == data
    assert sum(held) == len(fetched.base64)
    assert fetched.media_type == media_type(data[:MAGIC_BYTES])


@pytest.mark.parametrize("data", [b"", b"GIF", b"<html><body>", b"\x89PNG\r\n", b"%PDF-1.7"])
def test_what_is_no_image_is_dropped(data: bytes) -> None:
    encoded = EncodedImage(ImageBudget(100_000, lambda _: None))
    with pytest.raises(FetchRefused, match="no PNG"):
        for number in range(len(data)):
            encoded.add(data[number : number + 1])
        encoded.end()


def test_the_images_of_a_request_share_a_budget() -> None:
    held: list[int] = []
    budget = ImageBudget(100, held.append)
    budget.check(75)
    with pytest.raises(FetchRefused, match="does not fit"):
        budget.check(76)
    budget.take(30)
    budget.take(33)
    with pytest.raises(FetchRefused, match="does not fit"):
        budget.take(13)
    assert held == [40, 44]


LINK = "https://example.com/a.png"
FETCHED = FetchedImage("image/png", b"QUFB")


def spliced(messages: Any) -> Any:
    body = json.dumps({"seed": 1, "messages": messages, "model": "m"}).encode()
    return json.loads(with_images(body, {LINK: FETCHED}))


def test_images_take_the_place_of_links() -> None:
    url = "data:image/png;base64,QUFB"
    text = {"type": "text", "text": LINK}
    given = [
        {"role": "system", "content": LINK},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant"},
        {
            "role": "user",
            "content": [
                text,
                {"type": "image_url", "image_url": {"detail": "low", "url": LINK}},
                {"type": "image_url", "image_url": LINK},
                {"type": "image_url", "image_url": {"url": "data:image/gif;base64,AA=="}},
                {"type": "text", "text": "x", "image_url": None},
            ],
        },
    ]
    answer = spliced(given)
    assert answer["messages"][:3] == given[:3]
    assert answer["messages"][3]["content"] == [
        text,
        {"type": "image_url", "image_url": {"detail": "low", "url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": "data:image/gif;base64,AA=="}},
        {"type": "text", "text": "x", "image_url": None},
    ]
    assert (answer["seed"], answer["model"]) == (1, "m")


def test_a_link_in_a_second_field_of_one_name_is_not_sent() -> None:
    part = b'{"type":"image_url","image_url":{"url":"%b","url":"data:image/gif;base64,AA=="}}'
    body = b'{"messages":[{"role":"user","content":[%b]}]}' % (part % LINK.encode())
    assert b"https" not in with_images(body, {})


def test_a_host_cannot_choose_a_costly_handshake() -> None:
    context = with_cheap_handshakes(ssl.create_default_context())
    assert context.options & ssl.OP_NO_RENEGOTIATION
    ciphers = {
        cipher["name"] for cipher in context.get_ciphers() if cipher["protocol"] != "TLSv1.3"
    }
    assert ciphers
    assert all(name.startswith("ECDHE-") for name in ciphers)
    sent = ssl.MemoryBIO()
    connection = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="images.test")
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    # The extension 10 (supported groups) with one group of two bytes, secp256r1.
    assert b"\0\x0a\0\x04\0\x02\0\x17" in sent.read()
