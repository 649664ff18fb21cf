"""Messages for an operator whose command or service could not connect, with what to change."""

import os

import aiohttp

from isochrone.service.failure_log import error_text


def describe_connection_error(url: str, error: Exception) -> str:
    """Return what went wrong, and how to set up TLS where that is the likely cause."""
    problem = error_text(error)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return (
            f"{problem}; if an authority of your own has issued its certificate, set SSL_CERT_FILE"
            " to that authority's certificate"
        )
    if isinstance(error, aiohttp.ClientSSLError):
        return f"{problem}; if it serves without TLS, write the URL with http:"
    if isinstance(error, aiohttp.ServerDisconnectedError) and url.startswith("http:"):
        return f"{problem}; if it serves with TLS, write the URL with https:"
    if isinstance(error, aiohttp.ClientConnectorError):
        # aiohttp's own text says `ssl:default`, also of a URL without TLS.
        cause = error.os_error
        number = cause.errno or 0
        # Those of name lookups are negative.
        return os.strerror(number) if number > 0 else cause.strerror or problem
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return problem
