"""Where artifacts come from: an installed package, a folder, an HTTP origin, a model hub."""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Final
from urllib.parse import quote, urljoin, urlsplit

import aiohttp
from aiohttp import abc

CHUNK_BYTES: Final = 1024 * 1024
REDIRECTS_MAX: Final = 5
ANSWER_TIMEOUT_S: Final = 60.0


class SourceError(Exception):
    """The source cannot give the file; the message says why."""


class PublicResolver(abc.AbstractResolver):
    """Resolves names to public addresses only, so that no origin can send us inside (SSRF)."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[abc.ResolveResult]:
        """Return the addresses of `host`, or raise OSError where one is not public."""
        infos = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, family=family
        )
        results: list[abc.ResolveResult] = []
        for found, _, proto, _, address in infos:
            refuse_private(str(address[0]))
            results.append(
                {
                    "hostname": host,
                    "host": str(address[0]),
                    "port": port,
                    "family": found,
                    "proto": proto,
                    "flags": socket.AI_NUMERICHOST,
                }
            )
        return results

    async def close(self) -> None:
        """Nothing is held open."""


def refuse_private(host: str) -> None:
    """Raise OSError where `host` is an address that is not of the public internet."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return
    if not address.is_global:
        raise OSError(f"refused: {host} is not a public address")


class Sources:
    """Opens files of artifacts. Private addresses and plain http are for closed networks alone."""

    def __init__(self, *, private: bool, hf_url: str) -> None:
        self._private = private
        self._hf_url = hf_url.rstrip("/")

    def local_file(self, source: str, path: str) -> Path | None:
        """Return the file on this machine that `source` names, or None where it names an origin."""
        scheme, _, rest = source.partition(":")
        if scheme == "file":
            return Path(rest) / path
        if scheme == "pypi":
            return _package_file(rest, path)
        return None

    @asynccontextmanager
    async def open(
        self, source: str, path: str, offset: int
    ) -> AsyncIterator[tuple[bool, AsyncIterator[bytes]]]:
        """Open a file at an origin from `offset`; yields (whether it resumed there, its chunks)."""
        url = self._url(source, path)
        connector = (
            aiohttp.TCPConnector()
            if self._private
            else aiohttp.TCPConnector(resolver=PublicResolver())
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=60.0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as http:
            response = await self._follow(http, url, offset)
            async with response:
                yield response.status == 206, response.content.iter_chunked(CHUNK_BYTES)

    async def _follow(
        self, http: aiohttp.ClientSession, url: str, offset: int
    ) -> aiohttp.ClientResponse:
        headers = {"accept-encoding": "identity"}
        if offset:
            headers["range"] = f"bytes={offset}-"
        for _ in range(REDIRECTS_MAX):
            self._check(url)
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    response = await http.get(url, headers=headers, allow_redirects=False)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise SourceError(f"cannot reach {url}: {error or type(error).__name__}") from error
            if response.status in (200, 206):
                return response
            target = response.headers.get("location")
            response.release()
            if response.status not in (301, 302, 303, 307, 308) or target is None:
                raise SourceError(f"cannot fetch {url}: it answered {response.status}")
            url = urljoin(url, target)
        raise SourceError(f"cannot fetch {url}: more than {REDIRECTS_MAX} redirects")

    def _url(self, source: str, path: str) -> str:
        scheme, _, rest = source.partition(":")
        if scheme == "hf":
            repository, _, revision = rest.partition("@")
            tree = f"{quote(repository)}/resolve/{quote(revision or 'main')}"
            return f"{self._hf_url}/{tree}/{quote(path)}"
        if scheme in ("https", "http"):
            return f"{source.rstrip('/')}/{quote(path)}"
        raise SourceError(f"cannot fetch from {source!r}: an unknown kind of source")

    def _check(self, url: str) -> None:
        parts = urlsplit(url)
        if self._private:
            return
        if parts.scheme != "https":
            raise SourceError(f"cannot fetch {url}: only https is allowed (private_sources)")
        try:
            # A literal address never meets the resolver.
            refuse_private(parts.hostname or "")
        except OSError as error:
            raise SourceError(f"cannot fetch {url}: {error}") from error


def _package_file(rest: str, path: str) -> Path:
    """Return a file of an installed package: `name==version/folder/in/the/wheel/`."""
    requirement, _, folder = rest.partition("/")
    name, _, version = requirement.partition("==")
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise SourceError(
            f"cannot fetch from pypi:{rest}: {name} is not installed here; `pip install {name}`"
        ) from error
    if version and package.version != version:
        raise SourceError(f"cannot fetch from pypi:{rest}: {name} {package.version} is installed")
    return Path(str(package.locate_file(f"{folder.rstrip('/')}/{path}".lstrip("/"))))
