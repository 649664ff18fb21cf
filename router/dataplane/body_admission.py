"""Admits request bodies within a process's limits: while they arrive, and before they are parsed.

The limits are decided in `decide/admission/body_limits.py`.
"""

from collections.abc import Callable
from typing import Final

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


class BodyAdmission:
    """The bodies of all connections of one process."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float]) -> None:
        """Use the limits of `config`. `clock` returns monotonic seconds."""
        self.uploads = UploadSpool(config.state_folder / "uploads", config)
        self._clock = clock
        self._bytes_max = config.body_bytes_max
        self._budget = ParseBudget(config.parse_bytes_per_key_per_s)
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

    async def prepare(self, request: HttpRequest) -> None:
        """Charge a complete body to its key's parse budget, and inflate it. Raises ApiError."""
        body, key = request.body, request.key
        encoding = request.headers.get(b"content-encoding", b"").lower()
        is_compressed = encoding in (b"gzip", b"deflate")
        bytes_max = self._bytes_max
        if key is None and bytes_max > KEYLESS_BODY_BYTES_MAX:
            bytes_max = KEYLESS_BODY_BYTES_MAX
        bytes_max = inflated_bytes_max(len(body), bytes_max) if is_compressed else 0
        charged = inflated_charge(len(body), bytes_max)
        if key is not None and body:
            now_s = self._clock()
            self._budget.check(key.key_id, now_s)
            self._budget.charge(key.key_id, len(body) + charged, now_s)
        if not is_compressed:
            return
        inflater = BodyInflater(body, encoding, bytes_max)
        try:
            while not inflater.step():
                await inline_sleep(0)
            request.body = inflater.inflated()
        finally:
            if key is not None and body and inflater.inflated_bytes < bytes_max:
                unused = charged - inflated_charge(len(body), inflater.inflated_bytes)
                self._budget.charge(key.key_id, -unused, self._clock())


def _key_id(request: HttpRequest) -> str:
    return "" if request.key is None else request.key.key_id


def _process_share(config: RouterConfig, bytes_max: int) -> int:
    """Return one process's share of a limit, but at least the largest body."""
    share = bytes_max // (config.processes or 1)
    return share if share > config.body_bytes_max else config.body_bytes_max
