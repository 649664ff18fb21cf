"""Fetches the images that a request links to, within limits of the request, tenant and process."""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import aiohttp

from isochrone.fair_shares import FairShares
from isochrone.service.network.name_cache import Lookup
from isochrone.service.network.public_addresses import PublicResolver, refuse_private
from isochrone.service.threads import start_daemon_thread
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import TenantId
from isochrone.wire.peers.routes import KeyEntry
from router.apis.linked_images.answer_guard import GuardedConnector
from router.apis.linked_images.cheap_tls import with_cheap_handshakes
from router.apis.linked_images.download import TOO_LARGE, ImageBudget, LinkRules, download
from router.apis.linked_images.link import HTTPS_PORT, FetchRefused, printable
from router.apis.linked_images.splice import FetchedImage, with_images
from router.apis.openai.decode import named_as
from router.apis.openai.images import ImageCheck, ImageLink
from router.apis.relay import in_a_task
from router.config import RouterConfig
from router.dataplane.body_admission import BodyAdmission
from router.decide.admission.limits import LimitExceeded
from router.inference_request import FetchImages
from router.recording.metrics import Metrics

FETCH_TIMEOUT_S: Final = 10.0
"""The time for all images of a request, from the first lookup to the last byte."""

PARALLEL_MAX: Final = 8
"""Images of one request that are fetched at once."""

FETCHES_MAX: Final = 256
"""Images that a process fetches at once; a tenant alone half of them."""

FETCH_CHARGE_BYTES: Final = 256 * 1024
"""What a fetch costs the key's parse budget, besides the image: a TLS handshake takes about as long
as parsing so many bytes."""

RETRY_AFTER_S: Final = 2.0


class LookupThreads:
    """Looks up the names of one request, each in a thread of its own.

    A name server may hang for a client's name. The lookups of nodes' names must not wait for that.
    """

    def __init__(self) -> None:
        self.running: set[asyncio.Future[Sequence[str]]] = set()
        """Lookups that have not ended, also those that nothing waits for any more."""

    async def look_up(self, host: str) -> Sequence[str]:
        """Return the addresses of `host`. Raises OSError."""
        try:
            lookup = start_daemon_thread("image dns", partial(_addresses_of, host))
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, f"cannot look up {host}: {error}") from error
        self.running.add(lookup)
        lookup.add_done_callback(self._end)
        return await asyncio.shield(lookup)

    def _end(self, lookup: asyncio.Future[Sequence[str]]) -> None:
        self.running.discard(lookup)
        # Retrieved, so that asyncio does not log the error of a lookup that was given up.
        lookup.cancelled() or lookup.exception()


class ImageFetcher:
    """Fetches the images of requests, as `image_links` of the configuration allows."""

    def __init__(
        self, bytes_max: int, bodies: Callable[[], BodyAdmission], metrics: Metrics
    ) -> None:
        """`bytes_max` limits a body with its images; `bodies` has the budgets of keys."""
        self.rules = LinkRules(HTTPS_PORT, refuse_private)
        self.look_up: Lookup | None = None
        """Instead of the system's lookups."""
        self.tls = with_cheap_handshakes(ssl.create_default_context())
        self.timeout_s = FETCH_TIMEOUT_S
        self._bytes_max = bytes_max
        self._bodies = bodies
        self._metrics = metrics
        self._slots = FairShares(FETCHES_MAX)

    def completion(self, check: ImageCheck, key: KeyEntry, messages_field: str) -> FetchImages:
        """Return the function that completes the body of a request of a key.

        Errors are in terms of `messages_field`, if it is not empty.
        """
        return partial(self._complete, check, key, messages_field)

    async def _complete(
        self,
        check: ImageCheck,
        key: KeyEntry,
        messages_field: str,
        body: bytes,
        hold: Callable[[int], None],
    ) -> bytes:
        """Return `body` with the images that it links to. Raises ApiError. An inline task."""
        images: dict[str, FetchedImage] = {}
        with named_as(messages_field) if messages_field else nullcontext():
            if check.links:
                links = {link.url: link for link in reversed(check.links)}
                bodies = self._bodies()
                bodies.charge_stored(key, FETCH_CHARGE_BYTES * len(links))

                def keep(count: int) -> None:
                    hold(count)
                    bodies.charge_fetched(key, count)

                budget = ImageBudget(self._bytes_max - len(body), keep)
                fetching = self._fetch(key.tenant_id, links.values(), budget)
                images = await in_a_task(fetching)
            self._check(check, body, images)
        return with_images(body, images)

    def _check(self, check: ImageCheck, body: bytes, images: Mapping[str, FetchedImage]) -> None:
        """Raise ApiError 400 for images that may not be sent to an engine.

        A link that a body has twice becomes two images in it.
        """
        size_bytes = len(body)
        for link in check.links:
            image = images[link.url].base64
            size_bytes += len(image)
            if size_bytes > self._bytes_max:
                raise _invalid(link, FetchRefused("too_large", TOO_LARGE))
            check.add(memoryview(image), link.field)
        check.check_sum()

    async def _fetch(
        self, tenant_id: TenantId, links: Collection[ImageLink], budget: ImageBudget
    ) -> dict[str, FetchedImage]:
        """Return the images by their URLs. Raises ApiError."""
        slots = min(len(links), PARALLEL_MAX)
        if not self._slots.take(tenant_id, slots):
            raise LimitExceeded(
                "image_fetches",
                ErrorCode.OUT_OF_CAPACITY,
                "cannot fetch the images now: as many of this tenant's are being fetched as may be",
                RETRY_AFTER_S,
                {},
            )
        images: dict[str, FetchedImage] = {}
        lookups = LookupThreads()
        try:
            async with asyncio.timeout(self.timeout_s), self._session(lookups, slots) as http:
                left = iter(links)
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(slots):
                        tasks.create_task(self._fetch_each(http, left, budget, images))
        except TimeoutError:
            for late in links:
                if late.url not in images:
                    reason = f"it did not arrive within {self.timeout_s:.0f} s"
                    raise _invalid(late, FetchRefused("stopped", reason)) from None
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            # A lookup that hangs keeps its slot.
            self._slots.give_back(tenant_id, slots - len(lookups.running))
            for lookup in lookups.running:
                lookup.add_done_callback(lambda _: self._slots.give_back(tenant_id, 1))
        return images

    def _session(self, lookups: LookupThreads, connections_max: int) -> aiohttp.ClientSession:
        """Return a client without cookies, proxies or any headers but our own."""
        resolver = PublicResolver(self.look_up or lookups.look_up, self.rules.refuse)
        connector = GuardedConnector(resolver, connections_max, self.tls)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    async def _fetch_each(
        self,
        http: aiohttp.ClientSession,
        links: Iterator[ImageLink],
        budget: ImageBudget,
        images: dict[str, FetchedImage],
    ) -> None:
        """Fetch one image after the other, while any is left. Raises ApiError."""
        for link in links:
            outcome = "stopped"
            try:
                images[link.url] = await download(http, link.url, self.rules, budget)
                outcome = "fetched"
            except FetchRefused as refused:
                outcome = refused.outcome
                raise _invalid(link, refused) from None
            finally:
                self._metrics.image_fetches.labels(outcome).inc()


def image_fetcher(
    config: RouterConfig, bodies: Callable[[], BodyAdmission], metrics: Metrics
) -> ImageFetcher | None:
    """Return the fetcher of a router, None if it refuses links."""
    if config.image_links == "refuse":
        return None
    return ImageFetcher(config.body_bytes_max, bodies, metrics)


def _addresses_of(host: str) -> Sequence[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise socket.gaierror(socket.EAI_NONAME, "not a host name") from error
    return [str(address[0]) for *_, address in found]


def _invalid(link: ImageLink, refused: FetchRefused) -> ApiError:
    message = f"cannot use field '{link.field}': cannot fetch {printable(link.url)}: {refused}"
    return ApiError(ErrorCode.INVALID_IMAGE_URL, message, param=link.field)
