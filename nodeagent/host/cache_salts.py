"""The salts that separate the prefix caches of tenants on this node.

A salt is the HMAC of the tenant's id under a secret of this node, so that a tenant cannot guess
another's. The secret is made here and never leaves the node: routers, schedulers and other nodes do
not need it, because no prefix cache is shared between nodes. It is stored so that the cache on disk
stays usable after a restart of the agent.
"""

import hmac
import secrets
from pathlib import Path
from typing import Final

from isochrone.service.files import write_atomic

_FILE: Final = "cache_salt.key"
_SECRET_BYTES: Final = 32


class CacheSalts:
    """Computes the cache salt of each tenant."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def salt_of(self, tenant: str) -> str:
        """Return the tenant's salt: 64 hexadecimal digits."""
        return hmac.digest(self._secret, tenant.encode(errors="surrogateescape"), "sha256").hex()


def load_cache_salts(folder: Path) -> CacheSalts:
    """Read the node's secret from its state folder; make one if there is none. Raises OSError."""
    path = folder / _FILE
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = b""
    if len(secret) != _SECRET_BYTES:
        secret = secrets.token_bytes(_SECRET_BYTES)
        write_atomic(path, secret)
    return CacheSalts(secret)
