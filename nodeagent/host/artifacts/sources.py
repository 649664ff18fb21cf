"""Reads artifact files from their sources: an installed package, a folder, an HTTP origin, a hub.

An origin must keep a minimum rate, as peers must. A slower transfer is cut, and the next attempt
resumes from the byte where it ended.

The hub's token is sent only with requests to the hub's own scheme, host and port, for sources that
name the hub. The URLs it redirects to carry a signature in their query, so messages omit the query.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from ssl import SSLContext
from typing import Final, NamedTuple
from urllib.parse import quote

import aiohttp
from yarl import URL

from isochrone.service.failure_log import error_text
from isochrone.service.network.connection_errors import describe_connection_error
from isochrone.service.network.public_addresses import PublicResolver, refuse_private
from isochrone.service.trust.identity import SCHEDULER_NAME
from isochrone.wire.peers.adapter import CLUSTER_SCHEME
from isochrone.wire.peers.relay import ADAPTER_FILE_PATH, RELAY_TOKEN
from nodeagent.decide.bandwidth import MinimumRate
from nodeagent.host.artifacts.download import (
    ArtifactError,
    FileDownload,
    TransferCut,
    TransferTooLong,
)

CHUNK_BYTES: Final = 1024 * 1024
REDIRECTS_MAX: Final = 5
ANSWER_TIMEOUT_S: Final = 60.0
TRANSFER_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=60.0)

LOCAL_SCHEMES: Final = ("file:", "pypi:")
"""Prefixes of the sources that name files of this machine."""

ORIGIN_MINIMUM_RATE: Final = MinimumRate(bytes_per_s=64 * 1024, window_s=30.0)
"""Lower than for peers: there is only one origin."""


class ClusterOrigin(NamedTuple):
    """The acting scheduler, which has the files that clients have uploaded, and this node's token.

    `context` is for an https URL.
    """

    url: str
    token: str
    context: SSLContext | None


class ArtifactSources:
    """Reads artifact files. `private` allows private addresses and plain http."""

    def __init__(
        self,
        *,
        private: bool,
        hf_url: str,
        hf_token: str = "",
        minimum_rate: MinimumRate = ORIGIN_MINIMUM_RATE,
    ) -> None:
        self._private = private
        self._hf_url = hf_url.rstrip("/")
        self._hf_token = hf_token
        self._minimum_rate = minimum_rate
        self.cluster: Callable[[], ClusterOrigin | None] = lambda: None
        """Returns the origin of `cluster:` sources, None while no scheduler is connected."""

    def local_file(self, source: str, path: str) -> Path:
        """Return the path of a file of a local source. Raises ArtifactError."""
        scheme, _, rest = source.partition(":")
        return Path(rest) / path if scheme == "file" else _package_file(rest, path)

    async def fetch(self, source: str, download: FileDownload) -> str:
        """Fetch the rest of a file from its origin; return what is wrong with it, or "".

        Raises TransferCut if it can be resumed, and ArtifactError if a retry would not help.
        """
        path, offset = download.file.path, download.partial_bytes()
        if source.startswith(CLUSTER_SCHEME):
            return await self._fetch_from_cluster(source, download, offset)
        url, is_hub = self._url(source, path), source.startswith("hf:")
        connector = aiohttp.TCPConnector(
            resolver=None if self._private else PublicResolver(refuse=_refuse_private)
        )
        session = aiohttp.ClientSession(
            connector=connector, timeout=TRANSFER_TIMEOUT, auto_decompress=False
        )
        with _transfer_errors(path, source):
            async with session as http, await self._follow(http, url, offset, is_hub) as response:
                return await self._append(download, response, offset)

    async def _fetch_from_cluster(self, source: str, download: FileDownload, offset: int) -> str:
        """Fetch the rest of a file from the acting scheduler, as `fetch` does."""
        origin, path = self.cluster(), download.file.path
        if origin is None or not origin.token:
            raise ArtifactError(f"cannot fetch {path} from {source}: no scheduler is connected")
        rest = quote(source.removeprefix(CLUSTER_SCHEME))
        url = f"{origin.url}{ADAPTER_FILE_PATH}/{rest}/{quote(path)}"
        sent = {"accept-encoding": "identity", RELAY_TOKEN: origin.token}
        if offset:
            sent["range"] = f"bytes={offset}-"
        name = SCHEDULER_NAME if origin.context is not None else None
        with _transfer_errors(path, source):
            async with (
                aiohttp.ClientSession(timeout=TRANSFER_TIMEOUT, auto_decompress=False) as http,
                http.get(
                    url,
                    headers=sent,
                    allow_redirects=False,
                    ssl=origin.context or True,
                    server_hostname=name,
                ) as response,
            ):
                if response.status not in (200, 206):
                    raise ArtifactError(
                        f"cannot fetch {path} from {source}: the scheduler answered"
                        f" {response.status}"
                    )
                return await self._append(download, response, offset)

    async def _append(
        self, download: FileDownload, response: aiohttp.ClientResponse, offset: int
    ) -> str:
        """Add what an answer has to a file; without a range it has the whole file."""
        offset = offset if response.status == 206 else 0
        chunks = response.content.iter_chunked(CHUNK_BYTES)
        return await download.append(chunks, offset, self._minimum_rate, is_far=True)

    async def _follow(
        self, http: aiohttp.ClientSession, address: str, offset: int, names_hub: bool
    ) -> aiohttp.ClientResponse:
        """Follow redirects to the file; return an answer with status 200 or 206."""
        url = URL()
        for _ in range(REDIRECTS_MAX):
            # Parsed once, by the library that connects, so that check and connection agree.
            url = self._allowed_url(url, address)
            is_hub = names_hub and _origin(url) == _origin(URL(self._hf_url))
            response = await self._ask(http, url, offset, self._hf_token if is_hub else "")
            if response.status in (200, 206):
                return response
            target = response.headers.get("location")
            response.release()
            if response.status not in (301, 302, 303, 307, 308) or target is None:
                why = (
                    f": {self._access_advice()}" if is_hub and response.status in (401, 403) else ""
                )
                raise ArtifactError(
                    f"cannot fetch {_printable(url)}: it answered {response.status}{why}"
                )
            address = target
        raise ArtifactError(f"cannot fetch {_printable(url)}: more than {REDIRECTS_MAX} redirects")

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
            reason = describe_connection_error(str(url), error)
            raise ArtifactError(f"cannot reach {_printable(url)}: {reason}") from error

    def _access_advice(self) -> str:
        """Return the meaning of a hub's refusal, and what the operator can do about it."""
        if self._hf_token:
            return (
                "the model is gated or private, and the token in hf_token_file is invalid or its "
                "account has no access; request access on the model's page of the hub"
            )
        return (
            "the model is gated or private, or does not exist; for a gated model set this node's "
            "hf_token_file to a file with the token of an account that has access"
        )

    def _url(self, source: str, path: str) -> str:
        scheme, _, rest = source.partition(":")
        if scheme == "hf":
            repository, _, revision = rest.partition("@")
            tree = f"{quote(repository)}/resolve/{quote(revision or 'main')}"
            return f"{self._hf_url}/{tree}/{quote(path)}"
        if scheme in ("https", "http"):
            return f"{source.rstrip('/')}/{quote(path)}"
        raise ArtifactError(f"cannot fetch from {source!r}: unknown kind of source")

    def _allowed_url(self, base: URL, address: str) -> URL:
        """Return `address` as an absolute URL, relative to `base`.

        Raises ArtifactError if it is not a URL that may be fetched from.
        """
        try:
            url = base.join(URL(address))
            url.origin()
        except ValueError as error:
            raise ArtifactError(
                f"cannot fetch: the origin redirects to an invalid URL ({error})"
            ) from error
        if self._private:
            return url
        if url.scheme != "https":
            raise ArtifactError(
                f"cannot fetch {_printable(url)}: it is not https; set private_sources to allow it"
            )
        try:
            # A literal address is not passed to the resolver.
            _refuse_private(url.host or "")
        except OSError as error:
            raise ArtifactError(f"cannot fetch {_printable(url)}: {error}") from error
        return url


@contextmanager
def _transfer_errors(path: str, source: str) -> Iterator[None]:
    """Turn what can go wrong during a transfer into TransferCut or ArtifactError."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TransferCut(error_text(error)) from error
    except TransferTooLong as error:
        raise ArtifactError(f"cannot fetch {path} from {source}: {error}") from error


def _refuse_private(host: str) -> None:
    """Raise OSError if `host` is an IP address outside the public internet, with the setting."""
    try:
        refuse_private(host)
    except OSError as error:
        raise OSError(f"{error}; set private_sources to allow it") from error


def _origin(url: URL) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port."""
    return url.scheme, url.host, url.port


def _printable(url: URL) -> URL:
    """Return a URL without its query, which may hold a signature that grants access."""
    return url.with_query(None)


def _package_file(rest: str, path: str) -> Path:
    """Return a file of an installed package, named as `name==version/folder/in/the/wheel/`."""
    requirement, _, folder = rest.partition("/")
    name, _, version = requirement.partition("==")
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise ArtifactError(
            f"cannot fetch from pypi:{rest}: {name} is not installed here; `pip install {name}`"
        ) from error
    if version and package.version != version:
        raise ArtifactError(
            f"cannot fetch from pypi:{rest}: version {package.version} of {name} is installed"
        )
    return Path(str(package.locate_file(f"{folder.rstrip('/')}/{path}".lstrip("/"))))
