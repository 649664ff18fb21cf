"""The admin API as the CLI sees it: one request at a time, errors as words."""

import asyncio
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import msgspec

TIMEOUT_S: Final = 30.0
PAGE: Final = 200


class AdminError(Exception):
    """The admin API refused, or cannot be reached; the message is for the operator."""


class AdminClient:
    """Asks the admin API at `url` with `token`."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
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
        try:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.request(
                    method,
                    f"{self._url}{path}",
                    data=None if body is None else msgspec.json.encode(body),
                    params=query,
                    headers=headers,
                ) as response,
            ):
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise AdminError(
                f"cannot reach the admin API at {self._url}: {error or type(error).__name__}"
            ) from error
        if response.status >= 400:
            raise AdminError(_words(answer, response.status))
        return msgspec.json.decode(answer) if answer else None


def segment(name: str) -> str:
    """Quote a name for a path; models may have slashes."""
    return quote(name, safe="/@")


def _words(answer: bytes, status: int) -> str:
    try:
        error = msgspec.json.decode(answer)["error"]
        return f"{error['message']} ({error['code']})"
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the admin API answered {status}"
