"""HTTP of routers and nodes to the acting scheduler, beside their control connections.

A router relays its clients' requests for what schedulers store (files, batches, stored responses,
conversations, adapters), and sends messages of its own work (`batches.py`, `responses.py`). A node
fetches adapters' files.
"""

from typing import Final

RELAY_TOKEN: Final = "x-isochrone-relay-token"  # noqa: S105 - the name of a header
"""The token of a peer's control connection, from its Welcome."""

TENANT: Final = "x-isochrone-tenant"
KEY: Final = "x-isochrone-key"
"""The tenant and the key whose public request a router relays."""

PUBLIC_PREFIX: Final = "/v1/batch-service/public"
"""Before the path of a public request that a router relays."""

ADAPTER_FILE_PATH: Final = "/v1/artifact-service"
"""The path on a scheduler of an artifact whose source is `cluster:PATH`; the path of a file
follows. For nodes, with the token of their control connection."""

WORK_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest message of work or results."""

STORE_TIMEOUT_S: Final = 120.0
"""How long a disk or bucket may take for a file of any size: a request to a bucket has 60 s, and is
repeated."""

STORE_BYTES_PER_S: Final = 1_000_000
"""A bucket that takes fewer bytes in a second counts as one that hangs."""


def store_timeout_s(size_bytes: int) -> float:
    """Return how long a scheduler may take to store a file after its last byte has arrived.

    A file goes to a bucket only then, so this is no short time: 85 minutes for 5 GB.
    """
    return STORE_TIMEOUT_S + size_bytes / STORE_BYTES_PER_S
