"""Admits bodies within a process's limits: requests while they arrive, and before they are parsed;
answers while their clients do not read them.

The limits are decided in `decide/admission/body_limits.py`.
"""

from collections.abc import Callable
from typing import Final, Protocol

from isochrone.fair_shares import FairShares
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.routes import KeyEntry
from router.config import RouterConfig
from router.dataplane import http1
from router.dataplane.body_inflater import BodyInflater
from router.dataplane.http1 import HeaderFields
from router.dataplane.http_messages import HttpRequest
from router.dataplane.inline_task import inline_sleep
from router.dataplane.upload_spool import UploadSpool
from router.decide.admission.body_limits import (
    HeldBytes,
    ParseBudget,
    inflated_bytes_max,
    inflated_charge,
)

KEYLESS_BODY_BYTES_MAX: Final = 64 * 1024
"""The body limit of routes that need no API key: none of them uses a body."""


COMPRESSED: Final = (b"gzip", b"deflate")


class AnsweredClient(Protocol):
    """A client to which an answer was written."""

    @property
    def unread_bytes(self) -> int:
        """How many of the bytes written to it the client has not read."""

    async def drained(self) -> None:
        """Wait until the client has read what was written."""


class BodyAdmission:
    """The bodies of all connections of one process."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float]) -> None:
        """Use the limits of `config`. `clock` returns monotonic seconds."""
        self.uploads = UploadSpool(config.state_folder / "uploads", config)
        self._clock = clock
        self._bytes_max = config.body_bytes_max
        self._budget = ParseBudget(config.parse_bytes_per_key_per_s)
        self.unread = FairShares(config.answers_held_bytes_max)
        """The bytes of answers that each tenant's clients have not read."""
        self.held = HeldBytes(
            _process_share(config, config.held_bytes_per_key_max),
            _process_share(config, config.held_bytes_per_network_max),
            _process_share(config, config.held_bytes_max),
        )

    def check_head(self, key: KeyEntry | None, fields: HeaderFields) -> None:
        """Raise LimitExceeded if the body is costly and its key's parse budget is spent."""
        if key is not None and http1.is_costly_body(fields):
            self._budget.check(key.key_id, self._clock())

    def hold(self, request: HttpRequest, network: str, count: int) -> None:
        """Count bytes of an unfinished body. Raises LimitExceeded."""
        self.held.hold(_key_id(request), network, count)
        request.held_bytes += count

    def release(self, request: HttpRequest, network: str) -> None:
        """Count the bytes of a complete or abandoned body no longer."""
        self.held.release(_key_id(request), network, request.held_bytes)
        request.held_bytes = 0

    def drop(self, request: HttpRequest, network: str) -> None:
        """Drop the body of a request that is answered or given up."""
        self.release(request, network)
        if request.upload is not None:
            request.upload.close()

    def charge(self, request: HttpRequest) -> bool:
        """Charge a complete body to its key's parse budget; return whether it must be inflated.

        Raises LimitExceeded.
        """
        bytes_max = self._inflated_max(request)
        key, size = request.key, len(request.body)
        if key is not None and size:
            now_s = self._clock()
            self._budget.check(key.key_id, now_s)
            charged = size + inflated_charge(size, bytes_max) if bytes_max else size
            self._budget.charge(key.key_id, charged, now_s)
        return bytes_max > 0

    def charge_stored(self, key: KeyEntry, size_bytes: int) -> None:
        """Charge stored JSON that a request of a key needs, like a body. Raises LimitExceeded."""
        now_s = self._clock()
        self._budget.check(key.key_id, now_s)
        self._budget.charge(key.key_id, size_bytes, now_s)

    def charge_fetched(self, key: KeyEntry, size_bytes: int) -> None:
        """Charge what was fetched for a request of a key, whose next bodies wait for that."""
        self._budget.charge(key.key_id, size_bytes, self._clock())

    async def inflate(self, request: HttpRequest) -> None:
        """Inflate a body that was charged. Raises ApiError."""
        body, key, bytes_max = request.body, request.key, self._inflated_max(request)
        encoding = request.headers[b"content-encoding"].lower()
        charged = inflated_charge(len(body), bytes_max)
        inflater = BodyInflater(body, encoding, bytes_max)
        try:
            while not inflater.step():
                await inline_sleep(0)
            request.body = inflater.inflated()
        finally:
            if key is not None and body and inflater.inflated_bytes < bytes_max:
                unused = charged - inflated_charge(len(body), inflater.inflated_bytes)
                self._budget.charge(key.key_id, -unused, self._clock())

    async def until_read(self, request: HttpRequest, client: AnsweredClient) -> None:
        """Wait until a client has read its answer, which is in memory until then.

        Raises ApiError if its tenant has as many bytes of such answers as it may have.
        """
        tenant_id = "" if request.key is None else request.key.tenant_id
        count = client.unread_bytes
        if not self.unread.take(tenant_id, count):
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                "cannot keep the answer: the clients of this tenant do not read theirs",
            )
        try:
            await client.drained()
        finally:
            self.unread.give_back(tenant_id, count)

    def _inflated_max(self, request: HttpRequest) -> int:
        """Return how many bytes a compressed body may have when inflated, 0 for any other."""
        encoding = request.headers.get(b"content-encoding")
        if encoding is None or encoding.lower() not in COMPRESSED:
            return 0
        bytes_max = self._bytes_max
        if request.key is None and bytes_max > KEYLESS_BODY_BYTES_MAX:
            bytes_max = KEYLESS_BODY_BYTES_MAX
        return inflated_bytes_max(len(request.body), bytes_max)


def _key_id(request: HttpRequest) -> str:
    return "" if request.key is None else request.key.key_id


def _process_share(config: RouterConfig, bytes_max: int) -> int:
    """Return one process's share of a limit, but at least the largest body."""
    share = bytes_max // (config.processes or 1)
    return share if share > config.body_bytes_max else config.body_bytes_max
