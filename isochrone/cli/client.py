"""The CLI's client of the admin API: one request at a time.

Every scheduler serves the admin API. If one cannot be reached, the client tries the next.
"""

import asyncio
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import msgspec

from isochrone.service.http_responses import parse_error_body
from isochrone.service.network.connection_errors import describe_connection_error
from isochrone.wire.errors import ErrorCode

TIMEOUT_S: Final = 30.0
UPLOAD_TIMEOUT_S: Final = 3600.0
CONNECT_TIMEOUT_S: Final = 5.0
PAGE_ROWS: Final = 200
CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which a terminal obeys. The tab and the line feed are harmless."""

NO_ADMIN_API: Final = frozenset({401, 404, 405})
"""Statuses of a service that is not the admin API: it has other keys, paths and methods."""
NOT_NOW: Final = frozenset({502, 503, 504})
"""Statuses of a scheduler without its database, and of a proxy without a scheduler."""
WHERE_TO_SET_IT: Final = (
    "set it with --token, ISOCHRONE_ADMIN_TOKEN or `token` in ~/.config/isochrone/config.toml"
)
WHERE_THE_URL_IS_SET: Final = (
    "its URL is set with --url, ISOCHRONE_ADMIN_URL or `url` in ~/.config/isochrone/config.toml"
)


class AdminError(Exception):
    """The admin API refused a request or cannot be reached; the message is for the operator."""


class AdminUnavailable(AdminError):
    """No scheduler can answer now; the same request may be answered later."""


class AdminClient:
    """Uses the first of the comma-separated `urls` that can be reached, with `token`.

    Raises AdminError for a token that no header can carry.
    """

    def __init__(self, urls: str, token: str) -> None:
        self._urls = [url.strip().rstrip("/").removesuffix("/v1") for url in urls.split(",")]
        self._token = token.strip()
        if not self._token.isprintable():
            raise AdminError(f"cannot use the admin token: it is not one line; {WHERE_TO_SET_IT}")

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        etag: int | None = None,
        query: dict[str, str] | None = None,
    ) -> Any:
        """Send one request and return the decoded answer, or None if it has no body.

        Raises AdminError.
        """
        return asyncio.run(self._send(method, path, body, etag, query))

    def upload(self, path: str, file: Path) -> Any:
        """Put a file of any size, and return the decoded answer. Raises AdminError."""
        return asyncio.run(self._send("PUT", path, None, None, None, file))

    def list(self, path: str, query: dict[str, str] | None = None) -> list[dict[str, Any]]:
        """Return all rows of a list, fetched page by page. Raises AdminError."""
        rows: list[dict[str, Any]] = []
        cursor: str | None = ""
        while cursor is not None:
            page = self.ask(
                "GET", path, query={**(query or {}), "limit": str(PAGE_ROWS), "cursor": cursor}
            )
            rows += page["data"]
            cursor = page["next_cursor"]
        return rows

    async def _send(
        self,
        method: str,
        path: str,
        body: Any,
        etag: int | None,
        query: dict[str, str] | None,
        file: Path | None = None,
    ) -> Any:
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        if etag is not None:
            headers["if-match"] = f'"{etag}"'
        data = None if body is None else msgspec.json.encode(body)
        if file is not None:
            headers["content-type"] = "application/octet-stream"
        timeout = aiohttp.ClientTimeout(
            total=TIMEOUT_S if file is None else UPLOAD_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S
        )
        problems = []
        async with aiohttp.ClientSession(timeout=timeout) as http:
            for url in self._urls:
                try:
                    with nullcontext(data) if file is None else file.open("rb") as sent:
                        async with http.request(
                            method, f"{url}{path}", data=sent, params=query, headers=headers
                        ) as response:
                            answer = await response.read()
                except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                    # The request was not sent, so it is safe to send it to the next URL.
                    problems.append(f"at {url}: {describe_connection_error(url, error)}")
                    continue
                except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
                    raise AdminError(
                        f"cannot use admin API URL {url!r}: write it as https://host:7000"
                    ) from error
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    problems.append(f"at {url}: {describe_connection_error(url, error)}")
                    break
                if response.status in NO_ADMIN_API and (other := await _other_service(http, url)):
                    raise AdminError(
                        f"cannot use the admin API at {url}: this is {other}; the admin API is at"
                        f" a scheduler's admin_port (7000); {WHERE_THE_URL_IS_SET}"
                    )
                if response.status >= 400:
                    refusal = AdminUnavailable if response.status in NOT_NOW else AdminError
                    raise refusal(_error_message(url, answer, response.status))
                try:
                    return printable(msgspec.json.decode(answer)) if answer else None
                except msgspec.DecodeError as error:
                    raise AdminError(
                        f"cannot use the admin API at {url}: what answers there is another server;"
                        f" {WHERE_THE_URL_IS_SET}"
                    ) from error
        raise AdminUnavailable(
            f"cannot reach the admin API {'; '.join(problems)}; {WHERE_THE_URL_IS_SET}"
        )


def printable(value: Any) -> Any:
    """Return decoded JSON without control characters: tenants and nodes choose some texts."""
    if isinstance(value, str):
        return CONTROL.sub("", value)
    if isinstance(value, list):
        return [printable(inner) for inner in value]
    if isinstance(value, dict):
        return {printable(name): printable(inner) for name, inner in value.items()}
    return value


async def _other_service(http: aiohttp.ClientSession, url: str) -> str:
    """Return which service answers at `url`, by its `/healthz`; empty for the admin API."""
    try:
        async with http.get(f"{url}/healthz") as response:
            found = msgspec.json.decode(await response.read())
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
        return ""
    if not isinstance(found, dict) or "scheduler" in found:
        return ""
    known = {"pop": "a router", "replicas": "a node", "acting": "a scheduler's control port"}
    return next((service for field, service in known.items() if field in found), "")


def segment(name: str) -> str:
    """Quote a name for a URL path. Names of models may contain slashes."""
    return quote(name, safe="/@")


def _error_message(url: str, answer: bytes, status: int) -> str:
    message, code = printable([*parse_error_body(answer, status)])
    if code == ErrorCode.INVALID_KEY:
        return f"{message}; {WHERE_TO_SET_IT}"
    if code:
        return f"{message} ({code})"
    return f"cannot use the admin API at {url}: {message}; {WHERE_THE_URL_IS_SET}"
