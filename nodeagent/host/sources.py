"""Where artifacts come from: an installed package, a folder, an HTTP origin, a model hub.

An origin is held to a pace as peers are: one that sends next to nothing is let go, and the next
attempt goes on from the byte where this one stopped.

The hub's token goes with requests to the hub's own host and port, of sources that name the hub.
Wherever it redirects to has what it needs in the URL, so that words about one leave its query out.
"""

import asyncio
import ipaddress
import socket
from importlib import metadata
from pathlib import Path
from typing import Final
from urllib.parse import quote

import aiohttp
from aiohttp import abc
from yarl import URL

from nodeagent.decide.bandwidth import MinimumRate
from nodeagent.host.download import ArtifactError, FileDownload, TransferCut, TransferTooLong

CHUNK_BYTES: Final = 1024 * 1024
REDIRECTS_MAX: Final = 5
ANSWER_TIMEOUT_S: Final = 60.0


LOCAL: Final = ("file:", "pypi:")
"""What begins so names files of this machine."""

PATIENCE: Final = MinimumRate(least_bytes_per_s=64 * 1024, window_s=30.0)
"""An origin may be slower than a peer: there is no other."""


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
        raise OSError(f"refused: {host} is not a public address, and private_sources is not set")


class ArtifactSources:
    """Opens files of artifacts. Private addresses and plain http are for closed networks alone."""

    def __init__(
        self, *, private: bool, hf_url: str, hf_token: str = "", pace: MinimumRate = PATIENCE
    ) -> None:
        self._private = private
        self._hf_url = hf_url.rstrip("/")
        self._hf_token = hf_token
        self._pace = pace

    def local_file(self, source: str, path: str) -> Path:
        """Return the file that a LOCAL source names, or raise ArtifactError."""
        scheme, _, rest = source.partition(":")
        return Path(rest) / path if scheme == "file" else _package_file(rest, path)

    async def fetch(self, source: str, wanted: FileDownload) -> str:
        """Read what is missing of a file from its origin; say what is wrong with the whole.

        Raises Cut, or ArtifactError for good.
        """
        path, offset = wanted.file.path, wanted.held_bytes()
        url, is_hub = self._url(source, path), source.startswith("hf:")
        connector = aiohttp.TCPConnector(resolver=None if self._private else PublicResolver())
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=60.0)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        try:
            async with session as http, await self._follow(http, url, offset, is_hub) as response:
                offset = offset if response.status == 206 else 0
                chunks = response.content.iter_chunked(CHUNK_BYTES)
                return await wanted.append(chunks, offset, self._pace, is_far=True)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TransferCut(str(error) or type(error).__name__) from error
        except TransferTooLong as error:
            raise ArtifactError(f"cannot take {path} from {source}: {error}") from error

    async def _follow(
        self, http: aiohttp.ClientSession, address: str, offset: int, names_hub: bool
    ) -> aiohttp.ClientResponse:
        url = URL()
        for _ in range(REDIRECTS_MAX):
            # Read once, by what dials: who is meant must not be a matter of opinion.
            url = self._checked(url, address)
            is_hub = names_hub and _place(url) == _place(URL(self._hf_url))
            response = await self._ask(http, url, offset, self._hf_token if is_hub else "")
            if response.status in (200, 206):
                return response
            target = response.headers.get("location")
            response.release()
            if response.status not in (301, 302, 303, 307, 308) or target is None:
                why = f": {self._refused()}" if is_hub and response.status in (401, 403) else ""
                raise ArtifactError(
                    f"cannot fetch {_shown(url)}: it answered {response.status}{why}"
                )
            address = target
        raise ArtifactError(f"cannot fetch {_shown(url)}: more than {REDIRECTS_MAX} redirects")

    async def _ask(
        self, http: aiohttp.ClientSession, url: URL, offset: int, token: str
    ) -> aiohttp.ClientResponse:
        headers = {"accept-encoding": "identity"}
        if offset:
            headers["range"] = f"bytes={offset}-"
        if token:
            headers["authorization"] = f"Bearer {token}"
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await http.get(url, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            reason = error or type(error).__name__
            raise ArtifactError(f"cannot reach {_shown(url)}: {reason}") from error

    def _refused(self) -> str:
        """Say what a hub means that refuses, and who can do what about it."""
        if self._hf_token:
            return (
                "the model is gated or private, and the token of hf_token_file is not good, or "
                "its account may not read it: ask for access on the model's page of the hub"
            )
        return (
            "the model is gated or private, or there is none of this name; to be let in, name in "
            "this node's hf_token_file a file with the token of an account that may read it"
        )

    def _url(self, source: str, path: str) -> str:
        scheme, _, rest = source.partition(":")
        if scheme == "hf":
            repository, _, revision = rest.partition("@")
            tree = f"{quote(repository)}/resolve/{quote(revision or 'main')}"
            return f"{self._hf_url}/{tree}/{quote(path)}"
        if scheme in ("https", "http"):
            return f"{source.rstrip('/')}/{quote(path)}"
        raise ArtifactError(f"cannot fetch from {source!r}: an unknown kind of source")

    def _checked(self, asked: URL, address: str) -> URL:
        """Return the URL that `address` is, seen from the one `asked` before."""
        try:
            url = asked.join(URL(address))
            url.origin()
        except ValueError as error:
            raise ArtifactError(f"cannot fetch: the origin names no URL ({error})") from error
        if self._private:
            return url
        if url.scheme != "https":
            raise ArtifactError(
                f"cannot fetch {_shown(url)}: only https is taken, unless private_sources is set"
            )
        try:
            # A literal address never meets the resolver.
            refuse_private(url.host or "")
        except OSError as error:
            raise ArtifactError(f"cannot fetch {_shown(url)}: {error}") from error
        return url


def _place(url: URL) -> tuple[str, str | None, int | None]:
    """Return who is asked by a URL: another scheme or port is somebody else."""
    return url.scheme, url.host, url.port


def _shown(url: URL) -> URL:
    """Return what may be said of a URL: the query of a signed one lets anybody in."""
    return url.with_query(None)


def _package_file(rest: str, path: str) -> Path:
    """Return a file of an installed package: `name==version/folder/in/the/wheel/`."""
    requirement, _, folder = rest.partition("/")
    name, _, version = requirement.partition("==")
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise ArtifactError(
            f"cannot fetch from pypi:{rest}: {name} is not installed here; `pip install {name}`"
        ) from error
    if version and package.version != version:
        raise ArtifactError(f"cannot fetch from pypi:{rest}: {name} {package.version} is installed")
    return Path(str(package.locate_file(f"{folder.rstrip('/')}/{path}".lstrip("/"))))
