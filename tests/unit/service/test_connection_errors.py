"""Errors of connections say what to change."""

import errno
import socket
import ssl
from types import SimpleNamespace

import aiohttp
import pytest

from isochrone.service.network.connection_errors import describe_connection_error

KEY = SimpleNamespace(ssl=True, host="scheduler", port=7000, is_ssl=True)
CERTIFICATE = aiohttp.ClientConnectorCertificateError(
    KEY,  # type: ignore[arg-type]
    ssl.SSLCertVerificationError("unable to get local issuer certificate"),
)
NO_TLS = aiohttp.ClientConnectorSSLError(
    KEY,
    ssl.SSLError(1, "record layer failure"),
)
REFUSED = aiohttp.ClientConnectorError(
    KEY,  # type: ignore[arg-type]
    OSError(errno.ECONNREFUSED, "Connect call failed ('10.0.0.5', 7000)"),
)
UNKNOWN_NAME = aiohttp.ClientConnectorDNSError(
    KEY,  # type: ignore[arg-type]
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
)


@pytest.mark.parametrize(
    ("url", "error", "advice"),
    [
        ("https://scheduler:7000", CERTIFICATE, "SSL_CERT_FILE"),
        ("https://scheduler:7000", NO_TLS, "with http:"),
        ("http://scheduler:7000", aiohttp.ServerDisconnectedError(), "with https:"),
        ("https://scheduler:7000", aiohttp.ServerDisconnectedError(), "Server disconnected"),
        ("https://scheduler:7000", TimeoutError(), "did not answer in time"),
    ],
)
def test_an_error_says_what_to_change(url: str, error: Exception, advice: str) -> None:
    assert advice in describe_connection_error(url, error)


def test_an_error_without_a_known_cause_has_no_advice() -> None:
    lost = aiohttp.ServerDisconnectedError()
    assert describe_connection_error("https://scheduler:7000", lost) == str(lost)


@pytest.mark.parametrize(
    ("error", "cause"),
    [(REFUSED, "Connection refused"), (UNKNOWN_NAME, "Name or service not known")],
)
def test_a_connection_that_fails_without_tls_is_no_error_of_tls(
    error: Exception, cause: str
) -> None:
    assert describe_connection_error("http://scheduler:7000", error) == cause
