"""The salts that separate the prefix caches of tenants.

A salt is the HMAC of the tenant's id under a secret, so that a tenant cannot guess another's. The
secret is the cluster's: a scheduler sends it to each node that registers, and all nodes compute
the same salts, so that they can use each other's cached prefixes. Routers do not have it.

A node that has not got the secret from a scheduler yet uses one of its own, and shares no prefix
with others. The node stores both secrets, so that the cache on disk stays usable after a restart of
the agent.
"""

import asyncio
import hmac
import logging
import secrets
from pathlib import Path
from typing import Final

from isochrone.service.files import write_atomic
from isochrone.wire.peers.control import CacheSaltSecret

_OWN_FILE: Final = "cache_salt.key"
_CLUSTER_FILE: Final = "cluster_cache_salt.key"
_SECRET_BYTES: Final = 32

log = logging.getLogger(__name__)


class CacheSalts:
    """Computes the cache salt of each tenant."""

    def __init__(self, secret: bytes, *, is_shared: bool = False, folder: Path | None = None):
        """`is_shared` says that the secret is the cluster's. The next one is kept in `folder`."""
        self._secret = secret
        self._is_shared = is_shared
        self._folder = folder

    def __repr__(self) -> str:
        return f"<CacheSalts {'of the cluster' if self._is_shared else 'of this node'}>"

    def salt_of(self, tenant: str) -> str:
        """Return the tenant's salt: 64 hexadecimal digits."""
        return hmac.digest(self._secret, tenant.encode(errors="surrogateescape"), "sha256").hex()

    async def take(self, offered: CacheSaltSecret | None) -> None:
        """Use the secret that a scheduler sent, None from one of an earlier release.

        If the secret has changed, prefixes cached under the old salts are not found any more.
        """
        if offered is None or len(offered.secret) < _SECRET_BYTES:
            return
        if self._is_shared and hmac.compare_digest(offered.secret, self._secret):
            return
        self._secret, self._is_shared = offered.secret, True
        fields: dict[str, object] = {"version": offered.version}
        log.info("cache salts are the cluster's", extra={"fields": fields})
        if self._folder is None:
            return
        try:
            await asyncio.to_thread(write_atomic, self._folder / _CLUSTER_FILE, offered.secret)
        except OSError as error:
            fields["error"] = str(error.strerror)
            log.warning("cannot store the cache salt secret on disk", extra={"fields": fields})


def load_cache_salts(folder: Path) -> CacheSalts:
    """Read the cluster's secret from the node's state folder, else the node's own.

    Make one if there is none. Raises OSError.
    """
    if secret := _read(folder / _CLUSTER_FILE):
        return CacheSalts(secret, is_shared=True, folder=folder)
    secret = _read(folder / _OWN_FILE)
    if not secret:
        secret = secrets.token_bytes(_SECRET_BYTES)
        write_atomic(folder / _OWN_FILE, secret)
    return CacheSalts(secret, folder=folder)


def _read(path: Path) -> bytes:
    """Return a secret, empty if there is none or the file is damaged."""
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        return b""
    return secret if len(secret) == _SECRET_BYTES else b""
