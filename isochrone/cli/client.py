"""The admin API as the CLI sees it: one request at a time, errors as words.

Several schedulers serve it alike: the next is asked where one cannot be reached.
"""

import asyncio
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import msgspec

from isochrone.service.http_responses import parse_error_body
from isochrone.wire.errors import ErrorCode

TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 5.0
PAGE: Final = 200
WHO_ASKS: Final = (
    "give it by --token, ISOCHRONE_ADMIN_TOKEN or `token` in ~/.config/isochrone/config.toml"
)


class AdminError(Exception):
    """The admin API refused, or cannot be reached; the message is for the operator."""


class AdminClient:
    """Asks the admin API at the first of `urls` that is there, with `token`."""

    def __init__(self, urls: str, token: str) -> None:
        self._urls = [url.strip().rstrip("/") for url in urls.split(",")]
        self._token = token

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        etag: int | None = None,
        query: dict[str, str] | None = None,
    ) -> Any:
        """Send one request and return the decoded answer, None where there is no body."""
        return asyncio.run(self._ask(method, path, body, etag, query))

    def list(self, path: str, query: dict[str, str] | None = None) -> list[dict[str, Any]]:
        """Return every row of a list, page by page."""
        rows: list[dict[str, Any]] = []
        cursor: str | None = ""
        while cursor is not None:
            page = self.ask(
                "GET", path, query={**(query or {}), "limit": str(PAGE), "cursor": cursor}
            )
            rows += page["data"]
            cursor = page["next_cursor"]
        return rows

    async def _ask(
        self, method: str, path: str, body: Any, etag: int | None, query: dict[str, str] | None
    ) -> Any:
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        if etag is not None:
            headers["if-match"] = f'"{etag}"'
        data = None if body is None else msgspec.json.encode(body)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        problems = []
        async with aiohttp.ClientSession(timeout=timeout) as http:
            for url in self._urls:
                try:
                    async with http.request(
                        method, f"{url}{path}", data=data, params=query, headers=headers
                    ) as response:
                        answer = await response.read()
                except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                    # Nothing was asked yet, so that the next may be.
                    problems.append(f"at {url}: {error or type(error).__name__}")
                    continue
                except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
                    raise AdminError(
                        f"cannot use {url!r} as the admin API: write it as https://host:7000"
                    ) from error
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    problems.append(f"at {url}: {error or type(error).__name__}")
                    break
                if response.status >= 400:
                    raise AdminError(_words(answer, response.status))
                return msgspec.json.decode(answer) if answer else None
        raise AdminError(f"cannot reach the admin API {'; '.join(problems)}")


def segment(name: str) -> str:
    """Quote a name for a path; models may have slashes."""
    return quote(name, safe="/@")


def _words(answer: bytes, status: int) -> str:
    words, code = parse_error_body(answer, status)
    if code == ErrorCode.INVALID_KEY:
        return f"{words}; {WHO_ASKS}"
    return f"{words} ({code})" if code else f"cannot ask the admin API: {words}"
